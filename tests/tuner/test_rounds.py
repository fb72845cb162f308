"""Workload: samples of one call over cold or hot weights, in a graph or launched, in interleaved
rounds.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device, current_device, device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner import rounds as module
from tunedgemm.tuner.clocks import _THROTTLE
from tunedgemm.tuner.measure import median_and_noise
from tunedgemm.tuner.rounds import RETAKEN, Workload, cache_bytes, touch
from tunedgemm.tuner.trial import Samples

OP = op_named("a16w16")
SMALL = Shape("a16w16", 1, 16, 32, "fp32")
NATIVE = Solution("torch", "native")
LINEAR = Launcher(torch.nn.functional.linear)


def us(workload: Workload, launcher: Launcher = LINEAR, rounds: int = 21) -> float:
    answer = workload({NATIVE: launcher}, rounds)[NATIVE]
    assert isinstance(answer, Samples), answer
    return median_and_noise(answer.us)[0]


def test_every_solution_runs_once_a_round_in_a_changing_order() -> None:
    """Solutions are interleaved after the first calls of each.

    No round runs one twice, and the order is not fixed.
    """
    order: list[str] = []

    def launcher(name: str) -> Launcher:
        return Launcher(lambda x, weight: order.append(name) or torch.nn.functional.linear(x, weight))

    workload = Workload(OP, SMALL, device_of(-1))
    solutions = {Solution("torch", name): launcher(name) for name in "abc"}
    workload(solutions, 0)
    assert order == [name for name in "abc" for _ in range(2)]
    order.clear()
    workload(solutions, 12)
    calls = workload.calls
    rounds = [order[place : place + 3 * calls : calls] for place in range(0, len(order), 3 * calls)]

    assert len(rounds) == 12
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1


def test_a_sample_that_another_process_interrupts_is_taken_again() -> None:
    """On a GPU a sample of twice the shortest is repeated, for the shortest of a few; not on a CPU."""
    workload, taken = Workload(OP, SMALL, device_of(-1)), iter([8.0, 1.1, 5.0, 6.0, 7.0, 9.0])

    def start():
        return lambda: next(taken)

    assert workload._uninterrupted(lambda: 9.0, start, [1.0]) == 9.0
    workload.device = Device("sm_90", 132, "nvidia-h200", 0)
    assert workload._uninterrupted(lambda: 1.9, start, [1.0]) == 1.9
    assert workload._uninterrupted(lambda: 9.0, start, []) == 9.0
    assert workload._uninterrupted(lambda: 9.0, start, [1.0]) == 1.1
    assert workload._uninterrupted(lambda: 9.0, start, [1.0]) == 5.0
    assert next(taken) == 9.0, f"{RETAKEN} are taken at most"


def test_an_interrupted_sample_without_calls_shortens_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overhead taken off is a median of several samples, and no time is zero or less."""
    workload, answers = Workload(OP, SMALL, device_of(-1)), itertools.chain([1e6], itertools.repeat(0.5))
    monkeypatch.setattr(workload, "_touches", "a graph without calls")
    monkeypatch.setattr(workload, "_graphs", {NATIVE: "a graph"})
    monkeypatch.setattr(workload, "_replay", lambda graph: lambda: next(answers))
    monkeypatch.setattr(workload, "_on_cpu", lambda call: lambda: 20.0)

    assert us(workload, rounds=1) == 19.5
    assert us(workload, rounds=1) == 19.5
    monkeypatch.setattr(workload, "_on_cpu", lambda call: lambda: 0.2)
    assert 0 < us(workload, rounds=3) < 0.2


def test_weights_rotate_and_activations_stay() -> None:
    """Each copy has its own weight with its own contents; the activations are shared.

    A sample ends with the last copy, and uses every one where the calls suffice.
    """
    used: list[int] = []
    workload = Workload(OP, Shape("a16w16", 4, 256, 512, "fp32"), device_of(-1))
    weights = [operands[1] for operands in workload.copies]
    workload({NATIVE: Launcher(lambda x, weight: used.append(weight.data_ptr()) or torch.nn.functional.linear(x, weight))}, 1)

    assert len({weight.data_ptr() for weight in weights}) == len(weights) >= 2
    assert not torch.equal(weights[0], weights[1])
    assert len({operands[0].data_ptr() for operands in workload.copies}) == 1
    assert used[2:] == [weight.data_ptr() for weight in weights[-workload.calls :]]


