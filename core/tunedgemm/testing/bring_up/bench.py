"""Bench: what a check of the kit works on, and its verdict.

A check announces each step that may hang, so that the parent can name what hung and end the child.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.launching import Case
from tunedgemm.timing import Timing
from tunedgemm.tuner.verify import Verifier

#: Seconds after which a launch counts as hung, and a compilation or a run of the tuner as late.
LAUNCH_S, COMPILE_S, TUNE_S = 30.0, 120.0, 180.0
#: Seconds in which the solutions of one check begin.
CHECK_S = 20.0
#: Statuses of a timing that are faults of the backend.
FAULTY = ("wrong", "failed", "hung", "crashed", "fault", "leaks")
#: How refusals begin that are exceptions, and the one that `bind` may raise where registers or
#: shared memory do not suffice.
_RAISED, _ALLOWED = ("its bind() ", "its prepare() "), "OutOfResources"
#: Most kernels that a verdict names.
_NAMED = 5


@attrs.frozen
class Verdict:
    """Result of a check.

    Attributes:
        status: ``ok``, ``refused`` where nothing could run, or a fault: see `FAULTY`.
        detail: the reason.
        kernel: the first faulty kernel, else the last one that ran.
        measures: numbers by name.
    """

    status: str = "ok"
    detail: str = ""
    kernel: str = ""
    measures: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Bench:
    """What a check works on.

    Attributes:
        device: the present device.
        announce: tells the parent (step, kernel, seconds that it may take).
        backend, shape: the backend and the shape, of checks that have one.
        libtypes: the libtypes to tune.
    """

    device: Device
    announce: Callable[[str, str, float], None]
    backend: Backend | None = None
    shape: Shape | None = None
    libtypes: str = "all"

    @property
    def subject(self) -> tuple[Backend, Shape]:
        """Return the backend and the shape, of a check that has both."""
        assert self.backend is not None
        assert self.shape is not None
        return self.backend, self.shape

    def case(self) -> Case:
        """Return operands and references of the shape, made for two seeds."""
        _, shape = self.subject
        self.announce("reference", str(shape), COMPILE_S)
        case = Case(shape, self.device, op_named(shape.op), (), ())
        for seed in (0, 1):
            case.drawn(seed)
        return case

    def verifier(self) -> Verifier:
        """Return the tuner's verifier over two sets of operands."""
        case = self.case()
        verifier = Verifier(case.op, case.shape, [case.drawn(seed).operands for seed in (0, 1)], MAX_ERROR_RATIO)
        verifier.prepare()
        return verifier

    def bound(self, solutions: Iterable[Solution]) -> Iterator[tuple[Solution, Launcher | Unsupported]]:
        """Yield each solution with its launcher or refusal; announce its compilation and its launches."""
        backend, shape = self.subject
        for solution in solutions:
            if reason := backend.lacks(solution, shape, self.device):
                yield solution, Unsupported(reason)
                continue
            self.announce("compile", str(solution), COMPILE_S)
            _, fault = attempt(backend.prepare, solution, shape, self.device)
            answer = Unsupported(f"its prepare() raised {fault}") if fault else backend.bind(solution, shape, self.device)
            self.announce("launch", str(solution), LAUNCH_S)
            yield solution, answer

    def sample(self) -> list[Solution]:
        """Return the backend's own choice, and the first, middle and last solution of its list."""
        backend, shape = self.subject
        self.announce("list", backend.libtype, COMPILE_S)
        own, listed = backend.heuristic_fallback(shape, self.device), backend.solutions(shape, self.device)
        return list(dict.fromkeys([*([own] if own else []), *listed[:1], *listed[-1:], *listed[len(listed) // 2 :][:1]]))

    def each_launcher(
        self, examine: Callable[[Solution, Launcher], str], solutions: Iterable[Solution] | None = None, seconds: float = CHECK_S
    ) -> Verdict:
        """Return the verdict over solutions, as many as begin within some seconds, at least one.

        Args:
            examine: returns the fault of one after its status, ``wrong: …``, or "".
            solutions: the solutions; by default `sample`.
        """
        end = time.monotonic() + seconds
        ran, faults, refusals, last = 0, list[tuple[str, str]](), list[tuple[str, str]](), ""
        for solution, answer in self.bound(self.sample() if solutions is None else solutions):
            kernel = str(solution)
            if isinstance(answer, Launcher):
                ran, last = ran + 1, kernel
                fault, raised = attempt(examine, solution, answer)
                text = f"failed: {raised}" if raised and _ALLOWED not in raised else fault
                faults += [(kernel, text)] if text else []
            elif answer.reason.startswith(_RAISED) and _ALLOWED not in answer.reason:
                faults.append((kernel, f"failed: {answer.reason}"))
            else:
                refusals.append((kernel, answer.reason))
            if time.monotonic() > end:
                break
        verdict, (backend, shape) = verdict_over(ran, faults, refusals, last), self.subject
        none = verdict.status == "refused" and not refusals
        return attrs.evolve(verdict, detail=backend.why_none(shape, self.device)) if none else verdict


def verdict_over(ran: int, faults: list[tuple[str, str]], refusals: list[tuple[str, str]], last: str) -> Verdict:
    """Return the verdict over kernels.

    Args:
        ran: number of kernels that ran.
        faults: (kernel, "status: detail") of each faulty one.
        refusals: (kernel, reason) of each that did not bind.
        last: the last kernel that ran.
    """
    measures = {"ran": ran, "faulty": len(faults), "refused": len(refusals)}
    if faults:
        status, _, detail = faults[0][1].partition(": ")
        others = ", ".join(dict.fromkeys(kernel for kernel, _ in faults[1:_NAMED] if kernel != faults[0][0]))
        return Verdict(status, detail + (f"; also {others}" if others else ""), faults[0][0], measures)
    first = f"{len(refusals)} refused, the first: {': '.join(refusals[0])}" if refusals else ""
    return Verdict("ok" if ran else "refused", first, last, measures)


def fault_of(timing: Timing, scale: str = "") -> str:
    """Return the status and the detail of a faulty timing; "" for any other."""
    return f"{timing.status}: {timing.detail}{scale}" if timing.status in FAULTY else ""
