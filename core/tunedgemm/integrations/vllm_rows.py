"""Which of vLLM's linear layers have rows: the others are left to vLLM."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunedgemm.table import Table


def left(op: str, n: int, k: int, *, scale: str = "none", dtype: str = "") -> str:
    """Why the calls of a layer are left to vLLM, "" where they go through the tables.

    Args:
        op: the op of its products.
        n, k: sizes of its weight on this rank.
        scale: kind of its scales.
        dtype: what the name of its operands' dtype begins with.
    """
    from tunedgemm.device import current_device
    from tunedgemm.tuned_gemm import dispatcher

    known = dispatcher(op)
    if known.settings.capture or known.on_miss is not None:
        return ""
    weights = _weights(known.table, current_device().index)
    if any(kind == scale and of.startswith(dtype) for of, kind in weights.get((n, k), ())):
        return ""
    return f"has no tuned row of {op} with N={n}, K={k}, scales by {scale}"


@functools.lru_cache(maxsize=16)
def _weights(table: Table, index: int) -> dict[tuple[int, int], set[tuple[str, str]]]:
    """(N, K) of a table's rows to the (dtype, kind of scales) that they have; a model asks for hundreds of layers."""
    from tunedgemm.device import device_of

    found: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for row in table.rows_for(device_of(index)):
        found.setdefault((row.shape.n, row.shape.k), set()).add((row.shape.dtype, row.shape.scale))
    return found
