"""LaunchChecks: the checks of the conformance suite that launch kernels on the present device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

from tunedgemm.backends.launcher import Launcher
from tunedgemm.dispatch.offer import own_choice
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, same_bits
from tunedgemm.ops.formats.tensor_bytes import duplicate, overwrite
from tunedgemm.process.process_state import kept_switches
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.cases import ConformanceCases, breaks_contract, require_none
from tunedgemm.testing.launching import (
    Case,
    launch,
    output_of_side_stream,
    share_memory,
    work_of_children,
)
from tunedgemm.testing.sharing import fault_of_graphs, fault_of_threads
from tunedgemm.tuner.foldings import foldings
from tunedgemm.tuner.served import Served
from tunedgemm.tuner.verify import Verifier, rows_of
from tunedgemm.tuner.watching import Poisoned

#: Kernels per shape, and splits of K, with which `lacks` is checked.
_KERNELS, _SPLITS = 2, (0, 3, 1 << 20)
#: Rows of x, and those of a shape, with which orders of sums are checked.
_ROWS = (1, 17)


class LaunchChecks(ConformanceCases):
    """Checks of outputs, identities, threads and graphs."""

    def test_outputs_match_the_reference(self, op_name: str) -> None:
        """Check outputs (over NaN, between canaries), operands that stay unchanged, and bitwise claims.

        A call starts no process, returns new memory, and does not depend on earlier calls.
        """
        faults: list[str] = []
        for case in self._launching(op_name):
            before = [None if operand is None else duplicate(operand) for operand in case.operands]
            forms = list(foldings(case.op, case.shape, case.operands))
            checks = [(solution, self._faults_of_outputs(case, solution, launcher, forms)) for solution, launcher in case.launchers]
            first, launcher = case.launchers[0]
            for solution, found in (*checks, (first, self._faults_of_state(case, first, launcher))):
                faults += case.listed(solution, found)
                changed = [index for index, old in enumerate(before) if not same_bits(old, case.operands[index])]
                for index in changed:  # other solutions and checks share the operands
                    faults += case.listed(solution, [f"writes to {case.op.operands[index]}"])
                    overwrite(case.operands[index], before[index])  # type: ignore[arg-type]
            faults += [f"{case.shape}: {fault}" for fault in self._faults_of_orders(case)]
        require_none(faults)

    def _faults_of_outputs(self, case: Case, solution: Solution, launcher: Launcher, forms: Sequence[Any]) -> Iterator[str]:
        """Yield the faults of one solution's outputs, also for *forms* of the operands, and of its claims."""
        case, work = case.of(solution), work_of_children()
        with Poisoned() as poisoned, kept_switches() as changed:
            first = launch(launcher, case.operands)
        if work_of_children() != work:
            yield "starts a process in its first call; compile in prepare() or bind()"
        if changed:
            yield f"changes {', '.join(changed)} of the process"
        if poisoned.overwritten():
            yield "writes outside its output or workspace"
        if fault := case.fault(first):
            yield fault
        out = case.output(solution, launcher)
        yield from case.faults_of(out, case.operands)
        if share_memory(first, out):
            yield "returns the memory of its last output again"
        captured = launcher.graph_safe or case.device.kind == "cpu"  # a capture needs the current stream, too
        if not captured and case.fault(output_of_side_stream(launcher, case.operands)):
            yield "does not launch on the current stream"
        for form in forms:
            yield from case.faults_of(launch(launcher, form), form)
        if solution.deterministic and not same_bits(first, out):
            yield "claims to be deterministic"
        if solution.batch_invariant and not self._is_batch_invariant(case, solution, first):
            yield "claims to be batch invariant; row 0 differs at M=1"

    def _faults_of_state(self, case: Case, solution: Solution, launcher: Launcher) -> Iterator[str]:
        """Yield how calls of the other solutions changed the output of the first."""
        again = launch(launcher, case.operands)
        if solution.deterministic and not same_bits(again, case.output(solution, launcher)):
            yield "gives another output after other solutions ran: it depends on a setting of the process"

    def _is_batch_invariant(self, case: Case, solution: Solution, out: Any) -> bool:
        """Tell whether a row has the same bits alone; True where the solution does not run one row."""
        alone = attrs.evolve(case.shape, m=min(case.shape.m, 1))
        if self.backend().refusal(alone, case.device):
            return True
        single = self.backend().bind(solution, alone, case.device)
        if not isinstance(single, Launcher):
            return True
        first = case.op.first_rows(case.shape, case.operands, alone.m)
        among = rows_of(out, case.shape.m)[:, : alone.m]
        return same_bits(among, rows_of(launch(single, first), alone.m))

    def _faults_of_orders(self, case: Case) -> Iterator[str]:
        """Yield which solutions of one `Solution.sum_order` differ, for several M, the choices of
        batch-invariant mode among them.
        """
        outputs: dict[str, tuple[Solution, Any]] = {}
        for m in dict.fromkeys((case.shape.m, *(rows for rows in _ROWS if rows < case.shape.m))) if case.shape.m else ():
            shape = attrs.evolve(case.shape, m=m)
            chosen = self.backend().invariant_fallback(shape, case.device)
            solutions = [solution for solution, _ in case.launchers if solution.sum_order] + ([chosen] if chosen else [])
            operands = case.operands if m == case.shape.m else case.op.first_rows(case.shape, case.operands, m)
            for solution in dict.fromkeys(solutions):
                launcher = self.backend().bind(solution, shape, case.device)
                if not isinstance(launcher, Launcher):
                    if solution == chosen:
                        yield f"{solution}: invariant_fallback() chose it for M={m}, and bind() refuses it: {launcher}"
                    continue
                out = rows_of(launch(launcher, operands), m)
                first, rows = outputs.setdefault(solution.sum_order, (solution, out))
                if not same_bits(rows[:, :m], out):
                    yield f"{solution}: its rows of M={m} differ from those of {first}; both have the sum_order {solution.sum_order}"

    def test_a_solution_is_rebuilt_from_its_identity(self, op_name: str) -> None:
        """Check that its identity alone binds the same kernel, `run` agrees, and refusals have reasons."""
        faults, launching = list[str](), False
        for case in self._cases(op_name):
            faults += [f"{case.shape}: {fault}" for fault in self._faults_of_refusals(case)]
            for solution, launcher in case.launchers:
                launching = True
                faults += case.listed(solution, self._faults_of_identity(case, solution, launcher))
        require_none(faults)
        if not launching:
            next(self._launching(op_name))  # skips

    def _faults_of_identity(self, case: Case, solution: Solution, launcher: Launcher) -> Iterator[str]:
        """Yield how `run`, and a launcher bound from the identity, differ from the bound launcher."""
        case = case.of(solution)
        out = case.output(solution, launcher)

        def same(other: Any) -> bool:
            return same_bits(other, out) if solution.deterministic else not case.fault(other)

        # run() takes no output dtype; without a hook `run` it is the core's, over bind().
        if "run" in self.backend().functions and case.is_default:
            run = self.backend().run(solution, case.shape, case.device, case.operands)
            if not same(run):
                yield "run() and the launcher of bind() differ"
        stored = Solution(solution.libtype, solution.kernel_name, solution.split_k)
        answer = self.backend().bind(stored, case.shape, case.device)
        if isinstance(answer, Unsupported):
            yield f"bind() refuses it from its identity: {answer.reason}"
        elif not same(launch(answer, case.operands)):
            yield "another output from its identity alone"

    def _faults_of_refusals(self, case: Case) -> Iterator[str]:
        """Yield refusals without a reason, of solutions in the list and of a kernel name that does not exist.

        Yield what `bind` changed in the process, too.
        """
        if case.changed:
            yield f"bind() changes {', '.join(case.changed)} of the process"
        for solution, answer in case.refusals:
            if breaks_contract(answer) or not answer.reason.strip():
                yield f"{solution}: {answer}"
        if "bind" in self.backend().functions:
            unknown = self.backend().bind(Solution(self.libtype, "no-such-kernel"), case.shape, case.device)
            if isinstance(unknown, Launcher) or breaks_contract(unknown) or not unknown.reason.strip():
                yield f"bind() of a kernel that does not exist returned {unknown!r}"

    def test_lacks_refuses_what_bind_refuses(self, op_name: str) -> None:
        """Check that `lacks` refuses what `bind` refuses, with one reason, also for other kernels."""
        if "lacks" not in self.backend().functions:
            pytest.skip(f"{self.libtype} has no lacks()")
        cases = list(self._launching(op_name))
        solutions = list(dict.fromkeys(solution for case in cases for solution, _ in case.launchers[:_KERNELS]))
        split = [attrs.evolve(solution, split_k=parts) for solution in solutions[:_KERNELS] for parts in _SPLITS]
        asked = [Solution(self.libtype, "no-such-kernel"), *solutions, *split]
        faults = [
            f"{case.shape}: {solution} {fault}" for case in cases for solution in asked if (fault := self._fault_of_lacks(solution, case))
        ]
        require_none(faults)

    def _fault_of_lacks(self, solution: Solution, case: Case) -> str:
        """Return how `lacks` contradicts `bind`, or an empty text."""
        reason = self.backend().lacks(solution, case.shape, case.device)
        answer = self.backend().bind(solution, case.shape, case.device)
        if isinstance(answer, Launcher):
            return reason and f"is accepted by bind() and refused by lacks(): {reason}"
        raised = answer.reason.startswith("its bind() ") and not breaks_contract(answer)  # LaunchError: only bind can tell
        same = raised or answer.reason == reason
        return "" if same else f"is refused by bind(): {answer.reason!r}, by lacks(): {reason!r}"

    def test_a_row_without_a_name_is_served(self, op_name: str) -> None:
        """Check that a row without a kernel name runs the heuristic's choice, else the first listed."""
        faults: list[str] = []
        for case in self._launching(op_name):
            choice = own_choice(self.backend(), case.shape, case.device)
            if isinstance(choice, Unsupported):
                faults.append(f"{case.shape}: a row without a name is a miss: {choice}")
            elif choice not in dict([*case.launchers, *case.refusals]):  # other checks report those
                faults += case.listed(choice, self._faults_of_choice(case, choice))
        require_none(faults)

    def _faults_of_choice(self, case: Case, choice: Solution) -> Iterator[str]:
        """Yield the faults of the solution that the backend chooses itself."""
        launcher = self.backend().bind(choice, case.shape, case.device)
        if not isinstance(launcher, Launcher):
            yield f"the backend chooses it and bind() refuses it: {launcher}"
        elif fault := case.of(choice).fault(launch(launcher, case.operands)):
            yield f"of the backend's choice: {fault}"

    def test_rows_are_right_in_all_that_they_serve(self, op_name: str) -> None:
        """Check the first or the last solution, in turns by shape, as the tuner checks a winner: see `Served`."""
        faults: list[str] = []
        for number, case in enumerate(each for each in self._launching(op_name) if each.shape.m):
            solution, launcher = case.launchers[-(number % 2)]
            faults += case.listed(solution, self._faults_in_use(case, solution, launcher))
        require_none(faults)

    def _faults_in_use(self, case: Case, solution: Solution, launcher: Launcher) -> Iterator[str]:
        sets = [case.drawn(seed).operands for seed in (0, 1)]
        served = Served(Verifier(case.op, case.shape, sets, MAX_ERROR_RATIO).of(solution), case.device, None)
        timing = served.check(solution, launcher, functools.partial(self.backend().bind, solution, device=case.device))
        if timing.status != "ok":
            yield f"is {timing.status} in use: {timing.detail}"

    def test_launchers_serve_two_threads(self, op_name: str) -> None:
        """Check that two threads, each on its stream, can call one launcher with different operands."""
        faults: list[str] = []
        for case in self._launching(op_name):
            for solution, launcher in case.launchers:
                faults += case.listed(solution, self._faults_of_sharing(fault_of_threads, case.of(solution), launcher))
        require_none(faults)

    def test_graphs_capture_what_claims_to_be_graph_safe(self, op_name: str) -> None:
        """Check that two graphs, replayed at once on two streams, recompute their outputs at every replay."""
        faults, captured = list[str](), False
        for case in self._launching(op_name):
            for solution, launcher in case.launchers if case.shape.m else ():
                if launcher.graph_safe:
                    captured = True
                    faults += case.listed(solution, self._faults_of_sharing(fault_of_graphs, case.of(solution), launcher))
        require_none(faults)
        if not captured:
            pytest.skip(f"no launcher of {self.libtype} claims to be graph safe")

    def _faults_of_sharing(self, check: Callable[..., str], case: Case, launcher: Launcher) -> Iterator[str]:
        """Yield the fault of calls with two sets of operands, each output within the op's tolerance."""
        drawn = [case.drawn(seed) for seed in (0, 1)]
        operands = [each.operands for each in drawn]
        if found := check(launcher, operands, fault=lambda index, out: case.fault(out, drawn[index].reference)):
            yield found
