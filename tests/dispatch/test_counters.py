"""Counters: who serves how many calls, at no cost between the windows, in bounded memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.dispatch import cache, counters
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import fake_backend, fake_registry

OP = op_named("a16w16")
COUNTED = Settings(untuned=(), metrics=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start at 0, without the thread that opens windows."""
    for name, value in (("_counters", {}), ("_events", {}), ("_shapes", set()), ("_caches", weakref.WeakSet()), ("_threads", [None])):
        monkeypatch.setattr(counters, name, value)


def dispatcher(path: Path, settings: Settings = COUNTED, call: Callable[..., Any] | None = None) -> Dispatcher:
    """Return a dispatcher with rows of torch for M = 3 and 16, and of `turbo` for 5."""
    here = current_device()
    turbo = Solution("turbo", "k")
    rows = [
        Row(Shape("a16w16", m, 32, 64, "fp32", "fp32"), here.gfx, here.cu_num, here.name, solution, 5.0)
        for m, solution in ((3, Solution("torch", "native")), (16, Solution("torch", "native")), (5, turbo))
    ]
    write_rows(path, OP, rows)
    given = {} if call is None else {"call": call}
    return Dispatcher(OP, fake_registry(fake_backend("turbo", solutions=("k",), heuristic="k", **given)), above=(path,), settings=settings)


def serve(served: Dispatcher, m: int, calls: int = 1) -> None:
    x, weight = torch.randn(m, 64), torch.randn(32, 64)
    for _ in range(calls):
        served.call(x, weight)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the seconds of the caches' clock."""
    now = [0.0]
    monkeypatch.setattr(cache, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, seconds)


def test_calls_are_counted_by_tier(tmp_path: Path) -> None:
    """Rows of the same M, of a larger M, guesses and torch's call have counts, and misses names."""
    served = dispatcher(tmp_path / "tuned.csv")
    for m, calls in ((3, 4), (9, 3), (5, 2), (100, 5)):
        serve(served, m, calls)
    guessing = dispatcher(tmp_path / "tuned.csv", attrs.evolve(COUNTED, untuned=("turbo",)))
    serve(guessing, 101, 6)
    found = tunedgemm.metrics()
    assert found["calls"] == {
        ("a16w16", "torch", "exact"): 4, ("a16w16", "torch", "padded"): 3, ("a16w16", "turbo", "exact"): 2,
        ("a16w16", "torch", "torch"): 5, ("a16w16", "turbo", "untuned"): 6,
    }  # fmt: skip
    assert {shape.split()[1]: calls for (_, shape), calls in found["misses"].items()} == {"M=100": 5, "M=101": 6}
    offer = served.explain(Shape("a16w16", 3, 32, 64, "fp32", "fp32")).offer
    assert counters.tier_of(attrs.evolve(offer, table_layer="shipped")) == "shipped"


