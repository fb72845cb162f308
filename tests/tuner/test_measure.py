"""Measure: medians of interleaved rounds over cold weights."""

from __future__ import annotations

import time

import pytest
import torch
from tunedgemm.device import current_device, device_of
from tunedgemm.launcher import Launcher
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.measure import Workload, cache_bytes, median_and_noise
from tunedgemm.tuner.trial import Samples

OP = op_named("a16w16")


def test_the_median_and_its_noise() -> None:
    """Outliers move neither; the noise is the half width of the median's interval, relative to it."""
    median, noise = median_and_noise(tuple([10.0] * 50 + [10.2] * 50 + [500.0]))

    assert median == pytest.approx(10.2)
    assert 0 < noise < 0.02
    assert median_and_noise((7.0,)) == (7.0, 0.0)


def test_every_solution_runs_once_a_round_in_a_changing_order() -> None:
    """Candidates are interleaved: no round runs one twice, and the order is not fixed."""
    order: list[str] = []

    def launcher(name: str) -> Launcher:
        return Launcher(lambda x, weight: order.append(name) or torch.nn.functional.linear(x, weight))

    workload = Workload(OP, Shape("a16w16", 1, 16, 32, "fp32"), device_of(-1))
    workload({Solution("torch", name): launcher(name) for name in "abc"}, 12)
    calls = workload.calls
    rounds = [order[place : place + 3 * calls : calls] for place in range(0, len(order), 3 * calls)]

    assert len(rounds) == 12
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1


def test_weights_rotate_and_activations_stay() -> None:
    """Each copy has its own weight with its own contents; the activations are shared."""
    workload = Workload(OP, Shape("a16w16", 4, 256, 512, "fp32"), device_of(-1))
    weights = [operands[1] for operands in workload.copies]

    assert len({weight.data_ptr() for weight in weights}) == len(weights) >= 2
    assert not torch.equal(weights[0], weights[1])
    assert len({operands[0].data_ptr() for operands in workload.copies}) == 1


def test_times_are_of_one_call() -> None:
    """A call that sleeps 2 ms is timed at about 2 ms, whatever a sample holds."""

    def slow(x, weight):
        time.sleep(2e-3)
        return torch.nn.functional.linear(x, weight)

    workload = Workload(OP, Shape("a16w16", 1, 16, 32, "fp32"), device_of(-1))
    [answer] = workload({Solution("torch", "slow"): Launcher(slow)}, 3).values()

    assert isinstance(answer, Samples)
    assert 1900 < min(answer.us) < 20000


def test_the_last_level_cache_is_known() -> None:
    """The size that weights must outgrow is plausible."""
    assert 1 << 20 <= cache_bytes(current_device()) <= 1 << 30


@pytest.mark.gpu
def test_a_graphs_time_agrees_with_events_around_many_replays() -> None:
    """The time inside the graph is within 10 % of a long run of the same call between two events."""
    device, shape = current_device(), Shape("a16w16", 64, 8192, 8192)
    workload = Workload(OP, shape, device)
    native = Launcher(torch.nn.functional.linear)
    answer = workload({Solution("torch", "native"): native}, 21)[Solution("torch", "native")]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for place in range(400):
        native.call(*workload.copies[place % len(workload.copies)])
    end.record()
    end.synchronize()

    assert median_and_noise(answer.us)[0] == pytest.approx(start.elapsed_time(end) * 1e3 / 400, rel=0.1)


@pytest.mark.gpu
def test_two_copies_of_one_kernel_tie() -> None:
    """A/A: the medians of the same call under two names differ by less than 1 %."""
    workload = Workload(OP, Shape("a16w16", 16, 7168, 8192), current_device())
    names = [Solution("torch", "one"), Solution("torch", "two")]
    answers = workload(dict.fromkeys(names, Launcher(torch.nn.functional.linear)), 51)
    one, two = (median_and_noise(answers[name].us)[0] for name in names)

    assert one == pytest.approx(two, rel=0.01)


@pytest.mark.gpu
def test_a_launcher_that_cannot_be_captured_is_an_answer_and_not_the_end() -> None:
    """A call that synchronises breaks its own capture; the next solution is still timed."""

    def synchronises(x, weight):
        out = torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()
        return out

    workload = Workload(OP, Shape("a16w16", 16, 512, 512), current_device())
    bad, good = Solution("torch", "bad"), Solution("torch", "good")
    answers = workload({bad: Launcher(synchronises), good: Launcher(torch.nn.functional.linear)}, 3)

    assert isinstance(answers[bad], Exception)
    assert isinstance(answers[good], Samples)
