"""Shuffled weights: matrix-core layouts in a tensor type that ordinary products refuse.

The permutation is AITER's (aiter/ops/shuffle.py). In each block of IN rows, K is cut into packs of
16 bytes. The packs of the IN rows at one place of K are adjacent. IK decides only what K must be
divisible by. With P elements in a pack, element (n, k) of [N, K] is stored at
``(n // IN) * IN * K + (k // P) * IN * P + (n % IN) * P + k % P``. ``columns128`` is the same with
one block of all N rows and packs of 128 bytes: [K / P, N, P]. `tunedgemm.ops.layout` has both as
data.

Not here: AITER's variants for int4 (``use_int4``) and for interleaved gate and up rows
(``is_guinterleave``).

Saving: a state_dict with shuffled weights goes through `torch.save`; reading it with
``weights_only=True`` needs this module imported before. safetensors keeps bytes without a type:
save ``w.plain``, and pass the loaded tensor to `as_shuffled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.scales import ShuffledScale
from tunedgemm.ops.layout import Order, order_of

#: Other spellings of a layout in guides for AITER.
_ALIASES = {"tn": (16, 16)}
_aten = torch.ops.aten
#: Operations that leave the bytes and their order alone: their result is shuffled, too.
_KEPT = (
    _aten.detach.default, _aten.clone.default, _aten.alias.default, _aten._to_copy.default, _aten.empty_like.default,
    _aten.lift_fresh.default, _aten._pin_memory.default,
)  # fmt: skip
#: Operations that take whole matrices of a stack [..., N, K], experts for example.
_PARTS = (_aten.select.int, _aten.slice.Tensor, _aten.unbind.int)
#: Queries of the memory, not of its contents.
_ASKED = (_aten.is_pinned.default, _aten.record_stream.default)


def layout_name(layout: tuple[int, int] | str) -> str:
    """Return the name in `Shape.layout` of AITER's (IN, IK), its alias ``tn`` or a named layout.

    Raises:
        OperandError: no such layout.
    """
    pair: Any = _ALIASES.get(layout, layout) if isinstance(layout, str) else layout
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(side) is int for side in pair):
        pair = f"aiter{pair[0]}x{pair[1]}"
    if not isinstance(pair, str) or order_of(pair) is None:
        raise OperandError(f"unknown weight layout {layout!r}; known: (16, 16), (32, 16), (16, 32), 'tn' for (16, 16), 'columns128'")
    return pair


def _order(name: str) -> Order:
    if (order := order_of(name)) is None:
        raise OperandError(f"no order of bytes is known of layout {name!r}")
    return order


def _blocks(weight: torch.Tensor, name: str) -> tuple[int, int, int, int]:
    """Return (blocks of rows, their rows, packs along K, elements of a pack) of a weight.

    Raises OperandError where the weight's sizes are not divisible.
    """
    order = _order(name)
    if weight.dim() < 2:
        raise OperandError(f"a weight of layout {name} must be [..., N, K] (got {tuple(weight.shape)})")
    n, k = weight.shape[-2:]
    pack = max(1, order.pack // weight.element_size())
    if (order.rows and n % order.rows) or k % order.step:
        raise OperandError(
            f"a weight of layout {name} needs N divisible by {order.rows} and K by {order.step} (got N={n}, K={k}, {weight.dtype}); "
            "K counts elements of the tensor, bytes for two 4-bit values in one"
        )
    if k % pack:
        raise OperandError(f"a weight of layout {name} needs K divisible by the {pack} {weight.dtype} in {order.pack} bytes (got K={k})")
    return (n // order.rows, order.rows, k // pack, pack) if order.rows else (1, n, k // pack, pack)


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] | str = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    pad_k_to: int = 0,
) -> ShuffledWeight:
    """Shuffle a weight into one of AITER's layouts, or one with a name.

    Args:
        x: [..., N, K], contiguous; any dtype of 1, 2 or 4 bytes, two 4-bit values counting as one
            element.
        layout: (IN, IK): N must be divisible by IN and K by 2 * IK. ``"tn"`` is (16, 16).
            ``"columns128"``: a row has a multiple of 128 bytes, N is any.
        use_int4, is_guinterleave, pad_k_to: AITER's other orders and its padding: only False, False
            and 0.
        gate_up: of no effect without is_guinterleave, as in AITER.

    Returns:
        A new tensor of the same shape and dtype whose type names the layout.

    Raises:
        OperandError: x is not contiguous, is shuffled already, or does not divide; or an order or a
            padding is not made here.
    """
    del gate_up
    for argument, value in (("use_int4", use_int4), ("is_guinterleave", is_guinterleave), ("pad_k_to", pad_k_to)):
        if value:
            hint = "pad x and the weight with zeros before it is shuffled" if argument == "pad_k_to" else "leave it out"
            raise OperandError(f"shuffle_weight: {argument}={value!r} is not made here; {hint}")
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
    """Invert `shuffle_weight`: a new plain tensor [..., N, K].

    Args:
        x: a shuffled weight, or a plain tensor that holds the bytes of one.
        layout: needed for a plain tensor.

    Raises:
        OperandError: a plain tensor without a layout, one that does not divide or is not
            contiguous, or a layout that is not the weight's.
    """
    name = layout_name(layout) if layout is not None else getattr(x, "layout_name", "")
    if not name:
        raise OperandError("a plain tensor does not tell its layout: name it, as unshuffle_weight(x, (16, 16))")
    plain = as_shuffled(x, name).plain
    blocks, rows, packs, pack = _blocks(plain, name)
    view = _bytes(plain).view(*plain.shape[:-2], blocks, packs, rows, pack * plain.element_size())
    return view.transpose(-3, -2).contiguous().view(plain.dtype).view(plain.shape)


def as_shuffled(x: torch.Tensor, layout: tuple[int, int] | str = (16, 16)) -> ShuffledWeight:
    """Declare that a plain contiguous tensor, say of a checkpoint, holds shuffled bytes; copies nothing.

    Raises:
        OperandError: its sizes do not fit the layout, or it is typed with another.
    """
    name = layout_name(layout)
    if isinstance(x, ShuffledWeight):
        if x.layout_name != name:
            raise OperandError(f"the weight is of layout {x.layout_name} already, not {name}; unshuffle_weight(w) first")
        return x
    if not x.is_contiguous():
        raise OperandError(f"a shuffled weight is contiguous (got {tuple(x.shape)} with strides {x.stride()})")
    _blocks(x, name)
    return _wrapped(x, name)


def plain_weight(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a shuffled weight or scale without the type; any other tensor itself."""
    return x.plain if isinstance(x, (ShuffledWeight, ShuffledScale)) else x


