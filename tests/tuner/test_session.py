"""Session: requests to a device, each independent of earlier ones."""

from __future__ import annotations

import asyncio

import attrs
import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.errors import OutOfResources, PluginError
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.timing import Timing
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import DeviceFault, Options, Samples

SHAPE, OTHER = Shape("a16w16", 4, 32, 64, "fp32"), Shape("a16w16", 9, 32, 64, "fp32")
GOOD, BAD, GONE = (Solution("turbo", name) for name in ("good", "bad", "gone"))


def call(solution, shape, x, weight):
    if solution.kernel_name == "bad":
        raise OutOfResources("needs 3 times the shared memory")
    return torch.nn.functional.linear(x, weight)


def session(**options) -> Session:
    backend = fake_backend("turbo", solutions=("good", "bad"), call=call)
    return Session("a16w16", -1, Options(**{"libtype": "turbo", **options}), fake_registry(backend))


def test_a_restarted_session_answers_like_the_first() -> None:
    """A replaced worker binds the requested solutions, so no earlier request must be repeated."""
    samples = session().sample(SHAPE, (GOOD,), 3)

    assert isinstance(samples[GOOD], Samples)
    assert len(samples[GOOD].us) == 3
    assert session().check_again(SHAPE, GOOD).status == "ok"


def test_a_checked_solution_is_ready_to_be_timed() -> None:
    """Its first calls are part of the check, so no capture lets the GPU idle between samples."""
    calls: list[Solution] = []

    def counted(solution, shape, x, weight):
        calls.append(solution)
        return torch.nn.functional.linear(x, weight)

    ready = Session("a16w16", -1, Options(), fake_registry(fake_backend("turbo", solutions=("good",), call=counted)))
    assert ready.check_first(SHAPE, GOOD).status == "ok"
    before = len(calls)
    ready.sample(SHAPE, (GOOD,), 0)

    assert len(calls) == before


def test_candidates_limits_the_list_to_first_guesses() -> None:
    """`candidates` cuts a backend's list from its end."""
    assert session(candidates=1).solutions("turbo", SHAPE) == (GOOD,)
    assert session().solutions("turbo", SHAPE) == (GOOD, BAD)


def test_the_tolerance_of_an_element_can_be_set() -> None:
    """`atol` and `rtol` take the place of the op's.

    Without any, the rounding of a sum is too much.
    """
    assert session(errRatio=0.0).check(SHAPE, GOOD).status == "ok"
    assert session(errRatio=0.0, atol=1e-3, rtol=0.0).check(SHAPE, GOOD).status == "ok"
    assert session(errRatio=0.0, atol=0.0, rtol=0.0).check(SHAPE, GOOD).status == "wrong"


@pytest.mark.parametrize(
    ("fault", "flags"),
    [("uneven", {"atol": 0.1, "rtol": 0.1}), ("uneven", {"rtol": 0.2}), ("some", {"errRatio": 0.25}), ("some", {"errRatio": 1.0})],
)
def test_flags_relax_everything_that_judges(fault: str, flags: dict[str, float]) -> None:
    """A tolerance beyond the op's leaves AITER's error ratio as the only judge of finite outputs."""

    def spoilt(solution, shape, x, weight):
        out = torch.nn.functional.linear(x, weight)
        if fault == "uneven":
            return out * (1 + 0.09 * (torch.arange(shape.n) % 2))
        out[:, ::5] = float("nan") if solution == BAD else 0.0  # 22 % of the elements
        return out

    def status(solution: Solution, **options) -> str:
        backend = fake_backend("turbo", solutions=("good", "bad"), call=spoilt)
        return Session("a16w16", -1, Options(libtype="turbo", **options), fake_registry(backend)).check(SHAPE, solution).status

    assert status(GOOD) == "wrong"
    assert status(GOOD, **flags) == "ok"
    assert fault == "uneven" or status(BAD, **flags) == "wrong"


def test_a_failure_in_a_round_costs_one_solution() -> None:
    """Samples of the others come back with the Timing of the failure."""
    answers = session().sample(SHAPE, (BAD, GOOD, GONE), 2)

    assert isinstance(answers[GOOD], Samples)
    assert answers[BAD].status == "out_of_resources"
    assert (answers[GONE].status, "no kernel 'gone'" in answers[GONE].detail) == ("unsupported", True)


def test_the_baseline_is_always_known() -> None:
    """The baseline is torch's own call, even where torch is not among the libtypes."""
    assert str(session().baseline(SHAPE)) == "torch:native"


@pytest.mark.parametrize("asked", [True, False])
def test_determinism_is_checked_only_on_request(asked: bool) -> None:
    """A kernel whose bits change is right; it is refused only with --deterministic."""
    count = iter(range(1000))

    def unsteady(solution, shape, x, weight):
        return torch.nn.functional.linear(x, weight) * (1.0 + 2.0**-22 * (next(count) % 2))

    registry = fake_registry(fake_backend("turbo", solutions=("good",), call=unsteady))
    timing = Session("a16w16", -1, Options(libtype="turbo", deterministic=asked), registry).check(SHAPE, GOOD)

    assert timing.status == ("nondeterministic" if asked else "ok")
    assert timing.deterministic is False


