"""Kernels: two tables over a list of shapes, with planted times."""

from __future__ import annotations

import functools

import pytest
from tunedgemm.analysis.ab import compare_kernels
from tunedgemm.analysis.ab import kernels as module
from tunedgemm.analysis.compare.measuring import measuring
from tunedgemm.device import device_of
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.tuner import Terminated

OP = op_named("a16w16")
TIMES = {"plain": 100.0, "twin": 100.0, "later": 103.0, "torch": 110.0}
SHAPES = {Shape("a16w16", m, 64, 128, "fp32"): m for m in (1, 2, 4)}


@pytest.fixture
def planted(monkeypatch, planted_bench):
    """Run the arms here, with planted times of the kernel that ran last; "raises" raises."""
    ran: list[str] = []

    def call(solution, shape, *operands):
        ran.append(solution.kernel_name)
        if solution.kernel_name == "raises":
            raise RuntimeError("boom")
        return exact(solution, shape, *operands)

    registry = fake_registry(fake_backend("turbo", solutions=("plain", "twin", "later", "raises"), call=call))
    monkeypatch.setattr(module, "measuring", functools.partial(measuring, registry=registry, bench=planted_bench(ran, TIMES, 0.004)))


@pytest.fixture
def table(tmp_path):
    """Write a table whose rows of all shapes name one kernel."""

    def write(kernel: str):
        here, path = device_of(-1), tmp_path / f"{kernel}.csv"
        rows = [
            Row(gfx=here.gfx, cu_num=here.cu_num, device=here.name, shape=shape, solution=Solution("turbo", kernel), us=9.0)
            for shape in SHAPES
        ]
        write_rows(path, OP, rows)
        return path

    return write


@pytest.mark.parametrize(("other", "verdict"), [("later", "slower"), ("twin", "not resolved")])
def test_a_slower_table_is_found(planted, table, other, verdict):
    """A kernel 3 % slower is found in each shape and in the sum; one as fast is not."""
    found = compare_kernels(OP, lambda _: SHAPES, ([table("plain")], [table(other)]), 31)

    assert [shape.result.verdict for shape in found.shapes] == [verdict] * 3
    assert found.whole.verdict == verdict and not found.whole.control.resolved
    assert found.whole.turns[0]["a"] == pytest.approx(700.0, rel=0.02)  # 1 + 2 + 4 calls of 100 us
    assert [str(shape.b.solution) for shape in found.shapes] == [f"turbo:{other}"] * 3


def test_torch_is_an_arm(planted, table):
    """Without a table the first arm is torch's call."""
    found = compare_kernels(OP, lambda _: SHAPES, (None, [table("plain")]), 31)

    assert {str(shape.a.solution) for shape in found.shapes} == {"torch:native"} and found.whole.verdict == "faster"


def test_a_shape_that_fails_is_left_out_of_the_sum(planted, table):
    """It has its reason, and no time."""
    found = compare_kernels(OP, lambda _: SHAPES, ([table("plain")], [table("raises")]), 31)

    assert all(shape.failure.startswith("arm b: error:") for shape in found.shapes)
    assert found.whole.turns == () and found.whole.verdict == "not resolved"


@pytest.mark.parametrize(("stops", "ended"), [(KeyboardInterrupt(), "interrupted"), (Terminated("SIGTERM"), "SIGTERM")])
def test_an_interruption_keeps_the_shapes_before(planted, table, stops, ended):
    """Ctrl-C and SIGTERM end with what was timed."""

    def stop(found):
        if len(found.shapes) == 2:
            raise stops

    found = compare_kernels(OP, lambda _: SHAPES, ([table("plain")], [table("later")]), 31, stop)

    assert len(found.shapes) == 2 and found.ended == ended and found.whole.verdict == "slower"


def test_no_shape_is_an_error(planted, table):
    """The message names the flag that lists shapes."""
    with pytest.raises(UserError, match=r"no shape of a16w16.*-i"):
        compare_kernels(OP, lambda _: {}, ([table("plain")], [table("later")]), 31)
