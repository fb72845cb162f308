"""A plugin of vLLM: its linear layers and experts of 16 and of 8 bits run through the tables.

vLLM calls `register` in each of its processes, by the entry point ``tunedgemm`` of the group ``vllm.general_plugins``. It does nothing
unless ``TUNEDGEMM_VLLM`` is set. A layer goes through the tables where they have a row for its weight, at any number of rows of x, or
where shapes are captured or tuned online; else it is vLLM's own kernel that multiplies. Run with vLLM 0.32; 0.20 to 0.33 have the linear
layers in this form.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from tunedgemm.integrations.vllm_rows import left

# What routes is imported where it is needed: vLLM loads this module in all its processes, whether the plugin is on or not.

_log = logging.getLogger("tunedgemm")

VARIABLE = "TUNEDGEMM_VLLM"
#: Values of the variable: on, and on also where vLLM would pack its weights for a CPU, which are kept as they are then.
_ON, UNPACKED = ("1", "true", "yes"), "unpacked"
_LAYERS = "vllm.model_executor.layers"
#: Module and class of the methods for weights of 16 bits.
PLAIN = ((f"{_LAYERS}.linear", "UnquantizedLinearMethod"), (f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"))
_registered = False


def register() -> None:
    """Route vLLM's layers, once a process, where ``TUNEDGEMM_VLLM`` is set; vLLM may call it several times."""
    global _registered
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if _registered or asked not in (*_ON, UNPACKED):
        return
    _registered = True
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        _log.warning("VLLM_BATCH_INVARIANT is set: vLLM's layers stay vLLM's, for a table may have another kernel for each number of rows")
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and asked != UNPACKED:
        _log.warning(
            "vLLM packs weights for this CPU, which its kernels read quicker: they stay vLLM's; %s=%s routes them", VARIABLE, UNPACKED
        )
        return
    from tunedgemm.integrations.patching import patch

    patch(products=False)
    for module, name in PLAIN:
        _replace(module, name, apply=_plain_apply, process_weights_after_loading=_plain_loaded)
    for ours, what in (("vllm_kernels", "fp8 and int8 layers"), ("vllm_experts", "experts")):
        try:
            importlib.import_module(f"tunedgemm.integrations.{ours}").install()
        except (ImportError, AttributeError) as error:
            _log.warning("vLLM's kernels are not kept as they are known here (0.20 and newer): %s stay vLLM's: %s", what, error)


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


def _plain_loaded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``process_weights_after_loading`` of weights of 16 bits: marks the layers that go through the tables, which are not packed."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        weight = getattr(layer, "weight", None)
        matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and not weight.is_meta
        layer.tunedgemm_routed = matrix and not left("a16w16", *layer.weight.shape)
        if not layer.tunedgemm_routed:
            theirs(self, layer)

    return process_weights_after_loading


def _plain_apply(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of weights of 16 bits."""
    from tunedgemm.integrations.linear import linear

    def apply(self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if not getattr(layer, "tunedgemm_routed", False):
            return theirs(self, layer, x, bias)
        # vLLM's parameters are subclasses that know how to be loaded; their data is plain.
        weight: Any = layer.weight
        return linear(x, weight if type(weight) is torch.nn.Parameter else weight.data, bias)

    return apply
