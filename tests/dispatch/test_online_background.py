"""Online tuning in the background: calls are served at once, and rows arrive between them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch import online
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
LINEAR = torch.nn.functional.linear
TORCHS, OURS = "torch:native", "turbo:b"
#: Seconds after which an event counts as missing.
LATE = 60.0

#: A workload that calls until a row serves or the seconds are over, and prints the solution.
WORKLOAD = """
import sys, time, torch, tunedgemm
from tunedgemm.device import device_of
x, weight = torch.ones(4, 64), torch.ones(32, 64)
shape, end = tunedgemm.dispatcher().op.shape_of(x, weight), time.monotonic() + float(sys.argv[1])
served = lambda: tunedgemm.dispatcher().bound(shape, device_of(-1)).offer.solution
while time.monotonic() < end:
    assert (tunedgemm.gemm_a16w16(x, weight) == 64).all()
    if served().libtype != "torch":
        break
    time.sleep(0.01)
print(served(), sorted({"tunedgemm.tuner", "pandas", "filelock"} & set(sys.modules)), flush=True)
"""


class FakeTuner:
    """Stands in for the tuner's process: notes what it is asked, waits, writes a row, answers.

    Attributes:
        answer: exit code and last line.
        asked: calls by shape, and seconds, of each start.
        go: set when it may end.
    """

    def __init__(self, table: Path, answer: tuple[int | None, str] = (0, "done"), *, stores: bool = True) -> None:
        self.table, self.answer, self.stores = table, answer, stores
        self.asked: list[tuple[dict[Shape, int], float]] = []
        self.go, self.begun = threading.Event(), threading.Event()

    def __call__(
        self, calls: Mapping[Shape, int], device: Device, seconds: float, libtype: str, goes_on: Callable[[], bool]
    ) -> tuple[int | None, str]:
        self.asked.append((dict(calls), seconds))
        self.begun.set()
        while not self.go.wait(0.01) and goes_on():
            pass
        if self.answer[0] is None:
            time.sleep(seconds)
        if self.stores:
            put(self.table, *calls)
        return self.answer


def put(path: Path, *shapes: Shape) -> None:
    """Write a table with a row of ours for each shape."""
    here = device_of(-1)
    path.parent.mkdir(exist_ok=True)
    rows = [Row(shape=s, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=Solution("turbo", "b"), us=1.0) for s in shapes]
    write_rows(path, OP, rows)


def registry(calls: list[str] | None = None) -> Registry:
    """Return a registry with a backend that notes each call."""

    def noting(solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
        if calls is not None:
            calls.append(str(solution))
        return LINEAR(*operands)

    return fake_registry(fake_backend("turbo", solutions=("b",), call=noting))


def operands(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 64), torch.randn(n, 64)


def served(dispatcher: Dispatcher, shape: Shape = SHAPE) -> str:
    """Return the solution to which a shape is bound now."""
    return str(dispatcher.bound(shape, device_of(-1)).offer.solution)


def until(condition: Callable[[], Any], seconds: float = LATE) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at tables and begin to tune within hundredths of a second."""
    monkeypatch.setattr(online, "_LOOK", 0.02)
    monkeypatch.setattr(online, "_COUNTED", 0.2)
    monkeypatch.setattr(online, "_SHARE", 1.0)


@pytest.fixture
def table(home: Path) -> Path:
    return home / "bf16_tuned_gemm.csv"


