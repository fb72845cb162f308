"""Remeasure: rows timed again find an upgrade's cost, slower kernels and kernels that are gone."""

from __future__ import annotations

import functools

import pytest
from tunedgemm.analysis import remeasure as module
from tunedgemm.analysis.compare.measuring import measuring
from tunedgemm.analysis.remeasure import remeasure
from tunedgemm.device import device_of
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry, with_hooks

OP = op_named("a16w16")
#: Microseconds of each kernel today; tables say 100. The machine is 20 % slower than on their day.
TIMES = {"same": 120.0, "costs": 123.6, "crawls": 360.0, "torch": 150.0}
MS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48, 64)


@pytest.fixture
def check(tmp_path, monkeypatch, planted_bench):
    """Time a table of (kernel, libver) again, whose backend has version 2 now, with planted times."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    ran: list[str] = []

    def call(solution, shape, *operands):
        ran.append(solution.kernel_name)
        out = exact(solution, shape, *operands)
        return out * 0 if solution.kernel_name == "zeros" else out

    backend = fake_backend("turbo", solutions=("same", "costs", "crawls", "zeros"), call=call)
    registry = fake_registry(with_hooks(backend, library_version=lambda device: "2"))
    monkeypatch.setattr(module, "measuring", functools.partial(measuring, registry=registry, bench=planted_bench(ran, TIMES, 0.003)))
    monkeypatch.setattr(module, "Registry", lambda: registry)

    def run(*kernels, top=20, threshold=0.015):
        here, path = device_of(-1), tmp_path / "t.csv"
        fields = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name}
        rows = [
            Row(shape=Shape("a16w16", m, 64, 128, "fp32"), solution=Solution("turbo", kernel), us=100.0, libver=version, **fields)
            for m, (kernel, version) in zip(MS, kernels, strict=False)
        ]
        write_rows(path, OP, rows)
        return remeasure(OP, path, read_rows(path, OP)[0], top=top, threshold=threshold)

    return run


def test_another_version_that_costs_is_found(check):
    """Rows of version 1 take 3 % longer than the others: that is the upgrade's cost, without drift."""
    found = check(*[("costs", "1")] * 3, *[("same", "2")] * 5)

    assert len(found.moved) == 3 and found.drift[0] == pytest.approx(1.2, abs=0.01)
    assert found.cost.resolved and found.cost.share == pytest.approx(0.03, abs=0.008)
    assert found.costs and found.fails and {row.row.line for row in found.stale} == {row.row.line for row in found.moved}
    assert not found.behind and not found.failed


def test_another_version_of_equal_speed_costs_nothing(check):
    """A machine that is 20 % slower than on the table's day is not the upgrade's fault."""
    found = check(*[("same", "1")] * 3, *[("same", "2")] * 5)

    assert len(found.moved) == 3 and not found.cost.resolved and not found.fails


def test_without_controls_a_small_cost_is_not_resolved(check):
    """Times of two days differ by 10 %, so a table with moved rows alone shows no 3 %, but pairs count."""
    found = check(*[("costs", "1")] * 4, threshold=0.03)

    assert found.drift == (1.0, 0.10)
    assert found.cost.share == pytest.approx(0.236, abs=0.02)  # with the machine's 20 %: beyond 10 %
    assert found.against_table(found.rows[0]).low <= found.against_table(found.rows[0]).share - 0.10


def test_three_rows_of_slower_kernels_are_found(check):
    """Their lines are slower than the table, and behind torch; no other line is."""
    found = check(*[("same", "2")] * 2, *[("crawls", "2")] * 3, *[("same", "2")] * 3)

    assert sorted(row.row.line for row in found.slower) == [4, 5, 6]
    assert sorted(row.row.line for row in found.behind) == [4, 5, 6]
    assert found.drift[0] == pytest.approx(1.2, abs=0.01) and found.drift[1] < 0.01
    assert found.cost is None and found.fails and len(found.stale) == 3
    assert all(row.against_torch.share == pytest.approx(1.4, abs=0.05) for row in found.behind)


def test_rows_that_do_not_serve_are_found(check):
    """A kernel that is gone and one that is wrong fail, whatever serves in their place."""
    found = check(("gone", "1"), ("zeros", "2"), ("same", "2"))

    by_line = {row.row.line: row.failure for row in found.failed}
    assert by_line.keys() == {2, 3} and "mismatch" in by_line[3] and by_line[2]
    assert found.fails and all(row.factor == 0.0 and row.against_torch is None for row in found.failed)


def test_the_heaviest_rows_come_first(check, tmp_path):
    """Captured calls weigh the rows that serve them, also those of a smaller M."""
    (tmp_path / "home").mkdir()
    lines = "41,64,128,False,fp32,fp32,1000\n5,64,128,False,fp32,fp32,30\n"
    (tmp_path / "home" / "bf16_untuned_gemm.csv").write_text("M,N,K,bias,dtype,outdtype,count\n" + lines)

    found = check(*[("same", "2")] * 12, top=2)

    assert [(row.row.shape.m, row.calls) for row in found.rows] == [(48, 1000), (5, 30)]
    assert found.of == 12 and found.share == pytest.approx(1030 / 1040)


def test_a_table_without_rows_for_this_device_is_an_error(check):
    """The message names the command that tunes its shapes here."""
    with pytest.raises(TableError, match=r"no row to time.*tunedgemm tune"):
        check()
