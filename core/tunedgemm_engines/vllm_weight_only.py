"""Weight-only layers for vLLM: int4 of GPTQ, AWQ and compressed-tensors, nvfp4, mxfp8 and mxfp4.

Our kernels come first in vLLM's lists, as those of `vllm_kernels`, and hold the kernel that vLLM
would choose. `weight_only` decides who computes a layer, and keeps one layout of its weight.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from tunedgemm.plugin import UserError
from tunedgemm.tools.launching import FORMATS, short_dtype
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear
from vllm.model_executor.model_loader.utils import device_loading_context

from tunedgemm_engines.rows import record_unrouted, unserved_reason
from tunedgemm_engines.vllm import replace_function
from tunedgemm_engines.vllm_backend import AUTO, SCHEMES
from tunedgemm_engines.vllm_kernels import Everywhere, answering, prefer
from tunedgemm_engines.weight_only import OP, Stored, WeightOnly

#: Dtypes of the activations.
_DTYPES = (torch.bfloat16, torch.float16)
#: vLLM's kernels of nvfp4, mxfp8 and mxfp4 that do not quantise the activations.
_WEIGHT_ONLY = (
    "MarlinNvFp4LinearKernel", "FlashInferCuteDslNvFp4W4A16LinearKernel", "B12xNvFp4W4A16LinearKernel",
    "MarlinMxfp8LinearKernel", "EmulationMxfp8LinearKernel", "MarlinMxFp4LinearKernel",
)  # fmt: skip
#: Attributes with weight and scales, without zero points and index.
_NAMES = ("weight", "weight_scale", "", "")
#: vLLM's variable of Marlin's activations.
_MARLINS = "VLLM_MARLIN_INPUT_DTYPE"
#: vLLM's process that keeps repacked weights for engines, and the format by which those load them.
_DAEMON, _FROM_DAEMON = "vllm.model_executor.model_loader.weight_cache.daemon", "ipc_cache"
#: vLLM's kernel that quantises the activations as an attribute of the layer says; others ignore it.
_HUMMING, _INPUTS = "HummingLinearKernel", "_humming_input_quant_config"
_REPACKED = "vLLM's weight cache holds their weights repacked for vLLM's kernels"
#: Whether vLLM is asked for its own kernel.
_asking: list[bool] = []


@attrs.frozen
class Kind:
    """A scheme of vLLM whose layers share a list of kernels.

    Attributes:
        base: class of its kernels.
        chosen: asks vLLM for the kernel of a layer's configuration: a class, or an instance.
        w_format: its format; "" if that depends on the layer.
        per: elements of K in one of the stored weight.
        names: the layer's attributes with the operands, as in `Stored`.
    """

    base: str
    chosen: Callable[[Any], Any]
    w_format: str = ""
    per: int = 1
    names: tuple[str, ...] = (*_NAMES, "")


#: vLLM's name of a scheme -> its kernels.
KINDS = {
    "mixed_precision": Kind("MPLinearKernel", lambda config: linear.choose_mp_linear_kernel(config)),  # noqa: PLW0108 - looked up when called
    "nvfp4": Kind("NvFp4LinearKernel", lambda _: linear.init_nvfp4_linear_kernel(), "nvfp4", 2, (*_NAMES, "weight_global_scale")),
    "mxfp8": Kind("Mxfp8LinearKernel", lambda config: linear.init_mxfp8_linear_kernel(weight_shape=config.weight_shape), "mxfp8"),
    "mxfp4": Kind("MxFp4LinearKernel", lambda config: linear.init_mxfp4_linear_kernel(config.activation_quant_key), "mxfp4", 2),
}


def install(schemes: Collection[str]) -> None:
    """Put our kernels of some of vLLM's schemes before all others of the platform.

    Raises:
        AttributeError: this version of vLLM keeps its kernels in another form.
    """
    missing = []
    for scheme in schemes:
        kind = KINDS[scheme]
        kernels, base = getattr(linear, SCHEMES[scheme], None), getattr(linear, kind.base, None)
        if kernels is None or base is None:
            missing.append(scheme)
            continue
        kernel = type(f"TunedGemm{kind.base}", (_WeightOnlyKernel, base), {"kind": kind, "__doc__": _WeightOnlyKernel.__doc__})
        prefer(kernel, kernels)
        if scheme == "nvfp4":
            _prefer_weight_only(kernel)
    if missing:
        raise AttributeError(f"no list of kernels for {', '.join(missing)}")


@contextmanager
def _asked() -> Iterator[None]:
    """Refuse layers within, so that vLLM chooses among its own kernels."""
    _asking.append(True)
    try:
        yield
    finally:
        _asking.pop()


class _WeightOnlyKernel(Everywhere):
    """Kernel of weights alone: `tunedgemm.gemm_a16wn`, or vLLM's kernel where that is faster."""

    kind: Kind
    config: Any

    def __init__(self, config: Any, *names: Any, theirs: Any = None, **named: Any) -> None:
        super().__init__(config, *names, **named)  # type: ignore[call-arg]  # of vLLM's base
        theirs = theirs or _own(self.kind, config)
        self._whole = WeightOnly("vLLM", theirs(config, *names, **named) if isinstance(theirs, type) else theirs, device_loading_context)

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability: the tables decide."""
        return 0

    @answering
    def can_implement(cls, config: Any) -> str:
        """Require weights alone, and rows if the weight's size is known."""
        if _asking:
            return "vLLM is asked for its own kernel"
        if not cls.kind.w_format:
            return _unserved_int4(config)
        return cls._reason(config, _own(cls.kind, config))

    @classmethod
    def _reason(cls, config: Any, own: Any) -> str:
        """Return why a layer keeps vLLM's kernel *own*; "" if it need not."""
        reason = _REPACKED if _is_cached() else ""
        if not reason and own is not None and type(own).__name__ not in _WEIGHT_ONLY:
            reason = f"vLLM computes {cls.kind.w_format} by {type(own).__name__}, which is not known to leave the activations in 16 bits"
        if reason:
            record_unrouted(reason, "")
            return reason
        sizes, form = getattr(config, "weight_shape", None), FORMATS[cls.kind.w_format]
        if getattr(config, "bmm_batch_size", None) is not None:
            return "needs one matrix"
        return unserved_reason(OP, *sizes, scale="block", extras=(_fields(form.name, form.groups[0]),)) if sizes else ""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the loaded layout until the routes are timed, or let vLLM's kernel repack it."""
        if _is_repacked():
            self._whole.leave(_REPACKED, getattr(layer, "prefix", ""))
            return
        dtype = getattr(self.config, "act_type", None) or getattr(layer, "params_dtype", None) or torch.get_default_dtype()
        self._whole.load(layer, lambda: (self._stored(layer), dtype), getattr(layer, "prefix", ""))

    def _stored(self, layer: Any) -> Stored:
        """Return how a layer stores its weight."""
        kind = self.kind
        if kind.w_format:
            return Stored(kind.w_format, getattr(layer, kind.names[0]).shape[-1] * kind.per, kind.names)
        return _stored_int4(self, layer)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K] of 16 bits to [..., N]."""
        return self._whole.multiply(layer, x, bias)


def _own(kind: Kind, config: Any) -> Any:
    """Return the kernel that vLLM would choose, None if it has none."""
    with _asked():
        try:
            return kind.chosen(config)
        except ValueError:
            return None


def _is_cached() -> bool:
    """Check whether this process loads from vLLM's weight cache, or fills it for any engine."""
    settings = getattr(get_current_vllm_config_or_none(), "load_config", None)
    return _DAEMON in sys.modules or getattr(settings, "load_format", "") == _FROM_DAEMON


