"""Captured calls of a workload by shape, from untuned files of any ops."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import Problem, key_shape
from tunedgemm.table.folders import home_folder, named_file, untuned_path
from tunedgemm.table.sheet import present, read_sheet
from tunedgemm.table.untuned import MOST_CALLS, Untuned, read_listed
from tunedgemm.workload.lists import op_of_file

#: Most problems of a file that an error names; of more only the number is printed.
_NAMED = 3


@attrs.frozen
class Replays:
    """Number of runs of a workload's graphs, each of which repeats its recorded calls.

    Attributes:
        each: replays of every graph that *by_m* does not name.
        by_m: M to the replays of the graphs that recorded it; serving engines record one for each
            batch size.
    """

    per_graph: int = 1
    by_m: Mapping[int, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not _positive(self.per_graph):
            raise UserError(f"--replays: expected a whole number in 1 to {MOST_CALLS}, or M:N,M:N (got {self.per_graph!r})")
        for m, times in self.by_m.items():
            if not (_positive(m) and _positive(times)):
                raise UserError(f"--replays: M and its replays must be whole numbers in 1 to {MOST_CALLS} (got {m!r}:{times!r})")

    @classmethod
    def of(cls, value: Replays | int | Mapping[int, int] | str) -> Replays:
        """Make it from a number, a mapping of M, or the text of ``--replays``.

        Raises:
            UserError: *value* is invalid.
        """
        if isinstance(value, Replays):
            return value
        if isinstance(value, Mapping):
            return cls(by_m=value)
        if not isinstance(value, str):
            return cls(value)
        if ":" not in value:
            return cls(_whole(value, value))
        by_m: dict[int, int] = {}
        for part in value.split(","):
            m, colon, times = part.partition(":")
            if not colon:
                raise UserError(f"--replays: expected a number for all graphs, or M:N,M:N (got {value!r})")
            if by_m.setdefault(_whole(m, value), _whole(times, value)) != _whole(times, value):
                raise UserError(f"--replays: has two numbers for M={m.strip()} (got {value!r})")
        return cls(by_m=by_m)

    def at(self, m: int) -> int:
        """Return the replays of the graphs that recorded *m*."""
        return self.by_m.get(m, self.per_graph)


def _positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST_CALLS


def _whole(text: str, argument: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--replays: expected a whole number for all graphs, or M:N,M:N (got {argument!r})") from None


@attrs.frozen
class Captured:
    """The calls of a workload.

    Attributes:
        paths: the files.
        listed: the shapes, with their calls.
        problems: unreadable lines.
        notes: further remarks on the files.
    """

    paths: tuple[Path, ...]
    listed: tuple[Untuned, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, op: Op) -> list[Untuned]:
        """Return the shapes of one op."""
        return [call for call in self.listed if call.shape.op == op.name]

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the called ops, in the order of the files."""
        return tuple(dict.fromkeys(call.shape.op for call in self.listed))


def captured(paths: Sequence[str | Path] | None, op: str = "", gfx: str = "") -> Captured:
    """Read untuned files; a file's columns and name determine its op, and equal shapes are folded.

    Args:
        paths: the files, or bare names of shipped ones; None for every captured file of the user
            folder.
        op: the op of all files; without *paths* the op whose captured file is read.
        gfx: the architecture whose fp8 is meant; "" for the lines', else the present device's.

    Raises:
        UserError: a file is missing or not a list of shapes, or there are no calls.
    """
    named = op_named(op) if op else None
    distinct: dict[str, Path] = {}
    for path in [named_file(str(path)) for path in paths] if paths else _of_user_folder(named):
        distinct.setdefault(os.path.realpath(path), path)  # the calls of a link are those of its file
    files = tuple(distinct.values())
    folded: dict[Shape, Untuned] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for path in files:
        family = named or op_of_file(path)
        listed, faults = read_listed(path, family, gfx)
        problems += faults
        if "count" not in read_sheet(path, whole=False).columns:
            notes.append(f"{path} has no column 'count': each line counts as one call")
        for call in listed:
            shape = key_shape(call.shape)
            earlier = folded.get(shape, Untuned(shape, 0, 0, call.layer))
            folded[shape] = attrs.evolve(earlier, count=earlier.count + call.count, graph=earlier.graph + call.graph)
    _require_calls(files, folded.values(), problems)
    return Captured(files, tuple(folded.values()), tuple(problems), tuple(notes))


def _of_user_folder(op: Op | None) -> list[Path]:
    files = [path for family in ([op] if op else ops().values()) if present(path := untuned_path(family))]
    if not files:
        where = untuned_path(op) if op else home_folder()
        raise UserError(f"{where}: no shapes are captured; run the workload with AITER_TUNE_GEMM=1, or name a file")
    return files


def _require_calls(files: Iterable[Path], listed: Iterable[Untuned], problems: Sequence[Problem]) -> None:
    """Raise UserError without any call, because a check of no calls must not pass."""
    if any(call.calls for call in listed):
        return
    text = "; ".join(map(str, problems[:_NAMED]))
    more = f" ({text}{f'; and {len(problems) - _NAMED} more' if len(problems) > _NAMED else ''})" if text else ""
    raise UserError(f"{', '.join(map(str, files))}: no calls are listed{more}")
