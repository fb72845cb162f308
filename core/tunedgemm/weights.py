"""Shuffled weights: AITER's layouts for the matrix cores, as a tensor type of their own that ordinary products refuse.

The permutation is AITER's (aiter/ops/shuffle.py): of each block of IN rows, K is cut into packs of 16 bytes, and the packs
of the IN rows at one place of K lie next to each other. IK decides only what K must be divisible by.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tunedgemm.errors import OperandError

#: Bytes of one pack: what a lane of a matrix core loads at once.
_PACK = 16
_NAME = re.compile(r"aiter(\d+)x(\d+)")
#: Other spellings of a layout in guides for AITER.
_ALIASES = {"tn": (16, 16)}
_aten = torch.ops.aten
#: Operations that leave the bytes and their order alone: their result is shuffled, too.
_KEPT = (
    _aten.detach.default, _aten.clone.default, _aten.alias.default, _aten._to_copy.default, _aten.empty_like.default,
    _aten.lift_fresh.default, _aten._pin_memory.default,
)  # fmt: skip


def layout_name(layout: tuple[int, int] | str) -> str:
    """The name in `Shape.layout` of AITER's (IN, IK), or of its alias ``tn``.

    Raises:
        OperandError: no such layout.
    """
    pair = _ALIASES.get(layout, layout) if isinstance(layout, str) else layout
    if isinstance(pair, str):
        found = _NAME.fullmatch(pair)
        pair = (int(found[1]), int(found[2])) if found else (0, 0)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise OperandError(f"unknown weight layout {layout!r}; known: (16, 16), (32, 16), (16, 32), 'tn' for (16, 16)")
    return f"aiter{pair[0]}x{pair[1]}"


def _sides(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    if not found:
        raise OperandError(f"layout {name!r} is none of AITER's")
    return int(found[1]), int(found[2])


def _blocks(weight: torch.Tensor, name: str) -> tuple[int, int, int, int]:
    """(blocks of rows, IN, packs along K, elements of a pack) of a [..., N, K] weight; raises OperandError where it does not divide."""
    rows, step = _sides(name)
    if weight.dim() < 2:
        raise OperandError(f"a weight of layout {name} must be [..., N, K] (got {tuple(weight.shape)})")
    n, k = weight.shape[-2:]
    pack = max(1, _PACK // weight.element_size())
    if n % rows or k % (2 * step):
        raise OperandError(
            f"a weight of layout {name} needs N divisible by {rows} and K by {2 * step} (got N={n}, K={k}, {weight.dtype}); "
            "K counts elements of the tensor, bytes for two 4-bit values in one"
        )
    if k % pack:
        raise OperandError(f"a weight of layout {name} needs K divisible by the {pack} {weight.dtype} in {_PACK} bytes (got K={k})")
    return n // rows, rows, k // pack, pack


def shuffle_weight(x: torch.Tensor, layout: tuple[int, int] | str = (16, 16)) -> ShuffledWeight:
    """Shuffle a weight into one of AITER's layouts.

    Args:
        x: [..., N, K], contiguous; any dtype of 1, 2 or 4 bytes, two 4-bit values counting as one element.
        layout: (IN, IK): N must be divisible by IN and K by 2 * IK. ``"tn"`` is (16, 16).

    Returns:
        A new tensor of the same shape and dtype whose type names the layout.

    Raises:
        OperandError: x is not contiguous, is shuffled already, or does not divide.
    """
    name = layout_name(layout)
    if isinstance(x, ShuffledWeight):
        raise OperandError(f"the weight is shuffled already, to {x.layout_name}")
    if not x.is_contiguous():
        raise OperandError(f"a weight must be contiguous to be shuffled (got strides {x.stride()}); call .contiguous()")
    blocks, rows, packs, pack = _blocks(x, name)
    view = _bytes(x).view(*x.shape[:-2], blocks, rows, packs, pack * x.element_size())
    moved = view.transpose(-3, -2).contiguous().view(torch.uint8)
    return as_shuffled(moved.view(x.dtype).view(x.shape), name)


def unshuffle_weight(x: torch.Tensor, layout: tuple[int, int] | str | None = None) -> torch.Tensor:
    """The inverse of `shuffle_weight`: a new plain tensor [..., N, K].

    Args:
        x: a shuffled weight, or a plain tensor that holds the bytes of one.
        layout: needed for a plain tensor.

    Raises:
        OperandError: a plain tensor without a layout, or one that does not divide.
    """
    name = x.layout_name if isinstance(x, ShuffledWeight) else layout_name(layout) if layout is not None else ""
    if not name:
        raise OperandError("a plain tensor does not tell its layout: name it, as unshuffle_weight(x, (16, 16))")
    plain = plain_weight(x)
    blocks, rows, packs, pack = _blocks(plain, name)
    view = _bytes(plain).view(*plain.shape[:-2], blocks, packs, rows, pack * plain.element_size())
    return view.transpose(-3, -2).contiguous().view(plain.dtype).view(plain.shape)


def as_shuffled(x: torch.Tensor, layout: tuple[int, int] | str = (16, 16)) -> ShuffledWeight:
    """Declare that a plain contiguous tensor holds shuffled bytes already, as a checkpoint may; nothing is copied.

    Raises:
        OperandError: its sizes do not fit the layout.
    """
    name = layout_name(layout)
    if not x.is_contiguous():
        raise OperandError(f"a shuffled weight is contiguous (got {tuple(x.shape)} with strides {x.stride()})")
    _blocks(x, name)
    return _wrapped(plain_weight(x), name)


def plain_weight(x: torch.Tensor) -> torch.Tensor:
    """The tensor without the type: of a shuffled weight its bytes as they lie, of any other tensor itself."""
    return x.plain if isinstance(x, ShuffledWeight) else x


def unshuffled(x: torch.Tensor) -> torch.Tensor:
    """The plain [..., N, K] weight: a copy in order for a shuffled one, any other as it is."""
    return unshuffle_weight(x) if isinstance(x, ShuffledWeight) else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The last dimension as bytes: types such as fp4x2 have few operations of their own."""
    return x.detach().view(torch.uint8)


