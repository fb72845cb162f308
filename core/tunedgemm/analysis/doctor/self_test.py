"""Self-test: run every backend on one small shape of each op, in a child process with a timeout.

The child verifies the result against the op's reference, and compares its time with torch's, with
the weight in cache. A crash or hang affects that backend only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from typing import IO, Any

import attrs

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section, Value
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.usable import served_sample
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.offer import NATIVE
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named, ops
from tunedgemm.process.children import import_variables, signal_name
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

#: Most seconds of the whole self-test by default.
SECONDS = 10.0
#: Rounds of timing, and listed solutions that may refuse to bind.
_ROUNDS, _TRIED = 5, 3
#: Statuses of a Timing that are the backend's fault; others depend on the machine's memory.
_FAULTY = ("wrong", "failed", "leaks", "died")


@attrs.frozen
class Result:
    """Result of one backend on one op.

    Attributes:
        op, libtype, distribution: the op, the backend and its distribution.
        shape, kernel: the shape, and the solution that ran.
        status: ``right``, ``wrong``, ``refused``, or that of the failure.
        us, torch_us: microseconds of a call and of torch's; 0 if not measured or the same.
        detail: the reason of a status other than ``right``.
    """

    op: str
    libtype: str
    distribution: str = ""
    shape: str = ""
    kernel: str = ""
    status: str = "right"
    us: float = 0.0
    torch_us: float = 0.0
    detail: str = ""

    def fact(self) -> Fact:
        """Return it as a fact."""
        more: dict[str, Value] = {"shape": self.shape, "kernel": self.kernel}
        if self.us:
            more["us"] = round(self.us, 2)
        if self.us and self.torch_us:
            more |= {"torch_us": round(self.torch_us, 2), "speed": round(self.torch_us / self.us, 3)}
        return Fact(f"{self.op} {self.libtype}", self.status, more | ({"reason": self.detail} if self.detail else {}))

    def fault(self) -> Fault | None:
        """Return the fault of the backend, if it is one."""
        if self.status not in _FAULTY:
            return None
        what = "a wrong result" if self.status == "wrong" else f"a call that {self.status}"
        remedy = f"report it to the authors of {self.distribution or self.libtype}, and uninstall it, or leave it out of --libtype"
        fault = f"{what} of {self.kernel or 'a solution'} for {self.shape or self.op} (got: {self.detail})"
        return Fault(f"libtype {self.libtype}", fault, remedy)


def pairs(registry: Registry, device: Device) -> list[tuple[str, Backend]]:
    """Pair ops with their backends, all backends' first ops before second ones."""
    backends = [answer for libtype in registry.libtypes if isinstance(answer := registry.get(libtype), Backend)]
    covered = [[name for name in backend.ops if name in ops() and served_sample(backend, name, device)] for backend in backends]
    turns = [(turn, position, name) for position, names in enumerate(covered) for turn, name in enumerate(names)]
    return [(name, backends[position]) for _, position, name in sorted(turns)]


