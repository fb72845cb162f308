"""A model's linear layers through the tables, module by module: for models that are not to be patched, and for shuffled weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import attrs
import torch

from tunedgemm.device import device_of
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.dtype import short_dtype
from tunedgemm.errors import OperandError, UserError
from tunedgemm.integrations.layers import TunedFp8Linear, TunedLinear, TwofoldLinear
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.formats.shuffle import ShuffledWeight, layout_name, shuffle_weight, unshuffle_weight
from tunedgemm.shape import Shape

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Where layers of fp8 keep the scales of their weight: transformers' and DeepSeek's name, and compressed-tensors'.
_SCALES = ("weight_scale_inv", "weight_scale")
_BLOCK = 128


@attrs.frozen(eq=False)
class Converted:
    """What `convert` did to a model; as a context manager it is undone at the end of the block.

    Attributes:
        modules: names of the layers that go through the tables.
        shuffled: names of those among them whose weights are shuffled.
        skipped: names of linear layers that were left, wholly or with their weights in order, and
            why.
        bytes_added: memory of the weights that are kept twice.
    """

    modules: tuple[str, ...]
    shuffled: tuple[str, ...]
    skipped: Mapping[str, str]
    bytes_added: int
    _undo: list[Callable[[], None]] = attrs.field(repr=False)

    def undo(self) -> None:
        """Give every layer its class and its weight back, in the order that the weight had; a second time does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Converted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def convert(
    model: torch.nn.Module,
    *,
    shuffle: bool | str | tuple[int, int] = False,
    keep_plain: bool = False,
    skip: Iterable[str] = (),
    fp8: bool = True,
) -> Converted:
    """Have a model's linear layers go through the tuned tables, in place; convert where the model will run, and before torch.compile.

    ``nn.Linear`` layers keep all they have and get another class. Layers of fp8 are taken where
    their scales can be told: of blocks of 128 x 128, of rows, or of the tensor. Whatever has a
    forward of its own besides, or a weight of another type, is left and named in the result.

    A weight is shuffled only where a backend has kernels for its layout, for torch would put it in
    order at each call; where no other module holds it; and where it is no parameter that is
    trained. Load weights before: a state_dict of a converted model has shuffled ones.

    Args:
        model: on the device where it will run.
        shuffle: the layout of `shuffle_weight`, True for (16, 16); False leaves weights as they
            are.
        keep_plain: keep the plain weight, too, for the calls that it serves better: those of few
            rows as a rule (see `tunedgemm.dispatch.preshuffle`). It doubles the memory of such
            weights: 15 GB more for 8 billion parameters in bf16. Without it shuffled weights serve
            every call, which slows down decoding at batch 1.
        skip: names of modules to leave, with * and ? as in file names.
        fp8: whether layers of fp8 are taken. Their activations are quantised by several of torch's
            operations, which fused kernels that a model brings along may do faster.

    Returns:
        What was done, and its undo.

    Raises:
        UserError: a weight that is to be shuffled requires a gradient, or is on the meta device.
        OperandError: no such layout.
    """
    layout = "row" if shuffle is False else layout_name((16, 16) if shuffle is True else shuffle)
    patterns, holders = tuple(skip), _holders(model)
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
        if fp8 and reason and (told := _fp8_scales(module)) is not None:
            _to_fp8(module, *told, undo)
            done.append(name)
            continue
        if reason:
            skipped[name] = reason
            continue
        why = "" if layout == "row" else _no_shuffle(module, layout, keep_plain, holders)
        if layout != "row" and why:
            skipped[name] = why
        elif layout != "row":
            shuffled.append(name)
            added += _to_shuffled(module, layout, keep_plain, undo)
        module.__class__ = TwofoldLinear if "shuffled_weight" in module._buffers else TunedLinear
        undo.append(_class_back(module, torch.nn.Linear))
        done.append(name)
    return Converted(tuple(done), tuple(shuffled), skipped, added, undo)


def _holders(model: torch.nn.Module) -> dict[int, set[int]]:
    """Of each memory that parameters and buffers lie in, the modules that hold some of it."""
    found: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.numel() and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                found.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(module))
    return found


