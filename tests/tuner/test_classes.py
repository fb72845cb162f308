"""Bit classes of a group: members, costs, choice, and what is left to measure."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Mapping

import attrs
import pytest
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.class_search import ClassSearch
from tunedgemm.tuner.classes import REACH, Group
from tunedgemm.tuner.trial import SIZES, Outcome, Task

GROUP = Shape("a16w16", 0, 64, 128)
RANKS = {"asm": 0, "triton": 1}


def kernel(name: str, libtype: str = "triton", order: str = "") -> Solution:
    return Solution(libtype, name, sum_order=order)


def timing(solution: Solution, m: int, us: float, status: str = "ok") -> Timing:
    return Timing(GROUP.with_m(m), solution, status, us=us, samples=31)


def bits(solution: Solution, label: str, detail: str = "") -> Timing:
    return Timing(GROUP, solution, "ok" if label else "batch_variant", bits=label, detail=detail)


def group(us: Mapping[int, Mapping[Solution, float]], labels: Mapping[Solution, str], partial: tuple[Solution, ...] = ()) -> Group:
    """A group of accurate times by M, with labels, of which those of *partial* serve some M only."""
    outcomes = []
    for m, times in us.items():
        timings = tuple(timing(solution, m, one) for solution, one in times.items())
        outcomes.append(Outcome(Task(GROUP.with_m(m), count=m), min(timings, key=lambda each: each.us), None, timings))
    made = Group(GROUP, outcomes, RANKS, "nvidia")
    made.bits = {one: bits(one, label, "it refuses M = 5: small" if one in partial else "") for one, label in labels.items()}
    return made


A, B, C, D = (kernel(name) for name in "abcd")


def test_the_class_minimises_the_time_of_all_calls() -> None:
    """At each M its fastest member counts; the costs are relative to the fastest kernels of all."""
    us = {1: {A: 1.0, B: 9.0, C: 3.0, D: 2.0}, 3: {A: 9.0, B: 2.0, C: 3.0, D: 1.0}}
    chosen = group(us, {A: "one", B: "one", C: "two", D: ""}).chosen()

    assert [(cost.label, cost.kernels) for cost in chosen.classes] == [("one", 2), ("two", 1)]
    assert [(row.shape.m, row.solution) for row in chosen.rows] == [(1, A), (3, B), (0, B)]
    assert {row.bits for row in chosen.rows} == {"one"}
    assert chosen.classes[0].cost == pytest.approx((1 * 1.0 + 3 * 2.0) / (1 * 1.0 + 3 * 1.0))


def test_a_class_needs_a_kernel_for_every_m() -> None:
    """Kernels that refuse some M, or failed at one, serve as far as they go; torch's own choose by M."""
    torchs = kernel("native", "torch")
    us = {1: {A: 1.0, B: 5.0, torchs: 0.5}, 3: {A: 1.0, B: 5.0, torchs: 0.5}}
    labels = {A: "one", B: "two", torchs: "three"}

    with_partial = group(us, labels, partial=(A,)).chosen()
    joined = group(us, labels | {B: "one"}, partial=(A,)).chosen()
    without = attrs.evolve(made := group(us, {A: "one", torchs: "three"}, partial=(A,)), ranks=RANKS | {"torch": 2})
    without.bits = made.bits

    assert [cost.label for cost in with_partial.classes] == ["two", "one", "three"]
    assert [row.solution for row in joined.rows] == [A, A, B]
    assert without.chosen().rows == ()
    assert "no kernel within 2x of the fastest has equal bits at every M" in without.chosen().reason
    assert "torch's own calls left out (measured: 2); for example triton:a: it refuses M = 5" in without.chosen().reason


