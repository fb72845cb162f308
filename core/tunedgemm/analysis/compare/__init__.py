"""Time and check the production op, before and after tuning: ``--run_config`` and ``--compare``.

Both call the op as a workload does, through dispatch, and verify its outputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Side, rows_for
from tunedgemm.analysis.compare.show import print_checked, print_compared
from tunedgemm.analysis.compare.verdict import Change, Checked, Compared, Served, decide
from tunedgemm.backends.artifact import cache_folder
from tunedgemm.backends.file_trust import make_private
from tunedgemm.device import Device
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.process.filelocks import file_lock
from tunedgemm.process.files import read_regular
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import key_shape, read_rows, upsert
from tunedgemm.table.folders import table_paths, tuned_path
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import locked, present, replace_text
from tunedgemm.text.console import Console
from tunedgemm.tuner import tune
from tunedgemm.tuner.plan import Requested, Source, requested
from tunedgemm.tuner.trial import Event, Options, Place, Report, Step, Task

_log = logging.getLogger("tunedgemm")

#: M at which a pin is checked: a token, and a batch.
PINNED_M = (1, 256)


def run_config(
    op: str,
    source: Source,
    table: Path | Sequence[Path] | None,
    options: Options,
    *,
    progress: Callable[[Served], None] | None = None,
) -> Checked:
    """Check and time the production op without tuning, in a child process.

    Args:
        op: name of the op.
        source: shapes, as `tunedgemm.tune` takes them, used without *table*; None is the file that
            capture wrote.
        table: a tuned CSV, or several, whose rows for the present device are the only table; None
            leaves the tables as configured.
        options: of a tuning run; only errRatio, cache, timing, warmup, iters, seconds and the
            timeouts count.
        progress: called with each shape's result.

    Raises:
        UserError: a file cannot be read, or has no row for this device.
    """
    family = op_named(op)
    _local(options, "--run_config")
    tables = table_paths(table)
    read = [read_rows(path, family) for path in tables]
    rows = [row for rows, _ in read for row in rows]
    request = Requested(()) if tables else requested(family, source)
    listed = [untuned.shape for untuned in request.shapes]
    with measuring(op, [Side("now", only=tables)], options, table_only=bool(tables)) as ask:
        device = ask.begin().device
        notes = tuple(str(problem) for _, problems in read for problem in problems)
        if tables:
            here = rows_for(device, rows)
            if not here:
                raise TableError(f"{', '.join(map(str, tables))}: has no row for {device}; its rows are for {_devices(rows)}")
            listed = [shape for row in here for shape in _shapes(row)]
            others = len(rows) - len(here)
            notes += (f"left out: {others} rows of other devices or without a time",) if others else ()
        served = []
        for shape in _unique_sorted(listed):
            served.append(ask.served(shape))
            if progress is not None:
                progress(served[-1])
    return Checked(op, device, tables, tuple(served), notes, request.left_out)


def compare(
    op: str,
    source: Source,
    output: Path | Sequence[Path] | None,
    options: Options,
    *,
    update: bool,
    min_improvement_pct: float = 3.0,
    progress: Callable[[Place | None, Event], None] | None = None,
) -> Compared:
    """Tune into a candidate table, and time the op with the old and the new rows in the same rounds.

    Args:
        op: name of the op.
        source: shapes, as `tunedgemm.tune` takes them; None is the file that capture wrote.
        output: the tuned CSV to improve, touched only with *update*; further ones and None as in
            `tune`.
        options: of the tuning run.
        update: replace the rows for which `decide` says so.
        min_improvement_pct: the smallest improvement, in percent, that replaces a row.
        progress: called with the events of tuning, then of checking and timing.

    Raises:
        UserError: the input, the output or an option cannot be used.
    """
    family = op_named(op)
    output, *others = table_paths(output) or (tuned_path(family),)
    _comparable(options, min_improvement_pct)
    request = requested(family, source, output if options.stale else None)
    counts = {key_shape(untuned.shape): untuned.calls for untuned in request.shapes}
    folder = cache_folder() / "compare" / f"{output.stem}-{hashlib.sha256(os.path.realpath(output).encode()).hexdigest()[:12]}"
    with _lock_candidate_folder(folder, output):
        base, candidate = _copy_table(output, folder / output.name, family)
        _log.info("candidate table: %s", candidate)
        report = tune(op, request, (candidate, *others), options, progress=progress)
        after = folder / f"{output.stem}.after.csv"
        with measuring(op, [Side("before", swap=(output, output)), Side("after", swap=(output, after))], options) as ask:
            fresh = _rows_to_replace(family, candidate, base, report, ask.begin().device)
            _copy_table(output, after, family)
            upsert(after, family, fresh.values(), options.sort)
            changes = _changes(ask, fresh, counts, min_improvement_pct, progress)
            device = ask.place.device
        if update:
            changes = _update_table(family, output, base, fresh, changes, options.sort)
        failed = tuple(outcome.task.shape for outcome in report.failed)
        text = folder / f"{output.stem}.compare.txt"
        skipped = tuple(shape for shape in report.skipped if key_shape(shape) not in fresh)
        compared = Compared(
            device, output, candidate, text, changes, failed, skipped, report.unbegun, report.lost, min_improvement_pct, update,
            report.left_out,
        )  # fmt: skip
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
    for shape in _unique_sorted(fresh):
        count = counts.get(shape, 1)
        if progress is not None:
            progress(ask.place, Step(Task(shape, count), "time"))
        changes.append(decide(ask.change(shape, count), least))
        _log.info("%s: %s, %s", shape, changes[-1].decision, changes[-1].reason)
    return tuple(changes)


def _rows_to_replace(op: Op, candidate: Path, base: Sequence[Row], report: Report, device: Device) -> dict[Shape, Row]:
    """Return the device's new rows by shape, in the form in which they would replace the table's.

    A row without a device name holds for every device of its kind. The new row replaces it, and
    gets no name either.
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


