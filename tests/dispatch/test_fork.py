"""A child forked while other threads of its parent serve calls: it serves calls, too."""

from __future__ import annotations

import ast
import itertools
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.plugin import Shape, Solution
from tunedgemm.process import forksafe
from tunedgemm.testing.fakes import fake_backend, fake_registry

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

WEIGHT = torch.arange(16.0 * 32).view(16, 32) % 7
#: Seconds after which a thread counts as hung.
HUNG = 20


def serves(gemm: TunedGemm, rows: int) -> bool:
    """Check the product of a new shape; random numbers would need the lock of torch's generator."""
    x = torch.arange(rows * 32.0).view(rows, 32) % 5
    return torch.equal(gemm.mm(x, WEIGHT), summed(None, None, x, WEIGHT))


def summed(solution: object, shape: object, x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    """Compute the exact product without MKL, whose locks a child inherits held by threads it lacks."""
    return (x.unsqueeze(-2) * weight).sum(-1)


class Blocked:
    """A thread that waits inside a function until the test ends."""

    def __init__(self) -> None:
        self.inside, self.over = threading.Event(), threading.Event()

    def __call__(self, *arguments: object) -> None:
        """Wait; in a child, and the second time, return at once."""
        if not self.inside.is_set():
            self.inside.set()
            self.over.wait(HUNG)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], Blocked]]:
    """Return a function that starts a thread in *work* and waits until that is blocked."""
    monkeypatch.setattr(forksafe, "PATIENCE", 0.1)
    threads: list[threading.Thread] = []
    block = Blocked()

    def start(work: Callable[[], object]) -> Blocked:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        assert block.inside.wait(HUNG)
        return block

    start.block = block  # type: ignore[attr-defined]
    yield start
    block.over.set()
    for thread in threads:
        thread.join()


def test_while_another_thread_binds(blocked, in_child) -> None:
    """The child binds new shapes although the thread that held the lock does not exist in it."""
    registry = fake_registry(
        fake_backend("slow", heuristic="fake", supports=lambda shape, device: None if shape.m != 7 else blocked.block())
    )
    gemm = TunedGemm(registry, settings=Settings(untuned=("slow",)))
    gemm.mm(torch.randn(2, 32), WEIGHT)
    blocked(lambda: gemm.mm(torch.randn(7, 32), WEIGHT))
    assert in_child(lambda: serves(gemm, 2) and serves(gemm, 3) and serves(gemm, 7)) == "served"
    assert serves(gemm, 2)  # a hit needs no lock


def test_while_a_plugin_is_imported(importable: Path, in_child) -> None:
    """A fork waits for the import of a plugin, which would never end in the child."""
    (importable / "slow_plugin.py").write_text(
        "import time\nfrom tunedgemm.testing.fakes import fake_backend\ntime.sleep(0.5)\nslow = fake_backend('slow', heuristic='fake')\n"
    )
    from importlib.metadata import EntryPoint

    registry = Registry([EntryPoint("slow", "slow_plugin:slow", "tunedgemm.backends")])
    gemm = TunedGemm(registry, settings=Settings(untuned=("slow",)))
    thread = threading.Thread(target=lambda: gemm.mm(torch.randn(5, 32), WEIGHT))
    thread.start()
    time.sleep(0.1)
    how = in_child(lambda: serves(gemm, 6) and str(gemm.dispatcher.explain(Shape("a16w16", 6, 16, 32, dtype="fp32"))).find("slow") > 0)
    thread.join()
    assert how == "served"


def test_while_this_thread_holds_the_lock(in_child) -> None:
    """A plugin may fork in `bind`: the lock stays with that thread in both processes."""
    ended: list[str] = []

    def supports(shape: Shape, device: object) -> None:
        if shape.m == 7 and not ended:
            ended.append("forking")
            ended[0] = in_child(lambda: serves(gemm, 8))

    gemm = TunedGemm(fake_registry(fake_backend("forks", heuristic="fake", supports=supports)), settings=Settings(untuned=("forks",)))
    assert serves(gemm, 7) and serves(gemm, 9)
    assert ended == ["served"] and gemm.dispatcher.explain(Shape("a16w16", 9, 16, 32, dtype="fp32")).libtype == "forks"


