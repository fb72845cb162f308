"""What was captured: the calls of a workload by shape, from untuned files of any ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import Problem, key_shape, read_listed
from tunedgemm.table.folders import home_folder, named_file, untuned_path
from tunedgemm.table.row import MOST_CALLS, Untuned
from tunedgemm.table.sheet import present, read_sheet
from tunedgemm.workload.lists import op_of_file

#: Problems of a file that a message of its own names; of more the number is told.
_NAMED = 3


@attrs.frozen
class Replays:
    """How often the graphs of a workload ran, each of which repeats the calls that were recorded into it.

    Attributes:
        each: replays of every graph that *by_m* does not name.
        by_m: M to the replays of the graphs in which it was recorded: serving engines record one
            for each batch size.
    """

    each: int = 1
    by_m: Mapping[int, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not _positive(self.each):
            raise UserError(f"--replays is a whole number of at least 1 and at most {MOST_CALLS}, or M:N,M:N (got {self.each!r})")
        for m, times in self.by_m.items():
            if not (_positive(m) and _positive(times)):
                told = f"are whole numbers of at least 1 and at most {MOST_CALLS}"
                raise UserError(f"--replays: an M and the replays of its graphs {told} (got {m!r}:{times!r})")

    @classmethod
    def of(cls, said: Replays | int | Mapping[int, int] | str) -> Replays:
        """From a number, a mapping of M, or the text of ``--replays``.

        Raises:
            UserError: it makes no sense.
        """
        if isinstance(said, Replays):
            return said
        if isinstance(said, Mapping):
            return cls(by_m=said)
        if not isinstance(said, str):
            return cls(said)
        if ":" not in said:
            return cls(_whole(said, said))
        by_m: dict[int, int] = {}
        for part in said.split(","):
            m, colon, times = part.partition(":")
            if not colon:
                raise UserError(f"--replays takes a number for all graphs, or M:N,M:N (got {said!r})")
            if by_m.setdefault(_whole(m, said), _whole(times, said)) != _whole(times, said):
                raise UserError(f"--replays: says two numbers for M={m.strip()} (got {said!r})")
        return cls(by_m=by_m)

    def at(self, m: int) -> int:
        """Replays of the graphs in which *m* was recorded."""
        return self.by_m.get(m, self.each)


def _positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST_CALLS


def _whole(text: str, said: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--replays takes a whole number for all graphs, or M:N,M:N (got {said!r})") from None


@attrs.frozen
class Captured:
    """The calls of a workload.

    Attributes:
        paths: the files that were read.
        listed: a shape each, with its calls.
        problems: lines that could not be read.
        notes: what else is to be said about the files.
    """

    paths: tuple[Path, ...]
    listed: tuple[Untuned, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, op: Op) -> list[Untuned]:
        """The shapes of one op."""
        return [one for one in self.listed if one.shape.op == op.name]

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that are called, in the order of the files."""
        return tuple(dict.fromkeys(one.shape.op for one in self.listed))


def captured(paths: Sequence[str | Path] | None, op: str = "") -> Captured:
    """Read untuned files, each of the op that its columns and its name tell; shapes that several list are folded.

    Args:
        paths: the files, or bare names of shipped ones; None for every captured file of the user
            folder.
        op: the op that all of them are of; without *paths* the one whose captured file is meant.

    Raises:
        UserError: a file is missing, is no list of shapes, or nothing is called.
    """
    said = op_named(op) if op else None
    distinct: dict[Path, Path] = {}
    for path in [named_file(str(path)) for path in paths] if paths else _of_user_folder(said):
        distinct.setdefault(path.resolve(), path)  # the calls of a link are those of its file
    files = tuple(distinct.values())
    folded: dict[Shape, Untuned] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for path in files:
        family = said or op_of_file(path)
        listed, faults = read_listed(path, family)
        problems += faults
        if "count" not in read_sheet(path, whole=False).columns:
            notes.append(f"{path} has no column 'count': every line of it counts as one call")
        for one in listed:
            shape = key_shape(one.shape)
            earlier = folded.get(shape, Untuned(shape, 0, 0, one.layer))
            folded[shape] = attrs.evolve(earlier, count=earlier.count + one.count, graph=earlier.graph + one.graph)
    _called(files, folded.values(), problems)
    return Captured(files, tuple(folded.values()), tuple(problems), tuple(notes))


def _of_user_folder(op: Op | None) -> list[Path]:
    """The captured files that are there."""
    files = [path for family in ([op] if op else ops().values()) if present(path := untuned_path(family))]
    if not files:
        where = untuned_path(op) if op else home_folder()
        raise UserError(f"{where}: no shapes are captured; run the workload with AITER_TUNE_GEMM=1, or name a file")
    return files


def _called(files: Iterable[Path], listed: Iterable[Untuned], problems: Sequence[Problem]) -> None:
    """Raise UserError where there is nothing to judge: a check of nothing must not pass."""
    if any(one.calls for one in listed):
        return
    told = "; ".join(map(str, problems[:_NAMED]))
    more = f" ({told}{f'; and {len(problems) - _NAMED} more' if len(problems) > _NAMED else ''})" if told else ""
    raise UserError(f"{', '.join(map(str, files))}: no calls are listed{more}")