def test_bits_of_rows_are_measured_at_many_m() -> None:
    """A backend's claim does not count; operands that a call changes are made again."""
    group, sizes = attrs.evolve(SHAPE, m=0), (1, 16, 100)

    def by_size(solution, shape, x, weight):
        exact = (x.double() @ weight.double().t()).float()
        if solution.kernel_name == "gone":
            weight.zero_()
        return exact * (1.0 + 2.0**-20 * (x.shape[0] > 64)) if solution.kernel_name == "bad" else exact

    def refuse(shape, device):
        return Unsupported("one row is too few") if shape.m == 1 else None

    backend = fake_backend("turbo", solutions=("good", "bad", "gone"), call=by_size)
    refusing = fake_backend("turbo", solutions=("good",), call=by_size, supports=refuse)
    one, partly = (Session("a16w16", -1, Options(libtype="turbo"), fake_registry(each)) for each in (backend, refusing))

    changed, good, bad = (one.bits(group, solution, sizes) for solution in (GONE, GOOD, attrs.evolve(BAD, batch_invariant=True)))
    assert (changed.status, changed.bits, changed.detail) == ("wrong", "", "a later call changed its operands")
    assert (good.status, good.batch_invariant, good.detail) == ("ok", True, "")
    assert (bad.status, bad.batch_invariant, bad.bits) == ("batch_variant", False, "")
    assert one.check(SHAPE, GOOD).status == "ok"
    some = partly.bits(group, GOOD, sizes)
    assert (some.status, some.bits, some.detail) == ("ok", good.bits, "it refuses M = 1: one row is too few")


@pytest.mark.parametrize("place", ["bind", "call", "late"])
def test_a_solution_that_changes_torchs_switches_fails_alone(place: str) -> None:
    """The switches are restored, so the device and the others' times stay; the detail names them."""
    device, calls = device_of(-1), []

    def change() -> None:
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)

    def spoilt(solution, shape, x, weight):
        calls.append(solution)
        if solution == BAD and (place == "call" or (place == "late" and len(calls) > 40)):
            change()
        return x @ weight.t()

    def solutions(shape, device):
        return ["good", "bad"]

    backend = fake_backend("turbo", solutions=solutions, call=spoilt)
    bind = backend.functions["bind"]

    def bind_and_change(solution, shape, device):
        if solution == BAD and place == "bind":
            change()
        return bind(solution, shape, device)

    one = Session("a16w16", -1, Options(libtype="turbo"), fake_registry(with_hooks(backend, bind=bind_and_change)))
    with pytest.raises(PluginError, match="default device and torch's number of threads and torch's default dtype"):
        one.check(SHAPE, BAD)
        one.sample(SHAPE, (BAD,), 5)
    assert one.check(SHAPE, GOOD).status == "ok" and one.device == device_of(-1) == device
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")


@pytest.mark.parametrize("change", ["x.add_(1)", "weight.zero_()", "x.resize_(1)"])
@pytest.mark.parametrize("calls", [1, 5, 40])
def test_a_call_that_changes_operands_costs_its_solution_alone(change: str, calls: int) -> None:
    """Wherever a solution begins to change them, the others are checked and timed on right ones."""
    count = iter(range(10_000))

    def spoilt(solution, shape, x, weight):
        out = torch.nn.functional.linear(x, weight)
        if solution == BAD and next(count) >= calls - 1:
            exec(change)
        return out

    one = Session("a16w16", -1, Options(libtype="turbo"), fake_registry(fake_backend("turbo", solutions=("good", "bad"), call=spoilt)))
    statuses = [one.check_first(SHAPE, BAD).status, one.check(SHAPE, BAD).status, one.check(SHAPE, GOOD).status]
    assert (calls == 40) == (statuses[:2] == ["ok", "ok"]) and statuses[2] == "ok"
    with pytest.raises(DeviceFault, match="it changed its operands in a later call"):  # a new process tells which
        for _ in range(40):  # a busy machine calls less often in each
            one.sample(SHAPE, (BAD, GOOD), 5)
    alone = one.sample(SHAPE, (BAD,), 5)[BAD]
    assert isinstance(alone, Timing) and (alone.status, alone.detail) == ("wrong", "a later call changed its operands")
    assert isinstance(one.sample(SHAPE, (GOOD,), 2)[GOOD], Samples)
    assert one.check_again(SHAPE, GOOD).status == "ok" and one.check_again(SHAPE, BAD).status != "ok"


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), asyncio.CancelledError()])
def test_a_call_that_exits_is_an_error(error: BaseException) -> None:
    """A session in this process goes on, too."""

    def leave(solution, shape, x, weight):
        raise error

    one = Session("a16w16", -1, Options(libtype="turbo"), fake_registry(fake_backend("turbo", solutions=("good",), call=leave)))
    with pytest.raises(PluginError, match=f"it raised {type(error).__name__}"):
        one.check_first(SHAPE, GOOD)
