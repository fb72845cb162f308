"""Which experts compute layers of fp8."""

from __future__ import annotations

from enum import Enum
from typing import Any

from vllm import FORM
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel, PrepareAndFinalize
from vllm.model_executor.layers.fused_moe.oracle.unquantized import TritonExperts


class Fp8MoeBackend(Enum):
    """Kinds of kernels."""

    TRITON = "TRITON"


def select_fp8_moe_backend(
    config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
) -> tuple[Fp8MoeBackend, type]:
    """vLLM's own."""
    return Fp8MoeBackend.TRITON, TritonExperts


def _made(moe_quant_config: Any, moe_config: Any, experts_cls: type, shared_experts: Any = None) -> FusedMoEKernel:
    return FusedMoEKernel(PrepareAndFinalize(), experts_cls(moe_config=moe_config, quant_config=moe_quant_config), shared_experts)


if FORM >= (0, 33):

    def make_fp8_moe_kernel(
        moe_quant_config: Any, moe_config: Any, experts_cls: type, fp8_backend: Fp8MoeBackend, routing_tables: Any = None
    ) -> FusedMoEKernel:
        """The kernel of a layer."""
        del fp8_backend, routing_tables
        return _made(moe_quant_config, moe_config, experts_cls)
elif FORM >= (0, 25):

    def make_fp8_moe_kernel(
        moe_quant_config: Any, moe_config: Any, experts_cls: type, fp8_backend: Fp8MoeBackend, routing_tables: Any = None, layer: Any = None
    ) -> FusedMoEKernel:
        """The kernel of a layer."""
        del fp8_backend, routing_tables, layer
        return _made(moe_quant_config, moe_config, experts_cls)
else:

    def make_fp8_moe_kernel(
        moe_quant_config: Any,
        moe_config: Any,
        experts_cls: type,
        fp8_backend: Fp8MoeBackend,
        routing_tables: Any = None,
        shared_experts: Any = None,
    ) -> FusedMoEKernel:
        """The kernel of a layer, which may own shared experts."""
        del fp8_backend, routing_tables
        return _made(moe_quant_config, moe_config, experts_cls, shared_experts)
