"""Compilers: an error, a hang or a death in a compiling process is the status of one solution
alone.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.tuner import compilers as compilers_module
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Event, Options, Outcome, Task
from tunedgemm.tuner.worker import Inline

PLUGIN = """
import os, sys, threading, time
from tunedgemm.plugin import Backend, Launcher, Solution, hookimpl
@hookimpl
def supports(): return None
@hookimpl
def enumerate_solutions(): return [Solution("brittle", name) for name in ("fine", "raises", "dies", "hangs", "exits")]
@hookimpl
def prepare(solution, shape):
    if solution.kernel_name == "raises": raise ValueError("no such register")
    if solution.kernel_name == "dies": os.abort()
    if solution.kernel_name == "hangs": time.sleep(60)
    if solution.kernel_name.startswith("takes"): time.sleep(float(solution.kernel_name.split()[1]))
    if solution.kernel_name == "exits": sys.exit("enough")
    if solution.kernel_name.startswith("noted"):
        with open(os.environ["NOTES"], "a") as notes: print(shape.m, solution.kernel_name, file=notes)
        while not os.path.exists(os.environ["NOTES"] + ".open"): time.sleep(0.02)
    if solution.kernel_name == "dies idle": threading.Timer(0.2, lambda: os._exit(3)).start()
@hookimpl
def bind(): return Launcher(lambda x, w: x @ w.t())
backend, slow = (Backend(libtype, sys.modules[__name__], ops=("a16w16",)) for libtype in ("brittle", "slow"))
"""


@pytest.fixture
def brittle(importable: Path) -> Registry:
    """The plugin, installed."""
    (importable / "brittle_compiler.py").write_text(PLUGIN)
    info = importable / "brittle_compiler-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle-compiler\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nbrittle = brittle_compiler:backend\nslow = brittle_compiler:slow\n")
    return Registry()


@pytest.mark.nightly
def test_each_way_to_fail_costs_one_candidate(brittle: Registry) -> None:
    """A compiler that raises, exits, aborts or hangs is the status of one solution."""
    registry, shape, device = brittle, Shape("a16w16", 1, 16, 32), device_of(-1)
    solutions = registry.get("brittle").solutions(shape, device)

    compilers = Compilers(jobs=2, timeout=20, registry=registry)
    compilers.begin(shape, solutions, device)
    compilers.drain()
    lost = {timing.solution.kernel_name: timing for timing in compilers.finish(shape, solutions, device)}
    compilers.stop()

    assert {name: timing.status for name, timing in lost.items()} == {
        "raises": "compile_failed",
        "dies": "compile_failed",
        "hangs": "compile_timeout",
        "exits": "compile_failed",
    }
    assert lost["exits"].detail == "SystemExit: enough"
    assert "no such register" in lost["raises"].detail
    assert "died: killed by SIGABRT" in lost["dies"].detail
    assert "20 s" in lost["hangs"].detail


def test_only_what_compiled_by_a_moment_is_ready(brittle: Registry) -> None:
    """Solutions that still compile at the moment are left out, and `finish` does not wait for the others."""
    shape, device = Shape("a16w16", 1, 16, 32), device_of(-1)
    fine, raises, hangs = (Solution("brittle", name) for name in ("fine", "raises", "hangs"))
    compilers = Compilers(jobs=3, registry=brittle)
    assert compilers.finish(shape, [Solution("brittle", "other")], device) == []  # the processes have started

    ready = compilers.ready(shape, [hangs, fine, raises], device, time.monotonic() + 8)
    assert compilers.compiled(shape, [hangs, fine, raises], device) == ready
    lost = compilers.finish(shape, ready, device)
    compilers.stop()

    assert ready == [fine, raises]
    assert [timing.solution for timing in lost] == [raises]


@pytest.mark.slow
def test_a_compiler_that_dies_idle_costs_no_candidate(brittle: Registry) -> None:
    """The pool breaks with it.

    The next solutions are compiled by another, and a stopped pool begins no task.
    """
    shape, device = Shape("a16w16", 1, 16, 32), device_of(-1)
    idle, fine = Solution("brittle", "dies idle"), Solution("brittle", "fine")
    compilers = Compilers(jobs=1, timeout=20, registry=brittle)
    assert compilers.finish(shape, [idle], device) == []
    deadline = time.monotonic() + 60
    while compilers._pool is not None and compilers._pool.active and time.monotonic() < deadline:
        time.sleep(0.05)

    assert compilers.finish(shape, [fine], device) == []
    compilers.stop()
    compilers.begin(shape, [fine], device)

    assert compilers._pool is None


@pytest.mark.slow
def test_a_slow_compiler_holds_up_neither_other_backends_nor_a_budget(brittle: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget waits once for long compilations among short ones, and for all of a libtype alone."""
    monkeypatch.setattr(compilers_module, "_LONG", 1.0)
    shapes, device = [Shape("a16w16", m, 16, 32) for m in range(1, 6)], device_of(-1)
    fast, takes = [Solution("brittle", f"fast {place}") for place in range(4)], [Solution("slow", f"takes 4.{place}") for place in range(2)]
    mixed, straggler = [*takes, *fast], [*fast, Solution("brittle", "hangs")]
    compilers = Compilers(jobs=4, registry=brittle)
    answers, seconds = [], []
    try:
        assert compilers.finish(shapes[0], fast, device) == []  # the processes have started
        for shape, solutions in zip(shapes, (mixed, mixed, mixed, takes, straggler), strict=True):
            begun = time.monotonic()
            answers.append(compilers.ready(shape, solutions, device, begun + 50))
            seconds.append(time.monotonic() - begun)
    finally:
        compilers.stop()

    assert answers == [fast, fast, fast, takes, fast]
    assert max(seconds[1:3]) < 1
    assert 4 <= seconds[3] < 40
    assert seconds[4] < 40