@pytest.fixture
def fake(table: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    """Install the fake tuner."""
    tuner = FakeTuner(table)
    monkeypatch.setattr(online, "_run_tuner", tuner)
    return tuner


@pytest.fixture
def serving(request: pytest.FixtureRequest) -> Iterator[Callable[..., TunedGemm]]:
    """Return a function that makes instances with online tuning in the background; it ends with the test."""
    made: list[TunedGemm] = []

    def make(using: Registry | None = None, **fields: Any) -> TunedGemm:
        seconds = 100.0 + len(online._backgrounds)  # its own thread and its own seconds
        settings = evolve(Settings(background=True, online_seconds=seconds), **fields)
        made.append(TunedGemm(using or registry(), settings=settings))
        return made[-1]

    yield make
    for gemm in made:
        for dispatcher in gemm.dispatchers:
            dispatcher.background = None


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_calls_are_served_while_tuning_and_rows_arrive_between_them(
    mode: Callable[[], Any], fake: FakeTuner, serving: Callable[..., TunedGemm]
) -> None:
    """Calls run untuned until the row is there, then by the row; the tuner gets the numbers of calls."""
    calls: list[str] = []
    gemm = serving(registry(calls))
    with mode():
        (x, weight), other = operands(), operands(48)
        gemm.gemm_a16w16(*other)
        outs = [gemm.gemm_a16w16(each, weight) for each in (x, x[None]) for _ in range(5)]
        assert all(torch.equal(out.view(4, 32), LINEAR(x, weight)) for out in outs)
        fake.begun.wait(LATE)
        gemm.gemm_a16w16(x, weight)
        assert not calls and served(gemm.dispatcher) == TORCHS
        fake.go.set()
        until(lambda: torch.equal(gemm.gemm_a16w16(x, weight), LINEAR(x, weight)) and calls)
        gemm.gemm_a16w16(x[None], weight)
        gemm.gemm_a16w16(*other)

    assert served(gemm.dispatcher) == OURS and len(calls) == 3
    [(shapes, _)] = fake.asked
    assert shapes == {SHAPE: 10, evolve(SHAPE, n=48): 1}


def test_shapes_are_counted_only_until_the_tuner_begins(fake: FakeTuner, serving: Callable[..., TunedGemm]) -> None:
    """Then their launchers are those of dispatch without online tuning."""
    gemm, plain, (x, weight) = serving(), TunedGemm(registry(), settings=Settings()), operands()

    def launcher(instance: TunedGemm) -> str:
        instance.gemm_a16w16(x, weight)
        [launcher] = instance.dispatcher.launchers.values()
        return launcher.__qualname__

    assert launcher(gemm) != launcher(plain)
    fake.begun.wait(LATE)
    until(lambda: launcher(gemm) == launcher(plain))


def test_a_shape_with_a_row_and_an_empty_batch_are_not_tuned(table: Path, fake: FakeTuner, serving: Callable[..., TunedGemm]) -> None:
    """Nor is a call that needs a gradient; no thread starts for them."""
    put(table, SHAPE)
    gemm = serving()
    gemm.gemm_a16w16(*operands())
    gemm.gemm_a16w16(torch.randn(0, 64), torch.randn(48, 64))
    gemm.gemm_a16w16(torch.randn(4, 64), torch.randn(48, 64, requires_grad=True))

    assert gemm.dispatcher.background._thread is None and not gemm.dispatcher.background._waiting


def test_a_graph_of_autograd_survives_the_row(fake: FakeTuner, serving: Callable[..., TunedGemm]) -> None:
    """The gradient of a call before the row arrived is right after it."""
    gemm, (x, weight) = serving(), operands()
    needing = weight.clone().requires_grad_()
    before = gemm.gemm_a16w16(x, needing)
    fake.go.set()
    until(lambda: gemm.gemm_a16w16(x, weight) is not None and served(gemm.dispatcher) == OURS)

    (before.sum() + gemm.gemm_a16w16(x, needing).sum()).backward()

    torch.testing.assert_close(needing.grad, 2 * x.sum(0).expand(32, 64))


def test_a_call_inside_a_capture_keeps_its_binding(
    fake: FakeTuner, serving: Callable[..., TunedGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is captured, the earlier launcher serves; the next call outside binds the row."""
    gemm, (x, weight) = serving(), operands()
    gemm.gemm_a16w16(x, weight)
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.may_synchronize", lambda operand: False)
    fake.go.set()
    until(lambda: gemm.dispatcher.cache.outdated)

    for _ in range(2):
        torch.testing.assert_close(gemm.gemm_a16w16(x, weight), LINEAR(x, weight))
    assert served(gemm.dispatcher) == TORCHS and not gemm.dispatcher.launchers
    monkeypatch.undo()
    gemm.gemm_a16w16(x, weight)
    assert served(gemm.dispatcher) == OURS and len(gemm.dispatcher.launchers) == 1


def test_threads_get_the_row(fake: FakeTuner, serving: Callable[..., TunedGemm], hasty_switches: None) -> None:
    """Threads that call while rows arrive get right products, and all keys end at the row."""
    gemm = serving()
    shapes = [evolve(SHAPE, n=16 * n) for n in range(1, 9)]
    given = [operands(shape.n) for shape in shapes]
    faults: list[str] = []
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            faults.extend("wrong" for x, weight in given if not torch.equal(gemm.gemm_a16w16(x, weight), LINEAR(x, weight)))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    fake.go.set()
    until(lambda: all(served(gemm.dispatcher, shape) == OURS for shape in shapes))
    over.set()
    for thread in threads:
        thread.join()

    assert not faults
    for x, weight in given:
        gemm.gemm_a16w16(x, weight)
    assert {str(entry.solution) for entry in gemm.dispatcher.cache._served.values()} == {OURS}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_reads_rows_and_tunes_nothing(
    one_thread: None, table: Path, fake: FakeTuner, serving: Callable[..., TunedGemm], in_child: Callable[..., str]
) -> None:
    """It serves, binds a row that arrives, and starts no tuner for new shapes."""
    gemm, (x, weight) = serving(), operands()
    gemm.gemm_a16w16(x, weight)
    fake.begun.wait(LATE)

    def work() -> bool:
        asked = len(fake.asked)
        gemm.gemm_a16w16(*operands(48))
        put(table, SHAPE)
        until(lambda: gemm.gemm_a16w16(x, weight) is not None and served(gemm.dispatcher) == OURS, 5)
        return len(fake.asked) == asked

    assert in_child(work) == "served"


@pytest.mark.parametrize(
    ("answer", "said"),
    [((-9, "warnings.warn("), "exit code -9"), ((1, "no room"), "no room"), ((online.HELD, ""), ""), ((None, ""), "")],
    ids=["killed", "failed", "another tunes", "seconds are over"],
)
def test_a_tuner_that_ends_costs_the_tuning_alone(
    answer: tuple[int | None, str],
    said: str,
    table: Path,
    fake: FakeTuner,
    serving: Callable[..., TunedGemm],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its end is said once at most, calls are served, no tuner starts again, and rows of others serve."""
    fake.answer, fake.stores = answer, False
    fake.go.set()
    gemm, (x, weight) = serving(online_seconds=0.05 if answer[0] is None else 1000.0 + len(online._backgrounds)), operands()
    gemm.gemm_a16w16(x, weight)
    until(lambda: fake.asked and (gemm.dispatcher.background._left <= 0))
    gemm.gemm_a16w16(*operands(48))
    time.sleep(0.5)
    put(table, SHAPE)
    until(lambda: torch.equal(gemm.gemm_a16w16(x, weight), LINEAR(x, weight)) and served(gemm.dispatcher) == OURS)

    assert len(fake.asked) == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(said) and all(said in warning for warning in warnings)


def test_reloading_without_the_variable_ends_it(fake: FakeTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner and the thread end once no dispatcher asks for them."""
    monkeypatch.setenv("TUNEDGEMM_ONLINE", "background")
    monkeypatch.setenv("TUNEDGEMM_ONLINE_SECONDS", "77")
    dispatcher = Dispatcher(OP, registry())
    background = dispatcher.background
    dispatcher.call(*operands())
    fake.begun.wait(LATE)
    monkeypatch.delenv("TUNEDGEMM_ONLINE")
    dispatcher.reload()

    until(lambda: background._thread is None)
    assert dispatcher.background is None and dispatcher.on_miss is None


def test_a_freed_instance_ends_its_tuner(fake: FakeTuner, serving: Callable[..., TunedGemm]) -> None:
    """Nothing of online tuning keeps a dispatcher alive while the tuner runs."""
    dispatcher = Dispatcher(OP, registry(), settings=Settings(background=True, online_seconds=55.5))
    background, alive = dispatcher.background, weakref.ref(dispatcher)
    dispatcher.call(*operands())
    fake.begun.wait(LATE)
    del dispatcher

    until(lambda: gc.collect() is not None and background._thread is None, 10)
    assert alive() is None


def test_reading_tables_costs_a_share_of_a_core(table: Path, serving: Callable[..., TunedGemm], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that takes long to read is not read at each look, also while the tuner stores rows."""
    monkeypatch.setattr(online, "_SHARE", 1e-9)
    dispatcher = serving().dispatcher
    renewed: list[int] = []
    monkeypatch.setattr(dispatcher, "renew", lambda: renewed.append(sum(range(100_000))))
    for shapes in ([SHAPE], [SHAPE, evolve(SHAPE, n=48)]):
        put(table, *shapes)
        dispatcher.background._look()

    assert len(renewed) == 1


def test_an_error_of_a_look_costs_the_tuning_alone(
    table: Path, fake: FakeTuner, serving: Callable[..., TunedGemm], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread goes on and reads later rows."""
    gemm, (x, weight) = serving(), operands()
    gemm.gemm_a16w16(x, weight)
    raised: list[bool] = []

    def raises() -> None:
        raised.append(True)
        monkeypatch.delattr(gemm.dispatcher, "renew")
        raise MemoryError("no room")

    monkeypatch.setattr(gemm.dispatcher, "renew", raises, raising=False)
    put(table, evolve(SHAPE, n=48))
    until(lambda: raised)
    time.sleep(0.1)
    put(table, SHAPE, evolve(SHAPE, n=48))

    until(lambda: gemm.gemm_a16w16(x, weight) is not None and served(gemm.dispatcher) == OURS, 10)
    assert "ended in this process: MemoryError: no room" in caplog.text


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a workload that tunes in the background with the backend `notes`."""
    path = os.pathsep.join(filter(None, sys.path))
    own = {"TUNEDGEMM_ONLINE": "background", "TUNEDGEMM_ONLINE_LIBTYPE": "notes", "TUNEDGEMM_ONLINE_SECONDS": "100"}
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **own, **more}


def start(seconds: float, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKLOAD, str(seconds)], env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_of_two_processes_one_tunes_and_both_get_the_row(notes: Path, home: Path, descendants: Callable[[], list[str]]) -> None:
    """Neither loads the tuner; one tunes the shape, perhaps in two passes, and no process is left."""
    processes = [start(120), start(120)]

    said = [process.communicate(timeout=300)[0].strip() for process in processes]

    assert said == ["notes:linear_v1 []"] * 2
    assert set(notes.read_text().splitlines()) == {"tuned with []"}
    assert [(row.shape, str(row.solution)) for row in read_rows(home / "bf16_tuned_gemm.csv", OP)[0]] == [(SHAPE, "notes:linear_v1")]
    until(lambda: not descendants())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_the_end_of_the_process_ends_its_tuner(end: signal.Signals, notes: Path, descendants: Callable[[], list[str]]) -> None:
    """Also of a killed one, while a kernel hangs; no process is left within seconds."""
    process = start(100, NOTES_KIND="hangs")
    until(notes.exists)
    assert len(descendants()) > 1

    process.send_signal(end)
    process.communicate(timeout=60)

    until(lambda: not descendants(), 10)


@pytest.mark.nightly
def test_the_tuner_ends_with_its_seconds(notes: Path, descendants: Callable[[], list[str]]) -> None:
    """A kernel that hangs is killed with it, while the process still serves untuned."""
    process = start(25, NOTES_KIND="hangs", TUNEDGEMM_ONLINE_SECONDS="8")
    until(lambda: len(descendants()) > 1)
    started = time.monotonic()
    until(lambda: len(descendants()) == 1)

    assert time.monotonic() - started < 8 + 4
    out, errors = process.communicate(timeout=120)
    assert out.strip() == "torch:native []" and "Error" not in errors
