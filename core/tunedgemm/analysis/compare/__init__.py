"""What the production op does with the tables as they are, and what it would do after tuning: AITER's ``--run_config`` and ``--compare``.

Both look at the op as a workload calls it, through dispatch, and check what comes out besides
timing it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import filelock
from rich.console import Console

from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Side, rows_for
from tunedgemm.analysis.compare.show import print_checked, print_compared
from tunedgemm.analysis.compare.verdict import Change, Checked, Compared, Served, decide
from tunedgemm.backends.artifact import cache_folder
from tunedgemm.device import Device
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import key_shape, read_rows, upsert
from tunedgemm.table.folders import tuned_path
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import locked, present, replace_text
from tunedgemm.tuner import tune
from tunedgemm.tuner.plan import Source, requested
from tunedgemm.tuner.trial import Event, Options, Place, Report, Step, Task

_log = logging.getLogger("tunedgemm")

#: M at which a row that pins every M is looked at: a token, and a batch.
PINNED_M = (1, 256)


def run_config(
    op: str,
    source: Source,
    table: Path | None,
    options: Options,
    *,
    progress: Callable[[Served], None] | None = None,
) -> Checked:
    """Check and time the production op, tuning nothing; everything runs in a child process.

    Args:
        op: name of the op.
        source: shapes, as `tunedgemm.tune` takes them, used without *table*; None is the file that
            capture wrote.
        table: a tuned CSV whose rows for the present device are the only table; None leaves the
            tables as configured.
        options: of a tuning run; errRatio, cache, timing, warmup, iters, seconds and the timeouts
            hold.
        progress: called with each shape's result.

    Raises:
        UserError: a file cannot be read, or says nothing about this device.
    """
    family = op_named(op)
    _local(options, "--run_config")
    rows, problems = read_rows(table, family) if table else ([], [])
    listed = [] if table else [shape for shape, _ in requested(family, source)]
    with measuring(op, [Side("now", only=table)], options, table_only=table is not None) as ask:
        device = ask.begin().device
        notes = tuple(map(str, problems))
        if table:
            here = rows_for(device, rows)
            if not here:
                raise TableError(f"{table}: has no row for {device}; its rows are for {_places(rows)}")
            listed = [shape for row in here for shape in _shapes(row)]
            others = len(rows) - len(here)
            notes += (f"{others} rows of other devices, or without a time, left out",) if others else ()
        served = []
        for shape in _ordered(listed):
            served.append(ask.served(shape))
            if progress is not None:
                progress(served[-1])
    return Checked(op, device, table, tuple(served), notes)


def compare(
    op: str,
    source: Source,
    output: Path | None,
    options: Options,
    *,
    update: bool,
    min_improvement_pct: float = 3.0,
    progress: Callable[[Place | None, Event], None] | None = None,
) -> Compared:
    """Tune into a candidate table, and time the production op with the table as it is and as it would be, in the same rounds.

    Args:
        op: name of the op.
        source: shapes, as `tunedgemm.tune` takes them; None is the file that capture wrote.
        output: the tuned CSV to improve; None is the one that `tune` writes by default. Touched
            only with *update*.
        options: of the tuning run.
        update: replace the rows for which `decide` says so.
        min_improvement_pct: what the time must fall by, in percent, for a row to be replaced.
        progress: called with what tuning tells, then with what is checked and timed here.

    Raises:
        UserError: the input, the output or an option cannot be used.
    """
    family = op_named(op)
    output = output or tuned_path(family)
    _comparable(options, min_improvement_pct)
    if source is not None and not isinstance(source, Path):
        source = dict(requested(family, source))  # it is gone through twice
    counts = {key_shape(shape): count for shape, count in requested(family, source, output if options.stale else None)}
    folder = cache_folder() / "compare" / f"{output.stem}-{hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:12]}"
    with _alone(folder, output):
        base, candidate = _copied(output, folder / output.name, family)
        _log.info("candidate table: %s", candidate)
        report = tune(op, source, candidate, options, progress=progress)
        after = folder / f"{output.stem}.after.csv"
        with measuring(op, [Side("before", swap=(output, output)), Side("after", swap=(output, after))], options) as ask:
            fresh = _landing(family, candidate, base, report, ask.begin().device)
            _copied(output, after, family)
            upsert(after, family, fresh.values(), options.sort)
            changes = _changes(ask, fresh, counts, min_improvement_pct, progress)
            device = ask.place.device
        if update:
            changes = _updated(family, output, base, fresh, changes, options.sort)
        failed = tuple(outcome.task.shape for outcome in report.failed)
        text = folder / f"{output.stem}.compare.txt"
        skipped = tuple(shape for shape in report.skipped if key_shape(shape) not in fresh)
        compared = Compared(
            device, output, candidate, text, changes, failed, skipped, report.unbegun, report.lost, min_improvement_pct, update
        )
        _write(compared)
    return compared


def _changes(
    ask: Measuring,
    fresh: Mapping[Shape, Row],
    counts: Mapping[Shape, int],
    least: float,
    progress: Callable[[Place | None, Event], None] | None,
) -> tuple[Change, ...]:
    changes = []
    for shape in _ordered(fresh):
        count = counts.get(shape, 1)
        if progress is not None:
            progress(ask.place, Step(Task(shape, count), "time"))
        changes.append(decide(ask.change(shape, count), least))
        _log.info("%s: %s, %s", shape, changes[-1].decision, changes[-1].reason)
    return tuple(changes)


def _landing(op: Op, candidate: Path, base: Sequence[Row], report: Report, device: Device) -> dict[Shape, Row]:
    """The rows that tuning gave for the device, by shape, as they would stand in the table.

    A row of the table that names no device stands for every one of its kind: the new row takes its
    place, nameless, too.
    """
    tuned = {key_shape(outcome.task.shape) for outcome in report.outcomes if outcome.winner is not None}
    old, keys = set(base), {row.key for row in base}
    rows = read_rows(candidate, op)[0] if present(candidate) else []
    fresh = {}
    for row in rows_for(device, rows):
        if row.device == device.name and row.shape.m > 0 and (row.shape in tuned or row not in old):
            nameless = row.key not in keys and (row.gfx, row.cu_num, "", row.shape) in keys
            fresh[row.shape] = attrs.evolve(row, device="") if nameless else row
    return fresh


def _updated(
    op: Op, output: Path, base: Sequence[Row], fresh: Mapping[Shape, Row], changes: Sequence[Change], sort: bool
) -> tuple[Change, ...]:
    """Put the rows that qualify into the table; a row that somebody else has changed meanwhile is not what was compared."""
    now = {row.key: row for row in read_rows(output, op)[0]} if present(output) else {}
    then = {row.key: row for row in base}
    decided, chosen = [], []
    for change in changes:
        row = fresh[change.shape]
        if change.decision == "skip":
            decided.append(change)
        elif now.get(row.key) != then.get(row.key):
            decided.append(attrs.evolve(change, decision="skip", reason="the table's row has changed meanwhile"))
        else:
            decided.append(attrs.evolve(change, updated=True))
            chosen.append(row)
    if chosen:
        upsert(output, op, chosen, sort)
    return tuple(decided)


def _copied(output: Path, copy: Path, op: Op) -> tuple[list[Row], Path]:
    """The rows of a table, and a copy of the file; where there is none, no copy either.

    Raises:
        TableError: the file cannot be read as a table of this op.
    """
    with locked(copy):
        if not present(output):
            copy.unlink(missing_ok=True)
            return [], copy
        rows, _ = read_rows(output, op)
        replace_text(copy, output.read_text(encoding="utf-8-sig"), durable=False)
    return rows, copy


@contextlib.contextmanager
def _alone(folder: Path, output: Path) -> Iterator[None]:
    """Hold the folder of a table's candidate; a run that was interrupted finds its trials there again."""
    lock = filelock.FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UserError(f"{output}: another process compares it already (it holds {lock.lock_file})") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot be written: {reason}; set TUNEDGEMM_CACHE to a folder that can be written") from error
    try:
        yield
    finally:
        lock.release()


