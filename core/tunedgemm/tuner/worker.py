"""Child processes: kernels are compiled ahead of timing, on all cores, where an aborting compiler costs one candidate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import TimeoutError as Overdue
from types import TracebackType

import attrs
from pebble import ProcessExpired, ProcessPool

from tunedgemm.device import Device
from tunedgemm.registry import Backend, Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Candidate

_registry: Registry | None = None


def _prepare(solution: Solution, shape: Shape, device: Device) -> str:
    """In the child: compile one solution; returns what went wrong, or ""."""
    global _registry
    if _registry is None:
        _registry = Registry()
    backend = _registry.get(solution.libtype)
    if not isinstance(backend, Backend):
        return str(backend)
    try:
        backend.prepare(solution, shape, device)
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


@attrs.define(eq=False)
class Compilers:
    """A pool of compiling processes, started when it is first needed.

    Attributes:
        device: compile for this one; the children create no context on it.
        jobs: how many processes; 0 is one for each core.
        timeout: seconds that one compilation may take; 0 is no limit.
    """

    device: Device
    jobs: int = 0
    timeout: float = 0.0
    _pool: ProcessPool | None = attrs.field(default=None, init=False)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.stop() if error else self._pool.close()
            self._pool.join()

    def prepare(self, wanted: Iterable[tuple[Shape, Candidate]]) -> list[Timing]:
        """Compile what has a `prepare` hook; returns a Timing of status ``compile_failed`` for each that did not."""
        pending = []
        for shape, candidate in wanted:
            if "prepare" in candidate.backend.hooks:
                future = self._started().schedule(_prepare, args=[candidate.solution, shape, self.device], timeout=self.timeout or None)
                pending.append((shape, candidate.solution, future))
        lost = []
        for shape, solution, future in pending:
            try:
                reason = future.result()
            except Overdue:
                reason = f"it took more than {self.timeout:g} s"
            except ProcessExpired as error:
                reason = f"the compiler died: exit code {error.exitcode}"
            if reason:
                status = "out_of_resources" if reason.startswith("OutOfResources") else "compile_failed"
                lost.append(Timing(shape, solution, status, detail=reason[:500]))
        return lost

    def _started(self) -> ProcessPool:
        if self._pool is None:
            workers = self.jobs or len(os.sched_getaffinity(0))
            self._pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
        return self._pool
