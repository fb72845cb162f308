"""Which experts compute layers of 16 bits."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from vllm import FORM
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular, FusedMoEKernel, PrepareAndFinalize
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP


class TritonExperts(FusedMoEExpertsModular):
    """vLLM's own, expert by expert: of 16 bits, or of fp8 by its scales."""

    #: numbers of tokens so far
    calls: list[int] = []
    expects_unquantized_inputs = True
    activation_format = _supports_current_device = _supports_no_act_and_mul = supports_expert_map = staticmethod(lambda: True)
    _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *_: True)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """Nothing is left."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *others: Any) -> tuple[tuple[int, ...], ...]:
        """None but the output."""
        return (0,), (0,), (M, K)

    def _wide(self, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return weight.float()
        if self.quant_config.block_shape:
            return weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : weight.shape[1], : weight.shape[2]]
        return weight.float() * scale.reshape(len(weight), -1, 1)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
        """The weighted sum of each token's experts."""
        TritonExperts.calls.append(len(hidden_states))
        first, second = self._wide(w1, self.w1_scale), self._wide(w2, self.w2_scale)
        act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[others["activation"].value]
        for token, x in enumerate(hidden_states.float()):
            total = torch.zeros(output.shape[1])
            for weight, expert in zip(others["topk_weights"][token], others["topk_ids"][token], strict=True):
                if expert < 0:  # a padded token
                    continue
                gate, up = (first[expert] @ x).chunk(2)
                total += weight * (second[expert] @ (act(gate) * up))
            output[token] = total


class UnquantizedMoeBackend(Enum):
    """Kinds of kernels."""

    TRITON = "TRITON"


def select_unquantized_moe_backend(moe_config: Any) -> tuple[UnquantizedMoeBackend, type]:
    """vLLM's own."""
    del moe_config
    return UnquantizedMoeBackend.TRITON, TritonExperts


if FORM >= (0, 25):

    def make_unquantized_moe_kernel(
        quant_config: Any, moe_config: Any, backend: UnquantizedMoeBackend, experts_cls: type, routing_tables: Any = None
    ) -> FusedMoEKernel:
        """The kernel of a layer."""
        del backend, routing_tables
        return FusedMoEKernel(PrepareAndFinalize(), experts_cls(moe_config=moe_config, quant_config=quant_config))
else:

    def make_unquantized_moe_kernel(
        quant_config: Any,
        moe_config: Any,
        backend: UnquantizedMoeBackend,
        experts_cls: type,
        routing_tables: Any = None,
        shared_experts: Any = None,
    ) -> FusedMoEKernel:
        """The kernel of a layer, which may own shared experts."""
        del backend, routing_tables
        return FusedMoEKernel(PrepareAndFinalize(), experts_cls(moe_config=moe_config, quant_config=quant_config), shared_experts)