def test_hot_weights_are_one_copy() -> None:
    """With the cache hot every timed call reads the same weight, and outputs can still be verified
    on two.
    """
    used: list[int] = []
    workload = Workload(OP, Shape("a16w16", 4, 256, 512, "fp32"), device_of(-1), cache="hot")
    workload({NATIVE: Launcher(lambda x, weight: used.append(weight.data_ptr()) or torch.nn.functional.linear(x, weight))}, 3)

    assert len(workload.copies) == 2
    assert set(used[2:]) == {workload.copies[0][1].data_ptr()}
    assert len(used) == 2 + 3 * workload.calls


def test_times_are_of_one_call() -> None:
    """A call that sleeps 2 ms is timed at about 2 ms, whatever the calls per sample, which the
    samples have.
    """

    def slow(x, weight):
        time.sleep(2e-3)
        return torch.nn.functional.linear(x, weight)

    workload = Workload(OP, SMALL, device_of(-1))
    [answer] = workload({Solution("torch", "slow"): Launcher(slow)}, 3).values()

    assert isinstance(answer, Samples)
    assert 1900 < min(answer.us) < 20000
    assert answer.calls == workload.calls > 1
    assert (answer.clock_mhz, answer.throttled) == (0, "")


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_launcher_that_raises_leaves_the_others_timed(calls: int) -> None:
    """A launcher that raises, at once or later, gives its exception and no samples."""
    left = [calls]

    def breaks(x, weight):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no more")
        return torch.nn.functional.linear(x, weight)

    bad = Solution("torch", "bad")
    answers = Workload(OP, SMALL, device_of(-1))({bad: Launcher(breaks), NATIVE: LINEAR}, 4)

    assert str(answers[bad]) == "no more"
    assert isinstance(answers[NATIVE], Samples) and len(answers[NATIVE].us) == 4


def test_the_last_level_cache_is_known() -> None:
    """The size that weights must outgrow is plausible."""
    assert 1 << 20 <= cache_bytes(current_device()) <= 1 << 30


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
def test_touching_leaves_every_bit(dtype) -> None:
    """This holds for every dtype, stride and offset, and for empty tensors.

    Values are as before, NaN among them.
    """
    x = torch.randint(0, 256, (6, 512), dtype=torch.uint8).view(getattr(torch, dtype))
    before = x.view(torch.uint8).clone()
    for part in (x, x.t(), x[2:, 3:], x[:0]):
        touch(part)

    assert torch.equal(x.view(torch.uint8), before)


def test_each_weight_is_called_before_a_capture() -> None:
    """Only weights whose copies are kept, since each of them is in the captured sample."""
    workload, called = Workload(OP, Shape("a16w16", 4, 64, 64), device_of(-1)), []
    for keeps, count in ((False, 2), (True, len(workload.copies))):
        called.clear()
        workload.prepare(Solution("torch", f"{keeps}"), Launcher(lambda x, weight: called.append(id(weight)), keeps_weights=keeps))
        assert len(set(called)) == count > 1


@pytest.mark.gpu
def test_a_time_is_what_the_call_adds() -> None:
    """A call that launches nothing takes nothing, though a kernel writes the activations before it."""
    workload = Workload(OP, Shape("a16w16", 16, 512, 512), current_device())
    [answer] = workload({NATIVE: Launcher(lambda *_: None)}, 21).values()

    assert isinstance(answer, Samples)
    assert abs(median_and_noise(answer.us)[0]) < 0.1


@pytest.mark.gpu
@pytest.mark.timing
def test_a_graphs_time_agrees_with_events_around_many_replays() -> None:
    """The time inside the graph is within 10 % of a long run of the same call between two events."""
    workload = Workload(OP, Shape("a16w16", 64, 8192, 8192), current_device())
    inside = us(workload)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for place in range(400):
        LINEAR.call(*workload.copies[place % len(workload.copies)])
    end.record()
    end.synchronize()

    assert inside == pytest.approx(start.elapsed_time(end) * 1e3 / 400, rel=0.1)


@pytest.mark.gpu
def test_two_copies_of_one_kernel_take_the_same() -> None:
    """A/A: the medians of the same call under two names differ by less than 1 %."""
    workload = Workload(OP, Shape("a16w16", 16, 7168, 8192), current_device())
    names = [Solution("torch", "one"), Solution("torch", "two")]
    answers = workload(dict.fromkeys(names, LINEAR), 51)
    one, two = (median_and_noise(answers[name].us)[0] for name in names)

    assert one == pytest.approx(two, rel=0.01)


@pytest.mark.gpu
def test_a_launcher_that_cannot_be_captured_fails_alone() -> None:
    """A call that synchronises breaks its own capture; the next solution is still timed."""

    def synchronises(x, weight):
        out = torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()
        return out

    workload = Workload(OP, Shape("a16w16", 16, 512, 512), current_device())
    bad = Solution("torch", "bad")
    answers = workload({bad: Launcher(synchronises), NATIVE: LINEAR}, 3)

    assert isinstance(answers[bad], Exception)
    assert isinstance(answers[NATIVE], Samples)


