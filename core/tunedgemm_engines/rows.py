"""Find the layers of an engine to route: those with rows, or that a backend serves untuned.

Others keep the engine's kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm import dispatcher
from tunedgemm.integrations import current_device, equivalent_orders, offers, with_order
from tunedgemm.plugin import Device, Shape, device_of

from tunedgemm_engines.bit_classes import ClassMissing, class_of, unbound
from tunedgemm_engines.phases import phase
from tunedgemm_engines.scales import M_MAJOR, TELLING_ROWS, at_m
from tunedgemm_engines.start import described

if TYPE_CHECKING:
    from tunedgemm.tools.tables import Table

#: M at which a backend may serve a layer untuned: the sizes of small CUDA graphs. At other M, as in
#: prefill, choosing and binding a kernel takes longer than it saves.
UNTUNED_M = (1, 2, 4, *range(8, 129, 8))
#: M at which a backend must serve a layer before it serves all M of prefill. Its kernels for other
#: M are among those for these, which compile ahead, not in calls.
PREFILL_M = (*range(136, 257, 8), *range(320, 8193, 64), *range(8448, 16385, 256))
#: Further fields of a shape.
Fields = tuple[tuple[str, int | str | bool], ...]
#: Prefix of operand dtypes -> the dtype for which backends are queried.
_DTYPES = {"": "bf16", "fp8": "fp8_e4m3fn"}

#: Why layers keep the engine's kernels -> names of the layers.
_unrouted: dict[str, list[str]] = {}


@phase("routing")
def unserved_reason(
    op: str, n: int, k: int, *, scale: str = "none", dtype: str = "", layer: str = "", extras: tuple[Fields, ...] = ()
) -> str:
    """Return why a layer keeps the engine's kernel; "" if it is routed.

    Args:
        op: name of its op.
        n, k: N and K of its weight on this rank.
        scale: granularity of its scales.
        dtype: prefix of its operand dtype.
        layer: name of the layer, for `unrouted`.
        extras: further fields of its shape, for each format that its weight may have; of ops whose
            rows name the format.
    """
    try:
        op_dispatcher = dispatcher(op)
        settings, invariant = op_dispatcher.settings, op_dispatcher.settings.batch_invariant
        if settings.capture if invariant else settings.needs_calls(op):
            return ""
        device, table = current_device(), op_dispatcher.table
        weights = _weights(table, device.index)
        if any(kind == scale and of.startswith(dtype) and (not extras or own in extras) for of, kind, own in weights.get((n, k), ())):
            return ""
        of, out = _DTYPES.get(dtype, dtype), "bf16" if scale != "none" and not extras else ""
        shapes = [Shape(op, 1, n, k, of, out, scale=scale, extra=extra) for extra in extras or ((),)]
        if device.index >= 0 and any(_has_untuned(shape, device, settings) for shape in shapes):
            return ""
        named = " or ".join(", ".join(f"{name}={value}" for name, value in extra) for extra in extras) or f"scales by {scale}"
        reason = f"no {'class row' if invariant else 'row'} of {op} with N={n}, K={k}, {named}"
        others = table.foreign(device)
        reason += f" for {device}; the table's rows are for {others}" if others else ""
    except Exception as error:  # a table is damaged, and a plugin may raise anything
        reason = described(error)
    record_unrouted(reason, layer)
    return reason


def untuned_sizes(shape: Shape, device: Device) -> list[int]:
    """Return the M of `UNTUNED_M` at which a backend would serve a shape without a row."""
    op_dispatcher = dispatcher(shape.op)
    table, registry, libtypes = op_dispatcher.table, op_dispatcher.registry, op_dispatcher.settings.untuned
    return [m for m in UNTUNED_M if next(offers(at_m(shape, m), device, table, registry, libtypes)).origin == "heuristic"]


def rows_of(shape: Shape, device: Device) -> list[int]:
    """List the M of the rows that serve a shape at any M, ascending."""
    table = dispatcher(shape.op).table
    wanted = {unbiased(with_order(shape.with_m(1), order)) for order in equivalent_orders(at_m(shape, TELLING_ROWS))}
    return sorted({row.shape.m for row in table.rows_for(device) if row.shape.m and unbiased(row.shape.with_m(1)) in wanted})


def unbiased(shape: Shape) -> Shape:
    """Return a shape without its bias."""
    return shape if shape.epilogue == "none" else attrs.evolve(shape, epilogue="none", bias_dtype="")


@contextlib.contextmanager
def routing(layer: str) -> Iterator[None]:
    """Record an error within the context as the reason why a layer keeps the engine's kernel."""
    try:
        with phase("routing"):
            yield
    except ClassMissing as missing:
        record_unrouted(f"{missing}", layer)
    except Exception as error:  # a plugin, or an engine of another form, may raise anything
        record_unrouted(f"routing failed ({described(error)})", layer)


def record_unrouted(reason: str, layer: str) -> bool:
    """Record for `unrouted` why a layer keeps the engine's kernels; return True."""
    _unrouted.setdefault(reason, []).append(layer)
    return True


def forget_unrouted(reason: str) -> bool:
    """Undo one record of `record_unrouted`; return False."""
    _unrouted[reason].pop()
    return False


def unrouted(engine: str = "vLLM", kernels: str = "kernels") -> list[str]:
    """Return one line for each reason why layers keep the engine's kernels."""
    reasons = [(reason, names) for reason, names in _unrouted.items() if names]
    return [f"tunedgemm: {len(names)} layers keep {engine}'s {kernels} (as {names[0] or 'one'}): {reason}" for reason, names in reasons]


@functools.lru_cache(maxsize=16)
def _weights(table: Table, index: int) -> dict[tuple[int, int], set[tuple[str, str, Fields]]]:
    """Map (N, K) of a table's rows to their (dtype, scale granularity, fields), cached for all layers."""
    weights: dict[tuple[int, int], set[tuple[str, str, Fields]]] = {}
    for row in table.rows_for(device_of(index)):
        weights.setdefault((row.shape.n, row.shape.k), set()).add((row.shape.dtype, row.shape.scale, row.shape.extra))
    return weights


@functools.lru_cache(maxsize=1024)
def _has_untuned(shape: Shape, device: Device, settings: Any) -> bool:
    """Check whether a backend would serve a weight untuned, in the mode in one class; cached."""
    if not settings.untuned:
        return False
    shape = with_order(shape, M_MAJOR) if shape.scale == "block" and not shape.extra else shape
    return bool(class_of(shape, unbound(device))[0] if settings.batch_invariant else untuned_sizes(shape, device))
