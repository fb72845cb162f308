"""Coverage: of the calls that a workload makes, how many are answered by which rows, and by what else; what that costs.

What is asked is the dispatcher that serves: `Dispatcher.explain`, over the tables, backends and
environment of this process. On a GPU it is asked about the device as it is described: rows and
heuristics are judged by their backends' static limits, and nothing is bound or compiled, so
thousands of shapes take a second. What binding alone would refuse, such as a row whose kernel is
gone, shows when the shapes are measured, and in `tunedgemm explain`. On a CPU, where binding costs
nothing, all is bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tunedgemm.analysis.coverage.answers import described, entry_of
from tunedgemm.analysis.coverage.captured import Captured, Replays, captured
from tunedgemm.analysis.coverage.known import known_times
from tunedgemm.analysis.coverage.measured import measure_all
from tunedgemm.analysis.coverage.proposal import Next, write_next
from tunedgemm.analysis.coverage.result import PADDED, SOURCES, TUNED, UNTUNED, WORDS, Entry, Group, Passed, Regret, Unused
from tunedgemm.analysis.coverage.whole import BY, Coverage
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.table.folders import named_file, table_layers
from tunedgemm.table.sheet import present
from tunedgemm.workload.lists import op_of_file


def coverage(
    paths: str | Path | Sequence[str | Path] | None = None,
    *,
    op: str = "",
    device: Device | None = None,
    replays: Replays | int | Mapping[int, int] | str = 1,
    tables: Iterable[str | Path] = (),
    against: Iterable[str | Path] = (),
    measure: float = 0.0,
) -> Coverage:
    """Judge what answers the captured calls of a workload.

    Args:
        paths: untuned files, of several ops if need be; None for every captured file of the user
            folder.
        op: the op of all files; else each tells its own.
        device: where; the present device if not given. May describe one that is not present.
        replays: how often graphs ran, each of which repeats the calls recorded into it: a number,
            or one for each M.
        tables: tuned files to judge with, above all layers, as `TunedGemm.load_config` puts them;
            at most one of an op.
        against: tuned files whose rows, and the trials beside them, count as known times of this
            device.
        measure: seconds to spend on timing what runs, heaviest first; 0 times nothing.

    Raises:
        UserError: a file cannot be used, nothing is called, or what is asked makes no sense.
    """
    replays = Replays.of(replays)
    calls = captured([paths] if isinstance(paths, str | Path) else paths, op)
    above, beside = _by_op(tables, op, calls, "--table"), _by_op(against, op, calls, "--against")
    if several := next((family for family, files in above.items() if len(files) > 1), ""):
        raise UserError(f"--table: {' and '.join(map(str, above[several]))} are both tables of {several}: name one, or merge them")
    if measure and device is not None and device != current_device():
        raise UserError(f"--measure times what runs on this machine, which is {current_device()}, not {device}: leave one of both out")
    here = device or current_device()
    notes = [*calls.notes, *_said_of_graphs(calls, replays)]
    entries: list[Entry] = []
    for family in map(op_named, calls.ops):
        dispatcher = Dispatcher(family, above=above.get(family.name, ()), settings=Settings.from_environment().passive)
        listed = calls.of(family)
        files = [path for layer in table_layers(family, above.get(family.name, ())) for path in layer.paths if present(path)]
        known = known_times(family, here, (one.shape for one in listed), files, beside.get(family.name, ()))
        notes += known.notes
        if whose := dispatcher.table.foreign(here):
            notes.append(f"no row of the tables of {family.name} is for {here}: theirs are for {whose}")
        entries += [entry_of(dispatcher, described(here), one, replays, known) for one in listed]
    if not here.name and any(entry.how == "other device" for entry in entries):
        notes.append(f"rows that name their device count as another one's: --device {here.gfx}:{here.cu_num}:NAME says which this is")
    if measure:
        first = {name: files[0] for name, files in above.items()}
        entries, said = measure_all(entries, first, here, measure)
        notes.append(said)
    entries.sort(key=lambda entry: (-entry.time, str(entry.shape)))
    return Coverage(", ".join(map(str, calls.paths)), tuple(entries), here, calls.paths, calls.problems, tuple(notes))


def _by_op(said: Iterable[str | Path], op: str, calls: Captured, flag: str) -> dict[str, list[Path]]:
    """Tables by their op, each of which must be one of the ops that are called."""
    found: dict[str, list[Path]] = {}
    for text in said:
        path = named_file(str(text))
        if not present(path):
            raise UserError(f"{flag} {path}: no such file")
        family = op_named(op) if op else op_of_file(path)
        if family.name not in calls.ops:
            raise UserError(f"{flag} {path}: is a table of {family.name}, and the calls are of {', '.join(calls.ops)}; --op names its op")
        found.setdefault(family.name, []).append(path)
    return found


def _said_of_graphs(calls: Captured, replays: Replays) -> list[str]:
    """What is to be said of calls that were recorded into graphs.

    Raises:
        UserError: replays are told for an M that no graph has.
    """
    recorded = sorted({one.shape.m for one in calls.listed if one.graph})
    if strange := [m for m in replays.by_m if m not in recorded]:
        told = f"those of M={', '.join(map(str, recorded))} were" if recorded else "none were"
        raise UserError(f"--replays: no calls with M={strange[0]} were recorded into graphs; {told}")
    if not recorded and replays.each > 1:
        return ["--replays changes nothing: no call was recorded into a graph"]
    silent = [m for m in recorded if m not in replays.by_m]
    if not silent or replays.each > 1:
        return []
    which = f" with M={', '.join(map(str, silent))}" if replays.by_m else ""
    return [f"calls recorded into graphs{which} count once: --replays says how often the graphs ran"]


__all__ = [
    "BY", "PADDED", "SOURCES", "TUNED", "UNTUNED", "WORDS", "Coverage", "Entry", "Group", "Next", "Passed", "Regret", "Replays", "Unused",
    "coverage", "write_next",
]  # fmt: skip
