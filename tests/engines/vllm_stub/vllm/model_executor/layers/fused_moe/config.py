"""How vLLM describes a layer of experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from vllm import FORM
from vllm.model_executor.layers.fused_moe.activation import MoEActivation


class RoutingMethodType(Enum):
    """How tokens get their experts."""

    Renormalize = 1


@dataclass
class FusedMoEParallelConfig:
    """How a layer is split among ranks."""

    ep_size: int = 1
    dp_size: int = 1
    enable_eplb: bool = False

    @classmethod
    def make_no_parallel(cls) -> FusedMoEParallelConfig:
        """Not at all."""
        return cls()


@dataclass
class FusedMoEConfig:
    """A layer."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    if FORM >= (0, 25):
        intermediate_size: int
    else:
        intermediate_size_per_partition: int
    num_local_experts: int
    num_logical_experts: int
    activation: MoEActivation
    device: str
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    moe_backend: str = "auto"
    has_bias: bool = False
    is_lora_enabled: bool = False
    if FORM >= (0, 25):
        swiglu_limit: float | None = None

        @property
        def intermediate_size_per_partition(self) -> int:
            """Columns of w2 on this rank."""
            return self.intermediate_size


@dataclass
class FusedMoEQuantConfig:
    """The scales of a layer."""

    quant_dtype: torch.dtype | None = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None

    @classmethod
    def make(cls, quant_dtype: torch.dtype | None = None, **named: Any) -> FusedMoEQuantConfig:
        """Return a configuration with the given scales."""
        return cls(quant_dtype, **named)
