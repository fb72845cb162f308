"""Convert a model's linear layers to tuned ones instead of patching; also shuffles weights."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import attrs
import torch
from torch.nn.utils.parametrize import is_parametrized

from tunedgemm.backends.kept_weights import renew
from tunedgemm.device import device_of
from tunedgemm.dispatch.captures import watch_graphs
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.dtype import short_dtype
from tunedgemm.errors import OperandError, UserError
from tunedgemm.integrations.layers import DualLayoutLinear, TunedFp8Linear, TunedLinear
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.formats.dual_layout import (
    PLAIN_TYPES,
    DualLayoutWeight,
    copied,
    has_uncounted_alias,
    is_foreign,
    is_sole_holder,
    make_single,
    tensors_alive,
    uncounted,
)
from tunedgemm.ops.formats.shuffle import ShuffledWeight, layout_name, shuffle_weight, unshuffle_weight
from tunedgemm.shape import Shape

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Names of the scales of an fp8 weight: transformers' and DeepSeek's, compressed-tensors'.
_SCALES = ("weight_scale_inv", "weight_scale")
_BLOCK = 128


@attrs.frozen(eq=False)
class Converted:
    """The result of `convert`; as a context manager it undoes the conversion on exit.

    Attributes:
        modules: names of the converted layers.
        shuffled: names of the converted layers with shuffled weights.
        skipped: names of linear layers that were not converted or not shuffled, with the reasons.
        bytes_added: bytes of additional weight copies.
    """

    modules: tuple[str, ...]
    shuffled: tuple[str, ...]
    skipped: Mapping[str, str]
    bytes_added: int
    _undo: list[Callable[[], None]] = attrs.field(repr=False)
    _dual_layout: list[DualLayoutLinear] = attrs.field(repr=False)

    def refresh(self) -> None:
        """Call `refresh` for the converted layers."""
        _refresh(self._dual_layout)

    def undo(self) -> None:
        """Restore every layer's class and its weight's order; further calls do nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Converted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def refresh(model: torch.nn.Module) -> None:
    """Drop the shuffled copies of a model's weights; the next calls renew them.

    Dequantised copies are renewed at once, in their memory, which captured graphs read.

    Needed only after writes that torch does not count: see ``docs/models.md``.

    Args:
        model: a model, converted or not, or a part of one.
    """
    _refresh(model.modules())


def _refresh(modules: Iterable[torch.nn.Module]) -> None:
    for module in modules:
        weight = module._parameters.get("weight")
        if isinstance(weight, DualLayoutWeight):
            weight.orders = None
        renew([*module._parameters.values(), *module._buffers.values()])


