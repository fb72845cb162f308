"""Verification: a share of the calls is compared with torch's, and a wrong kernel is denied."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch import verification
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row
from tunedgemm.table.deny import DenyList, user_list
from tunedgemm.table.lookup import Table
from tunedgemm.testing.fakes import fake_backend, fake_registry

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 24, 64, 128)
RIGHT = torch.nn.functional.linear
Kernel = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(24, 128).bfloat16(), torch.randn(64, 128).bfloat16()


def with_rows(out: torch.Tensor, rows: slice, value: float) -> torch.Tensor:
    out[rows] = value
    return out


def stale(number: int, x: torch.Tensor, weight: torch.Tensor, kept: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006 - its workspace
    kept.append(RIGHT(x, weight))
    return kept[-2] if number and len(kept) > 1 else kept[-1]


#: Faults of kernels: what a call computes, by its number.
FAULTS: dict[str, Kernel] = {
    "another scale": lambda number, x, weight: RIGHT(x, weight) * 1.1,
    "a half-written output": lambda number, x, weight: with_rows(RIGHT(x, weight), slice(12, None), 0.0),
    "rows never written": lambda number, x, weight: with_rows(RIGHT(x, weight), slice(23, None), float("nan")),
    "a short K": lambda number, x, weight: RIGHT(x[:, :96], weight[:, :96]),
    "rows in another order": lambda number, x, weight: RIGHT(x, weight).flip(0),
    "columns in another order": lambda number, x, weight: RIGHT(x, weight).roll(1, 1),
    "a race, every fourth call": lambda number, x, weight: (
        with_rows(RIGHT(x, weight), slice(5, 6), 0.0 if number % 4 == 3 else 1e-9) if number % 4 == 3 else RIGHT(x, weight)
    ),
    "a library replaced after ten calls": lambda number, x, weight: RIGHT(x, weight) + (number >= 10),
    "a stale workspace": stale,
    "an output added twice": lambda number, x, weight: RIGHT(x, weight) * 2,
}


def dispatcher(kernel: Kernel, share: float) -> tuple[Dispatcher, list[int]]:
    here, calls, numbers = current_device(), [], itertools.count()

    def call(solution: Solution, shape: Shape, *given: torch.Tensor) -> torch.Tensor:
        calls.append(number := next(numbers))
        return kernel(number, *given[:2])

    row = Row(gfx=here.gfx, cu_num=here.cu_num, device=here.name, shape=SHAPE, us=1.0, solution=Solution("turbo", "k"))
    backend = fake_backend("turbo", solutions=("k",), call=call)
    return Dispatcher(OP, fake_registry(backend), settings=Settings(untuned=(), verify=share), table=Table(OP, [[row]])), calls


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_in_the_expected_calls(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that is wrong in a share of its calls is denied soon after, and torch serves then."""
    torch.manual_seed(0)
    made, calls = dispatcher(FAULTS[fault], share=0.2)
    for _ in range(400):
        made.call(*operands())
    assert len(calls) < 200
    (entry,) = DenyList.load().entries
    assert (entry.libtype, entry.kernel, dict(entry.fields)["M"]) == ("turbo", "k", "24")
    (record,) = [one for one in caplog.records if "will not be used" in one.getMessage()]
    assert "a verified call differs from torch's" in record.getMessage() and str(SHAPE) in record.getMessage()
    x, weight = operands()
    assert torch.equal(made.call(x, weight), RIGHT(x, weight)) and made.explain(SHAPE).libtype == "torch"
    assert "a verified call: " in str(Dispatcher(OP, made.registry, settings=Settings(untuned=()), table=made.table).explain(SHAPE))


