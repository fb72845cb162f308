"""Stage 7, store: write trials to the trial log and winners to the table; resume runs."""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from tunedgemm.device import Device, drivers
from tunedgemm.errors import TableError
from tunedgemm.ops.op import Op
from tunedgemm.process.filelocks import file_lock
from tunedgemm.process.files import open_regular
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, key_shape, read_rows, upsert
from tunedgemm.table.published import refuse_published
from tunedgemm.table.row import shape_cells
from tunedgemm.table.sheet import locked, present
from tunedgemm.text.printable import printable
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import History, Line, Reusable, append, line, trials_path
from tunedgemm.tuner.trial import ChosenClass, Outcome, Place
from tunedgemm.version import __version__

_log = logging.getLogger("tunedgemm")

#: AITER's time of an unmeasured candidate, and error ratio of a failed one.
_NO_TIME, _ALL_WRONG = -1, 1.0

#: Columns of a profile before and after those of the shape.
_BEFORE = ("gfx", "cu_num")
_AFTER = (
    "libtype", "solidx", "splitK", "kernelName",
    "status", "us", "noise", "samples", "err_ratio", "row_error", "tflops", "bw", "detail",
)  # fmt: skip

#: Fields of the winner's timing repeated in its outcome, which then suffices to rebuild the row.
_REPEATED = ("us", "noise", "samples", "err_ratio")


class Missing(enum.Enum):
    """The type of `MISSING`."""

    MISSING = enum.auto()


#: Result of `Store.done` for an unfinished shape.
MISSING: Final = Missing.MISSING


