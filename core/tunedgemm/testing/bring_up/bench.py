"""Bench: what a check of the kit works on, and its verdict.

A check announces each step that may hang, so that the parent can name what hung and end the child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.launching import Case
from tunedgemm.timing import Timing
from tunedgemm.tuner.accuracy import MAX_ERROR_RATIO
from tunedgemm.tuner.verify import Verifier

#: Seconds after which a launch counts as hung, and a compilation or a run of the tuner as late.
LAUNCH_S, COMPILE_S, TUNE_S = 30.0, 120.0, 180.0
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
    def limiting(self) -> Device:
        """Return the device whose limits apply: the one that a fake emulates, else the present one."""
        return self.device.limiting(self.backend.host if self.backend else None)

    def case(self) -> Case:
        """Return operands and references of the shape, made for two seeds."""
        assert self.shape is not None
        self.announce("reference", str(self.shape), COMPILE_S)
        case = Case(self.shape, self.device, op_named(self.shape.op), (), ())
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
        assert self.backend is not None
        assert self.shape is not None
        for solution in solutions:
            if reason := self.backend.lacks(solution, self.shape, self.device):
                yield solution, Unsupported(reason)
                continue
            self.announce("compile", str(solution), COMPILE_S)
            _, fault = attempt(self.backend.prepare, solution, self.shape, self.device)
            answer = Unsupported(f"its prepare() raised {fault}") if fault else self.backend.bind(solution, self.shape, self.device)
            self.announce("launch", str(solution), LAUNCH_S)
            yield solution, answer

    def sample(self) -> list[Solution]:
        """Return the backend's own choice, and the first, middle and last solution of its list."""
        assert self.backend is not None
        assert self.shape is not None
        self.announce("list", self.backend.libtype, COMPILE_S)
        own, listed = self.backend.heuristic_fallback(self.shape, self.device), self.backend.solutions(self.shape, self.device)
        return list(dict.fromkeys([*([own] if own else []), *listed[:1], *listed[-1:], *listed[len(listed) // 2 :][:1]]))

    def each_launcher(self, examine: Callable[[Solution, Launcher], str], solutions: Iterable[Solution] | None = None) -> Verdict:
        """Return the verdict over solutions: *examine* returns the fault of one, after its status."""
        ran, faults, refusals, last = 0, list[tuple[str, str]](), list[tuple[str, str]](), ""
        for solution, answer in self.bound(self.sample() if solutions is None else solutions):
            kernel = str(solution)
            if isinstance(answer, Unsupported):
                broken = answer.reason.startswith(_RAISED) and _ALLOWED not in answer.reason
                (faults if broken else refusals).append((kernel, f"failed: {answer.reason}" if broken else answer.reason))
                continue
            ran, last = ran + 1, kernel
            fault, raised = attempt(examine, solution, answer)
            if text := f"failed: {raised}" if raised and _ALLOWED not in raised else fault:
                faults.append((kernel, text))
        verdict = verdict_over(ran, faults, refusals, last)
        assert self.backend is not None
        assert self.shape is not None
        none = verdict.status == "refused" and not refusals
        return attrs.evolve(verdict, detail=self.backend.why_none(self.shape, self.device)) if none else verdict


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
