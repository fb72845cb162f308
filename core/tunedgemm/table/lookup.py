"""Table: an op's tuned rows from all layers, and their look-up by shape and device. Torch-free."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.device import Device
from tunedgemm.libtypes import rank
from tunedgemm.ops.padded_m import nearest, serving
from tunedgemm.ops.scale_order import of_any_m
from tunedgemm.products import are_alike, difference
from tunedgemm.table.bit_classes import class_faults, warn_of_plain_files
from tunedgemm.table.csvfile import Problem
from tunedgemm.table.folders import SHIPPED_WORD, TableLayer, table_layers, user_table
from tunedgemm.table.index import Index, RowSource, kind_of
from tunedgemm.table.match import Bucket, Match, Product, UnparsedRow
from tunedgemm.table.row import Row, key_shape, record_of
from tunedgemm.table.sheet import present
from tunedgemm.table.source import log_problems, read_layers

if TYPE_CHECKING:
    import pandas as pd

    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")

#: Granularity of rows with M = 0, which pin one solution for every M.
_PINNED = "pinned"

#: Granularity of rows of the next larger and the next smaller M, in batch-invariant mode.
_NEAREST = "nearest"

#: Most cached look-ups; shapes that pad to the same rows share one.
_REMEMBERED = 1 << 16

#: Matches parsed at once; more are parsed while the caller iterates, in batches that double up to
#: the second number.
_FEW, _TOGETHER = 8, 2048


#: Most rows of equal key, layer and time that are sorted further; more keep file order.
_COMPARED = 256


_Answers = tuple[Match, ...] | list[Match | UnparsedRow | None]


class Table:
    """The rows of an op, merged from layers of files; immutable, made by `load`.

    Rows are parsed when needed.

    Attributes:
        op: the op.
        problems: lines that cannot be read or are never chosen.
        invariant: whether the table serves batch-invariant mode. Then it has only rows with a bit
            class, and those that serve a group have the class of its first row with M = 0.
        decisions: what dispatch has decided for groups in that mode.
    """

    def __init__(
        self,
        op: Op,
        layers: Sequence[Sequence[Row]] = (),
        problems: Sequence[Problem] = (),
        *,
        index: Index | None = None,
        labels: Sequence[str] = (),
        named: Sequence[tuple[Path, RowSource]] = (),
        invariant: bool = False,
    ) -> None:
        """
        Args:
            layers: rows of each layer, highest precedence first.
            index: index of the rows, instead of *layers*.
            labels: names of the layers.
            named: files named by the user, with their rows.
            invariant: whether the table serves batch-invariant mode.
        """
        self.op, self.invariant = op, invariant
        index = index or Index([[RowSource.of(layer)] for layer in layers])
        self._index = index.classes if invariant else index
        broken = class_faults(self._index.rows) if invariant else ()
        self.problems = (*problems, *(Problem(row.source, row.line, why) for row, why in broken))
        self.decisions: dict[Any, Any] = {}
        self._labels = tuple(labels)
        self._named = tuple(named)
        self._examined: set[Device] = set()
        self._answers: dict[tuple[Any, ...], _Answers] = {}
        self._rows: tuple[Row, ...] | None = None
        self._sizes: Mapping[tuple[Shape, str], tuple[int, ...]] | None = None

    @classmethod
    def load(cls, op: Op, above: Sequence[Path] = (), layers: Sequence[TableLayer] | None = None, *, invariant: bool = False) -> Table:
        """Read all layers of an op's table.

        Broken files and lines are skipped, logged and kept in `problems`.

        Args:
            above: files that rank above all others.
            layers: the layers to read, instead of *above* and `table_layers`.
            invariant: whether batch-invariant mode is on; see the class.

        Raises:
            TableError: a file in *above* is unusable.
        """
        layers = table_layers(op, above, invariant=invariant) if layers is None else layers
        by_layer, named = read_layers(op, layers)
        problems = [problem for sources in by_layer for source in sources for problem in source.problems]
        table = cls(op, problems=problems, index=Index(by_layer), labels=list(map(str, layers)), named=named, invariant=invariant)
        if invariant:
            log_problems(table.problems[len(problems) :])
            plain = [path for path, source in named if len(source) and not source.classed]
            warn_of_plain_files(plain or [path for path in [user_table(op)] if not table._index.devices and present(path)])
        return table

    def of_classes(self) -> Table:
        """Return this table in batch-invariant mode: only rows with a bit class serve."""
        if self.invariant:
            return self
        return Table(self.op, (), self.problems, index=self._index, labels=self._labels, named=self._named, invariant=True)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return all readable rows by precedence; slow for a large table."""
        if self._rows is None:
            self._rows = tuple(self._index.rows)
        return self._rows

    def rows_for(self, device: Device) -> Iterator[Row]:
        """Yield the rows of this gfx and cu_num that may serve the device, by precedence."""
        return self._index.rows_of(device.gfx, device.cu_num, lambda layer, name: self._serves(layer, name, device))

    def foreign(self, device: Device) -> str:
        """Return the devices of the rows if none may be *device*; else ""."""
        return _others(self._index, device)

    def warn_of_foreign_files(self, device: Device) -> None:
        """Log once per device the user's files whose rows are all for other devices."""
        if device in self._examined:
            return
        self._examined.add(device)
        for path, source in self._named:
            if others := _others(Index([[source]]), device):
                _log.warning("a table that serves no call: %s: no row for %s; its rows are for %s", path, device, others)

    def elsewhere(self, shape: Shape, device: Device) -> str:
        """Describe the row that would serve *shape* on another device; "" if there is none.

        Devices of the same gfx come first. For messages only: it looks up the shape for each device
        in the table.
        """
        others = self._index.devices - {(device.gfx, device.cu_num), ("", device.cu_num), (device.gfx, 0), ("", 0)}
        for gfx, units in sorted(others, key=lambda other: (other[0] not in ("", device.gfx), abs(other[1] - device.cu_num), other)):
            match = next(self.candidates(shape, Device(gfx or device.gfx, units or device.cu_num)), None)
            if match is not None:
                row = match.row
                what = "this shape" if row.shape.m == shape.m else f"M={row.shape.m}, which serves this shape,"
                here = str(device.cu_num) if row.gfx in ("", device.gfx) else f"{device.gfx}, {device.cu_num}"
                return f"{row.source}:{row.line} has {what} for {Device(row.gfx or device.gfx, row.cu_num)}; this device has {here}"
        return ""

    def candidates(self, shape: Shape, device: Device) -> Iterator[Match]:
        """Yield the rows that may serve *shape* on *device*, best first.

        Pins come first, then the rows of `Op.padded_m` in its order. At each M, the shape precedes
        its equivalents (`Op.equivalent_shapes`), and rows with a cu_num precede rows for any. Then
        layers count by precedence, and within a layer the lowest time. Rows of other devices with
        the same gfx and cu_num follow, those with the most similar memory first. In 16 bits, rows
        of shipped tables serve only products with rates like their own (`are_alike`). On NVIDIA the
        nearest M comes first, and distant ones are left out: see `padded_m.on_nvidia`.

        In batch-invariant mode only rows of this shape with the class of `pin` serve. After those
        of `Op.padded_m` come the next larger and smaller tuned M, and pins last.
        """
        if self.invariant:
            pin = self.pin(shape, device)
            return (match for match in self._matches(shape, device) if pin and match.row.bit_class == pin.row.bit_class)
        return self._matches(shape, device)

    def pin(self, shape: Shape, device: Device) -> Match | None:
        """Return the row with M = 0 that determines the class of a shape's group; None without one."""
        return next((match for match in self._matches(of_any_m(shape), device) if not match.row.shape.m), None)

    def _matches(self, shape: Shape, device: Device) -> Iterator[Match]:
        """Yield the rows that may serve a shape, whatever their class."""
        buckets = self._buckets(shape, device)
        if not buckets:
            return iter(())
        key = (device, *[bucket[1:] for bucket in buckets])
        answers = self._answers.get(key)
        if answers is None:
            answers = self._look_up(key, device, buckets)
        return iter(answers) if answers.__class__ is tuple else self._walk(answers)  # type: ignore[arg-type]

    def has_row(self, shape: Shape, device: Device) -> bool:
        """Check whether a row may serve *shape* on *device*."""
        return next(self.candidates(shape, device), None) is not None

    def _walk(self, answers: list[Match | UnparsedRow | None]) -> Iterator[Match]:
        parsed, batch = 0, _FEW
        for position, answer in enumerate(answers):
            if isinstance(answer, UnparsedRow):
                if position >= parsed and len(answers) > 1:
                    parsed, batch = position + batch, min(2 * batch, _TOGETHER)
                    self._index.parse([later.number for later in answers[position:parsed] if isinstance(later, UnparsedRow)])
                answers[position] = self._match(answer)
            if (match := answers[position]) is not None:
                yield match  # type: ignore[misc]  # parsed above

    def _look_up(self, key: tuple[Any, ...], device: Device, buckets: list[Bucket]) -> _Answers:
        """Look up and cache the matches, unparsed if they are many."""
        unparsed = self._unparsed_rows(buckets, device)
        answers = tuple(self._walk(unparsed)) if len(unparsed) <= _FEW else unparsed
        if len(self._answers) >= _REMEMBERED:
            self._answers.clear()
        self._answers[key] = answers
        return answers

    def _unparsed_rows(self, buckets: list[Bucket], device: Device) -> list[Match | UnparsedRow | None]:
        """Return the valid rows in the buckets for a device, best first."""
        ordered = [self._ordered(rows) for rows, *_ in buckets]
        devices = {number: self._index.device_of(number) for numbers in ordered for number in numbers}
        offered: list[dict[Any, int]] = [{} for _ in buckets]
        unparsed: list[Match | UnparsedRow | None] = []
        unlike = {name: 0.0 if name in ("", device.name) else difference(name, device.name) for _, name in devices.values()}
        for tier in sorted(set(unlike.values())):
            for numbers, (_, m, word, product, units), once in zip(ordered, buckets, offered, strict=True):
                for number in numbers:
                    gfx, name = devices[number]
                    if gfx in ("", device.gfx) and unlike[name] == tier and self._serves(self._index.layer_of(number), name, device):
                        unparsed.append(UnparsedRow(number, m, word, not tier, product, units, once))
        return unparsed

    def _buckets(self, shape: Shape, device: Device) -> list[Bucket]:
        index, units = self._index, device.cu_num
        keys: list[tuple[int, Product, int]] = []
        for equivalent in self._equivalents(shape):
            kind = kind_of(equivalent)
            by_units = index.kinds.get(kind)
            if by_units is not None:
                if units in by_units:
                    keys.append((by_units[units], (equivalent.n, equivalent.k, kind), units))
                if units and 0 in by_units:
                    keys.append((by_units[0], (equivalent.n, equivalent.k, kind), 0))
        buckets: list[Bucket] = []
        if keys:
            parts, count = index.parts, len(index.parts)
            rungs = serving(self.op.padded_m, shape.m, shape.n, device.kind)
            if self.invariant:
                rungs = self._class_rungs(shape, device, rungs)
            elif index.pinned:
                rungs = {0: _PINNED, **{m: word for m, word in rungs.items() if m}}
            for m in rungs:
                for stamp, product, cu_num in keys:
                    key = hash((stamp, product[0], product[1], m))
                    rows = (parts[key % count] or index.part(key % count)).get(key)
                    if rows is not None:
                        buckets.append((rows, m, rungs[m], product, cu_num))
        return buckets

    def _class_rungs(self, shape: Shape, device: Device, padded: Mapping[int, str]) -> Mapping[int, str]:
        """Return the M of class rows that may serve a shape, all with equal bits, in order."""
        rungs = {m: word for m, word in padded.items() if m}
        if shape.m and (pin := self.pin(shape, device)) is not None:
            for m in nearest(shape.m, self._tuned_m.get((of_any_m(shape), pin.row.bit_class), ())):
                rungs.setdefault(m, _NEAREST)
        return {**rungs, 0: _PINNED}

    @property
    def _tuned_m(self) -> Mapping[tuple[Shape, str], tuple[int, ...]]:
        """Map each group and class to the M of its rows, ascending."""
        if self._sizes is None:
            found: dict[tuple[Shape, str], set[int]] = {}
            for row in self.rows:
                found.setdefault((of_any_m(row.shape), row.bit_class), set()).add(row.shape.m)
            self._sizes = {group: tuple(sorted(sizes - {0})) for group, sizes in found.items()}
        return self._sizes

    def _equivalents(self, shape: Shape) -> Iterable[Shape]:
        """Return the shapes whose rows may serve a shape; in batch-invariant mode without one of other bits."""
        equivalents = self.op.equivalent_shapes(shape)
        if not self.invariant:
            return equivalents
        group = of_any_m(shape)
        return [each for each in equivalents if of_any_m(each) == group == key_shape(group)]

    def _ordered(self, rows: int | list[int]) -> list[int]:
        """Return the valid row numbers of a key, best first.

        Rows of equal layer and time are parsed and sorted further, unless they are too many.
        """
        numbers: list[int] = []
        valid = self._index.ordered(rows)
        if len(valid) < 2:
            return [number for _, _, number in valid]
        for _, group in itertools.groupby(valid, key=lambda entry: entry[:2]):
            ties = [number for *_, number in group]
            if 1 < len(ties) <= _COMPARED:
                self._index.parse(ties)
                ties.sort(key=lambda number: _further(self._index.row(number)))
            numbers += ties
        return numbers

    def _match(self, unparsed: UnparsedRow) -> Match | None:
        """Parse a matching row; None if it repeats a better one or its key collides."""
        row = self._index.row(unparsed.number)
        shape = row.shape
        if (row.cu_num, shape.m, (shape.n, shape.k, kind_of(shape))) != (unparsed.units, unparsed.m, unparsed.product):
            return None
        if unparsed.offered.setdefault((row.gfx, row.device, _identity(row)), unparsed.number) != unparsed.number:
            return None
        return Match(row, unparsed.word, unparsed.same_device, self._label(self._index.layer_of(unparsed.number)))

    def _label(self, layer: int) -> str:
        """Return the name of a layer; "" for rows without files."""
        return self._labels[layer] if self._labels else ""

    def _serves(self, layer: int, name: str, device: Device) -> bool:
        """Check whether a layer's rows of a product may serve a device with its gfx and cu_num."""
        return name in ("", device.name) or self.op.serves_alike or self._label(layer) != SHIPPED_WORD or are_alike(name, device.name)

    def to_frame(self) -> pd.DataFrame:
        """Return all rows as a pandas DataFrame: the CSV's columns, and the file."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([{**record_of(row, self.op).cells, "source": str(row.source)} for row in self.rows])
        for column in frame:
            numbers = pd.to_numeric(frame[column], errors="coerce")
            frame[column] = numbers if numbers.notna().all() else frame[column]
        return frame

    def fingerprint(self) -> str:
        """Return a SHA-256 of the rows by precedence, independent of paths and order in files.

        It parses every row: about a minute per million.
        """
        total = 0
        for numbers in self._index.keys:
            groups: dict[Any, list[tuple[int, float, Row]]] = {}
            for layer, us, number in self._index.ordered(numbers):
                row = self._index.row(number, keep=False)
                groups.setdefault((row.cu_num, row.shape.n, row.shape.k, row.shape.m, kind_of(row.shape)), []).append((layer, us, row))
            for key, rows in groups.items():
                entries: dict[Any, None] = {}
                for _, group in itertools.groupby(rows, key=lambda ranked: ranked[:2]):
                    ties = [row for *_, row in group]
                    ties = sorted(ties, key=_further) if len(ties) <= _COMPARED else ties
                    entries |= dict.fromkeys((row.gfx, row.device, _identity(row)) for row in ties)
                total += int.from_bytes(hashlib.sha256(repr((key, list(entries))).encode()).digest(), "big")
        return hashlib.sha256(f"{self.op.name} {total % (1 << 256)}".encode()).hexdigest()


def _others(index: Index, device: Device) -> str:
    """Format the devices of rows as ``gfx942/80``; "" if *device* may be one."""
    pairs = index.devices
    if any(gfx in ("", device.gfx) and units in (0, device.cu_num) for gfx, units in pairs):
        return ""
    return ", ".join(f"{gfx or 'any gfx'}/{units or 'any cu_num'}" for gfx, units in sorted(pairs))


def _identity(row: Row) -> tuple[Any, ...]:
    solution = row.solution
    return solution.libtype, solution.kernel_name, solution.split_k, solution.extra, row.libver, *filter(None, (row.bit_class,))


def _further(row: Row) -> tuple[Any, ...]:
    """Return the sort key of rows with equal layer and time."""
    return rank(row.solution.libtype), _identity(row), row.gfx, row.device
