"""Stage 1, plan: which shapes to tune, in which order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, untuned_libtypes
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.ops.padded_m import serving
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Problem, Row, key_shape, problem_lines, read_rows
from tunedgemm.table.folders import table_paths, untuned_path
from tunedgemm.table.sheet import present
from tunedgemm.table.untuned import Untuned, read_shapes
from tunedgemm.tuner.roofline import cost, saving_us
from tunedgemm.tuner.trial import Options, Task

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Plan:
    """The shapes to tune, in order, and those to skip.

    Skipped are empty and tuned shapes; with ``--stale``, those whose row is not stale. With
    ``--all``, shapes whose lines name another device are *elsewhere*.
    """

    tasks: tuple[Task, ...]
    skipped: tuple[Shape, ...]
    elsewhere: tuple[Shape, ...] = ()


@attrs.frozen
class Requested:
    """The requested shapes, their file if any, and its invalid lines.

    Attributes:
        last: whether only the last shape is requested.
    """

    shapes: tuple[Untuned, ...]
    left_out: tuple[Problem, ...] = ()
    path: Path | None = None
    last: bool = False

    def on(self, op: Op, device: Device) -> tuple[Untuned, ...]:
        """Return the shapes for a device; ``fp8`` means that of its architecture."""
        shapes = tuple(read_shapes(self.path, op, device.gfx)[0]) if self.path else self.shapes
        return shapes[-1:] if self.last else shapes


#: Sources of shapes: an untuned or tuned CSV, shapes with or without call counts, or a `Requested`;
#: None for the captured shapes.
Source = Path | Mapping[Shape, int] | Iterable[Shape] | Requested | None


def requested(op: Op, source: Source, stale: Path | None = None) -> Requested:
    """Return the shapes of a source with call counts.

    Args:
        op: the op of the shapes.
        source: see `Source`.
        stale: with ``--stale``, the output table, whose shapes are the default of *source*.

    Raises:
        TableError: the file is missing or has no shape of this op.
    """
    if stale is not None and not present(stale):
        raise TableError(f"--stale: {stale} does not exist; leave --stale out, or name the table with -o")
    if isinstance(source, Requested):
        return source
    if isinstance(source, Mapping):
        return Requested(tuple(Untuned(shape, count) for shape, count in source.items()))
    if source is not None and not isinstance(source, Path):
        return Requested(tuple(map(Untuned, source)))
    path = source or untuned_path(op)
    shapes, problems = _read(path, op) if source or present(path) else ([], [])
    if source is None and stale is not None:
        captured = {untuned.shape: untuned for untuned in shapes}
        rows = dict.fromkeys(row.shape for row in read_rows(stale, op)[0] if row.shape.m)
        return Requested(tuple(captured.get(shape, Untuned(shape)) for shape in rows), tuple(problems))
    if source is None and not present(path):
        others = f"; shapes of {others} are captured: name one with --op" if (others := ", ".join(captured_ops(op))) else ""
        raise TableError(f"no shapes to tune: {path} does not exist; capture them with AITER_TUNE_GEMM=1, or name a file with -i{others}")
    return Requested(tuple(shapes), tuple(problems), path)


def _read(path: Path, op: Op) -> tuple[list[Untuned], list[Problem]]:
    """Return the shapes of a file; warn of invalid lines, and raise if no line is valid."""
    shapes, problems = read_shapes(path, op)
    lines = problem_lines(problems)
    if lines and not shapes:
        raise TableError("; ".join(lines))
    for line in lines:
        _log.warning("left out: %s", line)
    return shapes, problems


def captured_ops(op: Op) -> list[str]:
    """Return the names of other ops with captured shapes."""
    return [other.name for other in ops().values() if other.name != op.name and present(untuned_path(other))]


def plan(
    op: Op,
    listed: Iterable[Untuned],
    tables: Path | Sequence[Path],
    device: Device,
    options: Options,
    libvers: Mapping[str, str] = MappingProxyType({}),
    registry: Registry | None = None,
) -> Plan:
    """Merge duplicates, select this run's shard, and skip shapes that need no tuning.

    Tasks are in order of cost, the largest first; with a budget, in that of the expected saving.

    Args:
        op: the op to tune.
        listed: shapes with call counts and the devices that their lines name.
        tables: the tuned CSVs, the output first; they need not exist.
        device: rows of this device count as tuned.
        options: read are ``all`` (which leaves lines of other devices), ``stale``, ``shard``,
            ``budget``, ``whole`` and ``batch_invariant`` (rows for any M count then).
        libvers: library version of each libtype; read with ``stale``.
        registry: the backends that may serve untuned calls.

    Raises:
        TableError: a table exists but cannot be read.
    """
    counts: dict[Shape, int] = {}
    elsewhere: dict[Shape, None] = {}
    for line in listed:
        if options.all and line.cu_num and (line.cu_num, line.gfx or device.gfx) != (device.cu_num, device.gfx):
            elsewhere[line.shape] = None
        else:
            counts[line.shape] = counts.get(line.shape, 0) + line.calls
    rows = _rows_of(op, table_paths(tables), device)
    old = {row.shape for row in rows.values() if libvers.get(row.solution.libtype) != row.libver}
    old = {group_of(shape) for shape in old} if options.batch_invariant else old
    tasks, skipped = [], []
    for shape in _share(sorted(counts, key=_by_sizes), options):
        key = group_of(shape) if options.batch_invariant else key_shape(shape)
        row = rows.get(key)
        wanted = key in old if options.stale else row is None or options.all
        if shape.m and wanted:
            saving, guess = _saving(op, shape, device, rows, registry) if options.budget else (0.0, None)
            tasks.append(Task(shape, counts[shape], row.solution if row else None, guess, saving=counts[shape] * saving))
        else:
            skipped.append(shape)
    tasks = _in_order(op, tasks, device, options)
    return Plan(tuple(tasks), tuple(skipped), tuple(shape for shape in elsewhere if shape not in counts))


def refuse_without_classes(table: Path, op: Op) -> None:
    """Raise TableError for a table with rows of no bit class, since a table has one kind alone."""
    rows = read_rows(table, op)[0] if present(table) else []
    if plain := next((row for row in rows if not row.bit_class), None):
        raise TableError(f"{table}:{plain.line}: a row of no bit class, so no class is written to it; name another file with -o")


def groups(tasks: Iterable[Task]) -> list[tuple[Task, ...]]:
    """Group the tasks that one row for any M (M = 0) could serve."""
    by_group: dict[Shape, tuple[Task, ...]] = {}
    for task in tasks:
        group = group_of(task.shape)
        by_group[group] = (*by_group.get(group, ()), task)
    return list(by_group.values())


def group_of(shape: Shape) -> Shape:
    """Return the key of a row for any M, with M = 0."""
    return key_shape(attrs.evolve(shape, m=0))


def _by_sizes(shape: Shape) -> tuple[int, int, int, str]:
    """Return a sort key, N before K and M, that is equal on all machines."""
    return shape.n, shape.k, shape.m, f"{shape} {shape.bias_dtype}"


def _share(shapes: list[Shape], options: Options) -> list[Shape]:
    """Return every n-th shape, for this shard.

    With ``--batch-invariant``, every n-th group, since all M of a group get one row.
    """
    part, parts = options.shard
    if not options.batch_invariant:
        return shapes[part - 1 :: parts]
    members: dict[Shape, list[Shape]] = {}
    for shape in shapes:
        members.setdefault(group_of(shape), []).append(shape)
    shares: list[list[Shape]] = [[] for _ in range(parts)]
    for group in sorted(members.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return sorted(shares[part - 1], key=_by_sizes)


def _saving(op: Op, shape: Shape, device: Device, rows: Mapping[Shape, Row], registry: Registry | None) -> tuple[float, Solution | None]:
    """Return the microseconds that tuning is expected to save of a call, and the guess that serves it.

    A row serves it now, perhaps that of a padded M, or a backend's guess; else torch does.
    """
    near = (key_shape(attrs.evolve(shape, m=m)) for m in serving(op.padded_m, shape.m, shape.n, device.kind))
    has_row, guess = any(each in rows for each in near), None
    if not has_row and registry is not None:
        described = attrs.evolve(device, index=-1)  # this process touches no device
        guess = next(choices(shape, described, registry, untuned_libtypes()), None)
    return saving_us(op, shape, device, is_chosen=has_row or guess is not None), guess


def _in_order(op: Op, tasks: list[Task], device: Device, options: Options) -> list[Task]:
    """Sort by roofline time, descending, so that several devices end at about the same time.

    With a budget, sort by the expected saving of all calls: if it ends early, the most is saved.
    Shapes of one (N, K) stay together if ``batch_invariant`` or ``whole`` needs all of them.
    """
    costs = {task: task.saving if options.budget else cost(op, task.shape, device) for task in tasks}
    grouped = options.batch_invariant or options.whole
    groups = {task: group_of(task.shape) if grouped else task.shape for task in tasks}
    totals: dict[Shape, float] = {}
    for task, spent in costs.items():
        totals[groups[task]] = totals.get(groups[task], 0.0) + spent
    return sorted(tasks, key=lambda task: (-totals[groups[task]], _by_sizes(groups[task]), -costs[task]))


def _rows_of(op: Op, tables: Iterable[Path], device: Device) -> dict[Shape, Row]:
    """Return the valid rows of a device by shape.

    A row that names the device beats one without a name; then the fastest wins.
    """
    rows = [
        row
        for table in tables
        if present(table)
        for row in read_rows(table, op)[0]
        if row.valid and (row.gfx, row.cu_num) == (device.gfx, device.cu_num) and row.device in ("", device.name)
    ]
    return {row.shape: row for row in sorted(rows, key=lambda row: (row.device != "", -row.us))}
