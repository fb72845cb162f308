"""Memory layouts of weights: `Shape.layout`, and errors for a wrong one. Imports no torch."""

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
    """Memory order of a shuffled [N, K] weight.

    K is split into packs. In each block of rows, the packs at the same K index are adjacent.

    Attributes:
        rows: rows per block, which must divide N; 0 if all rows are one block.
        pack: bytes per pack, which must divide the bytes of a row.
        step: elements of which K must be a multiple.
    """

    rows: int
    pack: int
    step: int = 1


#: Layouts of `a16wn` that depend on the format of the weight; see `tunedgemm.ops.repacked`. Memory
#: from which such operands were made is noted as the checkpoint's.
REPACKED, CHECKPOINT = ("marlin", "machete", "humming"), "checkpoint"
#: Named layouts. In ``columns128``, the 128-byte packs of all rows at one K index are contiguous.
_ORDERS = {"columns128": Order(0, 128)}
#: AITER's names: rows per block, half of the divisor of K, then ``p`` and the bytes per pack if not
#: 16. A lane loads one pack per instruction.
_AITER, _AITER_PACK = re.compile(r"aiter([1-9]\d*)x([1-9]\d*)(?:p([1-9]\d*))?"), 16


def order_of(layout: str) -> Order | None:
    """Return the order of a named layout; None for a plain weight or an unknown name."""
    if match := _AITER.fullmatch(layout):
        return Order(int(match[1]), int(match[3] or _AITER_PACK), 2 * int(match[2]))
    return _ORDERS.get(layout)


def misfit(layout: str, sizes: tuple[int, int], dtype: str, names: tuple[str, str] = ("N", "K")) -> str:
    """Return why a weight of these sizes cannot have a layout, and what would fit; "" if it can.

    Args:
        sizes: rows and columns in values; an element of ``fp4x2`` has two.
        dtype: short dtype of the elements.
        names: names of both sizes for the message.
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
    """Return the divisors of N and K in a layout, or why no weight of the dtype has it."""
    order, width = order_of(layout), dtype_bits(dtype) // 8
    if order is None:
        return f"layout must be row, aiter16x16, aiter32x16, aiter16x32 or columns128 (got {layout})"
    if width > WIDEST:
        return f"layout: {layout} needs elements of 1, 2 or 4 bytes (got {dtype})"
    return order.rows or 1, (2 if dtype == "fp4x2" else 1) * math.lcm(order.step, max(1, order.pack // width))


def name_of(order: Order) -> str:
    """Return AITER's name of an order, without a divisor of K that only its kernels need."""
    step = order.step if order.step % 32 else 32
    pack = "" if order.pack == _AITER_PACK else f"p{order.pack}"
    return f"aiter{order.rows}x{step // 2}{pack}"


#: Largest element size that can be shuffled, in bytes.
WIDEST = 4


class _Places(dict[tuple[int, int], tuple[str, int | None]]):
    """Orders of a storage's operands by (offset, bytes), with the version to which each applies.

    None is any version. Freed with the storage.
    """

    def __init__(self, storage: Any) -> None:
        super().__init__()
        self.storage = weakref.ref(storage)
        self.addresses: dict[int, int | None] = {}

    def has(self, address: int, version: int | None) -> bool:
        """Check that an address is an operand's; not after `resize_` has given the storage other memory."""
        storage = self.storage()
        if storage is not None and not 0 <= address - storage.data_ptr() < storage.nbytes():
            return False
        return self.addresses.get(address, -1) in (None, version)

    def __del__(self) -> None:
        for address in self.addresses:
            if _places_at(address) in (None, self):  # else another storage has reused the memory
                _forget(address)


#: Addresses of live operands with their orders, and 0 for operands without storage. Cache keys
#: contain whether a weight's address is among them, and the order of a scale.
SHUFFLED_ADDRESSES: dict[int, str] = {0: ""}
_PLACES: dict[int, weakref.ref[_Places]] = {}


def _places_at(address: int) -> _Places | None:
    reference = _PLACES.get(address)
    return None if reference is None else reference()


def _forget(address: int) -> None:
    SHUFFLED_ADDRESSES.pop(address, None)
    _PLACES.pop(address, None)


def note_order(tensor: torch.Tensor, name: str, *, until_written: bool = False) -> None:
    """Record an operand's order for its memory, which ``p.data = operand`` passes on.

    Args:
        tensor: the operand.
        name: its order.
        until_written: whether a write that torch counts ends it, as where any bytes may follow.
    """
    storage: Any = tensor.untyped_storage()
    try:
        places = storage._tunedgemm_shuffled
    except AttributeError:
        places = storage._tunedgemm_shuffled = _Places(storage)
    version = _version(tensor) if until_written else None
    places[tensor.storage_offset(), tensor.nbytes] = name, version
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # no memory
        return
    if address:
        places.addresses[address] = version
        SHUFFLED_ADDRESSES[address], _PLACES[address] = name, weakref.ref(places)


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often torch has counted a write to a tensor; None where it counts none."""
    return None if tensor.is_inference() else tensor._version


def noted_order(tensor: torch.Tensor) -> str:
    """Return the order recorded for a tensor's memory; "" if none.

    Views of the first rows and DLPack exports share the operand's address.
    """
    try:
        storage: Any = tensor.untyped_storage()
        name, version = getattr(storage, "_tunedgemm_shuffled", {}).get((tensor.storage_offset(), tensor.nbytes), ("", None))
        if name or storage.device.type == "meta":
            return name if version in (None, _version(tensor)) else ""
        places, address = _places_at(tensor.data_ptr()), tensor.data_ptr()
        return SHUFFLED_ADDRESSES[address] if places is not None and places.has(address, _version(tensor)) else ""
    except (NotImplementedError, RuntimeError):  # no memory
        return ""


def forget_stale(tensor: Any) -> bool:
    """Remove a tensor's address from `SHUFFLED_ADDRESSES` if that operand was freed, or written to.

    Returns whether it was removed, which invalidates a cache key computed before.
    """
    try:
        address = tensor.data_ptr()
    except (AttributeError, RuntimeError):  # no tensor, or one without memory
        return False
    if not address or address not in SHUFFLED_ADDRESSES:
        return False
    if (places := _places_at(address)) is not None and places.has(address, _version(tensor)):
        return False
    _forget(address)
    return True


def layout_of(op: str, weight: torch.Tensor) -> str:
    """Return ``row`` for a plain weight, else the layout of its type.

    Raises:
        OperandError: the weight has a plain type, but its memory or AITER's mark is that of a
            shuffled one.
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
    """Return the remedy for a weight that would fit if transposed."""
    if weight.stride(0) == 1 and not weight.is_contiguous():
        return "the weight is a transposed view: pass the [N, K] weight itself, without .t()"
    return "a [K, N] weight must be passed as weight.t().contiguous()"


def check_not_transposed(op: str, weight: Any) -> None:
    """Check that a square weight is not a transposed view, which its sizes do not reveal.

    Raises:
        OperandError: the weight is a transposed view.
    """
    if hasattr(weight, "layout_name"):  # always contiguous; Dynamo cannot read its strides
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
        other: name of the function for shuffled weights, for the message.

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
        sides: the layout that AITER's kernels need, for the message.
        other: name of the function for plain weights, for the message.

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
