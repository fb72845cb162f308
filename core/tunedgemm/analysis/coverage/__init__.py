"""Coverage: fractions of a workload's calls served by rows, heuristics and torch, and their cost.

It uses `Dispatcher.explain` with the tables, backends and environment of this process. For GPUs,
backends check static limits only and bind nothing, so thousands of shapes take a second. A row that
only `bind` refuses, such as one with a missing kernel, is found by measuring or `tunedgemm
explain`. On a CPU, where binding is cheap, all shapes are bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tunedgemm.analysis.coverage.answers import described, entry_of
from tunedgemm.analysis.coverage.captured import Captured, Replays, captured
from tunedgemm.analysis.coverage.known import known_times
from tunedgemm.analysis.coverage.measure import measure_all
from tunedgemm.analysis.coverage.proposal import Next, write_next
from tunedgemm.analysis.coverage.result import PADDED, SOURCES, TUNED, UNTUNED, WORDS, Entry, Group, Passed, Regret, Unused
from tunedgemm.analysis.coverage.whole import Coverage
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.table.folders import SHIPPED_WORD, named_file, shipped_layers, table_layers
from tunedgemm.table.lookup import Table
from tunedgemm.table.sheet import present
from tunedgemm.workload.lists import op_of_file

#: word for the package's tables alone, in place of tables
SHIPPED = SHIPPED_WORD


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
    """Compute what serves the captured calls of a workload.

    Args:
        paths: untuned files of any ops; None for every captured file of the user folder.
        op: the op of all files; by default each file's columns decide.
        device: a device, present or described; None for the present one.
        replays: replays of the captured graphs: one number, or one per M.
        tables: tuned files above all layers, at most one per op; or `SHIPPED` for the shipped
            tables only, as before any tuning.
        against: tuned files whose rows and trials give known times on this device.
        measure: seconds to spend on timing, heaviest calls first; 0 for none.

    Raises:
        UserError: a file cannot be used, there are no calls, or arguments contradict each other.
    """
    replays = Replays.of(replays)
    calls = captured([paths] if isinstance(paths, str | Path) else paths, op, device.gfx if device else "")
    shipped = tables == SHIPPED
    above, compared = _by_op(() if shipped else tables, op, calls, "--table"), _by_op(against, op, calls, "--against")
    if several := next((family for family, files in above.items() if len(files) > 1), ""):
        raise UserError(f"--table: {' and '.join(map(str, above[several]))} are both tables of {several}; name one, or merge them")
    if measure and device is not None and device != current_device():
        raise UserError(f"--measure and --device {device}: --measure runs on this machine's {current_device()}; leave out one of them")
    if shipped and measure:
        raise UserError("--shipped and --measure: --measure times what runs with all tables; leave out one of them")
    here = device or current_device()
    notes = [*calls.notes, *_graph_notes(calls, replays)]
    notes += ["the package's tables alone were asked (--shipped)"] if shipped else []
    entries: list[Entry] = []
    settings = Settings.from_environment().passive
    for family in map(op_named, calls.ops):
        layers = shipped_layers(family) if shipped else table_layers(family, above.get(family.name, ()), invariant=settings.batch_invariant)
        dispatcher = Dispatcher(
            family,
            above=above.get(family.name, ()),
            settings=settings,
            table=Table.load(family, layers=layers),
        )
        listed = calls.of(family)
        files = [path for layer in layers for path in layer.paths if present(path)]
        times = known_times(family, here, (call.shape for call in listed), files, compared.get(family.name, ()))
        notes += times.notes
        if others := dispatcher.table.foreign(here):
            notes.append(f"the tables of {family.name} have no row for {here}; their rows are for {others}")
        answers = [entry_of(dispatcher, described(here), call, replays, times) for call in listed]
        notes += _version_notes(answers, dispatcher, here)
        entries += answers
    if not here.name and any(entry.how == "other device" for entry in entries):
        notes.append(f"rows with a device name count as another device's; --device {here.gfx}:{here.cu_num}:NAME names this one")
    if measure:
        first = {name: files[0] for name, files in above.items()}
        entries, note = measure_all(entries, first, here, measure)
        notes.append(note)
    entries.sort(key=lambda entry: (-entry.time, str(entry.shape)))
    return Coverage(", ".join(map(str, calls.paths)), tuple(entries), here, calls.paths, calls.problems, tuple(notes))


def _version_notes(entries: Iterable[Entry], dispatcher: Dispatcher, here: Device) -> Iterator[str]:
    """Yield a note for each library version of rows in use that is not the present one."""
    calls = Counter[tuple[str, str]]()
    for entry in entries:
        if entry.libver:
            calls[entry.solution.libtype, entry.libver] += entry.calls
    for (libtype, libver), count in calls.items():
        now = dispatcher.registry.library_version(libtype, here)
        if now and now != libver:
            yield f"{count} calls of {dispatcher.op.name} have rows of {libtype} tuned with {libver}; they serve if {now} binds them"


def _by_op(texts: Iterable[str | Path], op: str, calls: Captured, flag: str) -> dict[str, list[Path]]:
    """Sort tables by their op, which must be among the called ops."""
    by_op: dict[str, list[Path]] = {}
    for text in texts:
        path = named_file(str(text))
        if not present(path):
            raise UserError(f"{flag} {path}: no such file")
        family = op_named(op) if op else op_of_file(path)
        if family.name not in calls.ops:
            raise UserError(f"{flag} {path}: is a table of {family.name}, and the calls are of {', '.join(calls.ops)}; --op names its op")
        by_op.setdefault(family.name, []).append(path)
    return by_op


def _graph_notes(calls: Captured, replays: Replays) -> list[str]:
    """Return notes on calls that were recorded into graphs.

    Raises:
        UserError: *replays* names an M that no graph has.
    """
    recorded = sorted({call.shape.m for call in calls.listed if call.graph})
    if unknown := [m for m in replays.by_m if m not in recorded]:
        others = f"those of M={', '.join(map(str, recorded))} were" if recorded else "none were"
        raise UserError(f"--replays: no calls with M={unknown[0]} were recorded into graphs; {others}")
    if not recorded and replays.per_graph > 1:
        return ["--replays has no effect: no call was recorded into a graph"]
    silent = [m for m in recorded if m not in replays.by_m]
    if not silent or replays.per_graph > 1:
        return []
    graphs = f" with M={', '.join(map(str, silent))}" if replays.by_m else ""
    return [f"calls recorded into graphs{graphs} count once; pass the number of replays with --replays"]


__all__ = [
    "PADDED", "SHIPPED", "SOURCES", "TUNED", "UNTUNED", "WORDS",
    "Coverage", "Entry", "Group", "Next", "Passed", "Regret", "Replays", "Unused", "coverage", "write_next",
]  # fmt: skip
