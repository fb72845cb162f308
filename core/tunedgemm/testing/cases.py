"""ConformanceCases: the shapes and bound launchers that the checks of the conformance suite share."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.errors import LaunchError, OutOfResources
from tunedgemm.ops import op_named
from tunedgemm.process.process_state import kept_switches
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.launching import Case
from tunedgemm.testing.shapes import DEVICES, shapes_of

#: Variable with the index of the GPU to check, where there are several.
DEVICE_VARIABLE = "TUNEDGEMM_TEST_DEVICE"
#: Shapes whose launchers stay bound at a time: those of one op.
_BOUND = 32
#: Faults that a message lists.
_MOST_FAULTS = 40
#: How refusals by what `bind` may raise begin.
_LAUNCH_ERRORS = tuple(f"its bind() raised {kind.__name__}" for kind in (LaunchError, OutOfResources))
#: Checks of each op that launch nothing: they ask about devices which need not be present.
_WITHOUT_LAUNCH = ("test_supports_is_pure_quick_and_gives_reasons", "test_solutions_are_unique_and_stable")
#: The check of each op that needs a GPU.
_OF_GRAPHS = "test_graphs_capture_what_claims_to_be_graph_safe"


class ConformanceCases:
    """Shapes, devices and bound launchers of the backend under test.

    Attributes:
        libtype: the backend under test, found by its entry point.
        device: where to launch; None is the GPU whose index ``TUNEDGEMM_TEST_DEVICE`` gives, else
            the current one, else the CPU.
        shapes: the shapes to check, instead of `tunedgemm.testing.shapes.shapes_of` each op.
        max_solutions: how many solutions of a shape are launched, spread over the backend's list.
    """

    libtype: ClassVar[str] = ""
    device: ClassVar[Device | None] = None
    shapes: ClassVar[Sequence[Shape]] = ()
    max_solutions: ClassVar[int] = 8

    @classmethod
    def loading(cls) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this process and its children find the backend's entry point."""
        return contextlib.nullcontext()

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
            reason = f"{cls.libtype} on {device}: {cls.backend().refusal(shapes[0], device)}"
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
        return [shape for shape in cls.every_shape() if cls.backend().refusal(shape, cls._device()) is None]

    @classmethod
    @functools.cache
    def _device(cls) -> Device:
        if index := os.environ.get(DEVICE_VARIABLE):
            import torch

            torch.cuda.set_device(int(index))
        return cls.device or current_device()

    @classmethod
    @functools.lru_cache(maxsize=_BOUND)
    def _case(cls, shape: Shape) -> Case:
        """Bind the solutions of a shape here; skip the test where the backend does not support it."""
        backend, device = cls.backend(), cls._device()
        if refusal := backend.refusal(shape, device):
            pytest.skip(f"{cls.libtype} on {device}: {refusal}")
        chosen = _spread(backend.solutions(shape, device), cls.max_solutions)
        with kept_switches() as changed:
            bound = [(solution, backend.bind(solution, shape, device)) for solution in chosen]
        launchers = tuple((solution, answer) for solution, answer in bound if isinstance(answer, Launcher))
        refusals = tuple((solution, answer) for solution, answer in bound if isinstance(answer, Unsupported))
        return Case(shape, device, op_named(shape.op), launchers, refusals, tuple(dict.fromkeys(changed)))

    def _cases(self, op_name: str) -> Iterator[Case]:
        """Yield the cases of an op, of each shape that is supported here; skip the test where none is."""
        shapes = [shape for shape in self.served_shapes() if shape.op == op_name]
        supported = [shape for shape in shapes if not self.backend().refusal(shape, self._device())]
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


def require_none(faults: Sequence[str]) -> None:
    """Fail the test with its faults, a line each."""
    more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
    assert not faults, "\n  ".join([f"{len(faults)} faults:", *faults[:_MOST_FAULTS], *more])


def breaks_contract(refusal: Unsupported) -> bool:
    """Tell whether `bind` raised anything but LaunchError, or returned something else."""
    return refusal.reason.startswith("its bind() ") and not refusal.reason.startswith(_LAUNCH_ERRORS)


def _spread(solutions: list[Solution], count: int) -> list[Solution]:
    """Return at most *count* solutions, the first and the last among them."""
    if len(solutions) <= count:
        return solutions
    return [solutions[round(i * (len(solutions) - 1) / max(count - 1, 1))] for i in range(count)]
