"""Slice, join and view shuffled weights by whole blocks of rows, which keeps their layout."""

from __future__ import annotations

from typing import Any

import torch

from tunedgemm.errors import OperandError
from tunedgemm.ops.layout import Order, order_of

_aten = torch.ops.aten
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
#: Operations that select whole matrices of a stack [..., N, K], such as experts.
_PARTS = (*_SPLITS, _aten.slice.Tensor, _aten.select.int, _aten.unbind.int, _aten.index_select.default)
#: Operations that reinterpret the same memory with another shape or dtype.
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.view.dtype, _aten.unsqueeze.default,
    _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
)  # fmt: skip
_STACK, _CAT = _aten.stack.default, _aten.cat.default


def rearranged(layout: str, weight: torch.Tensor, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch operation that keeps a layout.

    Args:
        layout: its name in `Shape.layout`.
        weight: the shuffled bytes [..., N, K], as a plain tensor.
        func: the operation.
        args, kwargs: its arguments, with plain tensors.

    Returns:
        The results as plain tensors in the same layout; None if it would not be kept.

    Raises:
        OperandError: a part cuts a block of rows, or is not contiguous.
    """
    order = order_of(layout)
    if order is None:
        return None
    if func in _PARTS:
        return _taken(layout, order, weight, func, args, kwargs)
    if func in (_STACK, _CAT) and all(type(part) is torch.Tensor for part in args[0]):
        place, last = _dimension(args, kwargs) % (weight.dim() + (func is _STACK)), weight.dim() - 2
        joins = place < last or (place == last and (func is _STACK or order.rows > 0))
        return func(*args, **kwargs) if joins else None
    if func in _VIEWS:
        result = func(*args, **kwargs)
        return result if _keeps_rows(order, weight, result) else None
    return None


def blocks_as_rows(layout: str, weight: torch.Tensor, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the plain view [N/16, 16 K], one row per block, as AITER's Triton GEMMs take it.

    Returns None for other operations. A plain GEMM cannot mistake such a view for a weight [N, K].
    """
    order = order_of(layout)
    if order is None or not order.rows or func not in _VIEWS:
        return None
    result: torch.Tensor = func(*args, **kwargs)
    size, wanted = (part.shape[-1] * part.element_size() if part.dim() > 1 else 0 for part in (result, weight))
    return result if size == order.rows * wanted else None


def _dimension(args: list[Any], kwargs: dict[str, Any], position: int = 1) -> int:
    dim: int = args[position] if len(args) > position else kwargs.get("dim", 0)
    return dim


def _keeps_rows(order: Order, weight: torch.Tensor, result: torch.Tensor) -> bool:
    """Check that a view keeps the bytes per row, and the matrices or whole blocks of rows."""
    if result.dim() < 2 or result.shape[-1] * result.element_size() != weight.shape[-1] * weight.element_size():
        return False
    whole = order.rows > 0 and result.shape[-2] % order.rows == 0
    return (whole or result.shape[-2] == weight.shape[-2]) and result.shape[-1] % order.step == 0


def _taken(layout: str, order: Order, weight: torch.Tensor, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Select whole matrices of a stack, or whole blocks of rows."""
    dim = _dimension(args, kwargs, 2 if func in _SPLITS else 1)
    result = func(*args, **kwargs)
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if dim % weight.dim() >= weight.dim() - 2 and not all(part.shape == weight.shape for part in parts):
        by_rows = dim % weight.dim() == weight.dim() - 2 and func in (*_SPLITS, _aten.slice.Tensor)
        if not (by_rows and all(_is_blocks(order, weight, part) for part in parts)):
            raise OperandError(
                f"a weight of layout {layout} can be indexed only along the dimensions before [N, K], or along N in whole blocks (got "
                f"{tuple(weight.shape)}, dimension {dim}); unshuffle_weight(w) first, or take the bytes from w.plain"
            )
    if not all(part.is_contiguous() for part in parts):
        raise OperandError(f"this part of a weight {tuple(weight.shape)} of layout {layout} is not contiguous; unshuffle_weight(w) first")
    return result


def _is_blocks(order: Order, weight: torch.Tensor, part: torch.Tensor) -> bool:
    """Check that a part along N is whole blocks of consecutive rows."""
    first = (part.storage_offset() - weight.storage_offset()) // max(1, weight.shape[-1])
    return order.rows > 0 and part.stride(-2) == weight.stride(-2) and not (part.shape[-2] % order.rows or first % order.rows)