@pytest.mark.gpu
def test_solutions_are_timed_after_all_graphs_were_freed() -> None:
    """After all graphs are dropped, new ones can be captured."""
    workload = Workload(OP, Shape("a16w16", 16, 512, 512), current_device())
    for _ in range(3):
        assert isinstance(workload({NATIVE: LINEAR}, 1)[NATIVE], Samples)
        workload.forget({})


@pytest.mark.gpu
def test_a_hot_weight_is_read_faster_than_a_cold_one() -> None:
    """20 MB fit the last-level cache of a large GPU; from memory they take longer."""
    device, shape = current_device(), Shape("a16w16", 1, 1280, 8192)
    if cache_bytes(device) < 40 << 20:
        pytest.skip("the cache is too small for this weight")

    assert us(Workload(OP, shape, device, cache="hot")) < 0.95 * us(Workload(OP, shape, device))


@pytest.mark.gpu
def test_launching_a_tiny_call_takes_longer_than_replaying_it() -> None:
    """Eager samples contain the host time of each call, graphs do not.

    A call outside a graph is launched.
    """
    device, shape, launches = current_device(), Shape("a16w16", 16, 256, 256), []

    def counted(x, weight):
        launches.append(0)
        return torch.nn.functional.linear(x, weight)

    eager, graph = Workload(OP, shape, device, timing="eager"), Workload(OP, shape, device)
    assert us(eager) > 1.3 * us(graph)

    for workload, launcher in ((eager, Launcher(counted)), (graph, Launcher(counted, graph_safe=False))):
        launches.clear()
        workload({Solution("torch", "counted"): launcher}, 5)
        assert len(launches) >= 5 * workload.calls
    launches.clear()
    graph({Solution("torch", "captured"): Launcher(counted)}, 5)
    assert len(launches) == 2 + graph.calls


@pytest.mark.gpu
def test_the_clock_is_read_from_nvml() -> None:
    """With NVML's bindings each sample has a clock of hundreds of MHz.

    The throttle reason is text, or empty.
    """
    pytest.importorskip("pynvml")
    device = current_device()
    if device.kind != "nvidia":
        pytest.skip("needs an NVIDIA GPU")
    [answer] = Workload(OP, Shape("a16w16", 4096, 4096, 4096), device)({NATIVE: LINEAR}, 5).values()

    assert isinstance(answer, Samples)
    assert 300 <= answer.clock_mhz <= 4000
    assert set(answer.throttled.split(", ")) <= {"", *_THROTTLE.values()}


@pytest.mark.gpu
def test_a_busy_device_is_not_saturated_again() -> None:
    """The first call loads the chip.

    A measurement right after another takes little longer than its rounds.
    """
    workload = Workload(OP, Shape("a16w16", 16, 7168, 8192), current_device())
    us(workload, rounds=1)
    start = time.perf_counter()
    for _ in range(10):
        us(workload, rounds=1)

    assert (time.perf_counter() - start) / 10 < 1.5 * module.STEP  # saturating takes two steps at least


def test_the_screen_needs_a_busy_gpu_and_the_race_a_settled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rough times follow one step of load. Others follow a whole warm-up, also of a busy GPU."""
    workload, clock, load = Workload(OP, SMALL, device_of(-1)), itertools.count(), itertools.count(1)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock) * 1e-3))
    monkeypatch.setattr(workload, "device", Device("sm_90", 132, "nvidia-h200", 0))

    def loaded_s(is_rough: bool) -> float:
        begun = next(clock)
        workload._saturate({NATIVE: lambda: lambda: float(next(load))}, is_rough)  # it never settles
        workload._worked = next(clock) * 1e-3
        return workload._worked - begun * 1e-3

    assert module.STEP <= loaded_s(True) < 2 * module.STEP
    assert loaded_s(True) < module.STEP
    assert loaded_s(False) >= module.SATURATION
    assert loaded_s(False) < module.STEP


def test_slower_calls_than_guessed_get_shorter_samples() -> None:
    """On a CPU a call of 5 ms, for which microseconds were guessed, is not made hundreds of times
    for each sample.
    """

    def slow(x, weight):
        time.sleep(5e-3)
        return torch.nn.functional.linear(x, weight)

    workload = Workload(OP, SMALL, device_of(-1), cache="hot")
    guessed = workload.calls
    workload({NATIVE: Launcher(slow)}, 1)

    assert guessed > 100
    assert workload.calls == 2
