"""Bit classes of tables: compare those of two tables, and measure the kernels of one here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.ops.scale_order import of_any_m, order_of_all, with_order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.row import Row
from tunedgemm.tuner.bits import Bits, StandardOperands, measure
from tunedgemm.tuner.trial import SIZES

#: Verdicts on a group of two tables.
SAME, DIFFERENT, MISSING = "same", "different", "missing"


@attrs.frozen
class Pair:
    """The bit classes of one (N, K) in two tables.

    Attributes:
        shape: the shape with M = 0.
        first, second: the labels in each table; () for none.
    """

    shape: Shape
    first: tuple[str, ...]
    second: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Return `SAME`, `DIFFERENT`, or `MISSING` where a table has no class."""
        if not self.first or not self.second:
            return MISSING
        return SAME if self.first == self.second else DIFFERENT


@attrs.frozen
class Proof:
    """The bits of a row's kernel on this device.

    Attributes:
        row: the row, the first of this kernel in its group.
        label: the label measured here; "" if it has none.
        fault: why it has none.
    """

    row: Row
    label: str
    fault: str = ""

    @property
    def agrees(self) -> bool:
        """Check that the label is that of the row."""
        return bool(self.label) and self.label == self.row.bit_class


def compared(first: Iterable[Row], second: Iterable[Row]) -> list[Pair]:
    """Return the groups of two tables with their labels, in order of N and K."""
    ours, theirs = (_labels(rows) for rows in (first, second))
    groups = sorted({*ours, *theirs}, key=lambda shape: (shape.n, shape.k, str(shape)))
    return [Pair(group, ours.get(group, ()), theirs.get(group, ())) for group in groups]


def _labels(rows: Iterable[Row]) -> dict[Shape, tuple[str, ...]]:
    found: dict[Shape, set[str]] = {}
    for row in rows:
        if row.bit_class and row.valid:
            found.setdefault(of_any_m(row.shape), set()).add(row.bit_class)
    return {group: tuple(sorted(labels)) for group, labels in found.items()}


def proved(rows: Sequence[Row], op: Op, device: Device, registry: Registry) -> Iterator[Proof]:
    """Measure the bits of the kernels of class rows for this architecture, group by group."""
    groups: dict[Shape, dict[Solution, list[Row]]] = {}
    for row in rows:
        if row.bit_class and row.valid and row.gfx in ("", device.gfx):
            groups.setdefault(of_any_m(row.shape), {}).setdefault(row.solution, []).append(row)
    for group, kernels in groups.items():
        order = order_of_all([row.shape for own in kernels.values() for row in own if row.shape.m] or [group])
        operands = StandardOperands(op, with_order(group, order), device.torch_device)
        for solution, own in kernels.items():
            sizes = {row.shape.m for row in own}
            found = _bits(operands, solution, sizes, device, registry)
            # A row with M = 0 serves every M.
            refused = next((f"it refuses M = {m}: {reason}" for m, reason in found.refused if 0 in sizes or m in sizes), "")
            yield Proof(own[0], "" if refused else found.label, found.fault or refused or ("" if found.label else "it serves no M"))


def _bits(operands: StandardOperands, solution: Solution, sizes: set[int], device: Device, registry: Registry) -> Bits:
    """Return the bits of a kernel at the standard M and those of its rows."""
    backend = registry.get(solution.libtype)
    if not isinstance(backend, Backend):
        return Bits((), (), f"libtype {solution.libtype}: {backend.reason if isinstance(backend, Unsupported) else 'not installed'}")
    return measure(operands, lambda shape: backend.bind(solution, shape, device), sorted({*SIZES, *sizes} - {0}), order=solution.sum_order)