class ShuffledWeight(torch.Tensor):
    """A weight in a shuffled layout: shape, dtype and device of the plain one, its bytes in another order.

    It moves between devices, is cloned, detached, saved and loaded; whatever would compute with it as if it were plain raises.

    Attributes:
        layout_name: the name in `Shape.layout`.
        plain: the same memory as an ordinary tensor, which launchers get.
    """

    layout_name: str
    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor, layout: str) -> ShuffledWeight:
        made: ShuffledWeight = torch.Tensor._make_subclass(cls, plain, plain.requires_grad)
        made.plain, made.layout_name = plain, layout
        return made

    # Attributes such as shape stay as quick as those of a plain tensor: dispatch reads them in each call.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations that keep the order of the bytes; all others raise OperandError."""
        kwargs = kwargs or {}
        weight = next(value for value in [*args, *kwargs.values()] if isinstance(value, ShuffledWeight))
        plain_args = [plain_weight(value) if isinstance(value, torch.Tensor) else value for value in args]
        if func in _KEPT:
            if kwargs.get("dtype") not in (None, weight.dtype):
                raise OperandError(f"a weight of layout {weight.layout_name} cannot change its dtype; unshuffle_weight(w) first")
            return _wrapped(func(*plain_args, **kwargs), weight.layout_name)
        if func is _aten.copy_.default:
            source = args[1]
            if not (
                isinstance(args[0], ShuffledWeight) and isinstance(source, ShuffledWeight) and source.layout_name == args[0].layout_name
            ):
                raise OperandError(f"only a weight of layout {weight.layout_name} can be copied from or to one; shuffle_weight(w) first")
            func(*plain_args, **kwargs)
            return args[0]
        raise OperandError(
            f"{func.__name__.split('.')[0]} would read a weight of layout {weight.layout_name} as if it were plain; "
            "call the op for shuffled weights, or unshuffle_weight(w) first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and saved by `torch.save` as the plain tensor and the layout."""
        del protocol
        return as_shuffled, (self.plain, self.layout_name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShuffledWeight({tuple(self.shape)}, {self.dtype}, {self.device}, layout={self.layout_name})"


def _wrapped(plain: torch.Tensor, layout: str) -> ShuffledWeight:
    """As the type of that layout: dispatch tells shuffled weights apart by their type."""
    if layout not in _TYPES:
        _TYPES[layout] = type(f"ShuffledWeight_{layout}", (ShuffledWeight,), {})
    return _TYPES[layout](plain, layout)


_TYPES: dict[str, type[ShuffledWeight]] = {}
