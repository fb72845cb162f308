"""Tuning into JSON files: the shapes, one run of the tuner over all of them, and the files of the weights as they are done.

The search, the measurement and the worker processes are those of ``tunedgemm tune``: what is measured goes to a table and a trial log in
``tuning`` below the files, and a run that was interrupted goes on from there. The files are made from that table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Op, Shape, Unsupported, UserError
from tunedgemm.tools import (
    Options,
    Outcome,
    Planned,
    Row,
    dtype_bits,
    op_named,
    read_rows,
    shape_of_texts,
    shuffle_weight,
    torch_dtype,
    tune,
)

from tunedgemm_triton import buckets, export, jsonfile, searchspace
from tunedgemm_triton.dialect import Dialect, sizes_of
from tunedgemm_triton.jsonfile import Name, Sizes

#: The folder of tables and trial logs, below that of the files.
TUNING = "tuning"


@attrs.frozen
class Request:
    """What to tune.

    Attributes:
        dialect: the backend.
        op: name of the op.
        pairs: (N, K) of the weights.
        rows: values of M.
        columns: further columns of the op's table, by name, as they are written there.
        space: a search space: a file, ``aiter``, or "" for what the backend lists.
        folder: where the files go.
        style: of the keys: ``new`` or ``legacy``.
        options: how to tune; the libtype is the dialect's.
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
        """The op."""
        return op_named(self.op)

    def shapes(self) -> list[Shape]:
        """Every M of every weight.

        Raises:
            UserError: the op has no such shape.
        """
        names = sizes_in(self.family)
        if not all(self.rows):
            raise UserError(f"M must be at least 1 (got {', '.join(map(str, self.rows))})")
        found = []
        for n, k in self.pairs:
            for m in self.rows:
                said = {**self.columns, **dict(zip(names, map(str, (m, n, k)), strict=True))}
                found.append(shape_of_texts(self.family, (), said))
        for shape in found[:: len(self.rows)]:
            _check_layout(self.family, shape)
        return found

    def table(self) -> Path:
        """Where times go: a table for each kernel, search space and way of measuring."""
        options, space = self.options, searchspace.space_of(self.space) if self.space else None
        told = [options.atol, options.rtol, options.errRatio, options.iters, options.cache, options.timing]
        told += [hashlib.sha256(repr([dict(entry) for entry in space.entries]).encode()).hexdigest()] if space else []
        shape = self.shapes()[0]
        digest = hashlib.sha256(repr(told).encode()).hexdigest()[:8]
        return self.folder / TUNING / f"{self.dialect.tag_of(shape)}-{digest}.csv"


def _check_layout(op: Op, shape: Shape) -> None:
    """Raise UserError for N and K that the weight's layout does not have."""
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
    """The columns that M, N and K of `Shape` stand in."""
    return ("M", "N", "K") if "M" in op.columns.key else ("token", "model_dim", "inter_dim")


@attrs.frozen
class Result:
    """What a run gave.

    Attributes:
        report: the tuner's.
        files: those that were written, the default last.
        missing: those of weights for which nothing passed.
        unfinished: those of weights of which not every M was timed. They are as they were: the smallest bucket of such a file would serve
            all smaller M, for which something else may be several times as fast.
        shared: for each M that shares its bucket with others and gets another solution than its best: how much slower that is.
    """

    report: Any
    files: tuple[Path, ...]
    missing: tuple[Name, ...] = ()
    unfinished: tuple[Name, ...] = ()
    shared: tuple[str, ...] = ()


def run(request: Request, progress: Callable[..., None], say: Callable[[str], None], **bench: Any) -> Result:
    """Tune all weights and write their files, each as soon as its last M is done, and the default one at the end.

    Args:
        progress: called with each event of the tuner.
        say: prints a line.
        bench: ``registry`` and ``bench`` of `tune`, for other kernels and times, in this process.

    Raises:
        UserError: the op refuses a shape, nothing of the search space can run, a folder cannot be written.
        KeyboardInterrupt: the run was interrupted: files of the weights that were done stand.
    """
    shapes = request.shapes()
    if request.op not in request.dialect.ops:
        raise UserError(f"{request.dialect.libtype} has no kernel for {request.op}; it has for {', '.join(request.dialect.ops)}")
    jsonfile.check_writable(request.folder)
    run_ = _Run(request, shapes, request.table(), progress, say)
    with searchspace.used(request.space):
        report = tune(request.op, shapes, run_.table, attrs.evolve(request.options, whole=True), progress=run_, **bench)
    files, missing, unfinished = run_.finish({sizes_of(shape) for shape in (*report.unbegun, *report.lost)})
    shared = tuple(line for lines in run_.shared.values() for line in lines)
    return Result(report, tuple(files), tuple(missing), tuple(unfinished), shared)


