"""Table: an op's tuned rows of all layers, and which of them answer for a shape on a device; torch-free."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.csvfile import Problem, read_rows
from tunedgemm.errors import TableError
from tunedgemm.folders import table_layers
from tunedgemm.libtypes import rank
from tunedgemm.row import Row, record_of
from tunedgemm.sheet import present

if TYPE_CHECKING:
    import pandas as pd

    from tunedgemm.device import Device
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Match:
    """A row that answers for a shape.

    Attributes:
        row: the row; its shape is the one that was tuned.
        granularity: how its M relates to the one asked for.
        same_device: whether it was tuned on a device of this name, or the file does not tell.
    """

    row: Row
    granularity: str
    same_device: bool


class Table:
    """An op's rows, merged from layers of files. Immutable once made; `load` makes it.

    Attributes:
        op: the op.
        rows: all rows that could be read, in order of precedence, also those that never win.
        problems: what could not be read, or is never chosen.
    """

    def __init__(self, op: Op, layers: Sequence[Sequence[Row]], problems: Sequence[Problem] = ()) -> None:
        self.op = op
        self.rows: tuple[Row, ...] = tuple(row for layer in layers for row in layer)
        self.problems = tuple(problems)
        self._index = _index(layers)

    @classmethod
    def load(cls, op: Op, above: Sequence[Path] = ()) -> Table:
        """Read all layers of an op's table; what is broken is left out, logged and kept in `problems`.

        Args:
            above: files that rank above all others.

        Raises:
            TableError: a file of *above* cannot be used.
        """
        layers: list[list[Row]] = []
        problems: list[Problem] = []
        for layer in table_layers(op, above):
            rows: list[Row] = []
            for path in layer.paths:
                if not layer.asked_for and not present(path):
                    continue
                try:
                    found, faults = read_rows(path, op)
                except TableError as error:
                    if layer.name == "instance":
                        raise
                    found, faults = [], [Problem(path, 0, str(error))]
                rows += found
                problems += faults
                if faults:
                    more = f" (and {len(faults) - 1} more; `tunedgemm table check` lists them)" if len(faults) > 1 else ""
                    _log.warning("table left out: %s%s", faults[0], more)
            layers.append(rows)
        return cls(op, layers, problems)

    def candidates(self, shape: Shape, device: Device) -> Iterator[Match]:
        """The rows that answer for *shape* on *device*, best first; the caller walks on when it cannot use one.

        A row that pins every M comes first, then the exact M, then fine and coarse padding; at each the layers by
        precedence, inside a layer the lowest time; a row for any number of compute units comes after those that name it.
        Rows of another device of the same gfx and cu_num follow in the same order.
        """
        groups = [found for units in (device.cu_num, 0) if (found := self._index.get((units, *_group(shape))))]
        if not groups:
            return
        rungs = _rungs(self.op, shape.m, shape.n)
        for same_device in (True, False):
            for m, granularity in rungs.items():
                for row in itertools.chain.from_iterable(by_m.get(m, ()) for by_m in groups):
                    if row.gfx in ("", device.gfx) and (row.device in ("", device.name)) is same_device:
                        yield Match(row, granularity, same_device)

    def to_frame(self) -> pd.DataFrame:
        """All rows as a pandas frame, for questions of one's own: the columns of the CSV, numbers as numbers, and the file."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([{**record_of(row, self.op).cells, "source": str(row.source)} for row in self.rows])
        for column in frame:
            numbers = pd.to_numeric(frame[column], errors="coerce")
            frame[column] = numbers if numbers.notna().all() else frame[column]
        return frame

    def fingerprint(self) -> str:
        """A SHA-256 over which rows answer for what, in which order; independent of paths and of the order in files."""
        digest = hashlib.sha256(self.op.name.encode())
        for group in sorted(self._index, key=repr):
            for m, rows in sorted(self._index[group].items()):
                entries = [(row.gfx, row.device, _identity(row)) for row in rows]
                digest.update(repr((group, m, entries)).encode())
        return digest.hexdigest()


def _group(shape: Shape) -> tuple[Any, ...]:
    """What a row must share with a shape, M aside. The bias's dtype is no part of a table's key."""
    return shape.n, shape.k, shape.dtype, shape.outdtype, shape.epilogue, shape.scale, shape.layout, shape.extra


def _rungs(op: Op, m: int, n: int) -> dict[int, str]:
    """M of the rows to look for, in order: the pin for every M, then the op's ladder."""
    return {0: "pinned", **{row: word for row, word in op.ladder(m, n).items() if row}}


def _identity(row: Row) -> tuple[Any, ...]:
    solution = row.solution
    return solution.libtype, solution.kernel_name, solution.split_k, solution.extra, row.libver


def _index(layers: Sequence[Sequence[Row]]) -> dict[tuple[Any, ...], dict[int, list[Row]]]:
    """Group -> M -> valid rows, best first; a row that repeats a better one is left out."""
    index: dict[tuple[Any, ...], dict[int, list[Row]]] = {}
    for layer in layers:
        valid = [row for row in layer if row.valid]
        for row in sorted(valid, key=lambda row: (row.us, rank(row.solution.libtype), _identity(row), row.gfx, row.device)):
            rows = index.setdefault((row.cu_num, *_group(row.shape)), {}).setdefault(row.shape.m, [])
            place = (row.gfx, row.device, _identity(row))
            if all((other.gfx, other.device, _identity(other)) != place for other in rows):
                rows.append(row)
    return index
