"""Tuning into JSON files: the shapes, one run of the tuner over all of them, and the files of the weights as they are done.

The search, the measurement and the worker processes are those of ``tunedgemm tune``: what is measured goes to a table and a trial log in
``tuning`` below the files, and a run that was interrupted goes on from there. The files are made from that table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import (
    Device,
    Op,
    Options,
    Outcome,
    Planned,
    Row,
    Shape,
    Unsupported,
    UserError,
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
        names = _sizes(self.family)
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


def _sizes(op: Op) -> tuple[str, str, str]:
    """The columns that M, N and K of `Shape` stand in."""
    return ("M", "N", "K") if "M" in op.columns.key else ("token", "model_dim", "inter_dim")


@attrs.frozen
class Result:
    """What a run gave.

    Attributes:
        report: the tuner's.
        files: those that were written, the default last.
        missing: weights for which nothing passed.
        shared: for each M that shares its bucket with others and gets another solution than its best: how much slower that is.
    """

    report: Any
    files: tuple[Path, ...]
    missing: tuple[Name, ...] = ()
    shared: tuple[str, ...] = ()


def run(request: Request, progress: Callable[..., None], say: Callable[[str], None], **bench: Any) -> Result:
    """Tune all weights and write their files, each as soon as its last M is done, and the default one at the end.

    Args:
        progress: called with each event of the tuner.
        say: prints a line.
        bench: ``registry`` and ``bench`` of `tune`, for kernels and times of one's own in this process.

    Raises:
        UserError: the op refuses a shape, nothing of the search space can run, a folder cannot be written.
        KeyboardInterrupt: the run was interrupted: files of the weights that were done stand.
    """
    shapes = request.shapes()
    if request.op not in request.dialect.ops:
        raise UserError(f"{request.dialect.libtype} has no kernel for {request.op}; it has for {', '.join(request.dialect.ops)}")
    jsonfile.check_writable(request.folder)
    run_ = _Run(request, shapes, progress, say, described=bool(bench))
    with searchspace.used(request.space):
        report = tune(request.op, shapes, request.table(), request.options, progress=run_, **bench)
    run_.finish()
    return Result(report, tuple(run_.files), tuple(run_.missing), tuple(run_.shared))


@attrs.define(eq=False)
class _Run:
    """The events of a run; the tuner calls it."""

    request: Request
    shapes: Sequence[Shape]
    progress: Callable[..., None]
    say: Callable[[str], None]
    described: bool = False
    files: list[Path] = attrs.field(factory=list)
    missing: list[Name] = attrs.field(factory=list)
    shared: list[str] = attrs.field(factory=list)
    _left: dict[Sizes, set[Shape]] = attrs.field(factory=dict, init=False)
    _since: dict[Sizes, float] = attrs.field(factory=dict, init=False)
    _gfx: list[str] = attrs.field(factory=list, init=False)

    def __call__(self, place: Any, event: Any) -> None:
        """Note an event; the tuner's table has the row of a shape that is done."""
        if isinstance(event, Planned):
            self._planned(event)
        self.progress(place, event)
        task = getattr(event, "task", None)
        if task is None:
            return
        sizes = sizes_of(task.shape)
        self._since.setdefault(sizes, time.monotonic())
        if isinstance(event, Outcome) and task.shape in self._left.get(sizes, ()):
            self._left[sizes].discard(task.shape)
            if not self._left[sizes]:
                self.say(f"Tuning for {self._tag(sizes)} took {time.monotonic() - self._since[sizes]:.2f} seconds")
                self._write(sizes)

    def finish(self) -> None:
        """The files of weights that the table had already, and the default one."""
        done = {jsonfile.name_of(path) for path in self.files}
        for sizes in dict.fromkeys(map(sizes_of, self.shapes)):
            for name in self._names(sizes):
                if name not in done and name not in self.missing:
                    self._write(sizes)
                    break
        for gfx in self._gfx:
            name = Name(gfx, self._tag_of_all)
            found = export.neighbours_of(self.request.folder, name, self.request.style)
            if found:
                path = self.request.folder / name.text
                jsonfile.write(path, export.default_of(found))
                self.files.append(path)

    @property
    def _tag_of_all(self) -> str:
        return self.request.dialect.tag_of(self.shapes[0])

    def _tag(self, sizes: Sizes) -> str:
        return f"{self._tag_of_all.removeprefix('GEMM-')}{jsonfile.suffix(sizes)}"

    def _names(self, sizes: Sizes) -> list[Name]:
        return [Name(gfx, self._tag_of_all, sizes) for gfx in self._gfx]

    def _planned(self, event: Any) -> None:
        """Say what is about to be done; refuse what cannot be done before anything is measured."""
        self._gfx = list(dict.fromkeys(place.device.gfx for place in event.places))
        for task in event.tasks:
            self._left.setdefault(sizes_of(task.shape), set()).add(task.shape)
        device = event.places[0].device
        self.say(f"Architecture: {', '.join(self._gfx)}")
        if not self.described:
            self._check_supported(attrs.evolve(device, index=-1))
        self.say(f"Search space size: {self._size(attrs.evolve(device, index=-1))}")
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

    def _write(self, sizes: Sizes) -> None:
        """The files of one weight, one for each architecture, from the table."""
        table, asked = self.request.table(), [shape for shape in self.shapes if sizes_of(shape) == sizes]
        rows = _rows(table, self.request.family, asked)
        for name in self._names(sizes):
            here = [row for row in rows if row.gfx == name.gfx]
            times = export.times_of(_log_of(table), name.gfx)
            found = export.files_of(here, self.request.dialect, self.request.style, times).files
            if name not in found:
                self.missing.append(name)
                continue
            path = self.request.folder / name.text
            jsonfile.write(path, found[name])
            self.files.append(path)
            self.shared += _regrets(found[name], here, self.request.dialect, times)


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"


def _log_of(table: Path) -> Path:
    return table.with_name(table.name.removesuffix(".csv") + ".trials.jsonl")


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
