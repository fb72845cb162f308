"""The checks of the bring-up kit over fake backends: right, wrong, raising, refusing, and tuned."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tunedgemm.backends.backend import Backend
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.bring_up import backend_checks
from tunedgemm.testing.bring_up.bench import Bench, Verdict
from tunedgemm.testing.bring_up.checks import CHECKS
from tunedgemm.testing.bring_up.tuning_check import verdict_of_tuning
from tunedgemm.testing.fakes import exact, fake_backend, with_hooks
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Outcome, Task

SHAPE = Shape("a16w16", 5, 32, 64)
H200 = Device("sm_90", 132, "nvidia-h200")
OF_BACKENDS = ("outputs", "streams", "kernels", "served")


def run(check: str, device: Device, backend: Backend | None = None, shape: Shape = SHAPE) -> Verdict:
    (found,) = [each for each in CHECKS if each.name == check]
    return found.run(Bench(device, lambda *_: None, backend, shape))


def second_wrong(solution: Solution, shape: Shape, *operands: Any) -> Any:
    """Return a right output of the first kernel, a wrong one of the second."""
    return exact(solution, shape, *operands) * (2 if solution.kernel_name == "second" else 1)


def raising(solution: Solution, shape: Shape, *operands: Any) -> Any:
    raise RuntimeError("no such kernel image")


@pytest.mark.parametrize("check", OF_BACKENDS)
def test_a_right_backend(cpu: Device, check: str) -> None:
    """A right backend passes, with the number of kernels that ran."""
    verdict = run(check, cpu, fake_backend("mine", solutions=("first", "second")))
    assert verdict.status == "ok" and verdict.measures["ran"] and not verdict.measures["faulty"], verdict


@pytest.mark.parametrize("check", OF_BACKENDS)
def test_a_raising_backend(cpu: Device, check: str) -> None:
    """What a launch raises is the detail of a failure."""
    verdict = run(check, cpu, fake_backend("mine", call=raising))
    assert (verdict.status, verdict.kernel) == ("failed", "mine:fake") and "no such kernel image" in verdict.detail


@pytest.mark.parametrize("check", ["outputs", "streams", "kernels"])
def test_a_wrong_kernel_is_named(cpu: Device, check: str) -> None:
    """The kernel with the wrong output is named, not the right one before it."""
    verdict = run(check, cpu, fake_backend("mine", solutions=("first", "second"), call=second_wrong))
    assert (verdict.status, verdict.kernel) == ("wrong", "mine:second"), verdict
    assert verdict.measures.get("kernels", ["first"]) == ["first"]


def test_what_cannot_run_is_refused_with_its_reason(cpu: Device) -> None:
    """Refusals, and an empty list, are not faults; an exception of `bind` is one."""
    listed = with_hooks(fake_backend("mine"), bind=lambda: Unsupported("needs a pack"))
    assert run("outputs", cpu, listed) == Verdict(
        "refused", "1 refused, the first: mine:fake: needs a pack", "", {"ran": 0, "faulty": 0, "refused": 1}
    )
    assert run("outputs", cpu, fake_backend("mine", solutions=())).detail == "mine lists no kernel for this shape"

    def broken() -> None:
        raise ValueError("on purpose")

    assert run("outputs", cpu, with_hooks(fake_backend("mine"), bind=broken)).status == "failed"


def test_a_long_list_is_sampled_over_its_length(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check launches at least one kernel, and ends after its seconds."""
    names = [f"k{number}" for number in range(400)]
    monkeypatch.setattr(backend_checks, "_KERNELS_S", 0.3)
    start = time.perf_counter()
    verdict = run("kernels", cpu, fake_backend("mine", solutions=names, sleep=dict.fromkeys(names, 0.02)))
    assert time.perf_counter() - start < 5 and verdict.measures["listed"] == 400
    assert verdict.measures["kernels"][:3] == ["k0", "k20", "k40"] and verdict.measures["ran"] < 100


@pytest.mark.parametrize("check", ["formats", "shuffles", "dispatch"])
def test_checks_of_the_device(cpu: Device, check: str) -> None:
    """The CPU passes the checks of a device."""
    assert run(check, cpu).status == "ok"


def timed(us: float, status: str = "ok", name: str = "k") -> Timing:
    return Timing(SHAPE, Solution("mine", name), status, us=us, detail="" if status == "ok" else "why")


@pytest.mark.parametrize(
    ("timings", "status", "detail"),
    [
        ([timed(9.0), timed(4.0, name="fast")], "ok", ""),
        ([timed(0.1)], "wrong", "below the roofline's"),
        ([timed(9.0), timed(0.0, "hung", "slow")], "hung", "why"),
        ([], "failed", "no solution passed"),
    ],
)
def test_verdict_of_tuning(timings: list[Timing], status: str, detail: str) -> None:
    """Faulty candidates, a time below the roofline and a missing winner are faults."""
    winner = min((each for each in timings if each.us), key=lambda each: each.us, default=None)
    verdict = verdict_of_tuning(Bench(H200, lambda *_: None), Outcome(Task(SHAPE), winner, None, tuple(timings)))
    assert verdict.status == status and detail in verdict.detail
    if status == "ok":
        assert verdict.measures["lists"] == {"mine": {"timed": 2, "best_us": 4.0, "best_at": 1, "first_over_best": 2.25}}
        assert verdict.measures["us"] == 4.0 and 1.5 < verdict.measures["floor_us"] < 2
