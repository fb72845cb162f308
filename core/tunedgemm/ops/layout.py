"""Memory layouts of weights: `Shape.layout` of a weight, and the ops' errors for a wrong one.

Imports no torch.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import dtype_bits
from tunedgemm.errors import OperandError

if TYPE_CHECKING:
    import torch


@attrs.frozen
class Order:
    """The order of a shuffled [N, K] weight.

    K is cut into packs. In each block of rows, the packs at one place of K are adjacent.

    Attributes:
        rows: of a block, a divisor of N; 0 where all rows are one block.
        pack: bytes of a pack, a divisor of those of a row.
        step: elements of the tensor of which K is a multiple.
    """

    rows: int
    pack: int
    step: int = 1


#: Named layouts. In ``columns128`` the 128 bytes along K that a kernel loads of neighbouring rows,
#: however many, are one run of memory.
_ORDERS = {"columns128": Order(0, 128)}
#: AITER's: rows of a block, and half of the divisor of K; then ``p`` and the bytes of a pack other
#: than 16. A lane of a matrix core loads one pack at once.
_AITER, _AITER_PACK = re.compile(r"aiter([1-9]\d*)x([1-9]\d*)(?:p([1-9]\d*))?"), 16


def order_of(layout: str) -> Order | None:
    """Return the order of a layout of this name; None of a plain weight, or of a name that is not known."""
    if match := _AITER.fullmatch(layout):
        return Order(int(match[1]), int(match[3] or _AITER_PACK), 2 * int(match[2]))
    return _ORDERS.get(layout)


def misfit(layout: str, sizes: tuple[int, int], dtype: str, names: tuple[str, str] = ("N", "K")) -> str:
    """Return why no weight of these sizes has a layout, and what would fit; "" where one has it.

    Args:
        sizes: rows and columns, in values; an element of ``fp4x2`` has two.
        dtype: short text of the elements.
        names: of both sizes.
    """
    if layout == "row":
        return ""
    divisors = _divisors(layout, dtype)
    if isinstance(divisors, str):
        return divisors
    for name, size, divisor in zip(names, sizes, divisors, strict=True):
        if size % divisor:
            return f"layout: {layout} of {dtype} needs {name} divisible by {divisor} (got {name}={size})"
    return ""


@functools.lru_cache(maxsize=256)
def _divisors(layout: str, dtype: str) -> tuple[int, int] | str:
    """Return what divides the sizes of a weight of a layout, or why none of the dtype has it."""
    order, width = order_of(layout), dtype_bits(dtype) // 8
    if order is None:
        return f"layout must be row, aiter16x16, aiter32x16, aiter16x32 or columns128 (got {layout})"
    if width > WIDEST:
        return f"layout: {layout} needs elements of 1, 2 or 4 bytes (got {dtype})"
    return order.rows or 1, (2 if dtype == "fp4x2" else 1) * math.lcm(order.step, max(1, order.pack // width))


def name_of(order: Order) -> str:
    """Return the name of one of AITER's orders; a divisor of K that only AITER's kernels need is left out."""
    step = order.step if order.step % 32 else 32
    pack = "" if order.pack == _AITER_PACK else f"p{order.pack}"
    return f"aiter{order.rows}x{step // 2}{pack}"


#: Bytes of the widest elements that are shuffled.
WIDEST = 4


class _Places(dict[tuple[int, int], str]):
    """Orders of the shuffled operands in a storage by offset and bytes; dies with the storage."""

    def __init__(self, storage: Any) -> None:
        super().__init__()
        self.storage = weakref.ref(storage)
        self.addresses: dict[int, str] = {}

    def order_at(self, address: int) -> str:
        """Return the order at an address, "" if the storage has other memory now: `resize_` frees it."""
        storage = self.storage()
        if storage is not None and not 0 <= address - storage.data_ptr() < storage.nbytes():
            return ""
        return self.addresses.get(address, "")

    def __del__(self) -> None:
        for address in self.addresses:
            if (places := _places_at(address)) is None or places is self:  # else another storage has its memory by now
                SHUFFLED_ADDRESSES.pop(address, None)


#: Addresses of shuffled operands that are alive, with their orders, and that of operands without
#: memory. Cache keys hold whether a weight's is one.
SHUFFLED_ADDRESSES: dict[int, weakref.ref[_Places] | None] = {0: None}


def _places_at(address: int) -> _Places | None:
    reference = SHUFFLED_ADDRESSES.get(address)
    return None if reference is None else reference()


def note_order(tensor: torch.Tensor, name: str) -> None:
    """Keep the order of an operand's bytes with its memory, which ``p.data = operand`` hands over."""
    storage: Any = tensor.untyped_storage()
    try:
        places = storage._tunedgemm_shuffled
    except AttributeError:
        places = storage._tunedgemm_shuffled = _Places(storage)
    places[tensor.storage_offset(), tensor.nbytes] = name
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # no memory
        return
    if address:
        places.addresses[address] = name
        SHUFFLED_ADDRESSES[address] = weakref.ref(places)