@attrs.define(eq=False)
class _Run:
    """The events of a run; the tuner calls it.

    Attributes:
        shared: see `Result`, by file.
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
        """Note an event; the tuner's table has the row of a shape that is done."""
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
                if name in self._since:  # else an earlier run had done all of it
                    title = f"{self._tag.removeprefix('GEMM-')}{jsonfile.suffix(name.sizes)}"
                    self.say(f"Tuning for {title} took {time.monotonic() - self._since[name]:.2f} seconds")
                self._write(name, export.timed_beside(self.table, self.request.family))

    def finish(self, left: Collection[Sizes] = ()) -> tuple[list[Path], list[Name], list[Name]]:
        """Write all files, those of weights that the table had already, too, and the default ones.

        Args:
            left: sizes of the weights of which not every M was timed.

        Returns:
            What was written, which weights have no rows, and which are not finished.
        """
        times = export.timed_beside(self.table, self.request.family)
        names = [Name(gfx, self._tag, sizes) for gfx in self._gfx for sizes in dict.fromkeys(map(sizes_of, self.shapes))]
        unfinished = [name for name in names if name.sizes in left]
        missing = [name for name in names if name not in unfinished and not self._write(name, times)]
        written = [name for name in names if name not in (*missing, *unfinished)]
        for name in (Name(gfx, self._tag) for gfx in self._gfx):
            if found := export.neighbours_of(self.request.folder, name, self.request.style):
                jsonfile.write(self.request.folder / name.text, export.default_of(found))
                written.append(name)
        return [self.request.folder / name.text for name in written], missing, unfinished

    @property
    def _tag(self) -> str:
        return self.request.dialect.tag_of(self.shapes[0])

    def _planned(self, event: Any) -> None:
        """Say what is about to be done; refuse what cannot be done before anything is measured."""
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
        supports = self.request.dialect.supports
        refused = {shape: answer for shape in self.shapes if isinstance(answer := supports(shape, device), Unsupported)}
        if refused:
            shape, answer = next(iter(refused.items()))
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise UserError(f"{shape} on {device}{more}: {self.request.dialect.libtype} does not take it: {answer}")

    def _size(self, device: Device) -> str:
        """How many configurations there are, in words.

        Raises:
            UserError: none of them can run.
        """
        request = self.request
        if not request.space:
            counts = [len(list(request.dialect.listed(shape, device))) for shape in self.shapes]
            return f"{_range(counts)} configurations a shape, as the backend lists them, and neighbours of the best"
        space = searchspace.space_of(request.space)
        found = {shape: searchspace.listed(space, request.dialect, shape, device) for shape in self.shapes}
        counts = [len(one.solutions) for one in found.values()]
        empty = [shape for shape, one in found.items() if not one.solutions]
        if len(empty) == len(found):
            raise UserError(
                f"{space.source}: none of its {len(space.entries)} configurations can run {empty[0]} on {device}, "
                f"or any other of the shapes: {found[empty[0]].reason}"
            )
        for shape in empty:
            self.say(f"{space.source}: none of its configurations can run {shape}: {found[shape].reason}")
        different = max(one.different for one in found.values())
        return f"{len(space.entries)} configurations, of which {different} differ on {device.gfx} and {_range(counts)} fit a shape"

    def _write(self, name: Name, times: export.Timed) -> bool:
        """The file of one weight on one architecture, from the table; False where that has nothing for it."""
        dialect, asked = self.request.dialect, [shape for shape in self.shapes if sizes_of(shape) == name.sizes]
        rows = [row for row in _rows(self.table, self.request.family, asked) if row.gfx == name.gfx]
        entries = export.files_of(rows, dialect, self.request.style, times).files.get(name)
        if entries is None:
            return False
        jsonfile.write(self.request.folder / name.text, entries)
        self.shared[name] = _regrets(entries, rows, dialect, export.times_on(name.gfx, times))
        return True


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"


def _rows(table: Path, op: Op, asked: Iterable[Shape]) -> list[Row]:
    """The rows of a weight's shapes, whatever their M: those of earlier runs count, too."""
    if not table.exists():
        return []
    wanted = {attrs.evolve(shape, m=1) for shape in asked}
    return [row for row in read_rows(table, op)[0] if row.valid and row.shape.m and attrs.evolve(row.shape, m=1) in wanted]


def _regrets(entries: Mapping[str, Any], rows: Iterable[Row], dialect: Dialect, times: export.Times) -> list[str]:
    found = []
    for row in rows:
        bounds = buckets.bounds_of(dialect.tag_of(row.shape))
        key = buckets.find(entries, row.shape.m, bounds)
        own = dialect.entry_of(row.solution, row.shape, row.gfx)
        if key is None or entries[key] == own:
            continue
        solution, _ = dialect.solution_of(entries[key], row.shape, Device(row.gfx, row.cu_num))
        us = times.get(row.shape, {}).get(solution, 0.0) if solution else 0.0
        slower = f"{us / row.us:.3f}x as long as its best" if us else "not timed there"
        found.append(f"M={row.shape.m} of N={row.shape.n} K={row.shape.k} shares {key}: {slower}")
    return found
