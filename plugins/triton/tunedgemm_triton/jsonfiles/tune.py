"""Implement ``tunedgemm triton tune``: one run of the tuner, and a file of each finished weight.

The search, the measurement and the worker processes are those of ``tunedgemm tune``. Times go to a
table and a trial log in ``tuning`` below the files. An interrupted run resumes from them, and the
files are made from that table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Op, Shape, UserError
from tunedgemm.tools.launching import dtype_bits, torch_dtype
from tunedgemm.tools.tables import Options, Outcome, Planned, Row, op_named, read_rows, shape_of_texts, shuffle_weight, tune

from tunedgemm_triton.jsonfiles import buckets, export
from tunedgemm_triton.jsonfiles import files as json_files
from tunedgemm_triton.jsonfiles import space as json_space
from tunedgemm_triton.jsonfiles.dialect import Dialect, sizes_of
from tunedgemm_triton.jsonfiles.files import Name, Sizes

#: Folder of tables and trial logs, below that of the files.
TUNING = "tuning"


@attrs.frozen
class Request:
    """Shapes, files and options of a run.

    Attributes:
        dialect: the backend.
        op: name of the op.
        pairs: (N, K) of the weights.
        rows: values of M.
        columns: further columns of the op's table -> their texts.
        space: a search space: a file, ``aiter``, or "" for the backend's list.
        folder: folder of the files.
        style: of the keys: ``new`` or ``legacy``.
        options: the tuner's; the libtype is the dialect's.
    """

    dialect: Dialect
    op: str
    pairs: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    columns: Mapping[str, str]
    folder: Path
    options: Options
    space: str = ""
    style: str = buckets.NEW

    @property
    def family(self) -> Op:
        """Return the op."""
        return op_named(self.op)

    def shapes(self) -> list[Shape]:
        """Return every M of every weight.

        Raises:
            UserError: the op has no such shape.
        """
        names = sizes_in(self.family)
        if not all(self.rows):
            raise UserError(f"M must be at least 1 (got {', '.join(map(str, self.rows))})")
        shapes = []
        for n, k in self.pairs:
            for m in self.rows:
                texts = {**self.columns, **dict(zip(names, map(str, (m, n, k)), strict=True))}
                shapes.append(shape_of_texts(self.family, (), texts))
        for shape in shapes[:: len(self.rows)]:
            _check_layout(self.family, shape)
        return shapes

    def table(self) -> Path:
        """Return the table of times: one for each kernel, search space and way of measuring."""
        options, space = self.options, json_space.space_of(self.space) if self.space else None
        identity = [options.atol, options.rtol, options.errRatio, options.iters, options.cache, options.timing]
        identity += [hashlib.sha256(repr([dict(entry) for entry in space.entries]).encode()).hexdigest()] if space else []
        shape = self.shapes()[0]
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
        return self.folder / TUNING / f"{self.dialect.tag_of(shape)}-{digest}.csv"


def _check_layout(op: Op, shape: Shape) -> None:
    """Raise UserError for N and K that the weight's layout does not allow."""
    if shape.layout == "row" or "E" in dict(sizes_of(shape)):
        return
    import torch

    kind = torch_dtype(op.weight_dtype(shape))
    width = shape.k * dtype_bits(op.weight_dtype(shape)) // (8 * kind.itemsize)
    try:
        shuffle_weight(torch.empty(shape.n, width, dtype=kind, device="meta"), shape.layout)
    except UserError as error:
        raise UserError(f"{shape}: {error}") from None


def sizes_in(op: Op) -> tuple[str, str, str]:
    """Return the columns of M, N and K of `Shape`."""
    return ("M", "N", "K") if "M" in op.columns.key else ("token", "model_dim", "inter_dim")


@attrs.frozen
class Result:
    """Outcome of a run.

    Attributes:
        report: the tuner's.
        files: the written files, the default last.
        missing: files of weights for which no configuration passed.
        unfinished: files of weights with an M that is not timed. They are left unchanged: the
            smallest bucket would serve all smaller M, for which another kernel may be several times
            as fast.
        shared: one line for each M whose bucket has another solution than its best, with the
            slowdown.
    """

    report: Any
    files: tuple[Path, ...]
    missing: tuple[Name, ...] = ()
    unfinished: tuple[Name, ...] = ()
    shared: tuple[str, ...] = ()