def test_while_another_thread_logs(blocked, in_child) -> None:
    """A failing kernel is reported in the child although a thread was in the handler of the log."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            blocked.block()

    def fail(solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("lost")

    gemm = TunedGemm(fake_registry(fake_backend("turbo", heuristic="fake", call=fail)), settings=Settings(untuned=("turbo",)))
    handler = Handler()
    logging.getLogger("tunedgemm").addHandler(handler)
    try:
        blocked(lambda: gemm.mm(torch.randn(5, 32), WEIGHT))
        assert in_child(lambda: serves(gemm, 6)) == "served"
    finally:
        logging.getLogger("tunedgemm").removeHandler(handler)


def test_a_fork_waits_for_awaited_locks_alone(in_child) -> None:
    """A fork waits until the holder of an awaited lock is done, and for no holder of another."""
    for awaited in (True, False):
        lock, held, over, done = forksafe.ForkSafeLock(awaited=awaited), threading.Event(), threading.Event(), []

        def hold(lock=lock, held=held, over=over, done=done) -> None:
            with lock:
                held.set()
                over.wait(0.3 if lock.awaited else HUNG)
                done.append(True)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(HUNG)
        assert in_child(lambda done=done, awaited=awaited: bool(done) is awaited) == "served"
        over.set()
        thread.join()


def test_a_lock_is_free_in_the_child(monkeypatch: pytest.MonkeyPatch, in_child) -> None:
    """A fork-safe lock held by another thread is free in the child, and still held in the parent."""
    monkeypatch.setattr(forksafe, "PATIENCE", 0.1)
    for awaited in (True, False):
        lock, held, over = forksafe.ForkSafeLock(awaited=awaited), threading.Event(), threading.Event()

        def hold(lock=lock, held=held, over=over) -> None:
            with lock, lock:
                held.set()
                over.wait(HUNG)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(HUNG)
        assert in_child(lambda lock=lock: lock.acquire(timeout=1)) == "served"
        assert not lock.acquire(blocking=False)
        over.set()
        thread.join()
        assert lock.acquire(blocking=False)
        lock.release()


def test_threads_that_fork_at_once(in_child, request: pytest.FixtureRequest) -> None:
    """Threads that fork while others bind end, and so do their children."""
    if "filelock" in sys.modules:  # once it is imported, threads that fork at once may raise
        again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid]
        done = subprocess.run(again, cwd=request.config.rootpath, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return
    gemm = TunedGemm(fake_registry(fake_backend("turbo", heuristic="fake", call=summed)), settings=Settings(untuned=("turbo",)))
    ended: list[str] = []
    rows, over = itertools.count(2), threading.Event()

    def bind() -> None:
        while not over.is_set():
            serves(gemm, 2 + next(rows) % 500)
            gemm.dispatcher.reload()

    def fork() -> None:
        for _ in range(2):
            ended.append(in_child(lambda: serves(gemm, 600)))

    binds, forks = ([threading.Thread(target=work) for _ in range(count)] for work, count in ((bind, 2), (fork, 4)))
    for thread in (*binds, *forks):
        thread.start()
    for thread in forks:
        thread.join(3 * HUNG)
    over.set()
    for thread in binds:
        thread.join(HUNG)
    assert ended == ["served"] * 8


def test_locks_that_calls_take_are_fork_safe(repository: Path) -> None:
    """Only commands, the tuner and the reading of models, which no call needs, have other locks."""
    plain = re.compile(r"threading\.(R?Lock|Condition|Semaphore)\(")
    sources = [*(repository / "core").rglob("*.py"), *(repository / "plugins").glob("*/tunedgemm_*/**/*.py")]
    found = [
        str(path.relative_to(repository))
        for path in sources
        if not {"cli", "tuner", "models", "tunedgemm_report"} & set(path.parts) and plain.search(path.read_text())
    ]
    assert sources and found == []


def test_serving_imports_no_library_that_refuses_forks(child) -> None:
    """No plugin and no call imports filelock, after which threads that fork at once raise."""
    source = (
        "import sys, torch, tunedgemm as T\n"
        "from tunedgemm.backends.registry import Registry\n"
        "registry = Registry(); [registry.get(libtype) for libtype in registry.libtypes]\n"
        "T.gemm_a16w16(torch.ones(2, 8), torch.ones(4, 8)); T.patch(); T.explain(torch.ones(2, 8), torch.ones(4, 8))\n"
        "T.prewarm(); print('filelock' in sys.modules)"
    )
    assert child(source) == "False"


def test_no_property_locks(repository: Path) -> None:
    """Classes that are not attrs' use no `functools.cached_property`, which locks before Python 3.12."""
    found = []
    for path in (repository / "core").rglob("*.py"):
        for owner in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            decorators = [ast.unparse(each) for node in owner.body if isinstance(node, ast.FunctionDef) for each in node.decorator_list]
            if "functools.cached_property" in decorators and not any("attrs." in ast.unparse(each) for each in owner.decorator_list):
                found.append(f"{path}: {owner.name}")
    assert found == []
