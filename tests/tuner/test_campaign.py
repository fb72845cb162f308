"""Campaigns: waves of the most valuable shapes, from tables and logs alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.untuned import Untuned
from tunedgemm.testing.fakes import fake_registry
from tunedgemm.timing import Timing
from tunedgemm.tuner import campaign as module
from tunedgemm.tuner.campaign import Campaign, Part, Wave
from tunedgemm.tuner.store import Store
from tunedgemm.tuner.trial import Options, Outcome, Place, Task

GEMM, FP8 = op_named("a16w16"), op_named("a8w8")
H200 = Device("sm_90", 132, "nvidia-h200", 0)


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the campaign's clock."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def gemm(m: int, calls: int, n: int = 4096) -> Untuned:
    return Untuned(Shape("a16w16", m, n, 4096), calls)


def fp8(m: int, calls: int) -> Untuned:
    cells = {"M": str(m), "N": "4096", "K": "4096", "q_dtype_w": "torch.float8_e4m3fn", "gfx": "sm_90"}
    return Untuned(FP8.columns.parse(cells), calls)


def campaign(folder: Path, *parts: list[Untuned], **options: object) -> Campaign:
    ops = {"a16w16": GEMM, "a8w8": FP8}
    listed = [Part(ops[part[0].shape.op], tuple(part), (folder / f"{part[0].shape.op}.csv",)) for part in parts]
    return Campaign(tuple(listed), H200, Options(seconds=4.0, budget=60.0, **options), fake_registry())


def tuned(wave: Wave, most: int = 1000, failing: tuple[int, ...] = ()) -> list[int]:
    """Store outcomes of the first shapes of a wave as the tuner does; those with these M fail."""
    store, done = Store(wave.part.op, wave.part.tables[0]), []
    store.open({})
    for shape in list(wave.shapes)[:most]:
        winner = None if shape.m in failing else Timing(shape, Solution("torch", "native"), "ok", us=1.0)
        store.record(Outcome(Task(shape), winner, None, (winner,) if winner else (), place=Place(H200)))
        done.append(shape.m)
    if most >= len(wave.shapes):
        store.finish()
    else:
        store.close()
    return done


def test_value_is_calls_times_saving_over_all_ops(tmp_path: Path) -> None:
    """Shapes come in the order of their calls times the saving expected of one, whatever their op."""
    found = campaign(tmp_path, [gemm(1, 10), gemm(8192, 1), gemm(2, 1000, n=512)], [fp8(1, 40), fp8(16, 1)]).left()
    assert [(part.op.name, task.shape.m) for part, task in found] == [
        ("a16w16", 2), ("a8w8", 1), ("a16w16", 1), ("a8w8", 16), ("a16w16", 8192),
    ]  # fmt: skip


def test_waves_fit_the_time_and_share_it_by_shapes(tmp_path: Path, clock: Clock) -> None:
    """A wave has as many shapes as the time allows at the pace of those before."""
    listed = [gemm(m, 10000 - 100 * m) for m in range(1, 13)], [fp8(m, 1960 - 20 * m) for m in range(1, 13)]
    waves = campaign(tmp_path, *listed).waves(100.0)
    seen = []
    for wave in waves:
        seen.append((wave.part.op.name, len(wave.shapes), round(wave.budget)))
        clock.now += 2.0 * len(tuned(wave))
    assert seen == [("a8w8", 5, 56), ("a16w16", 4, 90), ("a16w16", 8, 44), ("a8w8", 7, 66)]


def test_few_shapes_of_an_op_wait(tmp_path: Path, clock: Clock) -> None:
    """An op with less than a tenth of a wave's shapes waits for a later one, and is not forgotten."""
    found = campaign(tmp_path, [gemm(m, 1000 - m) for m in range(1, 21)], [fp8(1, 10**6)])
    ops = []
    for wave in found.waves(1000.0):
        ops.append((wave.part.op.name, len(wave.shapes)))
        clock.now += len(tuned(wave))
    assert ops == [("a16w16", 20), ("a8w8", 1)] and not found.left()


def test_it_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    """Rows and failures on disk count as done; --no-resume tries failures again."""
    listed = [gemm(m, 1000 - m) for m in range(1, 7)]
    wave = next(campaign(tmp_path, listed).waves(time.monotonic() + 1000.0))
    assert tuned(wave, most=4, failing=(2, 3)) == [1, 2, 3, 4]
    assert [task.shape.m for _, task in campaign(tmp_path, listed).left()] == [5, 6]
    assert [task.shape.m for _, task in campaign(tmp_path, listed, resume=False).left()] == [2, 5, 6, 3]  # the row of 4 serves 3
    assert campaign(tmp_path, listed).shapes == 6


def test_it_ends_where_nothing_changes(tmp_path: Path, clock: Clock) -> None:
    """A pass that ends no shape is the last, and an op that cannot be tuned is left out."""
    found = campaign(tmp_path, [gemm(1, 1)], [fp8(1, 1)])
    assert len(list(found.waves(1000.0))) == 2
    found.refused.add("a8w8")
    assert [wave.part.op.name for wave in found.waves(1000.0)] == ["a16w16"]
    clock.now = 2000.0
    assert not list(found.waves(1000.0))


def test_it_ends_before_a_shape_would_be_cut_short(tmp_path: Path, clock: Clock) -> None:
    """A campaign leaves the rest of its time where no shape fits into it, once it knows the pace."""
    found = campaign(tmp_path, [gemm(m, 1000 - m) for m in range(1, 9)])
    sizes = []
    for wave in found.waves(24.0):
        sizes.append(len(wave.shapes))
        clock.now += 8.0 * len(tuned(wave))
    assert sizes == [2] and len(found.left()) == 6
    assert found.summary() == "6 of 8 shapes are left, 75 % of the expected saving; the same command goes on"
    assert [len(wave.shapes) for wave in campaign(tmp_path, [gemm(9, 1)]).waves(clock.now + 1.0)] == [1]