def test_windows_extrapolate(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """A call in a window stands for the time between windows; other calls run the bare launcher."""
    served = dispatcher(tmp_path / "tuned.csv")
    serve(served, 3, 4)
    clock(1.0)
    served.cache.close_window()
    ((key, bare),) = served.launchers.items()
    serve(served, 3, 1000)
    clock(4.5)
    served.cache.open_window()
    assert served.launchers[key] is not bare
    serve(served, 3, 10)
    clock(5.0)
    served.cache.close_window()
    assert served.launchers[key] is bare
    found, place = tunedgemm.metrics(), ("a16w16", "torch", "exact")
    assert found["calls"] == {place: 4 + 10 * (4.0 / 0.5)}
    assert found["timed_calls"] == {place: 3 + 10} and found["host_microseconds"][place] > 0


def test_a_window_counts_a_bounded_number_of_launchers(tmp_path: Path, clock: Callable[[float], None], monkeypatch) -> None:
    """Of more launchers a random part is counted, and stands for all."""
    monkeypatch.setattr(cache, "MAX_COUNTED", 2)
    served = dispatcher(tmp_path / "tuned.csv")
    for m in (100, 200, 300, 400):
        serve(served, m)
    served.cache.close_window()
    clock(1.0)
    served.cache.open_window()
    clock(2.0)
    for m in (100, 200, 300, 400):
        serve(served, m, 10)
    served.cache.close_window()
    assert tunedgemm.metrics()["calls"]["a16w16", "torch", "torch"] == 4 + 2 * 10 * 2.0 * 2.0


def test_a_kernel_that_fails_in_a_window_does_not_come_back(tmp_path: Path) -> None:
    """Its demotion is counted, and the end of the window does not put it back."""
    fails, failures = False, []

    def call(solution: Solution, shape: Shape, *given: torch.Tensor) -> torch.Tensor:
        if fails:
            failures.append(shape)
            raise RuntimeError("no")
        return torch.nn.functional.linear(*given[:2])

    served = dispatcher(tmp_path / "tuned.csv", call=call)
    serve(served, 5)
    served.cache.close_window()
    served.cache.open_window()
    fails = True
    serve(served, 5, 3)
    served.cache.close_window()
    assert tunedgemm.metrics()["demotions"] == {("a16w16", "turbo"): 1} and len(failures) == 1
    assert served.explain(Shape("a16w16", 5, 32, 64, "fp32", "fp32")).libtype == "torch"
    serve(served, 5, 2)


def test_a_launcher_that_is_removed_while_a_window_begins_does_not_come_back(tmp_path: Path) -> None:
    """Removing waits for the window, which would put the launcher back, as keeping does."""
    served = dispatcher(tmp_path / "tuned.csv")
    serve(served, 3)
    ((key, entry),) = served.cache._served.items()
    for change in (lambda: served.cache.take(key), lambda: served.cache.keep(key, entry)):
        thread = threading.Thread(target=change)
        with served.cache.lock:
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join()


def test_verified_calls_are_counted(tmp_path: Path) -> None:
    """Each comparison with torch's call is one."""
    served = dispatcher(
        tmp_path / "tuned.csv", attrs.evolve(COUNTED, verify=1.0), lambda _, __, *given: torch.nn.functional.linear(*given[:2])
    )
    serve(served, 5, 7)
    assert tunedgemm.metrics()["verifications"] == {("a16w16", "turbo"): 7}


def test_off_wraps_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable the cache holds the launcher itself, and no thread runs."""
    monkeypatch.setattr(counters, "_threads", [])
    served = dispatcher(tmp_path / "tuned.csv", Settings(untuned=()))
    serve(served, 3)
    ((key, launcher),) = served.launchers.items()
    behind = served.cache.behind(key, launcher)
    assert behind is not None and behind.counter is None and counters._threads == [] and tunedgemm.metrics()["calls"] == {}


def test_many_shapes_take_no_memory(tmp_path: Path) -> None:
    """300,000 untuned shapes are as many labels as the first few hundred, and none is lost."""
    held = dispatcher(tmp_path / "tuned.csv").cache
    offer = dispatcher(tmp_path / "tuned.csv").explain(Shape("a16w16", 999, 32, 64, "fp32", "fp32")).offer
    for number in range(300_000):
        counters.counter_of(held, SimpleNamespace(op=OP, shape=number), offer)  # type: ignore[arg-type]
    found = tunedgemm.metrics()
    assert len(counters._counters) == len(found["misses"]) == counters.MAX_SHAPES + 1
    assert found["misses"]["a16w16", counters.OTHERS] == 300_000 - counters.MAX_SHAPES and sum(found["calls"].values()) == 300_000


def test_the_thread_opens_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting begins with the first call, and goes on in windows."""
    monkeypatch.setattr(counters, "_threads", [])
    monkeypatch.setattr(counters, "WINDOW", 0.02)
    monkeypatch.setattr(counters, "PAUSE", 0.02)
    served, start = dispatcher(tmp_path / "tuned.csv"), time.monotonic()
    while len(counters._counters) == 0 or next(iter(counters._counters.values())).calls < 500:
        serve(served, 3, 10)
        assert time.monotonic() - start < 30
    (thread,) = counters._threads
    assert thread.daemon and thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_begins_at_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_child: Callable[[Callable[[], object]], str]
) -> None:
    """Its parent reports the earlier calls."""
    served = dispatcher(tmp_path / "tuned.csv")
    serve(served, 3, 4)
    monkeypatch.setattr(counters, "_threads", [])
    assert in_child(lambda: set(tunedgemm.metrics()["calls"].values()) == {0}) == "served"


def test_a_child_forked_in_a_window_does_not_extrapolate_all_its_calls(
    tmp_path: Path, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, in_child: Callable[[Callable[[], object]], str]
) -> None:
    """The window ends with the fork: the child counts in its own windows."""
    served = dispatcher(tmp_path / "tuned.csv")
    serve(served, 3)
    served.cache.close_window()
    served.cache.open_window()
    monkeypatch.setattr(counters, "_threads", [])

    def calls() -> float:
        clock(1.0)
        serve(served, 3, 100)
        served.cache.open_window()
        clock(2.0)
        serve(served, 3, 10)
        served.cache.close_window()
        return sum(tunedgemm.metrics()["calls"].values())

    assert in_child(lambda: calls() == 10 * 2.0) == "served"