def noted_order(tensor: torch.Tensor) -> str:
    """Return the order that the memory of a tensor was given, "" for none.

    The first rows of a shuffled operand, and its memory by DLPack, have its address.
    """
    try:
        storage: Any = tensor.untyped_storage()
        name: str = getattr(storage, "_tunedgemm_shuffled", {}).get((tensor.storage_offset(), tensor.nbytes), "")
        if name or storage.device.type == "meta":
            return name
        places = _places_at(tensor.data_ptr())
        return "" if places is None else places.order_at(tensor.data_ptr())
    except (NotImplementedError, RuntimeError):  # no memory
        return ""


def forget_freed(tensor: Any) -> bool:
    """Remove a tensor's address from those of shuffled operands where that operand's memory was freed.

    Returns whether it was one, so that a cache key made before is wrong.
    """
    try:
        address = tensor.data_ptr()
    except (AttributeError, RuntimeError):  # no tensor, or one without memory
        return False
    if not address or address not in SHUFFLED_ADDRESSES:
        return False
    if (places := _places_at(address)) is not None and places.order_at(address):
        return False
    SHUFFLED_ADDRESSES.pop(address, None)
    return True


def layout_of(op: str, weight: torch.Tensor) -> str:
    """Return ``row`` for a plain weight, else the layout that its type names.

    Raises:
        OperandError: the weight is plain by its type, but its memory is that of a shuffled one, or
            AITER's ``shuffle_weight`` has marked it as shuffled.
    """
    layout: str = getattr(weight, "layout_name", "row")
    if layout == "row" and (name := noted_order(weight)):
        raise OperandError(
            f"{op}: the weight has bytes of layout {name} and lost the type, as by parameter.data = shuffle_weight(w); assign "
            f"torch.nn.Parameter(shuffle_weight(w), requires_grad=False), or pass as_shuffled(weight, {name!r})"
        )
    if layout == "row" and getattr(weight, "is_shuffled", False) is True:
        raise OperandError(
            f"{op}: the weight was shuffled by another library, which marks it with an attribute is_shuffled; pass as_shuffled(weight, "
            "layout) with the layout that it was given, such as (16, 16)"
        )
    return layout


def transposed_hint(weight: torch.Tensor) -> str:
    """Return the remedy for a weight that fits x only when transposed."""
    if weight.stride(0) == 1 and not weight.is_contiguous():
        return "the weight is a transposed view: pass the [N, K] weight itself, without .t()"
    return "a [K, N] weight must be passed as weight.t().contiguous()"


def check_not_transposed(op: str, weight: Any) -> None:
    """Check that a square weight is not a transposed view, whose sizes do not show the mistake.

    Raises:
        OperandError: it is.
    """
    if hasattr(weight, "layout_name"):  # contiguous by its type, whose strides a tracing compiler cannot read
        return
    import torch

    if not isinstance(weight, torch.Tensor) or weight.layout is not torch.strided or weight.is_nested:
        return
    sizes = tuple(weight.shape)
    if len(sizes) == 2 and sizes[0] == sizes[1] and not weight.is_contiguous() and weight.stride(0) == 1:
        raise OperandError(
            f"{op}: the square weight is a transposed view (got {sizes} with strides {weight.stride()}); pass the [N, K] weight itself, "
            "without .t(), or call .contiguous() if the view is what x multiplies"
        )


def plain_layout(op: str, weight: torch.Tensor, other: str = "") -> str:
    """Return ``row`` for a plain weight.

    Args:
        other: the function that takes a shuffled weight, for the message.

    Raises:
        OperandError: the weight is shuffled.
    """
    layout = layout_of(op, weight)
    if layout != "row":
        call = f"call {other}, or " if other else ""
        raise OperandError(f"{op}: the weight must be plain (got layout {layout}); {call}pass unshuffle_weight(weight)")
    return layout


def shuffled_layout(op: str, weight: torch.Tensor, sides: str, other: str) -> str:
    """Return the layout of a shuffled weight.

    Args:
        sides: the layout that AITER's kernels want, for the message.
        other: the function that takes a plain weight.

    Raises:
        OperandError: the weight is plain.
    """
    layout = layout_of(op, weight)
    if layout == "row":
        raise OperandError(
            f"{op}: the weight must be shuffled (got a plain tensor); pass shuffle_weight(weight, {sides}), as_shuffled(weight, {sides}) "
            f"if its bytes are shuffled already, or call {other}"
        )
    return layout
