"""BackendConformance: what every backend must do, as a pytest class that plugins subclass.

::

    class TestMine(BackendConformance):
        libtype = "mine"

It asks about every op that the backend covers, in shapes of real models and awkward ones. The launching tests run on
the present device, with the shapes that the backend supports there; where there are none they skip once, with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import threading
import time
from collections.abc import Sequence
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
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import LaunchError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.contents import duplicate
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.child import ask_child
from tunedgemm.testing.launching import Case, concurrent_calls, foldings, launch, replayed
from tunedgemm.testing.shapes import DEVICES, shapes_of
from tunedgemm.tuner.accuracy import same_bits
from tunedgemm.tuner.verify import Poisoned, rows_of

#: A dispatcher asks `supports` once a shape, a tuner for thousands of them.
SUPPORTS_SECONDS = 1e-3
#: Tests of a shape that ask about devices which need not be here; all others launch.
_OF_EVERY_DEVICE = (
    "test_supports_is_pure_quick_and_gives_reasons", "test_solutions_are_unique_and_stable",
    "test_the_heuristic_names_a_solution_or_none",
)  # fmt: skip


class BackendConformance:
    """The checks that every backend passes. A new one arrives only with a minor version of the core.

    Attributes:
        libtype: the backend under test, found by its entry point.
        device: where to launch; None is the first GPU, else the CPU.
        shapes: what to ask instead of `tunedgemm.testing.shapes.shapes_of` each op.
        max_solutions: how many solutions of a shape are launched, spread over the backend's list.
    """

    libtype: ClassVar[str] = ""
    device: ClassVar[Device | None] = None
    shapes: ClassVar[Sequence[Shape]] = ()
    max_solutions: ClassVar[int] = 8

    @classmethod
    def loading(cls) -> contextlib.AbstractContextManager[None]:
        """A block in which the backend is found: the suite enters one to load it, and to start the processes that load it."""
        return contextlib.nullcontext()

    @classmethod
    def plugin(cls) -> object:
        """The object behind the entry point; the backend that the core brings needs none."""
        with cls.loading():
            found = list(entry_points(group=GROUP, name=cls.libtype))
            return found[0].load() if found else torch_backend

    @classmethod
    @functools.cache
    def backend(cls) -> Backend:
        """The backend as the registry binds it; the test fails with the reason where it does not load."""
        with cls.loading():
            answer = Registry().get(cls.libtype)
        if isinstance(answer, Unsupported):
            pytest.fail(f"libtype {cls.libtype!r}: {answer.reason}", pytrace=False)
        return answer

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Make one test for each shape; the tests of a shape run in a row, so that they share its operands."""
        if "shape" in metafunc.fixturenames:
            shapes = cls.every_shape() if metafunc.function.__name__ in _OF_EVERY_DEVICE else cls.served_shapes()
            metafunc.parametrize("shape", shapes, ids=_label, scope="class")

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """The shapes to ask about: `shapes`, else those of each op that the backend covers."""
        large = cls._device().kind != "cpu"
        return tuple(cls.shapes) or tuple(shape for name in cls.backend().ops for shape in shapes_of(name, large))

    @classmethod
    def served_shapes(cls) -> Sequence[Any]:
        """What to launch: `shapes`, else those of `every_shape` that the backend supports here."""
        return cls.shapes or cls._served()

    @classmethod
    @functools.cache
    def _served(cls) -> Sequence[Any]:
        """Ask the backend about every shape; where it supports none here, the first one has a skip that says why."""
        backend, device = cls.backend(), cls._device()
        answers = {shape: backend.supports(shape, device) for shape in cls.every_shape()}
        served = [shape for shape, answer in answers.items() if answer is True]
        if served or not answers:
            return served
        shape, answer = next(iter(answers.items()))
        return [pytest.param(shape, marks=pytest.mark.skip(reason=f"{cls.libtype} on {device}: {answer}"))]

    @classmethod
    @functools.cache
    def _device(cls) -> Device:
        return cls.device or current_device()

    @classmethod
    @functools.lru_cache(maxsize=1)
    def _case(cls, shape: Shape) -> Case:
        """The bound solutions of a shape here; skips the test where there are none."""
        backend, device, op = cls.backend(), cls._device(), op_named(shape.op)
        if not (answer := backend.supports(shape, device)):
            pytest.skip(f"{cls.libtype} on {device}: {answer}")
        chosen = _spread(backend.solutions(shape, device), cls.max_solutions)
        bound = [(solution, _bound(backend, solution, shape, device)) for solution in chosen]
        launchers = tuple((solution, answer) for solution, answer in bound if isinstance(answer, Launcher))
        refusals = tuple((solution, answer) for solution, answer in bound if not isinstance(answer, Launcher))
        operands = op.make_inputs(shape, device.torch_device, 0)
        return Case(shape, device, op, operands, op.reference(shape, operands), launchers, refusals)

    def _launching(self, shape: Shape) -> Case:
        case = self._case(shape)
        if not case.launchers:
            reasons = sorted({str(reason) for _, reason in case.refusals}) or ["it lists none"]
            pytest.skip(f"no solution of {self.libtype} binds on {case.device}: {'; '.join(reasons)[:300]}")
        return case

    def _asked(self) -> Sequence[Device]:
        return (*DEVICES, self._device())

    def test_the_plugin_keeps_the_contract(self) -> None:
        """It loads, covers ops that exist, and its hooks take arguments of the specification, without defaults."""
        plugin = self.plugin()
        make_backend(self.libtype, plugin)
        unknown = set(self.backend().ops) - set(ops())
        assert not unknown, f"OPS names {unknown}, which no installed distribution defines"
        for name in HOOKS:
            hook = getattr(plugin, name, None)
            if hook is None:
                continue
            taken, known = inspect.signature(hook).parameters, inspect.signature(getattr(hookspecs, name)).parameters
            wrong = [p for p in taken.values() if p.name not in known or p.default is not p.empty or p.kind is not p.POSITIONAL_OR_KEYWORD]
            assert not wrong, (
                f"{name}{inspect.signature(hook)}: {wrong[0]} is not an argument of {name}({', '.join(known)}), or has a default"
            )

    def test_library_version_is_text(self) -> None:
        """It answers for every device, with text that fits a CSV field."""
        library_version = getattr(self.plugin(), "library_version", self.backend().library_version)
        for device in self._asked():
            version = library_version(device)
            assert isinstance(version, str), f"library_version({device}) is {version!r}, not text"
            assert not set(version) & set("\r\n"), f"library_version({device}) has more than one line: {version!r}"

    def test_supports_is_pure_quick_and_gives_reasons(self, shape: Shape) -> None:
        """The same answer each time, True or a reason, in less than a millisecond, for devices present or not."""
        supports = self.backend().hooks["supports"]
        for device in self._asked():
            first = supports(shape, device)
            reasoned = isinstance(first, Unsupported) and first.reason.strip()
            assert first is True or reasoned, f"supports({shape}, {device}) returned {first!r}, not True or a reason"
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                again = supports(shape, device)
                seconds.append(time.perf_counter() - start)
                assert again == first, f"supports({shape}, {device}) answered {first!r}, then {again!r}"
            assert min(seconds) < SUPPORTS_SECONDS, f"supports({shape}, {device}) takes {min(seconds) * 1e3:.2f} ms"

    def test_solutions_are_unique_and_stable(self, shape: Shape) -> None:
        """Each identity is listed once, in the same order at a second call, and survives the trial log."""
        enumerate_solutions = self.backend().hooks["enumerate_solutions"]
        for device in self._asked():
            if not self.backend().supports(shape, device):
                continue
            found = list(enumerate_solutions(shape, device))
            foreign = [s for s in found if not isinstance(s, Solution) or s.libtype != self.libtype or not s.kernel_name]
            assert not foreign, f"{shape} on {device}: {foreign[0]!r} is not a named solution of {self.libtype!r}"
            twice = [str(solution) for solution in found if found.count(solution) > 1] if len(set(found)) < len(found) else []
            assert not twice, f"{shape} on {device}: listed more than once: {', '.join(sorted(set(twice)))}"
            assert found == list(enumerate_solutions(shape, device)), f"{shape} on {device}: a second call lists other solutions"
            for solution in found:
                stored = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))
                assert attrs.astuple(stored) == attrs.astuple(solution), f"{solution!r} comes back from its dict as {stored!r}"

    def test_the_heuristic_names_a_solution_or_none(self, shape: Shape) -> None:
        """For a supported shape the heuristic returns a solution of its own libtype or None, and does not raise."""
        hook = self.backend().hooks.get("heuristic_fallback")
        for device in self._asked():
            if hook is None or not self.backend().supports(shape, device):
                continue
            found = hook(shape, device)
            own = found is None or (isinstance(found, Solution) and found.libtype == self.libtype)
            assert own, f"heuristic_fallback({shape}, {device}) returned {found!r}"
            assert hook(shape, device) == found, f"heuristic_fallback({shape}, {device}) is not stable"

    @classmethod
    @functools.cache
    def _elsewhere(cls, hidden: bool) -> dict[str, Any]:
        """A child's answers: with all devices hidden about those described, else about the present one."""
        with cls.loading():
            return ask_child(cls.libtype, cls.every_shape(), DEVICES if hidden else (cls._device(),), hidden=hidden)

    def test_other_processes_list_the_same_solutions(self) -> None:
        """A fresh process, with another hash seed, enumerates the same solutions in the same order."""
        for hidden, devices in ((True, DEVICES), (False, (self._device(),))):
            answers = iter(self._elsewhere(hidden)["solutions"])
            for shape in self.every_shape():
                for device, there in zip(devices, answers, strict=False):
                    supported = self.backend().supports(shape, device)
                    here = [str(solution) for solution in self.backend().solutions(shape, device)] if supported else None
                    assert here == there, f"{shape} on {device}: {str(here)[:200]} here, {str(there)[:200]} in another process"

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """The plugin loads and answers for absent devices where no device is visible, without other plugins."""
        answer = self._elsewhere(True)
        assert not answer["cuda"], f"{self.libtype} initialises the GPU to answer for a device that is absent"
        own = self.backend().distribution
        others = {e.value.split(":")[0] for e in entry_points(group=GROUP) if e.dist is not None and e.dist.name != own}
        loaded = others & set(answer["modules"])
        assert not loaded, f"{self.libtype} imports other plugins: {', '.join(sorted(loaded))}"

    def test_prepare_needs_no_device(self, shape: Shape) -> None:
        """Where there is a `prepare`, it compiles the first solution in a process that sees no device."""
        if "prepare" not in self.backend().hooks:
            pytest.skip(f"{self.libtype} has no prepare()")
        self._launching(shape)
        with self.loading():
            answer = ask_child(self.libtype, [shape], [self._device()], hidden=True, prepare=1)
        assert not answer["cuda"], "prepare() initialises the GPU"

    def test_outputs_match_the_reference(self, shape: Shape) -> None:
        """Every solution is within the op's tolerance, writes all of its output, which was full of NaNs, and nothing beside."""
        case, faults = self._launching(shape), []
        for solution, launcher in case.launchers:
            with Poisoned() as poisoned:
                out = launch(solution, launcher, case.operands)
            faults += [f"{solution} writes outside its output or workspace"] if poisoned.overwritten() else []
            faults += [f"{solution}: {fault}"] if (fault := case.fault(out)) else []
        assert not faults, _listed(shape, faults)

    def test_outputs_have_the_right_form(self, shape: Shape) -> None:
        """Contiguous, of the output dtype, on the operands' device, with the leading dimensions of x, 2-D or 3-D."""
        case, faults = self._launching(shape), []
        for operands in foldings(case):
            wanted = case.op.fake(*operands, otype=torch_dtype(shape.outdtype))
            for solution, launcher in case.launchers:
                out = launch(solution, launcher, operands)
                found = f"{tuple(out.shape)} {out.dtype} on {out.device}" + ("" if out.is_contiguous() else ", not contiguous")
                expected = f"{tuple(wanted.shape)} {wanted.dtype} on {wanted.device}"
                faults += [f"{solution}: {found} instead of {expected}"] if found != expected else []
                faults += [f"{solution}: {fault}"] if (fault := case.fault(out)) else []
        assert not faults, _listed(shape, faults)

    def test_operands_stay_as_they_were(self, shape: Shape) -> None:
        """No solution writes to its operands."""
        case, faults = self._launching(shape), []
        before = [None if operand is None else duplicate(operand) for operand in case.operands]
        for solution, launcher in case.launchers:
            launch(solution, launcher, case.operands)
            changed = [name for name, old, new in zip(case.op.operands, before, case.operands, strict=False) if not same_bits(old, new)]
            faults += [f"{solution} writes to {', '.join(changed)}"] if changed else []
        assert not faults, _listed(shape, faults)

    def test_claims_of_determinism_hold(self, shape: Shape) -> None:
        """A solution that claims to be deterministic gives the same bits twice."""
        case = self._launching(shape)
        faults = [
            f"{solution} claims to be deterministic"
            for solution, launcher in case.launchers
            if solution.deterministic
            and not same_bits(launch(solution, launcher, case.operands), launch(solution, launcher, case.operands))
        ]
        assert not faults, _listed(shape, faults)

    def test_claims_of_batch_invariance_hold(self, shape: Shape) -> None:
        """A solution that claims to be batch invariant gives a row the same bits alone as among others."""
        case, faults = self._launching(shape), []
        alone = attrs.evolve(shape, m=min(shape.m, 1))
        first = case.op.first_rows(shape, case.operands, alone.m)
        for solution, launcher in case.launchers:
            if not solution.batch_invariant or not self.backend().supports(alone, case.device):
                continue
            single = self.backend().bind(solution, alone, case.device)
            if not isinstance(single, Launcher):
                continue
            among = rows_of(launch(solution, launcher, case.operands), shape.m)[:, : alone.m]
            if not same_bits(among, rows_of(launch(solution, single, first), alone.m)):
                faults.append(f"{solution} claims to be batch invariant; row 0 differs at M=1")
        assert not faults, _listed(shape, faults)

    def test_run_and_bind_agree(self, shape: Shape) -> None:
        """`run` gives the bits of the bound launcher; a solution that is not deterministic stays within tolerance."""
        case, faults = self._launching(shape), []
        if case.op.shape_of(*case.operands, **case.op.fields(shape)) != shape:
            pytest.skip("run() takes no output dtype")
        for solution, launcher in case.launchers:
            out = self.backend().run(solution, shape, case.device, case.operands)
            same = same_bits(out, launch(solution, launcher, case.operands)) if solution.deterministic else not case.fault(out)
            faults += [] if same else [f"{solution}: run() and the launcher of bind() differ"]
        assert not faults, _listed(shape, faults)

    def test_a_solution_is_rebuilt_from_its_identity(self, shape: Shape) -> None:
        """Libtype, kernel name and splitK alone, as a table stores them, bind to the same kernel."""
        case, faults = self._launching(shape), []
        for solution, launcher in case.launchers:
            stored = Solution(solution.libtype, solution.kernel_name, solution.split_k)
            answer = self.backend().bind(stored, shape, case.device)
            if isinstance(answer, Unsupported):
                faults.append(f"{solution}: bind() refuses it from its identity: {answer.reason}")
                continue
            out = launch(stored, answer, case.operands)
            same = same_bits(out, launch(solution, launcher, case.operands)) if solution.deterministic else not case.fault(out)
            faults += [] if same else [f"{solution}: another output from its identity alone"]
        assert not faults, _listed(shape, faults)

    def test_refusals_have_reasons(self, shape: Shape) -> None:
        """`bind` refuses with a reason and does not raise: a solution of its list, or a kernel name it does not know."""
        case = self._case(shape)
        wrong = [f"{s}: bind() returned {a!r}" for s, a in case.refusals if not isinstance(a, Unsupported) or not a.reason.strip()]
        if bind := self.backend().hooks.get("bind"):
            answer = bind(Solution(self.libtype, "no-such-kernel"), shape, case.device)
            refused = isinstance(answer, Unsupported) and answer.reason.strip()
            wrong += [] if refused else [f"bind() of a kernel that does not exist returned {answer!r}"]
        assert not wrong, _listed(shape, wrong)

    def test_the_heuristic_names_what_binds(self, shape: Shape) -> None:
        """The solution for untuned calls binds here and is right."""
        case = self._launching(shape)
        solution = self.backend().heuristic_fallback(shape, case.device)
        if solution is None:
            pytest.skip(f"{self.libtype} leaves this shape to others")
        launcher = self.backend().bind(solution, shape, case.device)
        assert isinstance(launcher, Launcher), f"{shape}: the heuristic names {solution}, which bind() refuses: {launcher}"
        fault = case.fault(launch(solution, launcher, case.operands))
        assert not fault, f"{shape}: {solution} of the heuristic: {fault}"

    def test_launchers_serve_two_threads(self, shape: Shape) -> None:
        """Two threads, each on its own stream, call one launcher with their own operands at the same time."""
        case, faults = self._launching(shape), []
        other = case.op.make_inputs(shape, case.device.torch_device, 1)
        jobs = [(case.operands, case.reference), (other, case.op.reference(shape, other))]
        for solution, launcher in case.launchers:
            start = threading.Barrier(len(jobs))
            call = functools.partial(concurrent_calls, solution, launcher, start)
            with ThreadPoolExecutor(len(jobs)) as pool:
                for (_, reference), outs in zip(jobs, pool.map(call, [operands for operands, _ in jobs]), strict=True):
                    found = {case.fault(out, reference) for out in outs} - {""}
                    faults += [f"{solution}: {fault}" for fault in found]
        assert not faults, _listed(shape, faults)

    def test_graphs_capture_what_claims_to_be_graph_safe(self, shape: Shape) -> None:
        """A captured launch recomputes its output at every replay, from what the operands then hold."""
        case, faults = self._launching(shape), []
        safe = [(solution, launcher) for solution, launcher in case.launchers if launcher.graph_safe]
        if case.device.kind == "cpu" or shape.m == 0 or not safe:
            pytest.skip("graphs need a GPU, rows, and a launcher that claims to be graph safe")
        later = case.op.make_inputs(shape, case.device.torch_device, 1)
        wanted = case.op.reference(shape, later)
        for solution, launcher in safe:
            fault = case.fault(replayed(solution, launcher, case.operands, later), wanted)
            faults += [f"{solution}: {fault}"] if fault else []
        assert not faults, _listed(shape, faults)


def _label(shape: Shape) -> str:
    return str(shape).replace(" ", "-")


def _listed(shape: Shape, faults: list[str]) -> str:
    return f"{shape}:\n  " + "\n  ".join(faults)


def _bound(backend: Backend, solution: Solution, shape: Shape, device: Device) -> object:
    """What the plugin's own `bind` answers; LaunchError is the one exception that counts as a refusal."""
    if "bind" not in backend.hooks:
        return backend.bind(solution, shape, device)
    try:
        answer = backend.hooks["bind"](solution, shape, device)
        return unwrapping(answer, shape) if isinstance(answer, Launcher) else answer
    except LaunchError as error:
        return Unsupported(f"{type(error).__name__}: {error}")


def _spread(solutions: list[Solution], count: int) -> list[Solution]:
    """At most *count*, the first and the last among them."""
    if len(solutions) <= count:
        return solutions
    return [solutions[round(i * (len(solutions) - 1) / max(count - 1, 1))] for i in range(count)]