def convert(
    model: torch.nn.Module,
    *,
    shuffle: bool | str | tuple[int, int] = False,
    keep_plain: bool = False,
    skip: Iterable[str] = (),
    fp8: bool = True,
) -> Converted:
    """Route a model's linear layers through the tables, in place.

    Convert on the target device and before torch.compile. ``nn.Linear`` layers keep their state and
    get another class. fp8 layers are converted if they have 128x128, row-wise or per-tensor scales.
    Layers with another forward or weight type are skipped and named in the result.

    A weight is shuffled only if a backend has kernels for its layout, because torch would unshuffle
    it in each call. It must belong to one module and not be trained. Load weights first, because
    the state_dict of a converted model has shuffled ones.

    Args:
        model: a model on the device where it will run.
        shuffle: the layout of `shuffle_weight`, True for (16, 16); False shuffles no weight.
        keep_plain: also keep the plain weight, for calls that it serves faster, mostly at small M
            (see `tunedgemm.dispatch.preshuffle`). The shuffled copy is renewed at the first call
            after a change. It doubles the memory of such weights: 15 GB more for 8 billion
            parameters in bf16. Without it, shuffled weights serve every call, which slows down
            decoding at batch 1.
        skip: names of modules to skip, with * and ? as in file names.
        fp8: whether to convert fp8 layers. Their activations are quantised by several torch
            operations; a model's fused kernels may be faster.

    Returns:
        The converted layers, and their undo.

    Raises:
        UserError: a weight to be shuffled requires a gradient, or is on the meta device.
        OperandError: the layout is unknown.
    """
    layout = "row" if shuffle is False else layout_name((16, 16) if shuffle is True else shuffle)
    patterns, holders, alive = tuple(skip), _holders(model), functools.cache(tensors_alive)
    done: list[str] = []
    shuffled: list[str] = []
    skipped: dict[str, str] = {}
    undo: list[Callable[[], None]] = []
    added = 0
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name, module in layers if layout != "row" else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            _check_shuffled(name, module)
    for name, module in layers:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        reason = _unfit(module)
        if fp8 and reason and (scales := _fp8_scales(module)) is not None:
            _to_fp8(module, *scales, undo)
            done.append(name)
            continue
        if reason:
            skipped[name] = reason
            continue
        why = "" if layout == "row" else _no_shuffle(module, layout, keep_plain, holders)
        if layout != "row" and keep_plain and not why and (unseen := _unseen_writes(module.weight, alive)):
            why = f"its weight stays plain: {unseen}"
        if layout != "row" and why:
            skipped[name] = why
        elif layout != "row":
            shuffled.append(name)
            added += _shuffle_layer(module, layout, keep_plain, undo)
        module.__class__ = DualLayoutLinear if "copy_layout" in module.__dict__ else TunedLinear
        undo.append(_restore_class(module, torch.nn.Linear))
        done.append(name)
    dual = [module for _, module in layers if isinstance(module, DualLayoutLinear)]
    return Converted(tuple(done), tuple(shuffled), skipped, added, undo, dual)


def _holders(model: torch.nn.Module) -> dict[int, set[int]]:
    """Map the storages of parameters and buffers to the modules that use them."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and type(tensor) in PLAIN_TYPES and tensor.numel() and not tensor.is_meta:
                holders.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(module))
    return holders


def _unfit(module: torch.nn.Linear) -> str:
    """Return why a layer cannot be converted, or ""."""
    if isinstance(module, (TunedLinear, TunedFp8Linear)):
        return "converted already"
    if "forward" in module.__dict__:
        return "its forward was replaced on the module itself"
    if type(module) is not torch.nn.Linear:
        return f"its class {type(module).__name__} may have another forward"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not a parameter"
    if type(weight) not in PLAIN_TYPES and not isinstance(weight, ShuffledWeight):
        return f"its weight is of the type {type(weight).__name__}"
    if weight.dtype not in _FLOATS:
        return f"its weight is {weight.dtype}"
    return ""


def _check_shuffled(name: str, module: torch.nn.Linear) -> None:
    """Raise UserError for a weight that cannot be shuffled."""
    weight = module.weight
    if _unfit(module) or isinstance(weight, ShuffledWeight):
        return
    if weight.is_meta:
        raise UserError(f"convert: the weight of {name!r} is on the meta device; load the model first")
    if weight.requires_grad:
        raise UserError(
            f"convert: the weight of {name!r} requires a gradient, unlike a shuffled weight; call model.requires_grad_(False) first"
        )


def _no_shuffle(module: torch.nn.Linear, layout: str, keep_plain: bool, holders: dict[int, set[int]]) -> str:
    """Return why a weight cannot be shuffled, or ""."""
    weight = module.weight
    if isinstance(weight, ShuffledWeight):
        return f"its weight has the layout {weight.layout_name} already"
    if not keep_plain and weight.numel() and len(holders[weight.untyped_storage().data_ptr()]) > 1:
        return "its weight stays plain: another module holds it, too"
    try:
        shuffle_weight(torch.empty_like(weight, device="meta", memory_format=torch.contiguous_format), layout)
    except OperandError as error:
        return f"its weight stays plain: {error}"
    if not weight.numel():
        return "its weight stays plain: it is empty"
    (n, k), short = weight.shape, short_dtype(weight.dtype)
    bias = "" if module.bias is None else short_dtype(module.bias.dtype)
    m = PRESHUFFLE_M_THRESHOLD if keep_plain else 1
    shape = Shape("a16w16", m, n, k, short, epilogue="bias" if bias else "none", bias_dtype=bias, layout=layout)
    device = device_of(weight.get_device())
    explanation = tgemm.dispatcher.explain(shape, device)
    if explanation.libtype == BUILTIN:
        return f"its weight stays plain: no backend on {device} has kernels for the layout {layout} (shape {shape})"
    return ""


def _unseen_writes(weight: torch.Tensor, alive: Callable[[], Mapping[int, list[torch.Tensor]]]) -> str:
    """Return why a write to a weight could go unnoticed, or ""."""
    if reason := uncounted(weight):
        return reason
    if is_foreign(weight) and type(weight) is not DualLayoutWeight:
        return "its memory is that of an array or a file, as by torch.from_numpy; clone it first"
    if is_sole_holder(weight) or not has_uncounted_alias(weight, alive()[weight.untyped_storage()._cdata]):
        return ""
    return "writes to another tensor of its memory are not counted as its own, as with weight.data; delete that tensor first"


def _shuffle_layer(module: torch.nn.Linear, layout: str, keep_plain: bool, undo: list[Callable[[], None]]) -> int:
    """Shuffle a layer's weight, or with *keep_plain* a copy of it; return the bytes that it adds."""
    if keep_plain:
        return _copy_layer(module, layout, undo)

    def back() -> None:
        weight: Any = module.weight
        if isinstance(weight, ShuffledWeight):
            module.weight = torch.nn.Parameter(unshuffle_weight(weight), requires_grad=False)

    module.weight = torch.nn.Parameter(shuffle_weight(module.weight.detach().contiguous(), layout), requires_grad=False)
    undo.append(back)
    return 0


