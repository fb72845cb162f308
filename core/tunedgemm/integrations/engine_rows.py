"""Find the linear layers of an engine that have rows; the others stay the engine's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.table.lookup import Table

#: Reasons why layers stay the engine's, with the names of those layers.
_unrouted: dict[str, list[str]] = {}


def unserved_reason(op: str, n: int, k: int, *, scale: str = "none", dtype: str = "", layer: str = "") -> str:
    """Return why a layer's calls stay the engine's, "" if they go through the tables.

    Args:
        op: the op of its products.
        n, k: sizes of its weight on this rank.
        scale: kind of its scales.
        dtype: prefix of its operands' dtype.
        layer: name of the layer, for `unrouted`.
    """
    from tunedgemm.device import current_device
    from tunedgemm.dispatch.tuned_gemm import dispatcher

    try:
        op_dispatcher = dispatcher(op)
        if op_dispatcher.settings.capture or op_dispatcher.on_miss is not None:
            return ""
        device, table = current_device(), op_dispatcher.table
        weights = _weights(table, device.index)
        if any(kind == scale and of.startswith(dtype) for of, kind in weights.get((n, k), ())):
            return ""
        reason = f"no row of {op} with N={n}, K={k}, scales by {scale}"
        others = table.foreign(device)
        reason += f" for {device}; the table's rows are for {others}" if others else ""
    except UserError as error:
        reason = str(error)
    record_unrouted(reason, layer)
    return reason


def record_unrouted(reason: str, layer: str) -> bool:
    """Record for `unrouted` why a layer keeps the engine's kernels; return True."""
    _unrouted.setdefault(reason, []).append(layer)
    return True


def forget_unrouted(reason: str) -> bool:
    """Undo one record of `record_unrouted`; return False."""
    _unrouted[reason].pop()
    return False


def unrouted(engine: str = "vLLM") -> list[str]:
    """Return one line for each reason why layers keep the engine's kernels."""
    reasons = [(reason, names) for reason, names in _unrouted.items() if names]
    return [f"tunedgemm: {len(names)} layers keep {engine}'s kernels (as {names[0] or 'one'}): {reason}" for reason, names in reasons]


@functools.lru_cache(maxsize=16)
def _weights(table: Table, index: int) -> dict[tuple[int, int], set[tuple[str, str]]]:
    """Map (N, K) of a table's rows to their (dtype, kind of scales), for models with hundreds of layers."""
    from tunedgemm.device import device_of

    weights: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for row in table.rows_for(device_of(index)):
        weights.setdefault((row.shape.n, row.shape.k), set()).add((row.shape.dtype, row.shape.scale))
    return weights
