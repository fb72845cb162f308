"""Measuring: both sides in the same rounds, or separately if that is impossible."""

from __future__ import annotations

import functools

import attrs
import pytest
from tunedgemm.analysis.compare import decide
from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Production, Side
from tunedgemm.backends.builtin import dequantised
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.tuner import Options
from tunedgemm.tuner.trial import Samples
from tunedgemm.tuner.worker import Inline, WorkerDied
from tunedgemm.tuner.worker_client import WorkerClient

OP = op_named("a16w16")
QUICK = Options(libtype="turbo", device="cpu", iters=15, warmup=2, seconds=0.1)


def wide(m: int) -> Shape:
    return Shape("a16w16", m, 64, 128, "fp32")


class Drifting:
    """A bench whose clock slows with use: every sample takes longer than the one before."""

    def __init__(self):
        self.asked, self.rounds = [], 0

    def __call__(self, op, shape, device):
        return self.sample

    def sample(self, launchers, rounds):
        self.asked.append(tuple(solution.libtype for solution in launchers))
        times = {solution: [] for solution in launchers}
        for _ in range(rounds):
            self.rounds += 1
            for solution in launchers:
                times[solution].append((95.0 if solution.libtype == "after" else 100.0) * (1 + self.rounds / 50))
        return {solution: Samples(tuple(us)) for solution, us in times.items()}


@pytest.fixture
def sides(tmp_path, row):
    """Two sides that a table each answers with another kernel."""
    for name in ("slow", "fast"):
        write_rows(tmp_path / f"{name}.csv", OP, [row(wide(1), name)])
    return Side("before", only=tmp_path / "slow.csv"), Side("after", only=tmp_path / "fast.csv")


def test_a_drifting_clock_does_not_decide(sides, turbo):
    """If times double during the run,
    the ratio over shared rounds stays exact and its noise small."""
    bench = Drifting()
    with measuring("a16w16", sides, QUICK, registry=turbo("slow", "fast"), bench=bench) as ask:
        change = ask.change(wide(1), 1)

    assert set(bench.asked) == {("before", "after")}
    assert change.ratio == pytest.approx(0.95)
    assert change.noise == pytest.approx(0.005)
    assert change.before.noise > 0.02


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_row_of_quantised_activations_is_judged_by_their_op(tmp_path, monkeypatch, factor):
    """Its numbers are no mismatch, although they are far from those of 16 bits; wrong ones of its op are."""
    monkeypatch.setenv("TUNEDGEMM_TORCH_ACTIVATIONS", "quantised")
    product = dequantised.tuned_call()
    monkeypatch.setattr(dequantised, "tuned_call", lambda: lambda *operands, otype: product(*operands, otype=otype) * factor)
    op, here = op_named("a16wn"), device_of(-1)
    shape = next(each for each in op.examples if each["w_format"] == "mxfp8" and each.m == 5)
    row = Row(shape, here.gfx, here.cu_num, here.name, Solution("torch", "as_a8w8_mxfp8"), 5.0)
    write_rows(tmp_path / "one.csv", op, [row])
    options = attrs.evolve(QUICK, libtype="torch")
    with measuring("a16wn", [Side("after", only=tmp_path / "one.csv")], options, table_only=True, registry=Registry([])) as ask:
        served = ask.served(shape)
    if factor == 1.0:
        assert served.ok and served.us, served
        assert served.detail.startswith("other numbers than a16wn: ") and served.err_ratio > 0.05
    else:
        assert served.status.startswith("mismatch:") and "worst row 2." in served.detail


class Frail(Inline):
    """A worker that dies whenever it times two sides together."""

    def __call__(self, request, *, timeout=0.0):
        if request.method == "sample" and len(request.arguments[1]) == 2:
            raise WorkerDied("crashed", "together")
        return super().__call__(request, timeout=timeout)


def test_sides_that_cannot_be_timed_together_are_timed_alone(sides, turbo):
    """Then the noise band is as wide as the error of separate timings."""
    make = functools.partial(Production, "a16w16", -1, QUICK, bench=Drifting(), sides=sides, installed=turbo("slow", "fast"))
    change = Measuring(sides, QUICK, WorkerClient(op_named("a16w16"), QUICK, Frail(make))).change(wide(1), 1)

    assert change.before.us > 0 < change.after.us
    assert change.noise >= 0.10
    assert decide(change, 3.0).decision == "skip"