def run(request: Request, progress: Callable[..., None], say: Callable[[str], None], **bench: Any) -> Result:
    """Tune all weights and write their files, each when its last M is done, and the default one at
    the end.

    Args:
        progress: called with each event of the tuner.
        say: prints a line.
        bench: ``registry`` and ``bench`` of `tune`, to replace kernels and times in this process.

    Raises:
        UserError: the op refuses a shape, no configuration of the search space can run, or a folder
            cannot be written.
        KeyboardInterrupt: the run was interrupted; files of finished weights stay.
    """
    shapes = request.shapes()
    if request.op not in request.dialect.ops:
        raise UserError(f"{request.dialect.libtype} has no JSON files for {request.op}; its ops are {', '.join(request.dialect.ops)}")
    json_files.check_writable(request.folder)
    events = _Run(request, shapes, request.table(), progress, say)
    with json_space.used(request.space):
        report = tune(request.op, shapes, events.table, attrs.evolve(request.options, whole=True), progress=events, **bench)
    files, missing, unfinished = events.finish({sizes_of(shape) for shape in (*report.unbegun, *report.lost)})
    shared = tuple(line for lines in events.shared.values() for line in lines)
    return Result(report, tuple(files), tuple(missing), tuple(unfinished), shared)


@attrs.define(eq=False)
class _Run:
    """Receives the tuner's events of a run and writes the files.

    Attributes:
        shared: file -> lines of `Result.shared`.
    """

    request: Request
    shapes: Sequence[Shape]
    table: Path
    progress: Callable[..., None]
    say: Callable[[str], None]
    shared: dict[Name, list[str]] = attrs.field(factory=dict, init=False)
    _left: dict[Name, set[Shape]] = attrs.field(factory=dict, init=False)
    _since: dict[Name, float] = attrs.field(factory=dict, init=False)
    _gfx: list[str] = attrs.field(factory=list, init=False)

    def __call__(self, place: Any, event: Any) -> None:
        """Handle an event; the tuner's table already has the row of a finished shape."""
        if isinstance(event, Planned):
            self._planned(event)
        self.progress(place, event)
        task = getattr(event, "task", None)
        if task is None or place is None:
            return
        name = Name(place.device.gfx, self._tag, sizes_of(task.shape))
        if not isinstance(event, Outcome):
            self._since.setdefault(name, time.monotonic())
        elif task.shape in self._left.get(name, ()):
            self._left[name].discard(task.shape)
            if not self._left[name]:
                if name in self._since:  # else an earlier run timed all of it
                    title = f"{self._tag.removeprefix('GEMM-')}{json_files.suffix(name.sizes)}"
                    self.say(f"Tuning for {title} took {time.monotonic() - self._since[name]:.2f} seconds")
                self._write(name, export.timed_by_log_of(self.table, self.request.family))

    def finish(self, left: Collection[Sizes] = ()) -> tuple[list[Path], list[Name], list[Name]]:
        """Write all files, including those of weights that the table had before, and the default
        ones.

        Args:
            left: sizes of the weights with an M that is not timed.

        Returns:
            The written files, the weights without rows, and the unfinished ones.
        """
        times = export.timed_by_log_of(self.table, self.request.family)
        names = [Name(gfx, self._tag, sizes) for gfx in self._gfx for sizes in dict.fromkeys(map(sizes_of, self.shapes))]
        unfinished = [name for name in names if name.sizes in left]
        missing = [name for name in names if name not in unfinished and not self._write(name, times)]
        written = [name for name in names if name not in (*missing, *unfinished)]
        for name in (Name(gfx, self._tag) for gfx in self._gfx):
            if neighbours := export.neighbours_of(self.request.folder, name, self.request.style):
                json_files.write(self.request.folder / name.text, export.default_of(neighbours))
                written.append(name)
        return [self.request.folder / name.text for name in written], missing, unfinished

    @property
    def _tag(self) -> str:
        return self.request.dialect.tag_of(self.shapes[0])

    def _planned(self, event: Any) -> None:
        """Print the size of the run; refuse impossible requests before anything is measured."""
        self._gfx = list(dict.fromkeys(place.device.gfx for place in event.places))
        for task in event.tasks:
            for gfx in self._gfx:
                self._left.setdefault(Name(gfx, self._tag, sizes_of(task.shape)), set()).add(task.shape)
        device = attrs.evolve(event.places[0].device, index=-1)
        self.say(f"Architecture: {', '.join(self._gfx)}")
        self._check_supported(device)
        self.say(f"Search space size: {self._size(device)}")
        weights = {sizes_of(shape) for shape in self.shapes}
        self.say(f"Number of (N, K): {len(weights)}, {len(event.tasks)} shapes to time, {len(event.skipped)} in the table already")

    def _check_supported(self, device: Device) -> None:
        unsupported = self.request.dialect.unsupported
        refused = {shape: reason for shape in self.shapes if (reason := unsupported(shape, device))}
        if refused:
            shape, reason = next(iter(refused.items()))
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise UserError(f"{shape} on {device}{more}: unsupported by {self.request.dialect.libtype}: {reason}")

    def _size(self, device: Device) -> str:
        """Return the number of configurations, as a text.

        Raises:
            UserError: none of them can run.
        """
        request = self.request
        if not request.space:
            counts = [len(list(request.dialect.listed(shape, device))) for shape in self.shapes]
            return f"{_range(counts)} configurations a shape from the backend's list, and neighbours of the best"
        space = json_space.space_of(request.space)
        listed = {shape: json_space.listed(space, request.dialect, shape, device) for shape in self.shapes}
        counts = [len(fitting.solutions) for fitting in listed.values()]
        empty = [shape for shape, fitting in listed.items() if not fitting.solutions]
        if len(empty) == len(listed):
            raise UserError(
                f"{space.source}: none of its {len(space.entries)} configurations can run {empty[0]} on {device}, "
                f"or any other shape: {listed[empty[0]].reason}"
            )
        for shape in empty:
            self.say(f"{space.source}: none of its configurations can run {shape}: {listed[shape].reason}")
        different = max(fitting.different for fitting in listed.values())
        return f"{len(space.entries)} configurations, of which {different} differ on {device.gfx} and {_range(counts)} fit a shape"

    def _write(self, name: Name, times: export.Timed) -> bool:
        """Write the file of one weight on one architecture from the table; return False where the
        table has no row.
        """
        dialect, shapes = self.request.dialect, [shape for shape in self.shapes if sizes_of(shape) == name.sizes]
        rows = [row for row in _rows(self.table, self.request.family, shapes) if row.gfx == name.gfx]
        entries = export.files_of(rows, dialect, self.request.style, times).files.get(name)
        if entries is None:
            return False
        json_files.write(self.request.folder / name.text, entries)
        self.shared[name] = _slowdowns(entries, rows, dialect, export.times_on(name.gfx, times))
        return True


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"


def _rows(table: Path, op: Op, shapes: Iterable[Shape]) -> list[Row]:
    """Return the rows of the weights of shapes for any M, including those of earlier runs."""
    if not table.exists():
        return []
    wanted = {attrs.evolve(shape, m=1) for shape in shapes}
    return [row for row in read_rows(table, op)[0] if row.valid and row.shape.m and attrs.evolve(row.shape, m=1) in wanted]


def _slowdowns(entries: Mapping[str, Any], rows: Iterable[Row], dialect: Dialect, times: export.Times) -> list[str]:
    lines = []
    for row in rows:
        bounds = buckets.bounds_of(dialect.tag_of(row.shape))
        key = buckets.find(entries, row.shape.m, bounds)
        own = dialect.entry_of(row.solution, row.shape, row.gfx)
        if key is None or entries[key] == own:
            continue
        solution, _ = dialect.solution_of(entries[key], row.shape, Device(row.gfx, row.cu_num))
        us = times.get(row.shape, {}).get(solution, 0.0) if solution else 0.0
        slower = f"{us / row.us:.3f}x as long as its best" if us else "not timed there"
        lines.append(f"M={row.shape.m} of N={row.shape.n} K={row.shape.k} shares {key}: {slower}")
    return lines
