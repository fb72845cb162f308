"""What explain says is what dispatch does and what ``table check`` notes, for real and synthetic rows."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.cli.table import check
from tunedgemm.device import Device, as_present, current_device
from tunedgemm.dispatch.choice import choose, offers
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.explain import explain_row
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import infer_op, read_rows, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import FakeHooks, fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

#: Rows of each real file that are explained, spread over it.
SAMPLE = 40
REFUSES = re.compile(r"^[\w.-]+ refuses: ")
NOTE = re.compile(r"note: .*?: (?:(\d+) rows are misses here, the first|one row is a miss here,) in line (\d+): (.*)")


def real_files(repository: Path) -> list[Path]:
    """Return AITER's tuned tables of the ops that we read; skip without them."""
    folder = repository.parent / "shared" / "aiter" / "configs"
    if not folder.exists():
        pytest.skip("AITER's tables are not on this machine")
    return [path for path in sorted(folder.rglob("*.csv")) if "untuned" not in path.name]


def sampled(rows: list[Row]) -> list[Row]:
    """Return some rows, the first and the last among them."""
    return rows if len(rows) <= SAMPLE else [rows[index * (len(rows) - 1) // (SAMPLE - 1)] for index in range(SAMPLE)]


def misses(rows: list[Row], registry: Registry) -> Iterator[tuple[int, str]]:
    """Yield the lines of the rows that explain passes over on their devices, with the reason.

    Only where a backend that covers the op, or runs such rows, is installed: ``table check`` notes
    no others.
    """
    for row in rows:
        backend, op = registry.get(row.solution.libtype), row.shape.op
        covered = isinstance(backend, Backend) and op in backend.ops
        if (covered or registry.runners(op, row.solution.libtype)) and row.gfx and row.valid:
            device = as_present(Device(row.gfx, row.cu_num, row.device))
            table = Table(op_named(row.shape.op), [[row]])
            shape = attrs.evolve(row.shape, m=row.shape.m or 1)
            explanation = choose(offers(shape, device, table, registry, ()), shape, device, registry, None)[0]
            if not explanation.tuned:
                reason = explanation.passed_over[0][1] if explanation.passed_over else explanation.refused
                yield row.line, REFUSES.sub("", reason)  # of the row's libtype, or of another that runs its kernels


def noted(path: Path, op: Op, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Return the reasons that ``table check`` gives for misses, and how many rows have each."""
    main(["table", "check", str(path), "--op", op.name])
    found = [NOTE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    return {match[3]: int(match[1] or 1) for match in found if match}


def counted(rows: list[Row], registry: Registry) -> dict[str, int]:
    """Count the misses of explain by libtype and reason."""
    libtypes, counts = {row.line: row.solution.libtype for row in rows}, dict[str, int]()
    for line, reason in misses(rows, registry):
        key = f"{libtypes[line]}: {reason}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_table_check_and_explain_agree_about_real_rows(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a sample of each real table, both refuse the same rows for the same reasons."""
    registry, total = Registry(), 0
    for path in real_files(repository):
        op = infer_op([path])
        rows, _ = read_rows(path, op)
        sample = tmp_path / path.name
        write_rows(sample, op, sampled(rows))
        again, _ = read_rows(sample, op)
        assert noted(sample, op, capsys) == counted(again, registry), path
        total += len(again)
    assert total > 500


def test_explain_file_line_agrees_about_real_rows(repository: Path) -> None:
    """A real row's own line says that it serves exactly where the explanation chose it."""
    for path in real_files(repository):
        op = infer_op([path])
        for row in [row for row in sampled(read_rows(path, op)[0]) if row.valid][:6]:
            said = explain_row(op, path, row.line)
            offer = said.explanation.offer
            served = offer.match is not None and (offer.match.row.source, offer.match.row.line) == (path, row.line)
            assert (said.verdict in ("serves it", "would serve it")) is served, said


class Tiles(FakeHooks):
    """A backend of kernels for M up to their tile."""

    @hookimpl
    def lacks(self, solution, shape):
        name, sizes = solution.kernel_name, {f"t{size}": size for size in (4, 16, 64)}
        if name not in sizes:
            return f"no kernel {name!r}"
        return f"{name} takes M up to {sizes[name]} (got {shape.m})" if shape.m > sizes[name] else ""

    @hookimpl
    def bind(self, solution, shape, device):
        reason = self.lacks(solution, shape)
        return Unsupported(reason) if reason else Launcher(lambda *operands: self._call(solution, shape, *operands))


def test_explain_table_check_and_dispatch_agree_about_synthetic_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For random rows, explain names what dispatch binds, and table check the misses."""
    tiles = Tiles("tiles", solutions=lambda shape, _: [f"t{size}" for size in (4, 16, 64) if shape.m <= size])
    registry, draw, here, op = fake_registry(fake_backend("tiles", hooks=tiles)), random.Random(7), current_device(), op_named("a16w16")
    monkeypatch.setattr(check, "Registry", lambda: registry)
    names, libtypes = ("t4", "t16", "t64", "t", "", "native", "mm", "gone"), ("tiles", "torch", "absent")
    shapes = [attrs.evolve(shape, m=m) for shape in shapes_of("a16w16")[:3] if shape.layout == "row" for m in (1, 4, 9, 40)]
    rows = [
        Row(
            shape=draw.choice(shapes), gfx=gfx, cu_num=here.cu_num if gfx else 0, device="", us=float(us + 1),
            solution=Solution(draw.choice(libtypes), draw.choice(names), solidx=draw.choice((0, 0, 5))),
        )
        for us in range(120) for gfx in (draw.choice((here.gfx, here.gfx, "")),)
    ]  # fmt: skip
    path = tmp_path / op.columns.tuned_file
    write_rows(path, op, rows)
    dispatcher = Dispatcher(op, registry, settings=Settings(), table=Table(op, [rows]))
    for shape in dict.fromkeys(shapes):
        before = dispatcher.explain(shape, here)
        assert str(dispatcher.bound(shape, here).offer.solution) == str(before.offer.solution)
        assert [reason for _, reason in dispatcher.bound(shape, here).passed_over] == [reason for _, reason in before.passed_over]
    again, _ = read_rows(path, op)
    expected = counted(again, registry)
    assert noted(path, op, capsys) == expected and len(expected) > 4
