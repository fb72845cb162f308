"""BackendConformance: the checks that every backend passes, as a pytest class that plugins subclass.

::

    class TestMine(BackendConformance):
        libtype = "mine"

A check covers one op in all its shapes, those of real models and awkward ones, and lists every
fault with its shape and solution. Launching checks run on the present device, with the shapes that
the backend supports there. Without such a shape they skip, with the backend's reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, ClassVar

import attrs
import pytest

from tunedgemm.backends import builtin as torch_backend
from tunedgemm.backends import hookspecs
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import GROUP, HOOKS, Backend, Registry, make_backend, unwrapping
from tunedgemm.device import Device, current_device
from tunedgemm.errors import LaunchError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.contents import duplicate, overwrite
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.child import ask_child
from tunedgemm.testing.launching import Case, concurrent_calls, foldings, launch, replayed
from tunedgemm.testing.shapes import DEVICES, shapes_of
from tunedgemm.tuner.accuracy import same_bits
from tunedgemm.tuner.verify import Poisoned, rows_of

#: A dispatcher asks `supports` once a shape, a tuner for thousands of them.
SUPPORTS_SECONDS = 1e-3
#: Shapes whose launchers stay bound at a time: those of one op.
_BOUND = 32
#: Faults that a message lists.
_MOST_FAULTS = 40
#: Checks of each op that launch nothing: they ask about devices which need not be present.
_WITHOUT_LAUNCH = ("test_supports_is_pure_quick_and_gives_reasons", "test_solutions_are_unique_and_stable")
#: The check of each op that needs a GPU.
_OF_GRAPHS = "test_graphs_capture_what_claims_to_be_graph_safe"


class BackendConformance:
    """The checks that every backend passes. A new one arrives only with a minor version of the core.

    Attributes:
        libtype: the backend under test, found by its entry point.
        device: where to launch; None is the first GPU, else the CPU.
        shapes: the shapes to check, instead of `tunedgemm.testing.shapes.shapes_of` each op.
        max_solutions: how many solutions of a shape are launched, spread over the backend's list.
    """

    libtype: ClassVar[str] = ""
    device: ClassVar[Device | None] = None
    shapes: ClassVar[Sequence[Shape]] = ()
    max_solutions: ClassVar[int] = 8

    @classmethod
    def loading(cls) -> contextlib.AbstractContextManager[None]:
        """Return the block in which the backend, and the processes that load it, find its entry point."""
        return contextlib.nullcontext()

    @classmethod
    def plugin(cls) -> object:
        """Return the object behind the entry point; the built-in backend needs none."""
        with cls.loading():
            entries = list(entry_points(group=GROUP, name=cls.libtype))
            return entries[0].load() if entries else torch_backend

    @classmethod
    @functools.cache
    def backend(cls) -> Backend:
        """Return the backend as the registry binds it; fail the test with the reason where it does not load."""
        with cls.loading():
            answer = Registry().get(cls.libtype)
        if isinstance(answer, Unsupported):
            pytest.fail(f"libtype {cls.libtype!r}: {answer.reason}", pytrace=False)
        return answer

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Make one test of each check for each op; those of an op run in a row and share its bound launchers."""
        if "op_name" in metafunc.fixturenames:
            metafunc.parametrize("op_name", cls._ops_to_check(metafunc.function.__name__), scope="class")

    @classmethod
    def _ops_to_check(cls, check: str) -> Sequence[Any]:
        """Return the ops of one check, or a single skipped one that gives the reason."""
        shapes, device = cls.every_shape(), cls._device()
        served = shapes if check in _WITHOUT_LAUNCH else cls.served_shapes()
        names = list(dict.fromkeys(shape.op for shape in served))
        reason = "graphs need a GPU" if check == _OF_GRAPHS and device.kind == "cpu" else ""
        if not names and shapes:
            reason = f"{cls.libtype} on {device}: {cls.backend().supports(shapes[0], device)}"
        return [pytest.param(shapes[0].op, marks=pytest.mark.skip(reason=reason))] if reason and shapes else names

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return the shapes to ask about: `shapes`, else those of each op that the backend covers."""
        large = cls._device().kind != "cpu"
        return tuple(cls.shapes) or tuple(shape for name in cls.backend().ops for shape in shapes_of(name, large))

    @classmethod
    def served_shapes(cls) -> Sequence[Shape]:
        """Return the shapes to launch: `shapes`, else those of `every_shape` that the backend supports here."""
        return cls.shapes or cls._served()

    @classmethod
    @functools.cache
    def _served(cls) -> Sequence[Shape]:
        return [shape for shape in cls.every_shape() if cls.backend().supports(shape, cls._device()) is True]

    @classmethod
    @functools.cache
    def _device(cls) -> Device:
        return cls.device or current_device()

    @classmethod
    @functools.lru_cache(maxsize=_BOUND)
    def _case(cls, shape: Shape) -> Case:
        """Bind the solutions of a shape here; skip the test where the backend does not support it."""
        backend, device = cls.backend(), cls._device()
        if not (answer := backend.supports(shape, device)):
            pytest.skip(f"{cls.libtype} on {device}: {answer}")
        chosen = _spread(backend.solutions(shape, device), cls.max_solutions)
        bound = [(solution, _bound(backend, solution, shape, device)) for solution in chosen]
        launchers = tuple((solution, answer) for solution, answer in bound if isinstance(answer, Launcher))
        refusals = tuple((solution, answer) for solution, answer in bound if not isinstance(answer, Launcher))
        return Case(shape, device, op_named(shape.op), launchers, refusals)

    def _cases(self, op_name: str) -> Iterator[Case]:
        """Yield the cases of an op, of each shape that is supported here; skip the test where none is."""
        shapes = [shape for shape in self.served_shapes() if shape.op == op_name]
        supported = [shape for shape in shapes if self.backend().supports(shape, self._device())]
        yield from map(self._case, supported or shapes[:1])

    def _launching(self, op_name: str) -> Iterator[Case]:
        """Yield the cases of an op that have launchers; skip the test where none has."""
        launching, refusals = False, set[str]()
        for case in self._cases(op_name):
            refusals |= {str(reason) for _, reason in case.refusals}
            if case.launchers:
                launching = True
                yield case
        if not launching:
            reasons = "; ".join(sorted(refusals)) or "it lists none"
            pytest.skip(f"no solution of {self.libtype} binds on {self._device()}: {reasons[:300]}")

    def _devices_to_ask(self) -> Sequence[Device]:
        return (*DEVICES, self._device())

    def _shapes_and_devices(self, op_name: str) -> Iterator[tuple[Shape, Device]]:
        """Yield the shapes of an op with each device, present or not."""
        return itertools.product([shape for shape in self.every_shape() if shape.op == op_name], self._devices_to_ask())

    def test_the_plugin_keeps_the_contract(self) -> None:
        """Check that the plugin loads, covers known ops, and has valid hooks and a one-line version."""
        plugin = self.plugin()
        make_backend(self.libtype, plugin)
        unknown = set(self.backend().ops) - set(ops())
        assert not unknown, f"OPS names {unknown}, which no installed distribution defines"
        for name in HOOKS:
            hook = getattr(plugin, name, None)
            if hook is None:
                continue
            hook_parameters, parameters = inspect.signature(hook).parameters, inspect.signature(getattr(hookspecs, name)).parameters
            faulty = (
                p
                for p in hook_parameters.values()
                if p.name not in parameters or p.default is not p.empty or p.kind is not p.POSITIONAL_OR_KEYWORD
            )
            wrong = next(faulty, None)
            assert wrong is None, (
                f"{name}{inspect.signature(hook)}: {wrong} is not an argument of {name}({', '.join(parameters)}), or has a default"
            )
        library_version = getattr(plugin, "library_version", self.backend().library_version)
        for device in self._devices_to_ask():
            version = library_version(device)
            assert isinstance(version, str), f"library_version({device}) is {version!r}, not text"
            assert not set(version) & set("\r\n"), f"library_version({device}) has more than one line: {version!r}"

    def test_supports_is_pure_quick_and_gives_reasons(self, op_name: str) -> None:
        """Check that `supports` gives one answer, True or a reason, within a millisecond, for any device."""
        supports, faults = self.backend().hooks["supports"], list[str]()
        for shape, device in self._shapes_and_devices(op_name):
            call, first = f"supports({shape}, {device})", supports(shape, device)
            if first is not True and not (isinstance(first, Unsupported) and first.reason.strip()):
                faults.append(f"{call} returned {first!r}, not True or a reason")
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                again = supports(shape, device)
                seconds.append(time.perf_counter() - start)
                if again != first:
                    faults.append(f"{call} answered {first!r}, then {again!r}")
                    break
            if min(seconds) >= SUPPORTS_SECONDS:
                faults.append(f"{call} takes {min(seconds) * 1e3:.2f} ms")
        _require_none(faults)

    def test_solutions_are_unique_and_stable(self, op_name: str) -> None:
        """Check that lists are stable, without duplicates, and survive the trial log; so does the choice."""
        faults, stored = list[str](), set[Any]()
        for shape, device in self._shapes_and_devices(op_name):
            if self.backend().supports(shape, device):
                listed_faults = [*self._faults_of_list(shape, device, stored), *self._faults_of_heuristic(shape, device)]
                faults += [f"{shape} on {device}: {fault}" for fault in listed_faults]
        _require_none(faults)

    def _faults_of_list(self, shape: Shape, device: Device, stored: set[Any]) -> Iterator[str]:
        """Yield what is wrong with a shape's solutions; *stored* ones already survived the trial log."""
        enumerate_solutions = self.backend().hooks["enumerate_solutions"]
        listed = list(enumerate_solutions(shape, device))
        foreign = [s for s in listed if not isinstance(s, Solution) or s.libtype != self.libtype or not s.kernel_name]
        if foreign:
            yield f"{foreign[0]!r} is not a named solution of {self.libtype!r}"
            return
        if len(set(listed)) < len(listed):
            yield f"listed more than once: {', '.join(sorted({str(s) for s in listed if listed.count(s) > 1}))}"
        if listed != list(enumerate_solutions(shape, device)):
            yield "a second call lists other solutions"
        for solution in listed:
            fields = attrs.astuple(solution)
            if fields not in stored:
                back = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))
                if attrs.astuple(back) == fields:
                    stored.add(fields)
                else:
                    yield f"{solution!r} comes back from its dict as {back!r}"

    def _faults_of_heuristic(self, shape: Shape, device: Device) -> Iterator[str]:
        hook = self.backend().hooks.get("heuristic_fallback")
        choice = hook(shape, device) if hook is not None else None
        if choice is not None and not (isinstance(choice, Solution) and choice.libtype == self.libtype):
            yield f"heuristic_fallback() returned {choice!r}"
        if hook is not None and hook(shape, device) != choice:
            yield "heuristic_fallback() is not stable"

    @classmethod
    @functools.cache
    def _answers_of_children(cls) -> tuple[dict[str, Any], ...]:
        """Ask a process without visible devices about the described ones, and another about the GPU."""
        present = cls._device()
        hidden = DEVICES if present.kind != "cpu" else (*DEVICES, present)
        with cls.loading():
            answers = [ask_child(cls.libtype, cls.every_shape(), hidden, hidden=True) | {"devices": hidden}]
            if present.kind != "cpu":
                answers.append(ask_child(cls.libtype, cls.every_shape(), (present,), hidden=False) | {"devices": (present,)})
        return tuple(answers)

    def test_other_processes_list_the_same_solutions(self) -> None:
        """Check that a fresh process, with another hash seed, lists the same solutions in the same order."""
        faults: list[str] = []
        for answer in self._answers_of_children():
            questions = itertools.product(self.every_shape(), answer["devices"])
            for (shape, device), there in zip(questions, answer["solutions"], strict=True):
                supported = self.backend().supports(shape, device)
                here = [str(solution) for solution in self.backend().solutions(shape, device)] if supported else None
                if here != there:
                    faults.append(f"{shape} on {device}: {str(here)[:200]} here, {str(there)[:200]} in another process")
        _require_none(faults)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """Check that the plugin loads and answers without a visible device and without other plugins."""
        answer = self._answers_of_children()[0]
        assert not answer["cuda"], f"{self.libtype} initialises the GPU to answer for a device that is absent"
        own = self.backend().distribution
        others = {e.value.split(":")[0] for e in entry_points(group=GROUP) if e.dist is not None and e.dist.name != own}
        loaded = others & set(answer["modules"])
        assert not loaded, f"{self.libtype} imports other plugins: {', '.join(sorted(loaded))}"

    def test_prepare_needs_no_device(self) -> None:
        """Check that `prepare` compiles the first solution of each shape in a process without devices."""
        if "prepare" not in self.backend().hooks:
            pytest.skip(f"{self.libtype} has no prepare()")
        shapes = [shape for shape in self.served_shapes() if self._binds_first(shape)]
        if not shapes:
            pytest.skip(f"no solution of {self.libtype} binds on {self._device()}")
        with self.loading():
            answer = ask_child(self.libtype, shapes, [self._device()], hidden=True, prepare=1)
        assert not answer["cuda"], "prepare() initialises the GPU"

    def _binds_first(self, shape: Shape) -> bool:
        """Tell whether the first solution of a shape binds here."""
        backend, device = self.backend(), self._device()
        first = backend.solutions(shape, device)[:1] if backend.supports(shape, device) else []
        return any(isinstance(_bound(backend, solution, shape, device), Launcher) for solution in first)

    def test_outputs_match_the_reference(self, op_name: str) -> None:
        """Check outputs (over NaN, between canaries), operands that stay unchanged, and bitwise claims."""
        faults: list[str] = []
        for case in self._launching(op_name):
            before = [None if operand is None else duplicate(operand) for operand in case.operands]
            forms = list(foldings(case.op, case.shape, case.operands))
            for solution, launcher in case.launchers:
                faults += case.listed(solution, self._faults_of_outputs(case, solution, launcher, forms))
                changed = [index for index, old in enumerate(before) if not same_bits(old, case.operands[index])]
                for index in changed:  # other solutions and checks share the operands
                    faults += case.listed(solution, [f"writes to {case.op.operands[index]}"])
                    overwrite(case.operands[index], before[index])  # type: ignore[arg-type]
        _require_none(faults)

    def _faults_of_outputs(self, case: Case, solution: Solution, launcher: Launcher, forms: Sequence[Any]) -> Iterator[str]:
        """Yield what is wrong with one solution's outputs, also for *forms* of the operands, and its claims."""
        with Poisoned() as poisoned:
            first = launch(launcher, case.operands)
        if poisoned.overwritten():
            yield "writes outside its output or workspace"
        if fault := case.fault(first):
            yield fault
        out = case.output(solution, launcher)
        yield from case.faults_of(out, case.operands)
        for form in forms:
            yield from case.faults_of(launch(launcher, form), form)
        if solution.deterministic and not same_bits(first, out):
            yield "claims to be deterministic"
        if solution.batch_invariant and not self._is_batch_invariant(case, solution, first):
            yield "claims to be batch invariant; row 0 differs at M=1"

    def _is_batch_invariant(self, case: Case, solution: Solution, out: Any) -> bool:
        """Tell whether a row has the same bits alone; True where the solution does not run one row."""
        alone = attrs.evolve(case.shape, m=min(case.shape.m, 1))
        if not self.backend().supports(alone, case.device):
            return True
        single = self.backend().bind(solution, alone, case.device)
        if not isinstance(single, Launcher):
            return True
        first = case.op.first_rows(case.shape, case.operands, alone.m)
        among = rows_of(out, case.shape.m)[:, : alone.m]
        return same_bits(among, rows_of(launch(single, first), alone.m))

    def test_a_solution_is_rebuilt_from_its_identity(self, op_name: str) -> None:
        """Check that its identity alone binds the same kernel, `run` agrees, and refusals have reasons."""
        faults, launching = list[str](), False
        for case in self._cases(op_name):
            faults += [f"{case.shape}: {fault}" for fault in self._faults_of_refusals(case)]
            for solution, launcher in case.launchers:
                launching = True
                faults += case.listed(solution, self._faults_of_identity(case, solution, launcher))
            if case.launchers and (choice := self.backend().heuristic_fallback(case.shape, case.device)) is not None:
                faults += case.listed(choice, self._faults_of_choice(case, choice))
        _require_none(faults)
        if not launching:
            next(self._launching(op_name))  # skips

    def _faults_of_identity(self, case: Case, solution: Solution, launcher: Launcher) -> Iterator[str]:
        """Yield how `run`, and a launcher bound from the identity, differ from the bound launcher."""
        out = case.output(solution, launcher)

        def same(other: Any) -> bool:
            return same_bits(other, out) if solution.deterministic else not case.fault(other)

        # run() takes no output dtype; without a hook `run` it is the core's, over bind().
        if "run" in self.backend().hooks and case.is_default:
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
        """Yield refusals without a reason, of solutions in the list and of a kernel name that does not exist."""
        for solution, answer in case.refusals:
            if not isinstance(answer, Unsupported) or not answer.reason.strip():
                yield f"{solution}: bind() returned {answer!r}"
        if bind := self.backend().hooks.get("bind"):
            answer = bind(Solution(self.libtype, "no-such-kernel"), case.shape, case.device)
            if not (isinstance(answer, Unsupported) and answer.reason.strip()):
                yield f"bind() of a kernel that does not exist returned {answer!r}"

    def _faults_of_choice(self, case: Case, choice: Solution) -> Iterator[str]:
        """Yield what is wrong with the heuristic's solution."""
        launcher = self.backend().bind(choice, case.shape, case.device)
        if not isinstance(launcher, Launcher):
            yield f"the heuristic names it and bind() refuses it: {launcher}"
        elif fault := case.fault(launch(launcher, case.operands)):
            yield f"of the heuristic: {fault}"

    def test_launchers_serve_two_threads(self, op_name: str) -> None:
        """Check that two threads, each on its stream, can call one launcher with different operands."""
        faults: list[str] = []
        for case in self._launching(op_name):
            for solution, launcher in case.launchers:
                faults += case.listed(solution, self._faults_of_threads(case, launcher))
        _require_none(faults)

    def _faults_of_threads(self, case: Case, launcher: Launcher) -> Iterator[str]:
        jobs = [case.drawn(seed) for seed in (0, 1)]
        call = functools.partial(concurrent_calls, launcher, threading.Barrier(len(jobs)))
        with ThreadPoolExecutor(len(jobs)) as pool:
            outs = list(pool.map(call, [job.operands for job in jobs]))
        for job, several in zip(jobs, outs, strict=True):
            yield from {case.fault(out, job.reference) for out in several} - {""}

    def test_graphs_capture_what_claims_to_be_graph_safe(self, op_name: str) -> None:
        """Check that a captured launch recomputes its output at every replay, from the current operands."""
        faults, captured = list[str](), False
        for case in self._launching(op_name):
            for solution, launcher in case.launchers if case.shape.m else ():
                if launcher.graph_safe:
                    captured = True
                    faults += case.listed(solution, self._faults_of_replay(case, launcher))
        _require_none(faults)
        if not captured:
            pytest.skip(f"no launcher of {self.libtype} claims to be graph safe")

    def _faults_of_replay(self, case: Case, launcher: Launcher) -> Iterator[str]:
        later = case.drawn(1)
        if fault := case.fault(replayed(launcher, case.operands, later.operands), later.reference):
            yield fault


def _require_none(faults: Sequence[str]) -> None:
    """Fail the test with its faults, a line each."""
    more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
    assert not faults, "\n  ".join([f"{len(faults)} faults:", *faults[:_MOST_FAULTS], *more])


def _bound(backend: Backend, solution: Solution, shape: Shape, device: Device) -> object:
    """Return the answer of the plugin's own `bind`; of exceptions, only LaunchError is a refusal."""
    if "bind" not in backend.hooks:
        return backend.bind(solution, shape, device)
    try:
        answer = backend.hooks["bind"](solution, shape, device)
        return unwrapping(answer, shape) if isinstance(answer, Launcher) else answer
    except LaunchError as error:
        return Unsupported(f"{type(error).__name__}: {error}")


def _spread(solutions: list[Solution], count: int) -> list[Solution]:
    """Return at most *count* solutions, the first and the last among them."""
    if len(solutions) <= count:
        return solutions
    return [solutions[round(i * (len(solutions) - 1) / max(count - 1, 1))] for i in range(count)]