def _update_table(
    op: Op, output: Path, base: Sequence[Row], fresh: Mapping[Shape, Row], changes: Sequence[Change], sort: bool
) -> tuple[Change, ...]:
    """Write the qualifying rows to the table, except where the table's row changed since the comparison."""
    now = {row.key: row for row in read_rows(output, op)[0]} if present(output) else {}
    then = {row.key: row for row in base}
    decided, chosen = [], []
    for change in changes:
        row = fresh[change.shape]
        if change.decision == "skip":
            decided.append(change)
        elif now.get(row.key) != then.get(row.key):
            decided.append(attrs.evolve(change, decision="skip", reason="the table's row changed during the comparison"))
        else:
            decided.append(attrs.evolve(change, updated=True))
            chosen.append(row)
    if chosen:
        upsert(output, op, chosen, sort)
    return tuple(decided)


def _copy_table(output: Path, copy: Path, op: Op) -> tuple[list[Row], Path]:
    """Copy a table's file if it exists; return its rows and the path of the copy.

    Raises:
        TableError: the file cannot be read as a table of this op.
    """
    with locked(copy):
        if not present(output):
            copy.unlink(missing_ok=True)
            return [], copy
        rows, _ = read_rows(output, op)
        replace_text(copy, read_regular(output).decode("utf-8-sig"), durable=False)
    return rows, copy


@contextlib.contextmanager
def _lock_candidate_folder(folder: Path, output: Path) -> Iterator[None]:
    """Lock the folder of a table's candidate, where an interrupted run finds its trials."""
    lock = file_lock(folder / "lock")
    try:
        make_private(folder)
        lock.acquire(blocking=False)
    except TimeoutError:
        raise UserError(f"{output}: another process is comparing it (it holds {lock.lock_file})") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder}: cannot be written: {reason}; set TUNEDGEMM_CACHE to a writable folder") from error
    try:
        yield
    finally:
        lock.release()


def _write(compared: Compared) -> None:
    with compared.report.open("w", encoding="utf-8") as file:
        print_compared(compared, Console(file=file, width=200))


def _comparable(options: Options, least: float) -> None:
    if not 0.0 <= least < 100.0:
        raise UserError(f"--min_improvement_pct: must be in 0 to 100 (got {least:g})")
    if options.batch_invariant:
        raise UserError(
            "--compare and --batch-invariant: are mutually exclusive, because a pin is not chosen per shape; "
            "tune into another table, and check both with --run_config"
        )
    _local(options, "--compare")


def _local(options: Options, flag: str) -> None:
    if options.executor != "local":
        raise UserError(f"{flag}: times the op on this machine; leave out --executor {options.executor}")


def _shapes(row: Row) -> list[Shape]:
    return [row.shape] if row.shape.m else [attrs.evolve(row.shape, m=m) for m in PINNED_M]


def _unique_sorted(shapes: Sequence[Shape] | Mapping[Shape, Row]) -> list[Shape]:
    """Return each shape once, sorted by N, K and M."""
    return sorted(dict.fromkeys(map(key_shape, shapes)), key=lambda shape: (shape.n, shape.k, shape.m, str(shape)))


def _devices(rows: Sequence[Row]) -> str:
    devices = sorted({f"{row.gfx or 'any'}/{row.cu_num or 'any'} {row.device}".strip() for row in rows})
    return ", ".join(devices[:5]) or "no device at all"


__all__ = ["Change", "Checked", "Compared", "Served", "compare", "decide", "print_checked", "print_compared", "run_config"]
