"""Stand-ins for GPUs and compilers, which sleep instead of working.

They show how the tuning process itself scales: its threads, its requests to worker processes, its
compile pool and its files are real. Sleeping processes need no cores, so a machine with two can
imitate four GPUs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import attrs
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner import compilers
from tunedgemm.tuner.executors import local
from tunedgemm.tuner.trial import Options, Place, Samples

#: Solutions of a shape: about as many as five backends offer for a shape on an H200.
SOLUTIONS = 240
#: Seconds of one compilation from a warm cache, of one check, of a first use, and of one sample.
COMPILE_S, CHECK_S, FIRST_S, SAMPLE_S = 0.002, 0.003, 0.002, 0.0004
LIST_S, OPEN_S = 0.02, 0.03
BASELINE = Solution("torch", "native")


@attrs.define(eq=False)
class FakeSession:
    """Answers each request as `tunedgemm.tuner.session.Session` does, after a sleep."""

    op_name: str
    index: int
    options: Options
    bench: object = None
    _used: set[Solution] = attrs.field(factory=set, init=False)
    _shape: Shape | None = attrs.field(default=None, init=False)

    def place(self) -> Place:
        """Return a GPU with the index of this session."""
        return Place(Device("sm_90", 132, "fake-gpu", self.index), "here")

    def versions(self) -> dict[str, str]:
        """Return a version of the only backend."""
        return {"torch": "0"}

    def list(self, shape: Shape) -> tuple[tuple[Solution, ...], Solution | None]:
        """Return the solutions and the baseline."""
        _work(shape, LIST_S)
        return (BASELINE, *(Solution("torch", f"fake_{number}") for number in range(SOLUTIONS))), BASELINE

    def neighbours(self, shape: Shape, leaders: Sequence[Solution]) -> tuple[Solution, ...]:
        """Return a few new solutions for each leader that is not itself a neighbour."""
        _work(shape, LIST_S)
        plain = [leader for leader in leaders if leader.kernel_name.count("_") == 1]
        return tuple(Solution("torch", f"{leader.kernel_name}_{number}") for leader in plain for number in range(4))

    def open(self, shape: Shape) -> None:
        """Change the shape."""
        if shape != self._shape:
            self._shape = shape
            self._used.clear()
            _work(shape, OPEN_S)

    def bind(self, shape: Shape, _: Solution) -> None:
        """Bind nothing."""
        self.open(shape)

    def check_first(self, shape: Shape, solution: Solution) -> Timing:
        """Find a solution right."""
        _work(shape, CHECK_S)
        return Timing(shape, solution, "ok", us=1.0)

    check = check_again = check_first

    def sample(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        """Return constant times; a fifth of the solutions are near the best."""
        fresh = set(solutions) - self._used
        self._used |= fresh
        _work(shape, FIRST_S * len(fresh) + SAMPLE_S * rounds * len(solutions))
        return {solution: Samples((_us(solution),) * rounds, calls=10) for solution in solutions}

    def forget(self, shape: Shape, keep: Sequence[Solution]) -> None:
        """Forget nothing."""


def _us(solution: Solution) -> float:
    number = sum(map(ord, solution.kernel_name)) % 97
    return 50.0 + number / (30 if number < 20 else 1)


def _work(shape: Shape, seconds: float) -> None:
    """Sleep, for some shapes longer than for others."""
    time.sleep(seconds * (0.6 + (shape.n * 31 + shape.k * 17 + shape.m) % 97 / 120))


def _compile(*_: object) -> str:
    """Stand for a compilation in a compiling process."""
    time.sleep(COMPILE_S)
    return ""


@contextlib.contextmanager
def fake_devices(count: int) -> Iterator[None]:
    """Let `tune` find this many fake GPUs within the context."""
    with (
        mock.patch.object(local, "devices", lambda _: list(range(count))),
        mock.patch.object(local, "Session", FakeSession),
        mock.patch.object(compilers, "_prepare", _compile),
        mock.patch.object(compilers.Compilers, "_prepares", lambda *_: True),
    ):
        yield
