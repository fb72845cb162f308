"""A plugin of vLLM: its linear methods for 16-bit weights and for fp8 run through the tables.

vLLM calls `register` in each of its processes, by the entry point ``tunedgemm`` of the group ``vllm.general_plugins``. It does nothing
unless ``TUNEDGEMM_VLLM`` is 1. What is replaced is the product; activations are quantised by vLLM's own functions, as before. Written to
the interfaces that vLLM's public source shows in November 2026.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

# What routes is imported where it is needed: vLLM loads this module in all its processes, whether the plugin is on or not.

_log = logging.getLogger("tunedgemm")

VARIABLE = "TUNEDGEMM_VLLM"
_LAYERS = "vllm.model_executor.layers"
#: Module and class of the methods for weights of 16 bits, and of that for fp8.
PLAIN = ((f"{_LAYERS}.linear", "UnquantizedLinearMethod"), (f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"))
FP8 = (f"{_LAYERS}.quantization.fp8", "Fp8LinearMethod")
_BLOCK = 128
#: Rows of the products that a layer is judged by, and the error of their norm that is rounding; another order of bytes is above 1.
_ROWS, _ROUNDING = 4, 0.05
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_registered = False


def register() -> None:
    """Replace the products of vLLM's linear methods, once a process, where ``TUNEDGEMM_VLLM`` is 1; vLLM may call it several times."""
    global _registered
    if _registered or os.environ.get(VARIABLE, "").strip().lower() not in ("1", "true", "yes"):
        return
    _registered = True
    from tunedgemm.integrations.patching import patch

    patch(products=False)
    for module, name in PLAIN:
        _replace(module, name, apply=_plain_apply)
    _replace(*FP8, apply=_fp8_apply, process_weights_after_loading=_fp8_loaded)


def _replace(module: str, name: str, **wrappers: Callable[[Any], Any]) -> None:
    """Wrap methods of a class of vLLM; a class that is not there, or has another form, is named in a warning and left alone."""
    try:
        owner = getattr(importlib.import_module(module), name)
        methods = {method: getattr(owner, method) for method in wrappers}
    except (ImportError, AttributeError) as error:
        _log.warning("vLLM's %s.%s is not as it is known here, and stays as it is: %s", module, name, error)
        return
    for method, wrapper in wrappers.items():
        setattr(owner, method, functools.wraps(methods[method])(wrapper(methods[method])))


def _plain_apply(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of weights of 16 bits."""
    from tunedgemm.integrations.linear import linear

    def apply(self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        weight = layer.weight
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or hasattr(layer, "cpu_linear"):  # packed for a CPU
            return theirs(self, layer, x, bias)
        # vLLM's parameters are subclasses that know how to be loaded; their data is plain.
        return linear(x, weight if type(weight) is torch.nn.Parameter else weight.data, bias)

    return apply


def _fp8_apply(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of fp8 weights, for the layers that `_fp8_loaded` has marked."""

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        kind = getattr(layer, "tunedgemm_kind", "")
        if not kind:
            return theirs(self, layer, x, bias)
        q, x_scale = _quantised(layer, x.reshape(-1, x.shape[-1]), kind)
        out = _product(q, _weight(layer, kind), x_scale, layer.tunedgemm_scale, bias, x.dtype, kind)
        return out.view(*x.shape[:-1], out.shape[-1])

    return apply


def _fp8_loaded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``process_weights_after_loading`` of fp8 weights: marks a layer that this plugin multiplies as vLLM does.

    vLLM's kernels may want a weight in an order of their own, which its shape does not tell. So both products of the same random
    rows are compared, and a layer where they differ stays vLLM's.
    """

    from tunedgemm.settings import Settings
    from tunedgemm.tuned_gemm import TunedGemm

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        theirs(self, layer)
        layer.tunedgemm_kind = ""  # while theirs is asked
        kind, scale = _kind_of(layer)
        if not kind:
            return
        weight = _weight(layer, kind)
        x = torch.randn(_ROWS, weight.shape[1], dtype=getattr(layer, "orig_dtype", torch.bfloat16), device=weight.device)
        try:
            expected = self.apply(layer, x)
            q, x_scale = _quantised(layer, x, kind)
            functions = TunedGemm(settings=Settings.from_environment().passive)
            found = _gemm(functions, kind)(q, weight, x_scale, scale, dtype=x.dtype)
            same = bool((found.float() - expected.float()).norm() <= _ROUNDING * expected.float().norm())
        except Exception as error:  # vLLM's kernels may raise anything
            _log.warning("an fp8 layer of vLLM stays vLLM's: %s: %s", type(error).__name__, error)
            return
        if not same:
            _log.warning("an fp8 layer of vLLM stays vLLM's: its weight [%d, %d] is in an order of vLLM's own", *weight.shape)
            return
        layer.tunedgemm_scale, layer.tunedgemm_kind = scale, kind

    return process_weights_after_loading


def _kind_of(layer: torch.nn.Module) -> tuple[str, torch.Tensor]:
    """``tensor``, ``row`` or ``block`` and the weight's scales by what a layer has; "" for anything else."""
    weight, nothing = getattr(layer, "weight", None), ("", torch.empty(0))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in _FP8:
        return nothing
    blocks = getattr(layer, "weight_scale_inv", None)
    if isinstance(blocks, torch.Tensor):
        wanted = (-(-weight.shape[0] // _BLOCK), -(-weight.shape[1] // _BLOCK))
        fits = tuple(blocks.shape) == wanted and blocks.dtype is torch.float32 and weight.is_contiguous()
        return ("block", blocks.data.contiguous()) if fits and getattr(layer, "input_scale", None) is None else nothing
    scale, n = getattr(layer, "weight_scale", None), weight.shape[1]
    if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32 or not weight.t().is_contiguous():
        return nothing
    if scale.numel() == 1 and getattr(layer, "input_scale", None) is not None:
        return "tensor", scale.data.reshape(1)
    return ("row", scale.data.reshape(-1).expand(n).contiguous()) if scale.numel() in (1, n) else nothing


def _weight(layer: Any, kind: str) -> torch.Tensor:
    """[N, K]; vLLM keeps the transposed view of weights whose scales are of rows or of the tensor."""
    weight: torch.Tensor = layer.weight.data
    return weight if kind == "block" else weight.t()


def _quantised(layer: Any, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] by vLLM's own functions: one scale in all, one a row, or one for 128 elements of a row."""
    found: tuple[torch.Tensor, torch.Tensor]
    if kind == "block":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        found = per_token_group_quant_fp8(x, _BLOCK)
        return found
    from vllm import _custom_ops

    scale = getattr(layer, "input_scale", None)
    q, x_scale = _custom_ops.scaled_fp8_quant(x, scale, use_per_token_if_dynamic=True)
    return q, x_scale.reshape(1) if kind == "tensor" else x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()


def _gemm(functions: Any, kind: str) -> Callable[..., torch.Tensor]:
    """The public function for a kind, of the menu or of a TunedGemm."""
    found: Callable[..., torch.Tensor] = functions.gemm_a8w8_blockscale if kind == "block" else functions.gemm_a8w8
    return found


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    kind: str,
) -> torch.Tensor:
    """The product of quantised operands through the tables."""
    import tunedgemm

    multiply = _gemm(tunedgemm, kind)
    if kind != "block":
        return multiply(x, weight, x_scale, w_scale, bias, dtype)
    out = multiply(x, weight, x_scale, w_scale, dtype)
    return out if bias is None else out.add_(bias)