def test_random_groups_get_the_best_class() -> None:
    """All rows have one label, and no class with a kernel for every M takes less time."""
    draw = random.Random(7)
    for _ in range(200):
        kernels = [kernel(str(number), draw.choice(["asm", "triton"])) for number in range(8)]
        us = {m: {one: 1.0 + draw.random() * 9 for one in kernels if draw.random() < 0.8} or {kernels[0]: 5.0} for m in (1, 16, 100)}
        labels = {one: draw.choice(["", "x", "y", "z"]) for one in kernels}
        partial = tuple(one for one in kernels if draw.random() < 0.4)
        chosen = group(us, labels, partial).chosen()

        totals = {}
        for label in ("x", "y", "z"):
            members = [one for one in kernels if labels[one] == label]
            if any(one not in partial and all(one in times for times in us.values()) for one in members):
                totals[label] = sum(m * min(times[one] for one in members if one in times) for m, times in us.items())
        assert {labels[row.solution] for row in chosen.rows} == ({min(totals, key=totals.__getitem__)} if totals else set())
        assert bool(chosen.reason) == (not totals)
        if totals:
            assert [row.shape.m for row in chosen.rows] == [1, 16, 100, 0]
            assert chosen.rows[-1].solution not in partial


def test_bits_are_measured_of_kernels_within_reach_at_what_rows_serve() -> None:
    """A kernel that is fast at one M is a candidate at all; padding gives smaller M to a row.

    Kernels for the largest M come first: the others are measured against their bits.
    """
    made = group({1: {A: 1.0, B: REACH, C: 2 * REACH}, 512: {A: 10.0, C: 1.0, D: REACH + 0.1}}, {})

    assert made.within_reach() == (A, C, B)
    assert {*SIZES, 1, 512} < set(made.sizes)
    assert any(257 < m < 512 for m in set(made.sizes) - set(SIZES))


def test_rough_times_are_replaced_before_the_choice() -> None:
    """The leading classes' fastest members are timed and checked; a failure gives way to the next."""
    names = [kernel(name) for name in ("fast", "faulty", "slow", "other")]
    true = {("fast", 1): 5.0, ("fast", 100): 9.0, ("faulty", 1): 4.0, ("faulty", 100): 4.0}
    true |= {(name, m): us for name, us in (("slow", 6.0), ("other", 7.0)) for m in (1, 100)}
    outcomes = []
    for m in (1, 100):
        rough = tuple(timing(one, m, true[one.kernel_name, m] * 0.9, "screened") for one in names)
        best = timing(kernel("varies"), m, 3.8)
        outcomes.append(Outcome(Task(GROUP.with_m(m)), best, None, (*rough, best)))
    asked: list[Task] = []

    def work(tasks):
        asked.extend(tasks)
        return [Outcome(task, None, None, tuple(answer(task, one) for one in task.only)) for task in tasks], frozenset()

    def answer(task: Task, one: Solution) -> Timing:
        m, name = task.shape.m, one.kernel_name
        if task.check == "bits":
            return bits(one, {"other": "two", "varies": ""}.get(name, "one"))
        return timing(one, m, true[name, m], "wrong" if name == "faulty" and task.check and m == 100 else "ok")

    made = Group(GROUP, outcomes, RANKS, "nvidia")
    [chosen], partial = ClassSearch([made], work).run()

    assert [(row.shape.m, row.solution.kernel_name) for row in chosen.rows] == [(1, "faulty"), (100, "slow"), (0, "slow")]
    assert partial == []
    assert [task.check for task in asked[:1]] == ["bits"] and asked[0].sizes == made.sizes
    checked = {(task.shape.m, one.kernel_name) for task in asked if task.check == "check_served" for one in task.only}
    assert checked >= {(1, "faulty"), (100, "faulty"), (100, "slow"), (1, "slow")}
    assert len({(task.shape, one, task.check) for task in asked for one in task.only}) == sum(len(task.only) for task in asked)


def test_a_group_with_a_lost_task_is_left_to_the_next_run() -> None:
    """Its class would be final; other groups get theirs."""
    made = group({1: {A: 1.0}}, {})
    chosen, partial = ClassSearch([made], lambda tasks: ([], frozenset(task.shape for task in tasks))).run()

    assert (chosen, partial) == ([], [made])


def test_broken_claims_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels of one declared order of sums with different bits, or with bits that depend on M."""
    one, two, three, four = (kernel(name, order="wgmma") for name in "abcd")
    made = group({1: {one: 1.0}}, {one: "x", two: "x", three: "y", four: ""})

    with caplog.at_level(logging.WARNING, logger="tunedgemm"):
        made.report_broken_claims()

    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert all("triton:a" in text and "sum_order 'wgmma'" in text for text in texts)
    assert "triton:c" in texts[0] and "triton:d" in texts[1]
    assert list(itertools.chain(made.members().values())) == [[one, two], [three]]
