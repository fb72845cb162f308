"""Weight-only layers for SGLang: int4 of GPTQ, AWQ and compressed-tensors.

SGLang's schemes repack them for Marlin.
"""

from __future__ import annotations

import contextlib
import copy
import pkgutil
from collections.abc import Callable
from typing import Any

import attrs
import torch
from tunedgemm.plugin import UserError

from tunedgemm_engines.routes import routes
from tunedgemm_engines.sglang_fp8 import original_of
from tunedgemm_engines.weight_only import ATTRIBUTE, Stored, WeightOnly

_SCHEMES = "sglang.srt.layers.quantization"
_PROCESS, _APPLY = "process_weights_after_loading", "apply_weights"
_LOADING = "sglang.srt.model_loader.loader.device_loading_context"
#: Codes in an element of int4.
_CODES = 8


def _gptq(scheme: Any, layer: Any) -> Stored:
    has_index = bool(scheme.quant_config.desc_act and scheme.quant_config.group_size != -1)
    stored = Stored(
        "gptq_int4_order" if has_index else "gptq_int4",
        layer.qweight.shape[0] * _CODES,
        ("qweight", "scales", "", "g_idx" if has_index else "", ""),
    )
    if has_index and layer.scales.shape[0] * scheme.quant_config.group_size != stored.k:
        raise UserError("act-order with sharded K needs the scales of all groups")
    return stored


def _awq(scheme: Any, layer: Any) -> Stored:
    if not scheme.quant_config.zero_point:
        raise UserError("no format for AWQ weights without zero points")
    return Stored("awq_int4", layer.qweight.shape[0], ("qweight", "scales", "qzeros", "", ""))


def _compressed(scheme: Any, layer: Any) -> Stored:
    if scheme.has_g_idx:
        raise UserError("no format for act-order of compressed-tensors")
    name, zeros = ("ct_int4", "") if scheme.symmetric else ("ct_int4_zp", "weight_zero_point")
    return Stored(name, layer.weight_packed.shape[1] * _CODES, ("weight_packed", "weight_scale", zeros, "", ""))


#: SGLang's schemes to what describes their loaded layers.
SCHEMES: dict[str, Callable[[Any, Any], Stored]] = {
    f"{_SCHEMES}.gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme": _gptq,
    f"{_SCHEMES}.awq.schemes.awq_marlin.AWQMarlinLinearScheme": _awq,
    f"{_SCHEMES}.compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16": _compressed,
}


@attrs.frozen
class _Kernel:
    """A scheme of SGLang in the form of a kernel."""

    scheme: Any
    process: Callable[..., None]
    apply: Callable[..., torch.Tensor]

    def __copy__(self) -> _Kernel:
        return attrs.evolve(self, scheme=copy.copy(self.scheme))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weights."""
        self.process(self.scheme, layer)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""
        return self.apply(self.scheme, layer, x, bias)


def _loading(layer: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return SGLang's block in which a layer's parameters are on a device."""
    block: contextlib.AbstractContextManager[Any] = pkgutil.resolve_name(_LOADING)(layer, device)
    return block


def _processing(target: str) -> Callable[..., None]:
    """Make the hook around a scheme's repacking."""

    def described(scheme: Any, layer: Any) -> tuple[Stored, torch.dtype]:
        codes = getattr(scheme, "pack_factor", None) or scheme.quant_config.pack_factor
        if codes != _CODES:
            raise UserError(f"no format for weights of {32 // codes} bits")
        stored = SCHEMES[target](scheme, layer)
        return stored, getattr(layer, stored.names[1]).dtype

    def process(theirs: Callable[..., None], scheme: Any, layer: Any) -> None:
        kernel = _Kernel(scheme, theirs, original_of(f"{target}.{_APPLY}"))
        whole = getattr(layer, ATTRIBUTE, None) or WeightOnly("SGLang", kernel, _loading)
        whole.load(layer, lambda: described(scheme, layer), getattr(layer, "prefix", ""))

    return process


def _apply(theirs: Callable[..., Any], scheme: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Multiply by the side that has the layer."""
    whole = getattr(layer, ATTRIBUTE, None)
    return theirs(scheme, layer, x, bias) if whole is None or whole.stored is None else whole.multiply(layer, x, bias)


def hand_back(reason: str) -> None:
    """Leave all layers to SGLang's kernels."""
    for route in list(routes.values()):
        if route.settle is not None:
            route.settle(reason)


#: SGLang's functions to their wrappers.
HOOKS: dict[str, Callable[..., Any]] = {
    f"{target}.{name}": _processing(target) if name == _PROCESS else _apply for target in SCHEMES for name in (_PROCESS, _APPLY)
}
