"""vLLM's kernels of weights alone, by torch: each repacks what is loaded, and decodes its own layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import FORM
from vllm.model_executor.parameter import BasevLLMParameter

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class MPLinearLayerConfig:
    """A layer of integer weights; 0.33 has no act-order."""

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: str
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    if FORM < (0, 33):
        has_g_idx: bool = False


@dataclass
class NvFp4LinearLayerConfig:
    """An nvfp4 layer, whose sizes are not known."""


@dataclass
class Mxfp8LinearLayerConfig:
    """An mxfp8 layer."""

    weight_shape: tuple[int, int]


@dataclass
class MxFp4LinearLayerConfig:
    """An mxfp4 layer."""

    activation_quant_key: Any = None


class MPLinearKernel:
    """Base of integer weights: the names of a layer's parameters come with it."""

    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None, w_gidx: str = "") -> None:
        assert self.can_implement(c)
        self.config, self.w_q_name, self.w_s_name, self.w_zp_name, self.w_gidx_name = (
            c, w_q_param_name, w_s_param_name, w_zp_param_name, w_gidx,
        )  # fmt: skip


class _Kernel:
    """Base of the other schemes."""

    def __init__(self, config: Any) -> None:
        assert self.can_implement(config)[0] and self.is_supported()[0]
        self.config = config

    def input_quant_key(self) -> None:
        """Activations arrive in 16 bits."""


class NvFp4LinearKernel(_Kernel):
    """Base of nvfp4."""


class Mxfp8LinearKernel(_Kernel):
    """Base of mxfp8."""


class MxFp4LinearKernel(_Kernel):
    """Base of mxfp4."""


class _Own:
    """A kernel of vLLM's, which takes every layer."""

    #: M of the products so far.
    calls: list[int] = []

    @classmethod
    def get_min_capability(cls) -> int:
        """Every device."""
        return 0

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere."""
        del compute_capability
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Every layer."""
        del config
        return True, None

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls.append(x.numel() // x.shape[-1])
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def _bits(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The 4-bit codes of int32 words, the lowest first, along a dimension."""
    parts = [(words >> 4 * place) & 15 for place in range(8)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


class MarlinLinearKernel(_Own, MPLinearKernel):
    """Keeps the codes of int4 [N, K] in bytes, last row first."""

    calls: list[int] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack; the parameters must be the loaded ones."""
        weight, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        assert isinstance(weight, BasevLLMParameter) and weight.packed_dim == weight.input_dim
        by_k = weight.input_dim == 0
        codes = _bits(weight.data, weight.packed_dim)
        self._replace(layer, self.w_q_name, (codes.t() if by_k else codes).to(torch.int8).flip(0))
        self._replace(layer, self.w_s_name, (scale.data.t() if by_k else scale.data).float())
        if self.config.zero_points:
            zeros = getattr(layer, self.w_zp_name)
            assert zeros.packed_dim == zeros.output_dim == 0
            self._replace(layer, self.w_zp_name, _bits(zeros.data, 0))

    @staticmethod
    def _replace(layer: Any, name: str, value: torch.Tensor) -> None:
        setattr(layer, name, torch.nn.Parameter(value.contiguous(), requires_grad=False))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        codes, scale = getattr(layer, self.w_q_name).flip(0).float(), getattr(layer, self.w_s_name)
        index = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
        if getattr(self.config, "has_g_idx", False):
            index = getattr(layer, self.w_gidx_name).long()
        zeros = getattr(layer, self.w_zp_name).float()[:, index] if self.config.zero_points else 8
        return self._multiply(x, (codes - zeros) * scale[:, index], bias)


def converted_awq(layer: Any, parameter: type, qweight: str = "qweight", qzeros: str = "qzeros") -> None:
    """Give an AWQ weight GPTQ's order, its zero points that of compressed-tensors, as vLLM does."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # where code 0, 1, … of eight along N are
    for name in (qweight, qzeros):
        words = getattr(layer, name).data
        codes = torch.stack([(words >> 4 * place) & 15 for place in order], -1).flatten(1)  # [K or groups, N]
        rows = codes if name == qweight else codes.t()
        packed = sum(rows.unflatten(0, (-1, 8))[:, place] << 4 * place for place in range(8)).to(torch.int32)
        dims = {"input_dim": 0, "output_dim": 1} if name == qweight else {"input_dim": 1, "output_dim": 0}
        setattr(layer, name, parameter(packed.contiguous(), packed_dim=0, **dims))


class MarlinNvFp4LinearKernel(_Own, NvFp4LinearKernel):
    """Keeps the bytes of e2m1 pairs last row first, and the scales in float32."""

    calls: list[int] = []
    group = 16

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        layer.weight = torch.nn.Parameter(layer.weight.data.view(torch.uint8).flip(0), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(self._scale(layer.weight_scale.data).flip(0), requires_grad=False)

    def _scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.float()

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        codes = layer.weight.flip(0).int()
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        weight = torch.tensor(_E2M1)[codes & 7] * (1 - 2 * (codes >> 3))
        weight = weight * layer.weight_scale.flip(0).repeat_interleave(self.group, 1)
        return self._multiply(x, weight * getattr(layer, "weight_global_scale", 1), bias)


class CutlassNvFp4LinearKernel(MarlinNvFp4LinearKernel):
    """Quantises the activations, on other devices."""

    supported = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """While tests say so."""
        del compute_capability
        return cls.supported, "another device"


class MarlinMxFp4LinearKernel(_Own, MxFp4LinearKernel):
    """As that of nvfp4, with powers of two as scales."""

    calls: list[int] = []
    group = 32
    process_weights_after_loading = MarlinNvFp4LinearKernel.process_weights_after_loading
    apply_weights = MarlinNvFp4LinearKernel.apply_weights

    def _scale(self, scale: torch.Tensor) -> torch.Tensor:
        return 2.0 ** (scale.view(torch.uint8).float() - 127)


class MarlinMxfp8LinearKernel(_Own, Mxfp8LinearKernel):
    """Keeps the bytes last row first."""

    calls: list[int] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        layer.weight = torch.nn.Parameter(layer.weight.data.view(torch.uint8).flip(0), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.view(torch.uint8).flip(0), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        scale = 2.0 ** (layer.weight_scale.flip(0).float() - 127)
        return self._multiply(x, layer.weight.flip(0).view(torch.float8_e4m3fn).float() * scale.repeat_interleave(32, 1), bias)