def _unfit(module: torch.nn.Linear) -> str:
    """Why a layer cannot have our forward in place of its own; "" where it can."""
    if isinstance(module, (TunedLinear, TunedFp8Linear)):
        return "converted already"
    if "forward" in module.__dict__:
        return "its forward was replaced on the module itself"
    if type(module) is not torch.nn.Linear:
        return f"its class {type(module).__name__} may have a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter, but computed"
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(weight, ShuffledWeight):
        return f"its weight is of the type {type(weight).__name__}"
    if weight.dtype not in _FLOATS:
        return f"its weight is {weight.dtype}"
    return ""


def _check_shuffled(name: str, module: torch.nn.Linear) -> None:
    """Raises UserError for a weight that would be shuffled, and cannot be."""
    weight = module.weight
    if _unfit(module) or isinstance(weight, ShuffledWeight):
        return
    if weight.is_meta:
        raise UserError(f"convert: the weight of {name!r} is on the meta device; load the model, then shuffle its weights")
    if weight.requires_grad:
        raise UserError(
            f"convert: the weight of {name!r} requires a gradient, which no shuffled weight has; model.requires_grad_(False) first"
        )


def _no_shuffle(module: torch.nn.Linear, layout: str, keep_plain: bool, holders: dict[int, set[int]]) -> str:
    """Why a weight stays in order; "" where it can be shuffled."""
    weight = module.weight
    if isinstance(weight, ShuffledWeight):
        return f"its weight is shuffled already, to {weight.layout_name}"
    if not keep_plain and len(holders[weight.untyped_storage().data_ptr()]) > 1:
        return "its weight stays in order, for another module holds it, too"
    try:
        shuffle_weight(torch.empty_like(weight, device="meta", memory_format=torch.contiguous_format), layout)
    except OperandError as error:
        return f"its weight stays in order: {error}"
    (n, k), short = weight.shape, short_dtype(weight.dtype)
    bias = "" if module.bias is None else short_dtype(module.bias.dtype)
    m = PRESHUFFLE_M_THRESHOLD if keep_plain else 1
    shape = Shape("a16w16", m, n, k, short, epilogue="bias" if bias else "none", bias_dtype=bias, layout=layout)
    device = device_of(weight.get_device())
    explanation = tgemm.dispatcher.explain(shape, device)
    if explanation.libtype == BUILTIN:
        return f"its weight stays in order, for no backend on {device} has kernels for the layout {layout} (asked for {shape})"
    return ""


def _to_shuffled(module: torch.nn.Linear, layout: str, keep_plain: bool, undo: list[Callable[[], None]]) -> int:
    """Shuffle a layer's weight, or a copy of it; how many bytes that adds."""
    made = shuffle_weight(module.weight.detach().contiguous(), layout)
    if keep_plain:
        module.register_buffer("shuffled_weight", made, persistent=False)
        undo.append(lambda: delattr(module, "shuffled_weight"))
        return made.numel() * made.element_size()

    def back() -> None:
        weight: Any = module.weight
        if isinstance(weight, ShuffledWeight):
            module.weight = torch.nn.Parameter(unshuffle_weight(weight), requires_grad=False)

    module.weight = torch.nn.Parameter(made, requires_grad=False)
    undo.append(back)
    return 0


def _class_back(module: torch.nn.Linear, before: type[torch.nn.Linear]) -> Callable[[], None]:
    def back() -> None:
        module.__class__ = before

    return back


def _fp8_scales(module: torch.nn.Linear) -> tuple[str, bool] | None:
    """The attribute with the scales of a layer of fp8, and whether they are of blocks; None where they cannot be told."""
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
    """Give a layer of fp8 our class, and what that has to know."""
    before = type(module)
    told = {"scale_name": scale_name, "blocks": blocks, "untuned": before}
    module.__dict__.update(told)
    module.__class__ = TunedFp8Linear

    def back() -> None:
        module.__class__ = before
        for name in told:
            module.__dict__.pop(name, None)

    undo.append(back)
