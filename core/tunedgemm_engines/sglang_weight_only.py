"""Weight-only layers for SGLang: int4 of GPTQ, AWQ and compressed-tensors, nvfp4 and mxfp4.

SGLang's schemes and methods repack them for Marlin. It has mxfp8 for quantised activations alone.
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
_PROCESS = "process_weights_after_loading"
_LOADING = "sglang.srt.model_loader.loader.device_loading_context"
#: Codes in an element of int4.
_CODES = 8
#: Attribute of an nvfp4 layer with its global scale as our op takes it.
_GLOBAL_SCALE = "tunedgemm_global_scale"
_BACKEND = f"{_SCHEMES}.fp4_utils.get_fp4_gemm_runner_backend"


def _check_int4(scheme: Any) -> None:
    codes = getattr(scheme, "pack_factor", None) or scheme.quant_config.pack_factor
    if codes != _CODES:
        raise UserError(f"no format for weights of {32 // codes} bits")


def _gptq(scheme: Any, layer: Any) -> Stored:
    _check_int4(scheme)
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
    _check_int4(scheme)
    if not scheme.quant_config.zero_point:
        raise UserError("no format for AWQ weights without zero points")
    return Stored("awq_int4", layer.qweight.shape[0], ("qweight", "scales", "qzeros", "", ""))


def _compressed(scheme: Any, layer: Any) -> Stored:
    _check_int4(scheme)
    if scheme.has_g_idx:
        raise UserError("no format for act-order of compressed-tensors")
    name, zeros = ("ct_int4", "") if scheme.symmetric else ("ct_int4_zp", "weight_zero_point")
    return Stored(name, layer.weight_packed.shape[1] * _CODES, ("weight_packed", "weight_scale", zeros, "", ""))


def _nvfp4(layer: Any, name: str, global_scale: torch.Tensor) -> Stored:
    """Return how an nvfp4 layer stores its weight, and keep its global scale outside of its state."""
    if hasattr(layer, _GLOBAL_SCALE):  # of weights that were loaded before
        delattr(layer, _GLOBAL_SCALE)
    layer.register_buffer(_GLOBAL_SCALE, global_scale.detach().to(torch.float32), persistent=False)
    return Stored("nvfp4", getattr(layer, name).shape[1] * 2, (name, "weight_scale", "", "", _GLOBAL_SCALE))


def _compressed_nvfp4(_scheme: Any, layer: Any) -> Stored:
    return _nvfp4(layer, "weight_packed", 1 / layer.weight_global_scale.max().to(torch.float32))  # stored as a divisor


def _compressed_mxfp4(_scheme: Any, layer: Any) -> Stored:
    return Stored("mxfp4", layer.weight_packed.shape[1] * 2, ("weight_packed", "weight_scale", "", "", ""))


def _modelopt(_method: Any, layer: Any) -> Stored:
    if not pkgutil.resolve_name(_BACKEND)().is_marlin():
        raise UserError("SGLang quantises its activations to nvfp4; --fp4-gemm-backend marlin leaves them in 16 bits")
    return _modelopt_a16(_method, layer)


def _modelopt_a16(_method: Any, layer: Any) -> Stored:
    # Of the scales of fused layers SGLang takes the largest.
    return _nvfp4(layer, "weight", layer.weight_scale_2.max())


#: SGLang's schemes and methods to what describes their loaded layers.
SCHEMES: dict[str, Callable[[Any, Any], Stored]] = {
    f"{_SCHEMES}.gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme": _gptq,
    f"{_SCHEMES}.awq.schemes.awq_marlin.AWQMarlinLinearScheme": _awq,
    f"{_SCHEMES}.compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16": _compressed,
    f"{_SCHEMES}.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4.CompressedTensorsW4A16Fp4": _compressed_nvfp4,
    f"{_SCHEMES}.compressed_tensors.schemes.compressed_tensors_w4a16_mxfp4.CompressedTensorsW4A16Mxfp4": _compressed_mxfp4,
    f"{_SCHEMES}.modelopt_quant.ModelOptFp4LinearMethod": _modelopt,
    f"{_SCHEMES}.modelopt_quant.ModelOptNvFp4A16LinearMethod": _modelopt_a16,
}


def _multiplying(target: str) -> str:
    """Return the name of the function that multiplies: schemes and methods have one each."""
    return f"{target}.{'apply' if target.endswith('Method') else 'apply_weights'}"


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
        stored = SCHEMES[target](scheme, layer)
        scale = getattr(layer, stored.names[1])
        of_x = scale.dtype if scale.dtype.itemsize == 2 else getattr(layer, "params_dtype", None) or torch.get_default_dtype()
        return stored, of_x

    def process(theirs: Callable[..., None], scheme: Any, layer: Any) -> None:
        kernel = _Kernel(scheme, theirs, original_of(_multiplying(target)))
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
    name: hook for target in SCHEMES for name, hook in ((f"{target}.{_PROCESS}", _processing(target)), (_multiplying(target), _apply))
}