def test_a_right_kernel_stays(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that differs by rounding, and inputs without finite results, deny nothing."""
    made, calls = dispatcher(lambda number, x, weight: (x.double() @ weight.double().T).bfloat16(), share=1.0)
    for factor in (1.0, 1e-30, 0.0, float("inf"), float("nan")):
        x, weight = operands()
        made.call(x * factor, weight)
    assert len(calls) == 5 and not user_list().exists() and caplog.records == []


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 1000, 1000), (0.1, 50, 200), (0.01, 2, 40), (1e-9, 1, 1)])
def test_the_share_is_that_of_the_calls(monkeypatch, share: float, least: int, most: int) -> None:
    """The first call is verified, and then a random share."""
    verified: list[Any] = []
    right = torch.zeros(2)
    monkeypatch.setattr(verification._Samples, "_compared", lambda self, *call: (verified.append(call), right)[1])
    made, calls = dispatcher(lambda number, x, weight: RIGHT(x, weight), share)
    given = operands()
    for number in range(1000):
        made.call(*given)
        assert number or len(verified) == 1
    assert least <= len(verified) <= most and len(calls) == 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_cancel_are_judged_by_the_others(dtype: torch.dtype) -> None:
    """Outputs of one column, and a bias that cancels a product, deny no kernel that rounds otherwise."""
    tolerance = OP.tolerance(attrs.evolve(SHAPE, outdtype="bf16" if dtype is torch.bfloat16 else "fp32"))
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(256, 512, generator=draw).to(dtype), torch.randn(1, 512, generator=draw).to(dtype)
        bias = (5 * torch.randn(1, generator=draw)).to(dtype)
        exact = x.double() @ weight.double().T + bias.double()
        for out in (RIGHT(x, weight) + bias, exact.to(dtype)):
            ratio, worst = verification.errors_of(out, RIGHT(x, weight, bias), tolerance).tolist()
            assert ratio <= verification.MAX_ERROR_RATIO and worst <= 2 * tolerance.row_error, (seed, ratio, worst)


def test_a_row_without_a_finite_expectation_hides_no_other() -> None:
    """Padding with infinities says nothing of its rows, and the others are judged; fp8 outputs are, too."""
    x, weight = operands()
    x[3] = float("inf")
    expected = RIGHT(x, weight)
    tolerance = OP.tolerance(SHAPE)
    assert verification.errors_of(expected * 1.5, expected, tolerance)[1] > 0.4
    assert verification.errors_of(expected, expected, tolerance).tolist() == [0.0, 0.0]
    narrow = (RIGHT(*operands()) / 64).to(torch.float8_e4m3fn)
    assert verification.errors_of(torch.zeros_like(narrow), narrow, tolerance)[1] > 0.9


def test_threads_read_pending_results_once(hasty_switches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that sample at once blame no kernel for a result that another has read."""

    class Event:
        def query(self) -> bool:
            return True

    made, _ = dispatcher(lambda number, x, weight: RIGHT(x, weight), 1.0)
    given, right = operands(), torch.zeros(2)
    samples = verification._Samples(made, 1.0, RIGHT, SHAPE, current_device(), Solution("turbo", "k"))
    monkeypatch.setattr(verification._Samples, "_keep", lambda self, errors: self.pending.append((right, Event())))
    function, errors = samples.function(), []

    def call() -> None:
        try:
            for _ in range(100):
                function(*given)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and not user_list().exists()


def test_off_adds_nothing_to_a_call() -> None:
    """Without a share the cache holds the backend's launcher itself."""
    made, _ = dispatcher(lambda number, x, weight: RIGHT(x, weight), 0.0)
    made.call(*operands())
    (launcher,) = made.launchers.values()
    assert launcher.__qualname__.startswith("FakeHooks.bind")


def test_pending_results_are_read_later() -> None:
    """A comparison is judged once the device has finished it, and no call waits for that."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    made, calls = dispatcher(FAULTS["another scale"], 1e-9)
    samples = verification._Samples(made, 1e-9, lambda *given: RIGHT(*given) * 1.1, SHAPE, current_device(), Solution("turbo", "k"))
    event = Event()
    samples.pending.append((torch.tensor([0.5, 0.1]), event))  # type: ignore[arg-type]
    function = samples.function()
    for _ in range(100):
        function(*operands())
    assert samples.pending and not user_list().exists()
    event.done = True
    for _ in range(verification._SOON):
        function(*operands())
    assert not samples.pending and user_list().exists() and calls == []


def test_torch_that_refuses_and_a_list_that_cannot_be_written(monkeypatch, caplog) -> None:
    """Serving goes on where torch cannot compute a call, and where the deny list is closed."""
    made, calls = dispatcher(FAULTS["another scale"], 1.0)

    def refusing(*given: object) -> Any:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(Dispatcher, "torch_fallback", lambda self, *place: refusing)
    for _ in range(3):
        made.call(*operands())
    (record,) = caplog.records
    assert len(calls) == 3 and "calls cannot be verified: torch raised not on this device" in record.getMessage()
    monkeypatch.undo()
    caplog.clear()
    monkeypatch.setenv("TUNEDGEMM_HOME", "/proc/none")
    made, calls = dispatcher(FAULTS["another scale"], 1.0)
    made.call(*operands())
    assert made.explain(SHAPE).libtype == "torch" and "denied in this process alone" in caplog.text


@pytest.mark.parametrize(
    ("text", "share", "warns"), [("", 0.0, 0), ("0", 0.0, 0), ("1e-6", 1e-6, 0), ("1", 1.0, 0), ("2", 0.0, 1), ("yes", 0.0, 1)]
)
def test_the_variable_is_a_share(monkeypatch, caplog, text: str, share: float, warns: int) -> None:
    """A share is from 0 to 1; anything else is named once and means off."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("TUNEDGEMM_VERIFY", text)
    settings = Settings.from_environment()
    assert (settings.verify, attrs.evolve(settings, verify=0.5).passive.verify) == (share, 0.0)
    assert caplog.text.count("TUNEDGEMM_VERIFY: must be a share from 0 to 1") == warns