def _write(compared: Compared) -> None:
    with compared.report.open("w", encoding="utf-8") as file:
        print_compared(compared, Console(file=file, width=200))


def _comparable(options: Options, least: float) -> None:
    if not 0.0 <= least < 100.0:
        raise UserError(f"--min_improvement_pct must be in 0 to 100 (got {least:g})")
    if options.batch_invariant:
        raise UserError(
            "--compare decides row by row, and --batch-invariant pins one row for every M: "
            "tune into another table, and look at both with --run_config"
        )
    _local(options, "--compare")


def _local(options: Options, flag: str) -> None:
    if options.executor != "local":
        raise UserError(f"{flag} times the op on this machine: leave --executor {options.executor} out")


def _shapes(row: Row) -> list[Shape]:
    return [row.shape] if row.shape.m else [attrs.evolve(row.shape, m=m) for m in PINNED_M]


def _ordered(shapes: Sequence[Shape] | Mapping[Shape, Row]) -> list[Shape]:
    """Each shape once, by N, K and M."""
    return sorted(dict.fromkeys(map(key_shape, shapes)), key=lambda shape: (shape.n, shape.k, shape.m, str(shape)))


def _places(rows: Sequence[Row]) -> str:
    places = sorted({f"{row.gfx or 'any'}/{row.cu_num or 'any'} {row.device}".strip() for row in rows})
    return ", ".join(places[:5]) or "no device at all"


__all__ = ["Change", "Checked", "Compared", "Served", "compare", "decide", "print_checked", "print_compared", "run_config"]