@pytest.mark.slow
def test_awaited_tasks_compile_first(brittle: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape's neighbours do not wait for the compilations of later shapes."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    shapes, device = [Shape("a16w16", m, 16, 32) for m in range(1, 4)], device_of(-1)
    ahead = [Solution("brittle", f"noted ahead {place}") for place in range(20)]
    waited = {shapes[0]: [Solution("brittle", "noted found")], shapes[2]: ahead[-3:]}
    compilers = Compilers(jobs=2, timeout=60, registry=brittle)
    try:
        for shape in shapes:
            compilers.begin(shape, ahead, device)
        waits = [threading.Thread(target=compilers.finish, args=[shape, found, device]) for shape, found in waited.items()]
        for thread in waits:
            thread.start()
        deadline = time.monotonic() + 60
        while len(compilers._running) < 2 + 4 and time.monotonic() < deadline:
            time.sleep(0.02)  # the two processes hold what they began until the notes are open
        (tmp_path / "notes.open").touch()
        for thread in waits:
            thread.join(timeout=60)
        order = notes.read_text().splitlines()
    finally:
        compilers.stop()

    assert {"1 noted found", "3 noted ahead 17", "3 noted ahead 18", "3 noted ahead 19"} <= set(order[:6]), order


@pytest.mark.slow
def test_spare_tasks_compile_last_and_are_dropped(brittle: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernels of a later shape precede the rest of an earlier one."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    (tmp_path / "notes.open").touch()
    shapes, device = [Shape("a16w16", m, 16, 32) for m in (1, 2, 3)], device_of(-1)
    first, rest = Solution("brittle", "noted first"), [Solution("brittle", f"noted rest {place}") for place in range(3)]
    compilers = Compilers(jobs=1, timeout=60, registry=brittle)
    try:
        with compilers._lock:  # nothing ends before all have begun
            for shape in shapes:
                compilers.begin(shape, [first], device)
                compilers.begin(shape, rest, device, spare=True)
            compilers.drop(shapes[1], device)
        compilers.drain()
    finally:
        compilers.stop()

    order = notes.read_text().splitlines()
    assert [line for line in order if line.startswith("2")] == []
    assert order[:2] == ["1 noted first", "3 noted first"]
    assert len(order) == 8


@pytest.mark.slow
def test_a_dropped_task_that_runs_does_not_stall_the_pool(
    brittle: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next task waits for it in the same pool, and `drain` until its deadline."""
    notes, device = tmp_path / "notes", device_of(-1)
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setattr("tunedgemm.tuner.compilers._STALLED", 1.0)
    shape, later = Shape("a16w16", 1, 16, 32), Shape("a16w16", 2, 16, 32)
    compilers = Compilers(jobs=1, registry=brittle)
    try:
        assert compilers.finish(shape, [Solution("brittle", "fine")], device) == []  # the pool has started
        compilers.begin(shape, [Solution("brittle", "noted")], device)
        while not notes.exists():
            time.sleep(0.02)
        compilers.drop(shape, device)
        compilers.begin(later, [Solution("brittle", "fine")], device)
        began = time.monotonic()
        compilers.drain(began + 4)
        assert time.monotonic() >= began + 4
        (tmp_path / "notes.open").touch()
        assert compilers.finish(later, [Solution("brittle", "fine")], device) == []
    finally:
        compilers.stop()
    assert "new ones take over" not in caplog.text


@pytest.mark.slow
def test_kernels_of_later_shapes_do_not_spend_the_budget(brittle: Registry) -> None:
    """Timing on a CPU waits for their compilations for half of the budget at most."""
    shape, options = Shape("a16w16", 1, 16, 32, "fp32"), Options(libtype="torch", iters=8, warmup=1, budget=8.0)
    compilers = Compilers(jobs=1, registry=brittle)
    worker = Inline(functools.partial(Session, "a16w16", -1, options, brittle))
    tuner = DeviceTuner(op_named("a16w16"), options, worker, compilers, {"torch": 0})
    tuner.begin()
    compilers.begin(attrs.evolve(shape, m=2), [Solution("brittle", "hangs")], device_of(-1))
    events: list[Event] = []
    try:
        tuner.tune(Task(shape), (), events.append, time.monotonic() + options.budget)
    finally:
        compilers.stop()
    assert isinstance(events[-1], Outcome) and events[-1].winner is not None


@pytest.mark.slow
def test_a_stalled_pool_is_replaced(brittle: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Processes that hold the queue and do not go on cost time, no candidate."""
    shape, device = Shape("a16w16", 1, 16, 32), device_of(-1)
    monkeypatch.setattr("tunedgemm.tuner.compilers._STALLED", 3.0)
    compilers = Compilers(jobs=2, registry=brittle)
    before = multiprocessing.active_children()
    assert not compilers.finish(shape, [Solution("brittle", "fine")], device)
    for child in multiprocessing.active_children():
        if child not in before and child.pid:
            os.kill(child.pid, signal.SIGSTOP)
    assert not compilers.finish(shape, [Solution("brittle", f"fine {place}") for place in range(4)], device)
    assert [record.message for record in caplog.records if "new ones take over" in record.message]
    compilers.stop()


def test_backends_without_prepare_start_no_process() -> None:
    """The built-in backend compiles nothing, so nothing is started."""
    compilers = Compilers(registry=Registry(entries=()))

    assert compilers.finish(Shape("a16w16", 1, 16, 32), [Solution("torch", "native")], device_of(-1)) == []
    assert compilers._pool is None


def test_the_device_is_absent_in_a_compiling_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `prepare` nor `supports`, which precedes it, may open the device or its library there."""
    asked: list[bool] = []
    noting = with_hooks(
        fake_backend("mine"),
        supports=lambda device: asked.append(device.is_present),
        prepare=lambda device: asked.append(device.is_present),
    )
    monkeypatch.setattr(compilers_module, "_registry", fake_registry(noting))
    solution, shape = Solution("mine", "fake"), Shape("a16w16", 1, 16, 32)
    assert compilers_module._prepare(Device("sm_90", 132, "nvidia-h200", 0), shape, solution) == ""
    assert asked == [False, False]


def test_a_compiling_process_loads_no_torch(child) -> None:
    """A pool of one for each core is there at once, and in little memory.

    Neither a backend nor its arguments make it load torch.
    """
    pytest.importorskip("tunedgemm_triton")
    shape = Shape("a16w16", 1, 16, 32, dtype="bf16", outdtype="bf16")
    triton = Registry().get("triton")
    assert isinstance(triton, Backend)
    solution = triton.solutions(shape, Device("sm_90", 132, "nvidia-h200"))[0]
    given = pickle.dumps((attrs.evolve(device_of(-1), gfx="sm_90", cu_num=132), shape, solution))
    source = (
        "import pickle, sys, tunedgemm.tuner.compilers as here\nhere._load(['triton'])\n"
        f"print(here._prepare(*pickle.loads({given!r})), 'torch' in sys.modules)"
    )

    assert child(source) == "False"