@attrs.define(eq=False)
class Store:
    """Writes the results of a run; safe with several threads, and other runs on the same table.

    Attributes:
        op: the op to tune.
        table: the tuned CSV.
        profile: AITER's ``--profile_file``, a CSV of every candidate; None for no such file.
        sort: whether to sort the table by its key.
        run: id of this run in the trial log; "" before `open`.
        trials: the trial log, in the table's folder.
    """

    op: Op
    table: Path
    profile: Path | None = None
    sort: bool = True
    run: str = attrs.field(default="", init=False)
    trials: Path = attrs.field(default=attrs.Factory(lambda self: trials_path(self.table), takes_self=True), init=False)
    _trials: dict[tuple[Device, Shape], dict[Solution, Timing]] = attrs.field(factory=dict, init=False)
    _outcomes: dict[tuple[Device, Shape], Timing | None] = attrs.field(factory=dict, init=False)
    _waiting: list[Row] = attrs.field(factory=list, init=False)
    _libvers: dict[tuple[Device, Shape], dict[Solution, str]] = attrs.field(factory=dict, init=False)
    _versions: dict[Device, dict[str, str]] = attrs.field(factory=dict, init=False)
    _alive: Any = attrs.field(default=None, init=False)
    _mutex: threading.RLock = attrs.field(factory=threading.RLock, init=False)

    def open(self, identity: Mapping[str, str], resume: bool = True) -> None:
        """Begin a run: check that all files are writable, and adopt interrupted runs' results.

        Args:
            identity: options, versions and shard, which must be equal for trials to be reused.
            resume: whether to adopt results.

        Raises:
            TableError: a file cannot be written, the table cannot be read, or the trial log is
                another file or of a newer schema.
        """
        self._check_writable()
        if present(self.table):
            read_rows(self.table, self.op)
        started = datetime.datetime.now(datetime.timezone.utc)
        self.run = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        with self._mutex:
            try:
                with locked(self.trials):
                    alive = self._running_runs()
                    history = History.read(self.trials)
                    reusable = history.reusable(self.op.name, identity, alive) if resume else Reusable()
                    self._lock_run()
                    header = line(
                        "run", self.run, op=self.op.name, version=__version__, host=socket.gethostname(), pid=os.getpid(),
                        started=started.isoformat(timespec="seconds"), identity=dict(identity), drivers=drivers(), resumes=reusable.runs,
                    )  # fmt: skip
                    append(self.trials, [header])
                self._adopt(reusable)
            except BaseException:
                self._release()
                raise

    def use(self, device: Device, versions: Mapping[str, str]) -> None:
        """Set the library versions of a kind of device; drop adopted trials of other versions.

        A shape with a dropped trial counts as unfinished; its other trials are reused.
        """
        with self._mutex:
            self._versions[device] = dict(versions)
            for key, libvers in self._libvers.items():
                if key[0] != device:
                    continue
                others = [solution for solution, libver in libvers.items() if versions.get(solution.libtype, libver) != libver]
                for solution in others:
                    self._trials.get(key, {}).pop(solution, None)
                if others:
                    self._outcomes.pop(key, None)
                    _log.info("%s: %d trials of other versions of their libraries are not reused for %s", self.trials, len(others), key[1])

    def final_timings(self, device: Device, shape: Shape) -> tuple[Timing, ...]:
        """Return the final timings of a shape, adopted or logged by this run."""
        with self._mutex:
            return tuple(self._trials.get((device, shape), {}).values())

    def done(self, device: Device, shape: Shape) -> Timing | Missing | None:
        """Return the winner of a finished shape; None if no solution passed, `MISSING` if unfinished."""
        with self._mutex:
            return self._outcomes.get((device, shape), MISSING)

    def log(self, place: Place, timings: Iterable[Timing]) -> None:
        """Append final timings to the log and the profile; skip those already logged.

        Raises:
            TableError: a file cannot be written; its earlier lines stay readable.
        """
        with self._mutex:
            self._append(place, timings)

    def record(self, outcome: Outcome) -> None:
        """Log an outcome and its remaining timings in one write; store the winner in the table.

        Raises:
            TableError: a file cannot be written; its earlier lines stay readable.
        """
        place, winner, shape = outcome.place, outcome.winner, outcome.task.shape
        if place is None:
            raise ValueError(f"the outcome of {shape} has no place")
        incumbent = outcome.task.incumbent
        fields: dict[str, Any] = {"winner": None, "us": 0.0}
        if winner is not None:
            fields = {"winner": winner.solution.to_dict(), **{name: getattr(winner, name) for name in _REPEATED}, "libver": outcome.libver}
        fields |= {"incumbent": incumbent and incumbent.to_dict(), "tied": outcome.tied, "reason": outcome.reason}
        fields |= {"seconds": {activity: round(seconds, 3) for activity, seconds in outcome.seconds}}
        ending = line("shape", self.run, **_place_fields(place), shape=shape.to_dict(), **fields)
        with self._mutex:
            if winner is not None:
                self._waiting.append(self._row(place.device, shape, winner, outcome.libver))
            self._append(place, [*outcome.timings, *([winner] if winner else [])], ending)
            self._outcomes[place.device, shape] = winner
            self._put()

    def put_class(self, place: Place, chosen: ChosenClass, versions: Mapping[str, str]) -> None:
        """Store the rows of a bit class in the table, in place of rows of other classes, or raise TableError."""
        rows = [self._row(place.device, row.shape, row, versions.get(row.solution.libtype, "")) for row in chosen.rows]
        with self._mutex:
            self._waiting += rows
            self._put()

    def finish(self) -> None:
        """Complete the run, so that it is not resumed; call `close` if shapes are left.

        Raises:
            TableError: a file cannot be written, so the run counts as interrupted.
        """
        with self._mutex:
            try:
                self._put()
                with locked(self.trials):
                    append(self.trials, [line("end", self.run)])
                    self._release()
            finally:
                self._release()

    def close(self) -> None:
        """Stop the run, so that the next one resumes it; does nothing after `finish`.

        Raises:
            TableError: a winner could not be stored; the next run does it.
        """
        with self._mutex:
            try:
                if self._alive is not None:
                    self._put()
            finally:
                self._release()

    def _check_writable(self) -> None:
        refuse_published(self.table)
        for path in filter(None, (self.table, self.trials, self.profile)):
            if path != self.profile and present(path) and not path.is_file():
                raise TableError(f"cannot write {path}: it is not a regular file; choose another place with -o")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=path.parent), path.open("a") if present(path) else contextlib.nullcontext():
                    pass
            except OSError as error:
                raise TableError(f"cannot write {path}: {error.strerror}; choose another place with -o (or -o2)") from error
        if self.profile is not None:
            self._check_profile(self.profile)

    def _check_profile(self, path: Path) -> None:
        """Check that a profile is writable, and is not the table, the log or another file."""
        if os.path.realpath(path) in map(os.path.realpath, (self.table, self.trials)):
            raise TableError(f"{path}: the table or the trial log is at the path of -o2; choose another place with -o2")
        if path.is_file() and path.stat().st_size:
            with open_regular(path) as file:
                first = file.readline(1000).decode("utf-8-sig", "replace").strip()
            if first != ",".join(self._profile_columns):
                raise TableError(f"{path}: not a profile (its first line is {first[:80]!r}); choose another place with -o2")

    def _lock_of(self, run: str) -> Path:
        return self.trials.with_name(f"{self.trials.name}.{run}.lock")

    def _lock_run(self) -> None:
        """Take the lock of this run, which the operating system releases when the process dies."""
        path = self._lock_of(self.run)
        self._alive = file_lock(path, thread_local=False)
        try:
            self._alive.acquire(timeout=0)
        except OSError as error:
            raise TableError(f"cannot write {path}: {error.strerror}; choose another place with -o") from error

    def _release(self) -> None:
        if self._alive is not None:
            self._alive.release()
            self._alive = None
            with contextlib.suppress(OSError):
                self._lock_of(self.run).unlink()

    def _running_runs(self) -> set[str]:
        """Return the ids of live runs, and remove locks of dead ones; the log's lock must be held."""
        alive = set()
        pattern = re.compile(re.escape(self.trials.name) + r"\.([\w-]+)\.lock")
        for path in self.trials.parent.iterdir():
            if named := pattern.fullmatch(path.name):
                lock = file_lock(path, thread_local=False)
                try:
                    lock.acquire(timeout=0)
                except OSError:  # another user's lock cannot be opened
                    alive.add(named[1])
                    continue
                lock.release()
                path.unlink(missing_ok=True)
        return alive

    def _adopt(self, reusable: Reusable) -> None:
        if not reusable.subjects:
            return
        stored = read_rows(self.table, self.op)[0] if present(self.table) else []
        rows = {row.key: row for row in stored}
        for subject in reusable.subjects:
            key, timings = subject[0].where(), [entry.timing() for entry in subject if entry.kind == "trial"]
            trials = {timing.solution: timing for timing in timings}
            libvers = [entry.fields.get("libver") for entry in subject if entry.kind == "trial"]
            self._libvers[key] = {timing.solution: text for timing, text in zip(timings, libvers, strict=True) if isinstance(text, str)}
            outcome = next((entry for entry in reversed(subject) if entry.kind == "shape"), None)
            if outcome is None:
                self._trials[key] = trials
                continue
            winner = _winner(outcome, trials)
            if winner is not None:
                with outcome.naming():
                    row = self._row(*key, winner, outcome.fields.get("libver", ""))
                if outcome.number in reusable.last and _died_before_table(outcome, rows.get(row.key), row):
                    self._waiting.append(row)
                elif row.key not in rows:
                    continue  # the user removed the row: the shape is tuned again
            self._trials[key], self._outcomes[key] = trials, winner
        count = sum(map(len, self._trials.values()))
        _log.info("%s: resumes run %s: %d trials are reused", self.trials, ", ".join(reusable.runs), count)
        self._put()

    def _append(self, place: Place, timings: Iterable[Timing], ending: str = "") -> None:
        fresh = {
            (timing.shape, timing.solution): timing
            for timing in timings
            if timing.solution not in self._trials.get((place.device, timing.shape), ())
        }
        versions = self._versions.get(place.device, {})
        libvers = [{"libver": text} if (text := versions.get(timing.solution.libtype)) else {} for timing in fresh.values()]
        of_trials = zip(fresh.values(), libvers, strict=True)
        lines = [line("trial", self.run, **_place_fields(place), **_fields_of(timing), **libver) for timing, libver in of_trials]
        if not lines and not ending:
            return
        with locked(self.trials):
            append(self.trials, [*lines, ending])
        for timing in fresh.values():
            self._trials.setdefault((place.device, timing.shape), {})[timing.solution] = timing
        if self.profile is not None and fresh:
            self._extend_profile(self.profile, [self._profile_row(place.device, timing) for timing in fresh.values()])

    def _put(self) -> None:
        """Write the pending rows to the table; after a failure or interrupt they stay pending."""
        if self._waiting:
            upsert(self.table, self.op, self._waiting, sort=self.sort)
            self._waiting = []

    def _row(self, device: Device, shape: Shape, winner: Timing, libver: str) -> Row:
        return Row(
            shape=key_shape(shape), gfx=device.gfx, cu_num=device.cu_num, device=device.name, solution=winner.solution,
            us=winner.us, err_ratio=winner.err_ratio, libver=libver, bit_class=winner.bits,
        )  # fmt: skip

    def _extend_profile(self, path: Path, rows: list[dict[str, object]]) -> None:
        import pandas as pd

        try:
            with locked(path) if path.is_file() or not present(path) else contextlib.nullcontext():  # it may be /dev/stdout
                fresh = not path.exists() or path.stat().st_size == 0
                pd.DataFrame(rows, columns=list(self._profile_columns)).to_csv(path, mode="a", header=fresh, index=False)
        except OSError as error:
            raise TableError(f"{path}: cannot be written: {error.strerror or error}; choose another place with -o2") from error

    @property
    def _profile_columns(self) -> tuple[str, ...]:
        return (*_BEFORE, *self.op.columns.key, *self.op.columns.own, *_AFTER)

    def _profile_row(self, device: Device, timing: Timing) -> dict[str, object]:
        shape, solution, us = timing.shape, timing.solution, timing.us
        err_ratio = timing.err_ratio or (0.0 if us or timing.status == "ok" else _ALL_WRONG)
        return {
            **shape_cells(shape, self.op, device.gfx),
            "gfx": device.gfx, "cu_num": device.cu_num, "libtype": solution.libtype, "solidx": solution.solidx,
            "splitK": solution.split_k, "kernelName": solution.kernel_name, "status": timing.status, "us": round(us, 4) if us else _NO_TIME,
            "noise": round(timing.noise, 4), "samples": timing.samples, "err_ratio": round(err_ratio, 4),
            "row_error": f"{timing.row_error:.3e}", "tflops": round(self.op.flops(shape) / us / 1e6, 2) if us else 0,
            "bw": round(self.op.bytes_moved(shape) / us / 1e3, 2) if us else 0, "detail": printable(" ".join(timing.detail.split())),
        }  # fmt: skip


def _place_fields(place: Place) -> dict[str, object]:
    """Return a place as fields of a log line; ``gpu`` is -1 for a CPU."""
    device = place.device
    return {"node": place.node, "gpu": device.index, "gfx": device.gfx, "cu_num": device.cu_num, "device": device.name}


def _fields_of(timing: Timing) -> dict[str, Any]:
    fields = json.loads(timing.to_json())
    del fields["schema"]
    return dict(fields)


def _winner(outcome: Line, trials: Mapping[Solution, Timing]) -> Timing | None:
    """Return the winner's timing from an outcome's line, since its trial may be in another run."""
    solution = outcome.solution("winner")
    if solution is None:
        return None
    timing = trials.get(solution) or Timing(outcome.where()[1], solution, "ok")
    with outcome.naming():
        return attrs.evolve(timing, **{name: outcome.fields[name] for name in _REPEATED})


def _died_before_table(outcome: Line, present_row: Row | None, row: Row) -> bool:
    """Check whether the run died after the log and before the table was written.

    The table then has the row from before that run, or none.
    """
    if present_row is None:
        return True
    return present_row.solution == outcome.solution("incumbent") and (
        present_row.solution != row.solution or present_row.us != round(row.us, 4)
    )
