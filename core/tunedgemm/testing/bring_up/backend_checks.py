"""Checks of one backend on one shape: outputs, kernels, graphs, streams, all that a row serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops.formats.tensor_bytes import duplicate, raw
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.solution import Solution
from tunedgemm.testing.bring_up.bench import Bench, Verdict, fault_of
from tunedgemm.testing.launching import Case, output_of_side_stream
from tunedgemm.testing.sharing import fault_of_graphs, fault_of_threads
from tunedgemm.tuner.served import Served

#: Seconds for which one check launches further kernels of a list.
_KERNELS_S = 8.0


def outputs(bench: Bench) -> Verdict:
    """Verify outputs over NaN and between canaries, twice, with other operands, for leaks."""
    verifier, case = bench.verifier(), bench.case()

    def examine(solution: Solution, launcher: Launcher) -> str:
        timing = verifier.of(solution).check(solution, launcher)
        named = attempt(_factor, case, launcher)[0] if timing.status == "wrong" else ""
        return fault_of(timing, named or "")

    return bench.each_launcher(examine)


def _factor(case: Case, launcher: Launcher) -> str:
    """Return by which power of two an fp8 product differs from its reference; "" for another fault.

    The same bits are twice as large in OCP's e4m3fn as in e4m3fnuz. Bits that are NaN in one of
    them do not occur in the operands here.
    """
    operands = tuple(None if operand is None else duplicate(operand) for operand in case.operands)
    matrices = [raw(operand) for operand in operands if operand is not None and "e4m3" in str(operand.dtype)]
    for codes in matrices:
        codes[(codes & 0x78) > 0x08] -= 0x08
        codes[codes == 0x80] = 0
    wanted = case.op.reference(case.shape, operands).double().flatten()
    large = wanted.abs() > wanted.abs().median()
    factor = float((launcher.call(*operands).double().flatten() / wanted)[large].median())
    if not matrices or not any(abs(factor / power - 1) < 0.1 for power in (0.25, 0.5, 2.0, 4.0)):
        return ""
    read, meant = ("e4m3fn", "e4m3fnuz") if factor > 1 else ("e4m3fnuz", "e4m3fn")
    return f"; its numbers are {factor:.2g} times the reference, as if fp8 were read as {read} instead of {meant}"


def kernels(bench: Bench) -> Verdict:
    """Launch and verify as many kernels of the list as fit in some seconds, spread over the list."""
    backend, shape = bench.subject
    verifier, listed = bench.verifier(), backend.solutions(shape, bench.device)
    step = max(1, int(len(listed) ** 0.5))
    spread = [solution for start in range(step) for solution in listed[start::step]]
    ran: dict[str, None] = {}

    def examine(solution: Solution, launcher: Launcher) -> str:
        if not (fault := fault_of(verifier.of(solution).check_first(solution, launcher))):
            ran[solution.kernel_name] = None
        return fault

    verdict = bench.each_launcher(examine, spread, _KERNELS_S)
    return attrs.evolve(verdict, measures=verdict.measures | {"listed": len(listed), "kernels": list(ran)})


def served(bench: Bench) -> Verdict:
    """Verify all that a row of a solution would serve: fewer rows, other strides, threads, memory."""
    (backend, _), verifier = bench.subject, bench.verifier()

    def examine(solution: Solution, launcher: Launcher) -> str:
        checks = Served(verifier.of(solution), bench.device, None)
        return fault_of(checks.check(solution, launcher, lambda shape: backend.bind(solution, shape, bench.device)))

    return bench.each_launcher(examine, bench.sample()[:1])


def _sharing(bench: Bench, check: Callable[..., str], launchers: Callable[[Launcher], bool]) -> Verdict:
    case = bench.case()
    operands = [case.drawn(seed).operands for seed in (0, 1)]

    def examine(solution: Solution, launcher: Launcher) -> str:
        if not launchers(launcher):
            return ""
        judge = case.of(solution)
        fault = check(launcher, operands, fault=lambda index, out: judge.fault(out, judge.drawn(index).reference))
        return f"wrong: {fault}" if fault else ""

    return bench.each_launcher(examine, bench.sample()[:2])


def graphs(bench: Bench) -> Verdict:
    """Replay two graphs at once on two streams, with other operands each time."""
    return _sharing(bench, fault_of_graphs, lambda launcher: launcher.graph_safe)


def streams(bench: Bench) -> Verdict:
    """Call a launcher from two threads, each on its stream, and behind a busy default stream."""

    def check(launcher: Launcher, operands: Any, fault: Callable[[int, Any], str]) -> str:
        if found := fault_of_threads(launcher, operands, fault=fault):
            return f"two threads: {found}"
        if bench.device.kind != "cpu" and (found := fault(0, output_of_side_stream(launcher, operands[0]))):
            return f"a stream beside a busy one: {found}"
        return ""

    return _sharing(bench, check, lambda _: True)