def _copy_layer(module: torch.nn.Linear, layout: str, undo: list[Callable[[], None]]) -> int:
    """Give a layer's weight a shuffled copy; return its bytes, 0 if another layer's weight is the same."""
    weight: Any = module.weight
    shared = isinstance(weight, DualLayoutWeight)
    if weight.is_cuda:
        watch_graphs()
    if not shared:
        weight.handed_out = False
        copied(weight, layout)
    module.copy_layout = layout  # type: ignore[assignment]

    def back() -> None:
        del module.copy_layout
        make_single(module._parameters.get("weight"))

    undo.append(back)
    return 0 if shared else weight.nbytes


def _restore_class(module: torch.nn.Linear, before: type[torch.nn.Linear]) -> Callable[[], None]:
    def back() -> None:
        if is_parametrized(module):
            type(module).__bases__ = (before,)  # torch made the class of ours, for this module
        else:
            module.__class__ = before

    return back


def _fp8_scales(module: torch.nn.Linear) -> tuple[str, bool] | None:
    """Return the attribute with an fp8 layer's scales, and whether they are of blocks; None if unknown."""
    weight = module._parameters.get("weight")
    plain = weight is not None and type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype in _FP8 and weight.dim() == 2
    if not plain or "forward" in module.__dict__ or isinstance(module, TunedFp8Linear) or weight is None or not weight.is_contiguous():
        return None
    for name in _SCALES:
        scale = getattr(module, name, None)
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            continue
        (n, k), block = weight.shape, getattr(module, "block_size", None)
        if block is not None:
            fits = tuple(block) == (_BLOCK, _BLOCK) and tuple(scale.shape) == (-(-n // _BLOCK), -(-k // _BLOCK))
            static = getattr(module, "activation_scale", None) is not None
            return (name, True) if fits and not static else None
        if scale.numel() == 1 or tuple(scale.shape) in ((n,), (n, 1)):
            return name, False
    return None


def _to_fp8(module: torch.nn.Linear, scale_name: str, blocks: bool, undo: list[Callable[[], None]]) -> None:
    """Convert an fp8 layer to our class, with its attributes."""
    before = type(module)
    attributes = {"scale_name": scale_name, "blocks": blocks, "untuned": before}
    module.__dict__.update(attributes)
    module.__class__ = TunedFp8Linear

    restore = _restore_class(module, before)

    def back() -> None:
        restore()
        for name in attributes:
            module.__dict__.pop(name, None)

    undo.append(back)
