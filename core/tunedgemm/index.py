"""Index: tuned rows found by their key without being made; the sources of a table and their merger. Torch-free.

A key is 64 bits: the hash of (stamp, N, K, M), where the stamp stands for cu_num and all of a shape but its sizes. Two keys
may have one hash: who looks up compares the row. Numbers alone are kept, so that a million rows load in seconds.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from tunedgemm.csvfile import Problem

if TYPE_CHECKING:
    from tunedgemm.row import Row
    from tunedgemm.shape import Shape

#: All of a shape but its sizes; the bias's dtype is no part of a table's key.
Kind = tuple[str, str, str, str, str, tuple[tuple[str, int | str | bool], ...]]

#: Rows whose lines had to be read one by one are remembered up to here, in rows of one file; beyond they are made again.
_REMEMBERED = 20_000


def kind_of(shape: Shape) -> Kind:
    """What a row must share with a shape, sizes aside."""
    return shape.dtype, shape.outdtype, shape.epilogue, shape.scale, shape.layout, shape.extra


@functools.lru_cache(maxsize=4096)
def stamp_of(units: int, kind: Kind) -> int:
    """56 bits for a number of compute units and a kind: the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr((units, kind)).encode(), digest_size=7).digest(), "big")


def numbers(code: str) -> Callable[[], array[int]]:
    """The factory of an empty array of integers of this type code."""
    return lambda: array(code)