def _is_repacked() -> bool:
    """Check whether vLLM hands over repacked weights (0.33), which their sizes may not show."""
    try:
        return bool(importlib.import_module("vllm.model_executor.utils").is_weights_pre_processed())
    except (ImportError, AttributeError):
        return False


def _fields(w_format: str, group: int) -> tuple[tuple[str, int | str], ...]:
    return ("w_format", w_format), ("w_group", group)


def _unserved_int4(config: Any) -> str:
    """Return why a layer of integer weights keeps vLLM's kernel, before its layout is known."""
    group, has_index = max(0, config.group_size), getattr(config, "has_g_idx", False)
    k, n = config.partition_weight_shape
    names = ("awq_int4", "ct_int4_zp") if config.zero_points else ("gptq_int4_order",) if has_index else ("gptq_int4", "ct_int4")
    known = f"{config.weight_type}" == ("uint4" if config.zero_points else "uint4b8") and config.act_type in _DTYPES
    known = known and getattr(config, "out_type", None) in (None, config.act_type)
    reason = ""
    if _is_cached():
        reason = _REPACKED
    elif os.environ.get(_MARLINS):
        reason = f"{_MARLINS} asks for activations of 8 bits"
    elif not known or (has_index and config.zero_points):
        reason = f"no format for weights of {config.weight_type} and activations of {config.act_type}".replace("torch.", "")
    elif has_index and k != config.full_weight_shape[0]:
        reason = "act-order with sharded K needs the scales of all groups"
    if reason:
        record_unrouted(reason, "")
        return reason
    extras = tuple(_fields(name, 0 if group == k else group) for name in names)
    return unserved_reason(OP, n, k, scale="block", dtype=short_dtype(config.act_type), extras=extras)


