"""Stage 1, plan: which shapes are to be tuned, and what their table holds already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from tunedgemm.csvfile import key_shape, read_rows, read_untuned
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.folders import untuned_path
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.trial import Task


@attrs.frozen
class Plan:
    """The shapes to tune, and those that the output has already."""

    tasks: tuple[Task, ...]
    skipped: tuple[Shape, ...]

    def batches(self, size: int) -> Iterator[tuple[Task, ...]]:
        """The tasks in groups of at most *size*."""
        for start in range(0, len(self.tasks), size):
            yield self.tasks[start : start + size]


def requested(op: Op, source: Path | None) -> list[tuple[Shape, int]]:
    """The shapes of an untuned file with their counts; without one, those that capture wrote.

    Raises:
        TableError: there is no such file, or it is no list of this op's shapes.
    """
    path = source or untuned_path(op)
    if source is None and not path.exists():
        raise TableError(f"no shapes to tune: {path} does not exist; capture them with AITER_TUNE_GEMM=1, or name a file with -i")
    return [(untuned.shape, untuned.count) for untuned in read_untuned(path, op)]


def plan(op: Op, shapes: Iterable[tuple[Shape, int]], output: Path, device: Device, *, retune: bool) -> Plan:
    """Fold duplicates, leave out empty shapes and those tuned already (unless *retune*), largest N first as AITER sorts."""
    counts: dict[Shape, int] = {}
    for shape, count in shapes:
        counts[shape] = counts.get(shape, 0) + count
    incumbents = _incumbents(op, output, device)
    tasks, skipped = [], []
    for shape in sorted(counts, key=lambda shape: (shape.n, shape.k, shape.m)):
        incumbent = incumbents.get(key_shape(shape))
        if shape.m == 0 or (incumbent is not None and not retune):
            skipped.append(shape)
        else:
            tasks.append(Task(shape, counts[shape], incumbent))
    return Plan(tuple(tasks), tuple(skipped))


def _incumbents(op: Op, output: Path, device: Device) -> dict[Shape, Solution]:
    if not output.exists() or output.stat().st_size == 0:
        return {}
    rows, _ = read_rows(output, op)
    here = [row for row in rows if row.valid and (row.gfx, row.cu_num) == (device.gfx, device.cu_num) and row.device in ("", device.name)]
    return {row.shape: row.solution for row in here}
