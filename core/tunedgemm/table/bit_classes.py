"""Bit classes: the rows of one class for each group, and those that break a group. Torch-free.

A group is the rows of one device and shape, whatever their M. The fastest row with M = 0 determines
its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.scale_order import field_of, of_any_m
from tunedgemm.text.printable import warn_once

if TYPE_CHECKING:
    from tunedgemm.table.row import Row

#: How a user gets rows with classes.
REMEDY = "`tunedgemm tune --batch-invariant` tunes them"


def class_faults(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the rows that break a group of their file, with the reason.

    They serve no call in batch-invariant mode. Rows without a class are ignored.
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row.bit_class:
            groups.setdefault((row.source, row.group), []).append(row)
    for group in groups.values():
        pin = next(iter(pins_of(group).values()), None)
        for row in group:
            if not row.shape.m and (fault := _fault_of_any_m(row)):
                why = f"a row with M = 0 {fault}"
            elif pin is None:
                why = f"no row with M = 0 of N={row.shape.n}, K={row.shape.k} serves the other M"
            elif row.bit_class != pin.bit_class:
                why = f"its class is {row.bit_class}, that of the row with M = 0 is {pin.bit_class}"
            else:
                continue
            yield row, f"not used in batch-invariant mode: {why}; {REMEDY}"


def one_class(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those of other classes than their group's.

    A row without a class is left out, too, where one with a class has its key.
    """
    classes = {group: row.bit_class for group, row in pins_of(rows).items()}
    kept = [row for row in rows if row.bit_class in ("", classes.get(row.group, row.bit_class))] if classes else rows
    classed = {row.key for row in kept if row.bit_class}
    return [row for row in kept if row.bit_class or row.key not in classed] if classed else list(kept)


def pins_of(rows: Iterable[Row]) -> dict[object, Row]:
    """Return the fastest row with M = 0 and a class of each group that has one."""
    pins: dict[object, Row] = {}
    for row in rows:
        serves = row.bit_class and row.valid and not row.shape.m and not _fault_of_any_m(row)
        if serves and (row.group not in pins or row.us < pins[row.group].us):
            pins[row.group] = row
    return pins


def _fault_of_any_m(row: Row) -> str:
    """Return why a row with M = 0 cannot serve every M; "" if it can."""
    if row.solution.libtype == BUILTIN:
        return f"cannot name torch's call, whose library chooses kernels by M (got {row.solution})"
    if row.shape != of_any_m(row.shape):  # look-ups for any M ask for the default
        return f"must have the default order of scales (got {field_of(row.shape)})"
    return ""


def warn_of_plain_files(files: Sequence[Path]) -> None:
    """Warn once of each of the user's tables without a class, which serve no call in the mode."""
    for path in files:
        warn_once(f"{path}: no row has a bit class, so none serves in batch-invariant mode; {REMEDY}")
