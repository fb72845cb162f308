"""turns: threads that bind different shapes at once."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dispatch.turns import Turns, _held
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks


def test_a_slow_bind_holds_up_its_own_shape_alone() -> None:
    """While one shape is bound, other shapes are bound and served, and its own waits for that bind."""
    inside, over, binds = threading.Event(), threading.Event(), []

    def bind(solution, shape, device):
        binds.append(shape.m)
        if shape.m == 7:
            inside.set()
            over.wait(20)
        return Launcher(torch._C._nn.linear)

    backend = fake_backend("slow", heuristic="fake")
    backend = with_hooks(backend, bind=bind)
    gemm = TunedGemm(fake_registry(backend), settings=Settings(untuned=("slow",)))
    weight = torch.randn(16, 32)
    threads = [threading.Thread(target=lambda: gemm.mm(torch.randn(7, 32), weight)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.wait(20)
    for rows in (2, 3, 2):
        gemm.mm(torch.randn(rows, 32), weight)
    gemm.dispatcher.explain(Shape("a16w16", 9, 16, 32, dtype="fp32"))
    assert not over.is_set() and binds == [7, 2, 3, 9]
    over.set()
    for thread in threads:
        thread.join()
    assert binds == [7, 2, 3, 9]


def test_an_interrupted_wait_leaves_no_turn() -> None:
    """A signal that another thread receives ends the wait for a turn, and later calls wait again."""
    inside, over, turns = threading.Event(), threading.Event(), Turns()

    def action() -> None:
        inside.set()
        over.wait(20)

    thread = threading.Thread(target=turns.run, args=("place", action))
    thread.start()
    assert inside.wait(20)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        turns.run("place", action)
    assert thread.is_alive()
    over.set()
    thread.join()
    timer.join()
    assert not turns._turns
    assert not _held.number
