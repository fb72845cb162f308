"""Routes of SGLang's 16-bit linear layers and LM head; `sglang_fp8` has the fp8 layers."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tunedgemm import linear
from tunedgemm.integrations import plain
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import short_dtype

from tunedgemm_engines.routes import Route, add_layer, adds_bias, product
from tunedgemm_engines.rows import record_unrouted, routing, unserved_reason
from tunedgemm_engines.sglang_fp8 import original_of, route_fp8

_METHODS = "sglang.srt.layers.quantization.unquant"
_APPLY = f"{_METHODS}.UnquantizedLinearMethod.apply"
_LM_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
#: Options of SGLang's logits processor for logits of another dtype than the weight's.
_OTHER_LOGITS = ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target")


def route_layers(model: torch.nn.Module, dtype: torch.dtype, heads: bool = True) -> None:
    """Route the linear layers of a loaded model that have rows.

    Args:
        model: SGLang's model.
        dtype: dtype of its activations.
        heads: whether LM heads are routed; SGLang computes those of other logits itself.
    """
    methods: Any = pkgutil.resolve_name(_METHODS)
    head_ids = {id(head) for module in model.modules() if (head := getattr(module, "lm_head", None)) is not None}
    for name, module in model.named_modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if method is None or not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.is_meta:
            continue
        module.tunedgemm_route = ""
        embedding = isinstance(method, methods.UnquantizedEmbeddingMethod)
        with routing(name):
            if weight.dtype.itemsize == 1 and weight.is_floating_point():
                route_fp8(name, module, dtype)
            elif (embedding and heads and id(module) in head_ids) or isinstance(method, methods.UnquantizedLinearMethod):
                module.tunedgemm_route = _route(name, module, embedding)


def _route(name: str, module: Any, head: bool) -> str:
    """Route a layer of 16 bits; return the name of its route, "" if SGLang keeps it."""
    (n, k), dtype, device = module.weight.shape, module.weight.dtype, module.weight.device
    if getattr(module, "use_intel_amx_backend", False):
        record_unrouted("SGLang packs the weights for this CPU", name)
        return ""
    if unserved_reason("a16w16", n, k, dtype=short_dtype(dtype), layer=name):
        return ""
    biased = adds_bias(module) and not head
    shape = Shape("a16w16", 1, n, k, short_dtype(dtype), epilogue="bias" if biased else "none")
    method, apply = module.quant_method, original_of(_APPLY)

    def ours(x: torch.Tensor, weight: torch.Tensor, _x: None, _w: None, bias: torch.Tensor | None) -> Any:
        return linear(x, weight, bias)

    def theirs(x: torch.Tensor, weight: torch.Tensor, _x: None, _w: None, bias: torch.Tensor | None) -> Any:
        return torch.matmul(x, weight.t()) if head else apply(method, SimpleNamespace(weight=weight), x, bias)

    route = Route(
        name=f"{shape} head" if head else f"{shape}", shape=shape, device=device, ours=ours, theirs=theirs, engine="SGLang",
        inputs=lambda m: (torch.randn(m, k, dtype=dtype, device=device),),
        operands=lambda inputs, layer: (*inputs, plain(layer.weight), None, None, plain(layer.bias) if biased else None),
    )  # fmt: skip
    return add_layer(route, module, name).name


def _apply(theirs: Callable[..., Any], method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Multiply by weights of 16 bits."""
    route = getattr(layer, "tunedgemm_route", "")
    return product(x, layer.weight, None, None, bias, x.dtype, route) if route else theirs(method, layer, x, bias)


def _compute_lm_head(
    theirs: Callable[..., Any], processor: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None, **named: Any
) -> Any:
    """Compute logits by the weights of an LM head of 16 bits."""
    route = getattr(lm_head, "tunedgemm_route", "")
    # `out` is for logits of float32.
    wide = any(getattr(processor, option, None) for option in _OTHER_LOGITS)
    if not route or named.keys() - {"out"} or wide or hasattr(lm_head, "set_lora"):
        return theirs(processor, hidden_states, lm_head, embedding_bias, **named)
    weight = lm_head.weight
    return product(hidden_states.to(weight.dtype), weight, None, None, None, weight.dtype, route)


#: SGLang's functions to their wrappers.
HOOKS: dict[str, Callable[..., Any]] = {_APPLY: _apply, _LM_HEAD: _compute_lm_head}
