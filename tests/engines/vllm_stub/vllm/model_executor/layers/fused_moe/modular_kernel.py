"""The base of vLLM's experts, and the kernel that calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from vllm import FORM
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP


class FusedMoEActivationFormat(Enum):
    """Whether rows are tokens."""

    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class FusedMoEExpertsModular(ABC):
    """Experts that take a given routing."""

    if FORM >= (0, 33):
        #: Called with the outputs of each token's experts, to sum them up.
        post_gemm2_hook: Any = None
    if FORM < (0, 25):

        @abstractmethod
        def supports_expert_map(self) -> bool:
            """Whether experts may be on other ranks."""

    def __init__(self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None) -> None:
        assert max_num_tokens is None and num_dispatchers is None
        self.moe_config, self.quant_config = moe_config, quant_config

    def __getattr__(self, name: str) -> Any:
        if name in ("w1_scale", "w2_scale", "a1_scale", "a2_scale"):
            return getattr(self.quant_config, name)
        raise AttributeError(name)

    @staticmethod
    def is_supported_config(
        experts: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, Any]:
        """Whether a class of experts takes a layer, and why not."""
        for able, what in (
            (experts._supports_current_device(), "device"),
            (experts._supports_activation(moe_config.activation), f"{moe_config.activation} activation"),
            (experts._supports_quant_scheme(weight_key, activation_key), f"quantization scheme {weight_key}x{activation_key}"),
            (experts._supports_parallel_config(moe_config.moe_parallel_config), "parallel config"),
            (activation_format == experts.activation_format(), "activation format"),
        ):
            if not able:
                return False, f"kernel does not support {what}"
        return True, None

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat:
        """What rows are."""

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...

    @abstractmethod
    def workspace_shapes(self, M: int, N: int, K: int, *others: Any) -> tuple[tuple[int, ...], ...]:
        """Memory for both products, and the output."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """What is left to do."""

    @abstractmethod
    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
        """The experts' sum into *output*."""


class PrepareAndFinalize:
    """What surrounds experts where no other rank has any."""

    def supports_async(self) -> bool:
        """Nothing is sent."""
        return False


class FusedMoEKernel:
    """Experts, and what surrounds them."""

    def __init__(self, prepare_finalize: PrepareAndFinalize, fused_experts: FusedMoEExpertsModular, shared_experts: Any = None) -> None:
        self.impl = SimpleNamespace(prepare_finalize=prepare_finalize, fused_experts=fused_experts, shared_experts=shared_experts)

    @property
    def prepare_finalize(self) -> PrepareAndFinalize:
        """What surrounds the experts."""
        found: PrepareAndFinalize = self.impl.prepare_finalize
        return found

    @property
    def fused_experts(self) -> FusedMoEExpertsModular:
        """The experts."""
        found: FusedMoEExpertsModular = self.impl.fused_experts
        return found

    def _output(self, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, how: dict[str, Any]) -> torch.Tensor:
        assert self.fused_experts.expects_unquantized_inputs
        assert isinstance(self.fused_experts.finalize_weight_and_reduce_impl(), TopKWeightAndReduceNoOP)
        if how["apply_router_weight_on_input"]:
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        sizes = (len(hidden_states), w1.shape[1], hidden_states.shape[1], topk_ids.shape[1], len(w1), len(w1), None, None)
        output = torch.empty(self.fused_experts.workspace_shapes(*sizes)[2], dtype=hidden_states.dtype)
        routing = {"topk_weights": topk_weights, "topk_ids": topk_ids, **how}
        self.fused_experts.apply(output=output, hidden_states=hidden_states, w1=w1, w2=w2, a1q_scale=None, **routing)
        return output

    if FORM >= (0, 25):

        def apply(  # noqa: PLR0917
            self,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            apply_router_weight_on_input: bool,
            shared_experts: Any = None,
            shared_experts_input: Any = None,
        ) -> torch.Tensor:
            """The layer's output [M, K]."""
            del shared_experts, shared_experts_input
            how = {"activation": activation, "global_num_experts": global_num_experts, "expert_map": expert_map}
            how["apply_router_weight_on_input"] = apply_router_weight_on_input
            return self._output(hidden_states, w1, w2, topk_weights, topk_ids, how)
    else:

        @property
        def owns_shared_experts(self) -> bool:
            """Whether shared experts are computed here."""
            return self.impl.shared_experts is not None

        def apply(  # noqa: PLR0917
            self,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            apply_router_weight_on_input: bool,
            shared_experts_input: Any = None,
        ) -> torch.Tensor:
            """The layer's output [M, K]."""
            del shared_experts_input
            how = {"activation": activation, "global_num_experts": global_num_experts, "expert_map": expert_map}
            how["apply_router_weight_on_input"] = apply_router_weight_on_input
            return self._output(hidden_states, w1, w2, topk_weights, topk_ids, how)
