"""Capture: note every shape a workload meets, tuned or not, with the number of calls; torch-free.

A shape's row is on disk as soon as it is met, so that a process that is killed loses counts, never a shape.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.errors import TunedGemmError
from tunedgemm.folders import untuned_path
from tunedgemm.row import key_shape, untuned_of
from tunedgemm.sheet import Record, Sheet, locked, present, read_sheet, replace_text

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op
    from tunedgemm.shape import Shape

_log = logging.getLogger("tunedgemm")

#: Longest wait for other processes' writing, in seconds: a model waits for it. What is not written now is, at the next flush.
_PATIENCE = 2.0

_captures: weakref.WeakSet[Capture] = weakref.WeakSet()


class Capture:
    """The shapes that one process meets, merged into an untuned CSV which other processes and people may write, too.

    Thread-safe. A forked child counts from zero: what its parent had counted is the parent's to write.

    Attributes:
        op: the op whose shapes these are.
        path: the untuned CSV: the op's key columns and ``count``, the number of calls of all processes so far.
    """

    def __init__(self, op: Op, path: Path | None = None) -> None:
        self.op = op
        self.path = path or untuned_path(op)
        self._counters: dict[Shape, list[int]] = {}
        self._written: dict[Shape, int] = {}  # of the counters, what the file has
        self._parsed: dict[tuple[tuple[str, str], ...], Shape | None] = {}
        self._lock = threading.RLock()
        self._complained = False
        _captures.add(self)
        _at_exit(self)
        multiprocessing.util.register_after_fork(self, _at_exit)

    def meet(self, shape: Shape) -> list[int]:
        """Register a shape and return its counter, one integer in a list, which the caller raises by one at each call.

        A shape that is new in this process gets its row on disk before this returns, with a count of at least 1.
        Shapes that differ in nothing that a table tells apart share a counter. An empty batch has one, too, but no row.
        """
        shape = key_shape(shape)
        counter = self._counters.get(shape)
        if counter is not None:
            return counter
        with self._lock:
            fresh = shape not in self._counters
            counter = self._counters.setdefault(shape, [0])
        if fresh and shape.m > 0:
            self.flush()
        return counter

    def flush(self) -> None:
        """Add to the file what it does not have yet. A failure is logged once and tried again at the next flush."""
        with self._lock:
            deltas = {shape: delta for shape, counter in self._counters.items() if (delta := self._unwritten(shape, counter[0])) > 0}
            if not deltas:
                return
            try:
                with locked(self.path, _PATIENCE):
                    sheet = self._merged(deltas)
                    replace_text(self.path, sheet.text(), durable=False)  # a power cut ends the workload, too
            except (TunedGemmError, OSError) as error:
                if not self._complained:
                    self._complained = True
                    _log.warning("shapes are not captured for now: %s", error)
                return
            for shape, delta in deltas.items():
                self._written[shape] = self._written.get(shape, 0) + delta
            self._complained = False

    def _unwritten(self, shape: Shape, count: int) -> int:
        """Calls that the file does not have; a shape just met counts as one, for its caller raises the counter only after that."""
        if shape.m == 0:
            return 0
        return count - self._written[shape] if shape in self._written else max(1, count)

    def _merged(self, deltas: dict[Shape, int]) -> Sheet:
        """The file's content with these counts added; lines that are not understood stay as they are."""
        sheet = read_sheet(self.path) if present(self.path) else Sheet([], [])
        rows: dict[Shape, Record] = {}
        for record in sheet.records:
            shape = self._shape_of(record)
            if shape is not None:
                rows.setdefault(shape, record)
        for shape, delta in deltas.items():
            if shape not in rows:
                cells = {column: text for column, text in self.op.columns.format(shape).items() if text or column in self.op.columns.key}
                rows[shape] = Record(cells={**cells, "count": "0"})
                sheet.records.append(rows[shape])
            cells = rows[shape].cells
            cells["count"] = str(untuned_of(rows[shape], self.op).count + delta)
        used = (column for record in sheet.records for column in record.cells)
        # Those of a file that is there lead in their order, so that its lines keep their text.
        sheet.columns = list(dict.fromkeys((*sheet.columns, *self.op.columns.key, "count", *used)))
        return sheet

    def _shape_of(self, record: Record) -> Shape | None:
        """The shape of a line, remembered by its texts: the whole file is read again for each new shape."""
        texts = tuple((column, text) for column, text in record.cells.items() if column != "count")
        if record.raw or record.surplus:
            return None
        if texts not in self._parsed:
            try:
                self._parsed[texts] = untuned_of(Record(cells=dict(texts)), self.op).shape
            except (TunedGemmError, ValueError):
                self._parsed[texts] = None
        return self._parsed[texts]

    def _restart(self) -> None:
        """In a forked child: leave the counts so far to the parent, and drop a lock that one of its threads may hold."""
        self._lock = threading.RLock()
        self._written = {shape: counter[0] for shape, counter in self._counters.items()}


@functools.cache
def _recorder(op: Op, path: Path) -> Capture:
    return Capture(op, path)


def recorder(op: Op) -> Capture:
    """This process's capture of an op into the user's untuned file."""
    return _recorder(op, untuned_path(op))


def _at_exit(capture: Capture) -> None:
    """Flush when this process ends; children of multiprocessing end without `atexit` and drop what their parent registered."""
    multiprocessing.util.Finalize(capture, Capture.flush, (capture,), exitpriority=0)


def _flush_all() -> None:
    for capture in list(_captures):
        capture.flush()


def _restart_all() -> None:
    for capture in list(_captures):
        capture._restart()


atexit.register(_flush_all)
os.register_at_fork(after_in_child=_restart_all)