def unshuffled(x: torch.Tensor) -> torch.Tensor:
    """Return the plain [..., N, K] weight: a copy of a shuffled one in order, any other unchanged."""
    return unshuffle_weight(x) if isinstance(x, ShuffledWeight) else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View the last dimension as bytes: types such as fp4x2 support few operations."""
    return x.detach().view(torch.uint8)


class ShuffledWeight(torch.Tensor):
    """A weight in a shuffled layout: shape, dtype and device of the plain one, its bytes in another order.

    It moves between devices, is cloned, detached, compared (bytes), saved and loaded, and may be a
    parameter; of a stack [E, N, K] whole matrices can be taken (``w[e]``, ``w[a:b]``, ``for one in
    w``). Whatever would read it as if it were plain raises OperandError. No gradient reaches it.
    One subclass a layout, made by `shuffle_weight` and `as_shuffled`.

    Attributes:
        layout_name: the name in `Shape.layout`.
        plain: the same memory as an ordinary tensor without a gradient, which launchers, Triton and
            safetensors get.
    """

    layout_name: str
    _plain: torch.Tensor | None = None

    # Attributes such as shape stay as quick as those of a plain tensor: dispatch reads them in each
    # call.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def plain(self) -> torch.Tensor:
        """Return the weight's present memory as an ordinary tensor without a gradient."""
        kept = self._plain
        # A module that moves gives its parameter other memory, by ways that Python does not see
        # either.
        if kept is None or kept.data_ptr() != self.data_ptr():
            with torch._C._DisableTorchDispatch():
                kept = self._plain = torch.Tensor._make_subclass(torch.Tensor, self)
        return kept

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return a detached view, as for any tensor; the setter takes a weight of the same layout only."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the memory of a weight of the same layout.

        Raises:
            OperandError: value is plain, or of another layout.
        """
        if not _same_layout(self, value):
            raise OperandError(_unlike(self, value))
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._plain = plain_weight(value)  # and lets the old memory go

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run operations that keep the order of the bytes; raise OperandError for all others."""
        kwargs = kwargs or {}
        weight = next(_weights([args, kwargs.values()]))
        plain_args = [plain_weight(value) if isinstance(value, torch.Tensor) else value for value in args]
        if func in _KEPT:
            if kwargs.get("dtype") not in (None, weight.dtype):
                raise OperandError(f"a weight of layout {weight.layout_name} cannot change its dtype; unshuffle_weight(w) first")
            return _wrapped(func(*plain_args, **kwargs), weight.layout_name)
        if func in _PARTS:
            return _taken(weight, func, plain_args, kwargs)
        if func in _ASKED:
            return func(*plain_args, **kwargs)
        if func in (_aten.copy_.default, _aten.equal.default):
            if not _same_layout(args[0], args[1]):
                raise OperandError(_unlike(args[0], args[1]))
            if func is _aten.equal.default:
                return bool(torch.equal(_bytes(plain_args[0]), _bytes(plain_args[1])))
            _copied(plain_args[0], plain_args[1], bool(plain_args[2:] and plain_args[2]) or bool(kwargs.get("non_blocking")))
            return args[0]
        raise OperandError(
            f"{func.__name__.split('.')[0]} would read a weight of layout {weight.layout_name} as if it were plain; "
            "call the op for shuffled weights, unshuffle_weight(w) first, or take the bytes from w.plain"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShuffledWeight:
        """Clone the weight; a parameter stays one."""
        if id(self) not in memo:
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = _rebuilt(self.plain.clone(), self.layout_name, self.requires_grad, parameter)
        copied: ShuffledWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain tensor, the layout, and whether it is a parameter; `torch.save` uses this."""
        del protocol
        return _rebuilt, (self.plain, self.layout_name, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShuffledWeight({tuple(self.shape)}, {self.dtype}, {self.device}, layout={self.layout_name})"


def _wrapped(plain: torch.Tensor, layout: str) -> ShuffledWeight:
    """Give a tensor the type of that layout: dispatch distinguishes shuffled weights by their type."""
    if layout not in _TYPES:
        _TYPES[layout] = type(f"ShuffledWeight_{layout}", (ShuffledWeight,), {"layout_name": layout})
    wrapped: ShuffledWeight = torch.Tensor._make_subclass(_TYPES[layout], plain)
    wrapped._plain = torch.Tensor._make_subclass(torch.Tensor, plain)  # compilers see the memory of a weight through it alone
    return wrapped


_TYPES: dict[str, type[ShuffledWeight]] = {}


def _rebuilt(plain: torch.Tensor, layout: str, requires_grad: bool, parameter: bool) -> ShuffledWeight:
    """Rebuild a weight from the parts of `__reduce_ex__` and `__deepcopy__`."""
    weight: Any = as_shuffled(plain, layout)
    if parameter:
        weight = torch.nn.Parameter(weight, requires_grad=requires_grad)
    if requires_grad:
        weight.requires_grad_()
    rebuilt: ShuffledWeight = weight
    return rebuilt


def _weights(values: Iterable[Any]) -> Iterator[ShuffledWeight]:
    """Yield the shuffled weights among arguments, in lists, too."""
    for value in values:
        if isinstance(value, ShuffledWeight):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str)):
            yield from _weights(value)


def _same_layout(tensor: Any, other: Any) -> bool:
    return isinstance(tensor, ShuffledWeight) and type(tensor) is type(other)


def _unlike(tensor: Any, other: Any) -> str:
    """Return why two tensors cannot be compared or copied, with the remedy."""
    names = [value.layout_name if isinstance(value, ShuffledWeight) else "row" for value in (tensor, other)]
    if names[0] == "row":
        return f"a weight of layout {names[1]} cannot go where a plain one is; unshuffle_weight(w) first"
    hint = f"shuffle_weight(w, {names[0]!r}), or as_shuffled(w, {names[0]!r}) if its bytes are in that order already"
    if names[1] == "row":
        return f"a plain weight cannot go where one of layout {names[0]} is; {hint}"
    return f"a weight of layout {names[1]} cannot go where one of layout {names[0]} is; unshuffle_weight(w), then {hint}"


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise OperandError(
            f"a shuffled weight is copied between equal shapes and dtypes: {tuple(target.shape)} {target.dtype} from "
            f"{tuple(source.shape)} {source.dtype}"
        )
    _bytes(target).copy_(_bytes(source), non_blocking)


def _taken(weight: ShuffledWeight, func: Any, plain_args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Take whole matrices of a stack, each in the layout of the stack."""
    dim = plain_args[1] if len(plain_args) > 1 else kwargs.get("dim", 0)
    result = func(*plain_args, **kwargs)
    whole = isinstance(result, torch.Tensor) and result.shape == weight.shape
    if dim % weight.dim() >= weight.dim() - 2 and not whole:
        raise OperandError(
            f"a weight of layout {weight.layout_name} can be indexed only along the dimensions before [N, K] (got {tuple(weight.shape)}, "
            f"dimension {dim}); unshuffle_weight(w) first, or take the bytes from w.plain"
        )
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if not all(part.is_contiguous() for part in parts):
        raise OperandError(
            f"this part of a weight {tuple(weight.shape)} of layout {weight.layout_name} is not contiguous; unshuffle_weight(w) first"
        )
    typed = [_wrapped(part, weight.layout_name) for part in parts]
    return typed if isinstance(result, (tuple, list)) else typed[0]


torch.serialization.add_safe_globals([_rebuilt])
