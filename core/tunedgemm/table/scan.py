"""Scan: a tuned file as a source of lazily parsed rows; a million lines in seconds. Torch-free.

A line is plain where splitting it at its commas is enough to read it. Plain lines are read by
column. `rows_of_records` parses one line for each combination of the texts that are neither sizes
nor measurements. It also reads every other line, so that only it decides what is a row and what is
a fault.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import math
import operator
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import TunedGemmError
from tunedgemm.ops.op import as_they_are
from tunedgemm.solution import LARGEST
from tunedgemm.table.columns import BIT_CLASS, foreign_columns, own_names, unknown_columns
from tunedgemm.table.csvfile import Problem, name_columns, rows_of_records
from tunedgemm.table.index import RowSource, kind_of
from tunedgemm.table.row import UNUSED
from tunedgemm.table.sheet import may_be_header, parse_sheet, record_of_line
from tunedgemm.text.cell import LONGEST_CELL

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.table.row import Row

#: bytes of a chunk, whose fields should fit a core's private cache
_CHUNK = 1 << 17

#: columns outside the key, by what they may hold: a whole number, any number, or any text
_WHOLE, _NUMBER, _TEXT = ("solidx", "splitK"), ("err_ratio",), ("kernelName", "tflops", "bw", "libver")

#: most valid texts of a number column, and combinations of the other columns, to cache
_MOST = 10_000

_SIZES = ("m", "n", "k")
#: sizes of a plain line are below this: no memory holds the products of some larger ones
_LARGE = 1 << 19

#: Keys, times and device numbers of plain lines.
_Numbers = tuple[list[int], "array[float]", list[int]]

#: M that lines are probed with: one that every power of two divides, and the largest prime
_PROBES = (1 << 18, 524_287)

#: least M of the plain lines of a kind, and what divides their N and K: tiled layouts need
#: multiples, and one row or one block of scales may be another kind
_RULES = tuple(itertools.product((1, 2), (1, 16, 32, 64, 128, 256)))

_BOM = b"\xef\xbb\xbf"


@attrs.frozen
class Reader:
    """Reads the lines of a file one by one.

    Attributes:
        names: the op's name of each field of the header, "" for one that is not read.
        unknown: the columns that the op does not know.
    """

    path: Path
    op: Op
    names: tuple[str, ...]
    unknown: frozenset[str]

    def read(self, numbers: Sequence[int], lines: Sequence[str]) -> tuple[list[Row], list[Problem]]:
        """Return the rows of some lines, and their problems."""
        records = map(record_of_line, numbers, lines, itertools.repeat(self.names))
        return rows_of_records(self.path, self.op, records, self.unknown)

    def rows(self, numbers: Sequence[int], lines: Sequence[bytes]) -> list[Row]:
        """Return the rows of some lines."""
        return self.read(numbers, [line.decode() for line in lines])[0]


@attrs.frozen
class _PlainLine:
    """Positions of the fields of a plain line."""

    width: int
    sizes: tuple[int, int, int]
    us: int
    kind: tuple[int, ...]
    whole: tuple[int, ...]
    number: tuple[int, ...]


def normalise(content: bytes) -> bytes:
    """Strip a byte order mark, and end lines by newlines alone."""
    content = content.removeprefix(_BOM)
    return content.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in content else content


def head_of(path: Path, op: Op, content: bytes) -> tuple[Reader, int, int] | None:
    """Return the reader of a normalised file, the offset of its first data line, and that line's number.

    Raises:
        TableError: the file lacks a column that every row needs, or is another op's.
    """
    start, number = 0, 1
    while (end := content.find(b"\n", start)) >= 0:
        head = content[start:end].decode()
        if may_be_header(head):
            sheet = parse_sheet(path, head + "\n")
            name_columns(path, op, sheet)
            return Reader(path, op, sheet.names, unknown_columns(op, sheet.columns)), end + 1, number + 1
        start, number = end + 1, number + 1
    return None


def scan(path: Path, op: Op, content: bytes) -> RowSource | None:
    """Scan a normalised file; None for one that must be read line by line.

    That is a broken file, or one with special columns.

    Raises:
        TableError: the file lacks a column that every row needs, or is another op's.
    """
    if b"\0" in content or op.columns.read is not as_they_are:
        return None
    try:
        head = head_of(path, op, content)
        if head is None:
            return None
        reader, start, number = head
        plan = _plan(reader, content, start)
        if plan is None:
            return None
        with _uncollected():
            return _Scanner(reader, plan, RowSource(reader.rows, content)).run(start, number)
    except UnicodeDecodeError:
        return None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection, which would walk millions of short-lived fields."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plan(reader: Reader, content: bytes, start: int) -> _PlainLine | None:
    """Plan a file by its first line that is one row; None without one, or with a truncated last line."""
    op, names = reader.op, reader.names
    if not content.endswith(b"\n"):
        last = content[content.rfind(b"\n") + 1 :]
        if b'"' in last or last.count(b",") + 1 < len(names):
            return None
    sizes = next((sizes for row in _first(reader, content, start) if (sizes := _size_columns(op, row))), None)
    own = own_names(op.columns)
    positions = {name: at for at, name in enumerate(names) if name}
    if BIT_CLASS in positions:  # each line's class is checked
        return None
    if sizes is None or len(positions) < sum(map(bool, names)) or not {*sizes, "us"} <= {*positions}:
        return None
    whole, number, text = (
        {positions[own.get(name, name)] for name in group if own.get(name, name) in positions} for group in (_WHOLE, _NUMBER, _TEXT)
    )
    in_key = {"gfx", "cu_num", "device", "libtype", UNUSED[0], *op.columns.key, *op.columns.own, *op.columns.values, *foreign_columns(op)}
    measured = {*whole, *number, *text, positions["us"], *(positions[name] for name in sizes)}
    kind = tuple(at for name, at in positions.items() if name in in_key and at not in measured)
    if 0 not in kind and 0 not in measured - text:
        return None  # merge markers are recognised by the start of a line
    first, second, third = (positions[name] for name in sizes)
    return _PlainLine(len(names), (first, second, third), positions["us"], kind, tuple(whole), tuple(number))


def _first(reader: Reader, content: bytes, start: int) -> list[Row]:
    lines = content[start : start + 4096].split(b"\n")[:8]
    return reader.read(range(len(lines)), [line.decode(errors="replace") for line in lines])[0]


def _size_columns(op: Op, row: Row) -> tuple[str, ...] | None:
    """Return the columns that hold m, n and k alone: each changes with its size."""
    base, changed = op.columns.format(row.shape), []
    for size in _SIZES:
        try:
            other = op.columns.format(attrs.evolve(row.shape, **{size: getattr(row.shape, size) + 32}))
        except TunedGemmError:
            return None
        changed += [column for column, text in other.items() if text != base.get(column)]
    return tuple(changed) if len(changed) == len(set(changed)) == len(_SIZES) else None


class _RestrictedError(ValueError):
    """Lines of sizes that change the rest of their kind.

    Attributes:
        positions: of these lines.
    """

    def __init__(self, positions: list[int]) -> None:
        super().__init__(positions)
        self.positions = positions


def _others(positions: Sequence[int], count: int) -> list[int]:
    """Return the positions below *count* that are not among these."""
    return sorted({*range(count)} - {*positions})


class _Scanner:
    """One scan: what it has learned of the file's texts, and the source that it fills."""

    def __init__(self, reader: Reader, plan: _PlainLine, source: RowSource) -> None:
        self.reader, self.plan, self.source = reader, plan, source
        self._kinds: dict[tuple[str, ...], int] = {}
        self._stamps, self._device_numbers = [0], [0]  # of each kind; 0 is for lines that are read one by one
        self._rules, self._restricted = [_RULES[0]], False  # of each kind; whether one has another rule than the first
        self._good: dict[int, set[str]] = {at: set() for at in (*plan.whole, *plan.number)}

    def run(self, start: int, number: int) -> RowSource:
        """Read all lines."""
        content = self.source.content
        while start < len(content):
            end = content.rfind(b"\n", start, start + _CHUNK) + 1 or content.find(b"\n", start + _CHUNK) + 1 or len(content)
            text = content[start:end].decode()
            lines = text.removesuffix("\n").split("\n")
            self._chunk(text, lines, start, number)
            start, number = end, number + len(lines)
        self.source.problems.sort(key=lambda problem: problem.line)
        return self.source

    def _chunk(self, text: str, lines: list[str], start: int, number: int) -> None:
        source, fields = self.source, [line.split(",") for line in lines]
        widths = list(map(len, lines if text.isascii() else map(str.encode, lines)))
        starts = list(itertools.accumulate(widths, lambda at, width: at + width + 1, initial=start))[:-1]
        numbers: Sequence[int] = range(number, number + len(lines))
        columns, odd = self._plain(fields, lines, text, max(widths))
        if not odd:
            self._append(columns, starts, numbers)
            return
        left = _others(odd, len(lines))
        self._append(columns, [starts[at] for at in left], [numbers[at] for at in left])
        source.sorted = source.sorted and not left
        rows, problems = self.reader.read([numbers[at] for at in odd], [lines[at] for at in odd])
        for row in rows:
            source.add(row, starts[row.line - number])
        source.problems += problems

    def _plain(self, fields: list[list[str]], lines: list[str], text: str, longest: int) -> tuple[_Numbers, Sequence[int]]:
        """Return the numbers of the plain lines, and the positions of the others."""
        try:
            return self._columns(fields, text, longest), ()
        except _RestrictedError as error:
            with contextlib.suppress(ValueError):
                return self._columns([fields[at] for at in _others(error.positions, len(lines))]), error.positions
        except ValueError:
            pass
        odd = [at for at, line in enumerate(lines) if self._is_odd(fields[at], line)]
        left = _others(odd, len(lines))
        return self._columns([fields[at] for at in left]) if left else ([], array("d"), []), odd

    def _append(self, columns: _Numbers, starts: list[int], numbers: Sequence[int]) -> None:
        keys, us, devices = columns
        self.source.keys.extend(keys)
        self.source.us.extend(us)
        self.source.device_numbers.extend(devices)
        self.source.starts.extend(starts)
        self.source.lines.extend(numbers)

    def _is_odd(self, fields: list[str], line: str) -> bool:
        try:
            self._columns([fields], line, len(line))
        except ValueError:
            return True
        return False

    def _columns(self, rows: list[list[str]], text: str = "", longest: int = 0) -> _Numbers:
        """Return the numbers of lines.

        *text* and *longest* are the lines' text and the length of the longest.

        Raises:
            ValueError: a line is not plain.
        """
        plan = self.plan
        if '"' in text or "'" in text or longest > LONGEST_CELL or {*map(len, rows)} != {plan.width}:
            raise ValueError
        columns = list(zip(*rows, strict=True))
        kinds = list(map(self._kinds.get, zip(*(columns[at] for at in plan.kind), strict=True), itertools.repeat(-1)))
        if -1 in kinds:
            kinds = [self._kind(fields) if kind == -1 else kind for kind, fields in zip(kinds, rows, strict=True)]
        m, n, k = (list(map(int, columns[at])) for at in plan.sizes)
        us = array("d", map(float, columns[plan.us]))
        if 0 in kinds or min(m) < 0 or min(n) < 1 or min(k) < 1 or max(map(max, (m, n, k))) >= _LARGE:
            raise ValueError
        if self._restricted and (positions := self._restricted_lines(kinds, m, n, k)):
            raise _RestrictedError(positions)
        if not (math.isfinite(sum(us)) and min(us) > 0.0):
            raise ValueError
        for at, good in self._good.items():
            if not good.issuperset(columns[at]):
                self._judge(at, good, columns[at])
        self.source.pinned = self.source.pinned or min(m) == 0
        stamps = map(self._stamps.__getitem__, kinds)
        return list(map(hash, zip(stamps, n, k, m, strict=True))), us, list(map(self._device_numbers.__getitem__, kinds))

    def _judge(self, at: int, good: set[str], texts: tuple[str, ...]) -> None:
        """Raise ValueError unless each field of a number column is empty or a number, whole where it must be."""
        whole = at in self.plan.whole
        if len(good) >= _MOST:
            with contextlib.suppress(ValueError):
                if whole and max(map(abs, map(int, texts))) > LARGEST:
                    raise ValueError
                collections.deque(map(float, texts), maxlen=0)
                return
        new = {text for text in {*texts} - good if _is_number(text, whole=whole)}
        if not (new | good).issuperset(texts):
            raise ValueError
        if len(good) < _MOST:
            good.update(new)

    def _kind(self, fields: list[str]) -> int:
        """Return the number of a line's kind, learned from its first line."""
        texts = tuple(fields[at] for at in self.plan.kind)
        kind = self._kinds.get(texts)
        if kind is None:
            kind = 0
            row, rule = next(((row, rule) for rule in _RULES if (row := self._sample(fields, *rule)) is not None), (None, _RULES[0]))
            if row is not None and (row.gfx or row.cu_num) and len(self._stamps) < _MOST:
                kind = len(self._stamps)
                self._rules.append(rule)
                self._restricted = self._restricted or rule != _RULES[0]
                self._stamps.append(self.source.stamp(row.cu_num, kind_of(row.shape)))
                self._device_numbers.append(self.source.device_number(row.gfx, row.device, row.cu_num))
            self._kinds[texts] = kind
        return kind

    def _restricted_lines(self, kinds: list[int], m: list[int], n: list[int], k: list[int]) -> list[int]:
        """Return the positions of lines whose sizes no plain line of their kind has; M = 0 stands for any M."""
        least, steps = zip(*map(self._rules.__getitem__, kinds), strict=True)
        if all(map(operator.ge, m, least)) and not any(map(operator.mod, n, steps)) and not any(map(operator.mod, k, steps)):
            return []
        lines = enumerate(zip(m, n, k, least, steps, strict=True))
        return [at for at, (rows, columns, depth, fewest, step) in lines if 0 < rows < fewest or columns % step or depth % step]

    def _sample(self, fields: list[str], least: int, step: int) -> Row | None:
        """Return a row of a line's kind where all sizes of a rule are free; None where some change the rest."""
        probes = [(least, step, step), *((m, m // step * step, m // step * step) for m in _PROBES)]
        lines = []
        for sizes in probes:
            changed = dict(zip(self.plan.sizes, map(str, sizes), strict=True))
            lines.append(",".join(changed.get(at, text) for at, text in enumerate(fields)))
        rows = self.reader.read(range(len(lines)), lines)[0]
        if [row.line for row in rows] != [*range(len(lines))]:
            return None
        wanted = [attrs.evolve(rows[0].shape, **dict(zip(_SIZES, sizes, strict=True))) for sizes in probes]  # type: ignore[arg-type]
        return rows[0] if [row.shape for row in rows] == wanted else None


def _is_number(text: str, *, whole: bool) -> bool:
    """Tell whether a text is empty or a valid number; raise ValueError where it is not a number."""
    if not text.strip():
        return True
    number = float(text)
    return not whole or (number.is_integer() and abs(number) <= LARGEST)