@attrs.define(eq=False)
class Source(Sequence["Row"]):
    """The rows of one file, each made when it is asked for and remembered; or rows that were given.

    Attributes:
        read: (line number, its bytes) to the rows of that line.
        content: the file, without a byte order mark, each line ended by one newline.
        kinds: kind -> cu_num -> stamp, for all that occur.
        places: (gfx, device) of the rows, by the numbers in `place`.
        keys, us, place, starts, lines: of each row the hash of its key, its time in microseconds, its place, where its
            line starts in `content`, and the number of that line. The rows of one line follow each other.
        problems: what could not be read, or is never chosen.
        made: the rows made so far.
        sorted: whether the rows are in the order of their lines.
        heads, links: key -> the last row of it, and of each row the one before it of the same key, or -1; no links where
            no key has two rows.
    """

    read: Callable[[int, bytes], list[Row]]
    content: bytes = b""
    kinds: dict[Kind, dict[int, int]] = attrs.field(factory=dict)
    places: list[tuple[str, str]] = attrs.field(factory=list)
    keys: array[int] = attrs.field(factory=numbers("q"))
    us: array[float] = attrs.field(factory=lambda: array("d"))
    place: array[int] = attrs.field(factory=numbers("I"))
    starts: array[int] = attrs.field(factory=numbers("q"))
    lines: array[int] = attrs.field(factory=numbers("I"))
    problems: list[Problem] = attrs.field(factory=list)
    made: dict[int, Row] = attrs.field(factory=dict)
    sorted: bool = True
    heads: dict[int, int] = attrs.field(factory=dict)
    links: array[int] = attrs.field(factory=numbers("q"))
    _numbered: dict[tuple[str, str], int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Source:
        """A source of rows that are there."""
        source = cls(unread)
        for row in rows:
            source.add(row, 0)
            source.made[len(source.keys) - 1] = row
        return source.linked()

    def stamp(self, units: int, kind: Kind) -> int:
        """The stamp, which the source knows from now on."""
        by_units = self.kinds.setdefault(kind, {})
        found = by_units[units] = by_units.get(units) or stamp_of(units, kind)
        return found

    def place_of(self, gfx: str, device: str) -> int:
        """The number of a place."""
        number = self._numbered.setdefault((gfx, device), len(self.places))
        if number == len(self.places):
            self.places.append((gfx, device))
        return number

    def add(self, row: Row, start: int) -> None:
        """Append a row that was read one by one from the line that starts there."""
        shape = row.shape
        if len(self.made) < _REMEMBERED:
            self.made[len(self.keys)] = row
        self.keys.append(hash((self.stamp(row.cu_num, kind_of(shape)), shape.n, shape.k, shape.m)))
        self.us.append(row.us)
        self.place.append(self.place_of(row.gfx, row.device))
        self.starts.append(start)
        self.lines.append(row.line)

    def linked(self) -> Source:
        """The source, with its keys in a dict."""
        count = len(self.keys)
        heads = self.heads = dict(zip(self.keys, range(count), strict=True))
        if len(heads) < count:
            links = self.links = array("q", [-1]) * count
            before: dict[int, int] = {}
            for place in itertools.compress(range(count), map(operator.ne, map(heads.__getitem__, self.keys), range(count))):
                key = self.keys[place]
                links[place] = before.get(key, -1)
                before[key] = place
            for key, place in before.items():
                links[heads[key]] = place
        return self

    def row(self, place: int) -> Row:
        """The row at a place, made at the first call."""
        row = self.made.get(place)
        if row is None:
            row = self.made[place] = self.peek(place)
        return row

    def peek(self, place: int) -> Row:
        """The row at a place, not remembered."""
        if place in self.made:
            return self.made[place]
        first, number, start = place, self.lines[place], self.starts[place]
        while first and self.lines[first - 1] == number:
            first -= 1
        end = self.content.find(b"\n", start)
        return self.read(number, self.content[start : end if end >= 0 else None])[place - first]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self.row(place)

    def __iter__(self) -> Iterator[Row]:
        places: Sequence[int] = range(len(self.keys))
        return map(self.row, places if self.sorted else sorted(places, key=self.lines.__getitem__))


def unread(line: int, text: bytes) -> list[Row]:
    """The `read` of a source that has no lines, or none yet."""
    raise AssertionError(f"line {line} was never read: {text!r}")


class Index:
    """Sources by precedence, looked up as one. It owns them: the largest one's dict becomes that of all.

    Attributes:
        kinds: kind -> cu_num -> stamp, for all that occur.
        heads: key -> the number of one row of it; `places` gives the others.
    """

    def __init__(self, layers: Sequence[Sequence[Source]]) -> None:
        self._sources = [source for layer in layers for source in layer]
        self.kinds: dict[Kind, dict[int, int]] = {}
        for source in self._sources:
            for kind, stamps in source.kinds.items():
                self.kinds.setdefault(kind, {}).update(stamps)
        rank = {id(source): place for place, layer in enumerate(layers) for source in layer}
        stored = sorted(self._sources, key=len, reverse=True)
        self._stored, self._ranks, self._bases = stored, [rank[id(source)] for source in stored], [0] if stored else []
        self.heads: dict[int, int] = stored[0].heads if stored else {}
        self._links = stored[0].links if stored else array("q")
        total = len(stored[0]) if stored else 0
        for source in stored[1:]:
            self._bases.append(total)
            self._merge(source, total)
            total += len(source)

    def _merge(self, source: Source, base: int) -> None:
        heads, links = self.heads, self._links
        if not links:  # so far no key has two rows
            links = self._links = array("q", [-1]) * base
        for place, key in enumerate(source.keys, base):
            links.append(heads.get(key, -1))
            heads[key] = place

    @property
    def rows(self) -> Iterator[Row]:
        """All rows, by precedence; each is made."""
        return (row for source in self._sources for row in source)

    def ordered(self, head: int) -> list[tuple[int, float, int]]:
        """The valid rows of one key: layer, time, number, sorted; rows of an equal time are in no order that matters."""
        found = []
        while head >= 0:
            at = bisect.bisect_right(self._bases, head) - 1
            us = self._stored[at].us[head - self._bases[at]]
            if 0.0 < us < math.inf:
                found.append((self._ranks[at], us, head))
            head = self._links[head] if self._links else -1
        return sorted(found) if len(found) > 1 else found

    def place(self, number: int) -> tuple[str, str]:
        """gfx and device of a row."""
        at = bisect.bisect_right(self._bases, number) - 1
        source = self._stored[at]
        return source.places[source.place[number - self._bases[at]]]

    def row(self, number: int, *, keep: bool = True) -> Row:
        """The row of this number; *keep*: remember it."""
        at = bisect.bisect_right(self._bases, number) - 1
        return (self._stored[at].row if keep else self._stored[at].peek)(number - self._bases[at])