def examine(op_name: str, backend: Backend, device: Device, torchs: Backend) -> Result:
    """Run a backend on an op: verify its output, then compare its time with torch's."""
    from tunedgemm.ops.accuracy import MAX_ERROR_RATIO
    from tunedgemm.tuner.rounds import Workload
    from tunedgemm.tuner.trial import Samples
    from tunedgemm.tuner.verify import Verifier

    shape = served_sample(backend, op_name, device)
    result = Result(op_name, backend.libtype, backend.distribution, str(shape or ""))
    bound = _first_bound(backend, shape, device) if shape else Unsupported("no sample shape is served")
    if isinstance(bound, Unsupported) or shape is None:
        return attrs.evolve(result, status="refused", detail=str(bound))
    solution, launcher = bound
    result = attrs.evolve(result, kernel=str(solution))
    op = op_named(op_name)
    workload = Workload(op, shape, device, cache="hot")
    timing = Verifier(op, shape, workload.copies, MAX_ERROR_RATIO).of(solution).check_first(solution, launcher)
    if timing.status != "ok":
        return attrs.evolve(result, status=timing.status, detail=timing.detail)
    native = torchs.bind(NATIVE, shape, device)
    launchers = {solution: launcher} | ({NATIVE: native} if isinstance(native, Launcher) else {})
    us = {key: sorted(samples.us)[_ROUNDS // 2] for key, samples in workload(launchers, _ROUNDS).items() if isinstance(samples, Samples)}
    return attrs.evolve(result, us=us.get(solution, 0.0), torch_us=us.get(NATIVE, 0.0) if solution != NATIVE else 0.0)


def _first_bound(backend: Backend, shape: Shape, device: Device) -> tuple[Solution, Launcher] | Unsupported:
    """Return the first solution that binds: the backend's own choice, else of its list."""
    refusal: Unsupported | None = None
    for solution in _first_solutions(backend, shape, device):
        answer = backend.bind(solution, shape, device)
        if isinstance(answer, Launcher):
            return solution, answer
        refusal = answer
    return refusal or Unsupported(backend.why_none(shape, device))


def _first_solutions(backend: Backend, shape: Shape, device: Device) -> Iterator[Solution]:
    if (own := backend.heuristic_fallback(shape, device)) is not None:
        yield own
    for solution, _ in zip(backend.iterate(shape, device), range(_TRIED), strict=False):
        yield solution


def run(registry: Registry, device: Device, sink: IO[str], skipped: Collection[tuple[str, str]] = ()) -> None:
    """Examine all pairs except skipped ones; write a JSON line before and after each."""
    torchs = registry.get(BUILTIN)
    assert isinstance(torchs, Backend)
    for op_name, backend in pairs(registry, device):
        if (op_name, backend.libtype) in skipped:
            continue
        _write(sink, {"op": op_name, "libtype": backend.libtype, "distribution": backend.distribution})
        result, raised = attempt(examine, op_name, backend, device, torchs)
        if raised:
            result = Result(op_name, backend.libtype, backend.distribution, status="failed", detail=raised)
        _write(sink, attrs.asdict(result))
        if device.kind != "cpu" and attempt(_synchronize)[1]:  # the context is lost: a new process goes on
            return
    _write(sink, {"end": True})


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _write(sink: IO[str], line: dict[str, Any]) -> None:
    sink.write(json.dumps(line) + "\n")
    sink.flush()


def child() -> None:
    """Run the self-test in the child, with results on stdout and plugins' output on stderr."""
    skipped = [tuple(pair) for pair in json.loads(sys.argv[-1])]
    with os.fdopen(os.dup(1), "w") as sink:
        os.dup2(2, 1)
        run(Registry(), current_device(), sink, skipped)


def self_test(seconds: float = SECONDS, skipped: Collection[tuple[str, str]] = ()) -> Section:
    """Examine all backends in child processes.

    Args:
        seconds: most seconds of all processes together.
        skipped: pairs of op and libtype to leave out.
    """
    results: list[Result] = []
    facts: list[Fact] = []
    faults: list[Fault] = []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        lines, ending = _run_child([*skipped, *((result.op, result.libtype) for result in results)], left)
        finished = [Result(**line) for line in lines if "status" in line]
        results += finished
        last = lines[-1] if lines else {}
        if "end" in last:
            break
        if last and "status" not in last and ending:
            results.append(Result(**last, status="died", detail=ending))
        elif last and "status" not in last:
            facts.append(Fact(f"{last['op']} {last['libtype']}", "not finished in time"))
        elif ending and not finished:
            faults.append(Fault("self-test", f"its process ended early (got {ending})", "mend this error, or report it with this output"))
            break
    facts = [result.fact() for result in results] + facts
    faults += [fault for result in results if (fault := result.fault())]
    if seconds and not (facts or faults):
        faults.append(Fault("self-test", f"nothing was tested in time (got {seconds:g} s)", "allow more with --seconds", harmless=True))
    return Section("self-test", tuple(facts), tuple(faults))


def _run_child(skipped: Collection[tuple[str, str]], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run one child; return its lines and how it died, "" after a timeout."""
    command = [sys.executable, "-c", "from tunedgemm.analysis.doctor.self_test import child; child()", json.dumps(list(skipped))]
    environment = {**os.environ, **import_variables()}
    with tempfile.TemporaryFile("w+") as results, tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=results, stderr=errors, start_new_session=True, env=environment
        )
        try:
            code = process.wait(seconds)
            ending = f"signal {name}" if (name := signal_name(code)) else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ending = ""
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in results.read().splitlines() if line.endswith("}")]
        reasons = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return lines, f"{ending}: {reasons[-1][:300]}" if ending and reasons else ending