def _stored_int4(kernel: Any, layer: Any) -> Stored:
    """Return how a layer stores int4, by what vLLM's parameters say of their dimensions.

    vLLM hands AWQ weights over in GPTQ's order.

    Raises:
        UserError: the layout is not one of these, or vLLM's kernel quantises the activations.
    """
    config, weight, own = kernel.config, getattr(layer, kernel.w_q_name), type(kernel._whole.theirs).__name__
    if own == _HUMMING and getattr(layer, _INPUTS, None):
        raise UserError(f"vLLM computes it by {own}, which quantises the activations")
    has_index = getattr(config, "has_g_idx", False)
    zeros, is_kn = (kernel.w_zp_name if config.zero_points else ""), weight.input_dim == 0
    names = (kernel.w_q_name, kernel.w_s_name, zeros, kernel.w_gidx_name if has_index else "", "")
    along_n = not zeros or (getattr(layer, zeros).packed_dim == getattr(layer, zeros).output_dim == 0)
    if weight.packed_dim != weight.input_dim or not along_n or (has_index and not is_kn):
        raise UserError("its int4 weight has another layout than those of GPTQ, AWQ and compressed-tensors")
    name = ("awq_int4" if zeros else "gptq_int4") if is_kn else ("ct_int4_zp" if zeros else "ct_int4")
    return Stored(f"{name}_order" if has_index else name, config.partition_weight_shape[0], names, is_kn and bool(zeros))


def _prefer_weight_only(kernel: type) -> None:
    """Put our kernel before vLLM's of nvfp4 checkpoints with 16-bit activations, which pass by its list."""

    def wrap(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def init_nvfp4_linear_kernel(*arguments: Any, **named: Any) -> Any:
            own = theirs(*arguments, **named)
            use_a16 = named.get("use_a16", bool(arguments and arguments[0]))
            if not use_a16 or isinstance(own, kernel) or not _chooses("nvfp4_w4a16"):
                return own
            ours: Any = kernel
            return own if ours._reason(own.config, own) else ours(own.config, theirs=own)

        return init_nvfp4_linear_kernel

    replace_function((linear.__name__, "", "init_nvfp4_linear_kernel"), wrap)


def _chooses(scheme: str) -> bool:
    """Check whether vLLM chooses the backend of a scheme by itself."""
    settings = getattr(get_current_vllm_config_or_none(), "kernel_config", None)
    of_each = getattr(settings, "linear_backend_per_quant", None) or {}
    return bool((of_each.get(scheme) or getattr(settings, "linear_backend", AUTO)) == AUTO)
