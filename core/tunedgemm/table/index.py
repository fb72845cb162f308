"""Index: find tuned rows of several sources by key, without parsing them. Torch-free.

A key is the 64-bit hash of (stamp, N, K, M), where the stamp hashes cu_num and a shape without its
sizes. Keys may collide, so a look-up compares the row. Only numbers are stored, so that a million
rows load in seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from tunedgemm.table.csvfile import Problem

if TYPE_CHECKING:
    from tunedgemm.shape import Shape
    from tunedgemm.table.row import Row

#: A shape without sizes, and without the bias dtype, which is not part of a table's key.
Kind = tuple[str, str, str, str, str, tuple[tuple[str, int | str | bool], ...]]

#: Number of parts of an index with more rows than `WHOLE`.
PARTS, WHOLE = 256, 1 << 15

#: Rows per batch when all are parsed.
_TOGETHER = 2000

#: Most rows cached per file while reading line by line; others are parsed again.
_REMEMBERED = 20_000


def kind_of(shape: Shape) -> Kind:
    """Return the kind of a shape: all fields of the key but sizes."""
    return shape.dtype, shape.outdtype, shape.epilogue, shape.scale, shape.layout, shape.extra


def stamp_of(units: int, kind: Kind) -> int:
    """Hash cu_num and a kind."""
    return hash((units, kind))


def numbers(code: str) -> Callable[[], array[int]]:
    """Return the factory of an empty array of integers of this type code."""
    return lambda: array(code)


@attrs.define(eq=False)
class RowSource(Sequence["Row"]):
    """The rows of one file, each parsed on first use and cached; or given rows.

    Attributes:
        read: (line numbers, lines) -> their rows, in order.
        content: bytes of the file, without a byte order mark, with lines ended by ``\\n``.
        kinds: kind -> cu_num -> stamp, for all rows.
        devices: distinct (gfx, device, cu_num) of the rows.
        keys, us, device_numbers, starts, lines: per row its key, microseconds, index in `devices`,
            offset in `content` and line number. The rows of one line are adjacent.
        problems: lines that cannot be read or are never chosen.
        parsed: the rows parsed so far, by position.
        sorted: whether the rows are in the order of their lines.
        parts: positions of rows by the low bits of their keys; empty until `split`.
        pinned: whether any row has M = 0.
        classed: whether any row has a bit class.
    """

    read: Callable[[Sequence[int], Sequence[bytes]], list[Row]]
    content: bytes = b""
    kinds: dict[Kind, dict[int, int]] = attrs.field(factory=dict)
    devices: list[tuple[str, str, int]] = attrs.field(factory=list)
    keys: array[int] = attrs.field(factory=numbers("q"))
    us: array[float] = attrs.field(factory=lambda: array("d"))
    device_numbers: array[int] = attrs.field(factory=numbers("I"))
    starts: array[int] = attrs.field(factory=numbers("q"))
    lines: array[int] = attrs.field(factory=numbers("I"))
    problems: list[Problem] = attrs.field(factory=list)
    parsed: dict[int, Row] = attrs.field(factory=dict)
    sorted: bool = True
    parts: list[array[int]] = attrs.field(factory=list)
    pinned: bool = False
    classed: bool = False
    _numbered: dict[tuple[str, str, int], int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowSource:
        """Make a source of existing rows."""
        source = cls(unread)
        for row in rows:
            source.add(row, 0)
            source.parsed[len(source.keys) - 1] = row
        return source

    @property
    def classes(self) -> RowSource:
        """Return the rows with a bit class, as another source."""
        return RowSource.of([row for row in self if row.bit_class] if self.classed else ())

    def stamp(self, units: int, kind: Kind) -> int:
        """Return the stamp of a kind, and register it."""
        by_units = self.kinds.setdefault(kind, {})
        stamp = by_units[units] = by_units.get(units) or stamp_of(units, kind)
        return stamp

    def device_number(self, gfx: str, device: str, units: int) -> int:
        """Return the number of a gfx, device name and cu_num, and register it."""
        number = self._numbered.setdefault((gfx, device, units), len(self.devices))
        if number == len(self.devices):
            self.devices.append((gfx, device, units))
        return number

    def add(self, row: Row, start: int) -> None:
        """Append a parsed row of the line at this offset."""
        shape = row.shape
        self.pinned = self.pinned or shape.m == 0
        self.classed = self.classed or bool(row.bit_class)
        if len(self.parsed) < _REMEMBERED:
            self.parsed[len(self.keys)] = row
        self.keys.append(hash((self.stamp(row.cu_num, kind_of(shape)), shape.n, shape.k, shape.m)))
        self.us.append(row.us)
        self.device_numbers.append(self.device_number(row.gfx, row.device, row.cu_num))
        self.starts.append(start)
        self.lines.append(row.line)

    def split(self) -> list[array[int]]:
        """Return the parts, computed on first use."""
        if not self.parts:
            parts = [array("I") for _ in range(PARTS)]
            append = [part.append for part in parts]
            for position, key in enumerate(self.keys):
                append[key % PARTS](position)
            self.parts = parts
        return self.parts

    def row(self, position: int) -> Row:
        """Return the row at a position, parsed on first use."""
        row = self.parsed.get(position)
        if row is None:
            row = self.parsed[position] = self.peek(position)
        return row

    def peek(self, position: int) -> Row:
        """Return the row at a position without caching it."""
        return self.parsed[position] if position in self.parsed else self._parse((position,))[0]

    def _parse(self, positions: Sequence[int]) -> list[Row]:
        texts: dict[int, bytes] = {}
        for position in positions:
            start, end = self.starts[position], self.content.find(b"\n", self.starts[position])
            texts.setdefault(self.lines[position], self.content[start : end if end >= 0 else None])
        rows: dict[int, list[Row]] = {number: [] for number in texts}
        for row in self.read(list(texts), list(texts.values())):
            rows[row.line].append(row)
        parsed = []
        for position in positions:
            first = position
            while first and self.lines[first - 1] == self.lines[position]:
                first -= 1
            parsed.append(rows[self.lines[position]][position - first])
        return parsed

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, position):  # type: ignore[no-untyped-def]
        return self.row(position)

    def __iter__(self) -> Iterator[Row]:
        return self.iterate(range(len(self.keys)))

    def iterate(self, positions: Sequence[int]) -> Iterator[Row]:
        """Yield the rows at these positions in line order, parsed in batches."""
        if not self.sorted:
            positions = sorted(positions, key=self.lines.__getitem__)
        for at in range(0, len(positions), _TOGETHER):
            some = positions[at : at + _TOGETHER]
            self.parse(some)
            yield from map(self.parsed.__getitem__, some)

    def parse(self, positions: Sequence[int]) -> None:
        """Parse and cache rows in one batch, which is ten times as fast per row."""
        missing = [position for position in positions if position not in self.parsed]
        self.parsed.update(zip(missing, self._parse(missing), strict=True))


def unread(numbers: Sequence[int], lines: Sequence[bytes]) -> list[Row]:
    """Raise AssertionError for lines: the `read` of a source without a file."""
    if lines:
        raise AssertionError(f"lines {numbers} were never read")
    return []


class Index:
    """Sources merged in order of precedence.

    A large index is hashed in parts, each on first use. So a million rows are available at once,
    while each of the first look-ups takes half a millisecond longer.

    Attributes:
        kinds: kind -> cu_num -> stamp, for all rows.
        parts: by ``key % len(parts)``, a dict from key to row number or list of numbers; None for
            a part that `part` has not built.
        pinned: whether any row has M = 0.
    """

    def __init__(self, layers: Sequence[Sequence[RowSource]]) -> None:
        self._sources = [source for layer in layers for source in layer if len(source)]
        self._ranks = [rank for rank, layer in enumerate(layers) for source in layer if len(source)]
        *self._bases, total = itertools.accumulate(map(len, self._sources), initial=0)
        self.kinds: dict[Kind, dict[int, int]] = {}
        for source in self._sources:
            for kind, stamps in source.kinds.items():
                self.kinds.setdefault(kind, {}).update(stamps)
        self.pinned = any(source.pinned for source in self._sources)
        self.parts: list[dict[int, int | list[int]] | None] = [None] * (PARTS if total > WHOLE else 1)

    @property
    def classes(self) -> Index:
        """Return the index of the rows with a bit class, with the same layers."""
        layers: list[list[RowSource]] = [[] for _ in range(max(self._ranks, default=-1) + 1)]
        for rank, source in zip(self._ranks, self._sources, strict=True):
            layers[rank].append(source.classes)
        return Index(layers)

    def part(self, part: int) -> dict[int, int | list[int]]:
        """Return the dict of a part, built on first use."""
        there = self.parts[part]
        if there is not None:
            return there
        numbers_by_key: dict[int, int | list[int]] = {}
        for base, source in zip(self._bases, self._sources, strict=True):
            keys = source.keys
            for position in range(len(keys)) if len(self.parts) == 1 else source.split()[part]:
                other = numbers_by_key.setdefault(keys[position], base + position)
                if isinstance(other, list):
                    other.append(base + position)
                elif other != base + position:
                    numbers_by_key[keys[position]] = [other, base + position]
        self.parts[part] = numbers_by_key
        return numbers_by_key

    @property
    def rows(self) -> Iterator[Row]:
        """Yield all rows by precedence, parsed."""
        return (row for source in self._sources for row in source)

    def rows_of(self, gfx: str, units: int, serves: Callable[[int, str], bool] | None = None) -> Iterator[Row]:
        """Yield the rows of a gfx and cu_num by precedence; only these are parsed.

        *serves* filters by layer and device slug.
        """
        for layer, source in zip(self._ranks, self._sources, strict=True):
            named = {number: slug for number, (name, slug, count) in enumerate(source.devices) if (name, count) == (gfx, units)}
            wanted = {number for number, slug in named.items() if serves is None or serves(layer, slug)}
            positions = [position for position, number in enumerate(source.device_numbers) if number in wanted]
            yield from source.iterate(positions)

    @property
    def devices(self) -> set[tuple[str, int]]:
        """Return the (gfx, cu_num) pairs of all rows; "" and 0 mean any."""
        return {(gfx, units) for source in self._sources for gfx, _, units in source.devices}

    @property
    def keys(self) -> Iterator[int | list[int]]:
        """Yield the row numbers of each key."""
        for part in range(len(self.parts)):
            yield from self.part(part).values()

    def ordered(self, numbers: int | list[int]) -> list[tuple[int, float, int]]:
        """Sort the valid rows of a key as (layer, time, number)."""
        valid = []
        for number in numbers if isinstance(numbers, list) else (numbers,):
            at = bisect.bisect_right(self._bases, number) - 1
            us = self._sources[at].us[number - self._bases[at]]
            if 0.0 < us < math.inf:
                valid.append((self._ranks[at], us, number))
        return sorted(valid) if len(valid) > 1 else valid

    def layer_of(self, number: int) -> int:
        """Return the layer number of a row."""
        return self._ranks[bisect.bisect_right(self._bases, number) - 1]

    def device_of(self, number: int) -> tuple[str, str]:
        """Return gfx and device slug of a row."""
        at = bisect.bisect_right(self._bases, number) - 1
        source = self._sources[at]
        return source.devices[source.device_numbers[number - self._bases[at]]][:2]

    def parse(self, numbers: Sequence[int]) -> None:
        """Parse and cache rows in one batch."""
        positions: dict[int, list[int]] = {}
        for number in numbers:
            at = bisect.bisect_right(self._bases, number) - 1
            positions.setdefault(at, []).append(number - self._bases[at])
        for at, of_source in positions.items():
            for start in range(0, len(of_source), _TOGETHER):
                self._sources[at].parse(of_source[start : start + _TOGETHER])

    def row(self, number: int, *, keep: bool = True) -> Row:
        """Return the row with this number; cache it if *keep*."""
        at = bisect.bisect_right(self._bases, number) - 1
        return (self._sources[at].row if keep else self._sources[at].peek)(number - self._bases[at])
