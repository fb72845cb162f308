"""Table: an op's tuned rows of all layers, and which of them answer for a shape on a device; torch-free."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.errors import TableError
from tunedgemm.libtypes import rank
from tunedgemm.table.csvfile import Problem
from tunedgemm.table.folders import table_layers
from tunedgemm.table.index import Index, Kind, Source, kind_of
from tunedgemm.table.indexfile import open_source
from tunedgemm.table.row import Row, record_of
from tunedgemm.table.sheet import present

if TYPE_CHECKING:
    import pandas as pd

    from tunedgemm.device import Device
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")

#: The word for rows with M = 0, which pin one solution for every M.
_PINNED = "pinned"

#: The most sets of rows whose answers a table remembers; the shapes that one row pads share them.
_REMEMBERED = 1 << 16

#: Up to so many rows of one answer are made at once; of more, each when the caller walks on to it.
_FEW = 8


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

    @functools.cached_property
    def why(self) -> str:
        """The row in words: its file and line, its time, and how it is related to what is asked for."""
        row = self.row
        other = "" if self.same_device else f", measured on {row.device}"
        return f"{row.source}:{row.line}, {row.us:.2f} us, {self.granularity} M={row.shape.m}{other}"


@attrs.frozen(eq=False)
class _Asked:
    """A row that answers and is not made yet.

    Attributes:
        number: its number in the index.
        m, product, units: the key that it was found under.
        word: how its M relates to the one asked for.
        same_device: see `Match`.
        offered: which solution of which device was met first under this key, shared by all rows of
            it.
    """

    number: int
    m: int
    word: str
    same_device: bool
    product: _Product
    units: int
    offered: dict[Any, int]


#: N, K and kind of one of the kin.
_Product = tuple[int, int, Kind]

#: The numbers of the rows of one key, and that key: M, the word for it, which product, and the cu_num.
_Bucket = tuple[int | list[int], int, str, _Product, int]

_Answers = tuple[Match, ...] | list[Match | _Asked | None]


class Table:
    """An op's rows, merged from layers of files. Immutable to its user; `load` makes it.

    A row of a file becomes an object when a look-up or `rows` asks for it.

    Attributes:
        op: the op.
        problems: what could not be read, or is never chosen.
    """

    def __init__(
        self, op: Op, layers: Sequence[Sequence[Row]] = (), problems: Sequence[Problem] = (), *, index: Index | None = None
    ) -> None:
        """
        Args:
            layers: rows of each layer, the one of highest precedence first.
            index: the layers' rows, instead of those.
        """
        self.op = op
        self.problems = tuple(problems)
        self._index = index or Index([[Source.of(layer)] for layer in layers])
        self._answers: dict[tuple[Any, ...], _Answers] = {}

    @classmethod
    def load(cls, op: Op, above: Sequence[Path] = ()) -> Table:
        """Read all layers of an op's table; what is broken is left out, logged and kept in `problems`.

        Args:
            above: files that rank above all others.

        Raises:
            TableError: a file of *above* cannot be used.
        """
        layers: list[list[Source]] = []
        problems: list[Problem] = []
        for layer in table_layers(op, above):
            sources: list[Source] = []
            for path in layer.paths:
                if not layer.asked_for and not present(path):
                    continue
                try:
                    source = open_source(path, op)
                except TableError as error:
                    if layer.name == "instance":
                        raise
                    source = Source.of(())
                    source.problems.append(Problem(path, 0, str(error)))
                sources.append(source)
                problems += source.problems
                if faults := source.problems:
                    more = f" (and {len(faults) - 1} more; `tunedgemm table check` lists them)" if len(faults) > 1 else ""
                    what = "a row that is not used" if faults[0].line else "a table that is not used"
                    _log.warning("%s: %s%s", what, faults[0], more)
            layers.append(sources)
        return cls(op, problems=problems, index=Index(layers))

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows that could be read, in order of precedence, also those that never win; each is made, which takes a large table long."""
        return tuple(self._index.rows)

    def rows_for(self, device: Device) -> Iterator[Row]:
        """The rows that name this gfx and cu_num, in order of precedence; those of another gfx are not made."""
        return self._index.rows_of(device.gfx, device.cu_num)

    def foreign(self, device: Device) -> str:
        """Whose rows these are where none can be for *device*: each gfx and cu_num, in words; "" where some may be, or there are none."""
        gfx, units = self._index.devices
        if not gfx or (gfx & {"", device.gfx} and units & {0, device.cu_num}):
            return ""
        return f"{', '.join(sorted(gfx - {''}) or ['any gfx'])} with cu_num {', '.join(map(str, sorted(units)))}"

    def candidates(self, shape: Shape, device: Device) -> Iterator[Match]:
        """The rows that answer for *shape* on *device*, best first; the caller walks on when it cannot use one.

        A row that pins every M comes first, then those of the op's ladder in its order; at each the
        shape itself before its kin (see `Op.kin`), then a row that names the compute units before
        one for any, the layers by precedence, inside a layer the lowest time. Rows of another
        device of the same gfx and cu_num follow in the same order.
        """
        found = self._buckets(shape, device)
        if not found:
            return iter(())
        key = (device, *[bucket[1:] for bucket in found])
        answers = self._answers.get(key)
        if answers is None:
            answers = self._look_up(key, device, found)
        return iter(answers) if answers.__class__ is tuple else self._walk(answers)  # type: ignore[arg-type]

    def _walk(self, answers: list[Match | _Asked | None]) -> Iterator[Match]:
        for place, answer in enumerate(answers):
            match = answers[place] = self._match(answer) if isinstance(answer, _Asked) else answer
            if match is not None:
                yield match

    def _look_up(self, key: tuple[Any, ...], device: Device, found: list[_Bucket]) -> _Answers:
        """What answers, remembered: matches, or what they are made from where they are many."""
        asked = self._asked(found, device)
        answers = tuple(self._walk(asked)) if len(asked) <= _FEW else asked
        if len(self._answers) >= _REMEMBERED:
            self._answers.clear()
        self._answers[key] = answers
        return answers

    def _asked(self, found: list[_Bucket], device: Device) -> list[Match | _Asked | None]:
        """The valid rows of the buckets that hold for a device, best first."""
        ordered = [self._ordered(rows) for rows, *_ in found]
        places = {number: self._index.place(number) for numbers in ordered for number in numbers}
        offered: list[dict[Any, int]] = [{} for _ in found]
        asked: list[Match | _Asked | None] = []
        for same in (True, False):
            for numbers, (_, m, word, product, units), once in zip(ordered, found, offered, strict=True):
                for number in numbers:
                    gfx, name = places[number]
                    if gfx in ("", device.gfx) and (name in ("", device.name)) is same:
                        asked.append(_Asked(number, m, word, same, product, units, once))
        return asked

    def _buckets(self, shape: Shape, device: Device) -> list[_Bucket]:
        """Where rows may be, in order."""
        index, units = self._index, device.cu_num
        keys: list[tuple[int, _Product, int]] = []
        for kin in self.op.kin(shape):
            kind = kind_of(kin)
            by_units = index.kinds.get(kind)
            if by_units is not None:
                if units in by_units:
                    keys.append((by_units[units], (kin.n, kin.k, kind), units))
                if units and 0 in by_units:
                    keys.append((by_units[0], (kin.n, kin.k, kind), 0))
        found: list[_Bucket] = []
        if keys:
            parts, count = index.parts, len(index.parts)
            rungs = self.op.ladder(shape.m, shape.n)
            if index.pinned:
                rungs = {0: _PINNED, **{m: word for m, word in rungs.items() if m}}
            for m in rungs:
                for stamp, product, cu_num in keys:
                    key = hash((stamp, product[0], product[1], m))
                    rows = (parts[key % count] or index.part(key % count)).get(key)
                    if rows is not None:
                        found.append((rows, m, rungs[m], product, cu_num))
        return found

    def _ordered(self, rows: int | list[int]) -> list[int]:
        """The numbers of one key's valid rows, best first; rows of one layer and time are made, and compared further."""
        numbers: list[int] = []
        valid = self._index.ordered(rows)
        if len(valid) < 2:
            return [number for _, _, number in valid]
        for _, group in itertools.groupby(valid, key=lambda found: found[:2]):
            ties = [number for *_, number in group]
            numbers += sorted(ties, key=lambda number: _further(self._index.row(number))) if len(ties) > 1 else ties
        return numbers

    def _match(self, asked: _Asked) -> Match | None:
        """The row asked for; None where it repeats a better one, or has another key of the same hash."""
        row = self._index.row(asked.number)
        shape = row.shape
        if (row.cu_num, shape.m, (shape.n, shape.k, kind_of(shape))) != (asked.units, asked.m, asked.product):
            return None
        if asked.offered.setdefault((row.gfx, row.device, _identity(row)), asked.number) != asked.number:
            return None
        return Match(row, asked.word, asked.same_device)

    def to_frame(self) -> pd.DataFrame:
        """All rows as a pandas frame, for questions of one's own: the columns of the CSV, numbers as numbers, and the file."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([{**record_of(row, self.op).cells, "source": str(row.source)} for row in self.rows])
        for column in frame:
            numbers = pd.to_numeric(frame[column], errors="coerce")
            frame[column] = numbers if numbers.notna().all() else frame[column]
        return frame

    def fingerprint(self) -> str:
        """A SHA-256 over which rows answer for what, in which order; independent of paths and of the order in files.

        Every row is read, none is kept: about half a minute for a million.
        """
        total = 0
        for numbers in self._index.keys:
            groups: dict[Any, list[tuple[int, float, Row]]] = {}
            for layer, us, number in self._index.ordered(numbers):
                row = self._index.row(number, keep=False)
                groups.setdefault((row.cu_num, row.shape.n, row.shape.k, row.shape.m, kind_of(row.shape)), []).append((layer, us, row))
            for key, rows in groups.items():
                rows.sort(key=lambda found: (*found[:2], _further(found[2])))
                entries = dict.fromkeys((row.gfx, row.device, _identity(row)) for *_, row in rows)
                total += int.from_bytes(hashlib.sha256(repr((key, list(entries))).encode()).digest(), "big")
        return hashlib.sha256(f"{self.op.name} {total % (1 << 256)}".encode()).hexdigest()


def _identity(row: Row) -> tuple[Any, ...]:
    solution = row.solution
    return solution.libtype, solution.kernel_name, solution.split_k, solution.extra, row.libver


def _further(row: Row) -> tuple[Any, ...]:
    """What ranks rows of one layer and time."""
    return rank(row.solution.libtype), _identity(row), row.gfx, row.device
