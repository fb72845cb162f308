"""Fake backends: made of plain functions, they return given answers and compute the op's reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

Solutions = Iterable[Solution | str] | Callable[[Shape, Device], Iterable[Solution | str]]
Call = Callable[..., Any]


class FakeHooks:
    """Hooks of a backend, which return the constructor's values."""

    def __init__(
        self,
        libtype: str,
        *,
        solutions: Solutions = ("fake",),
        call: Call | None = None,
        supports: Callable[[Shape, Device], Unsupported | None] | None = None,
        heuristic: str | Solution | None = None,
        invariant: Callable[[Shape, Device], Solution | None] = lambda *_: None,
        sleep: Mapping[str, float] | None = None,
    ) -> None:
        self._libtype, self._solutions, self._heuristic = libtype, solutions, heuristic
        self._invariant = invariant
        self._call, self._supports, self._sleep = call or exact, supports, dict(sleep or {})

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Support every shape, or ask the given function."""
        return None if self._supports is None else self._supports(shape, device)

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> list[Solution]:
        """List the given solutions; a text is the kernel name of one."""
        answers = self._solutions(shape, device) if callable(self._solutions) else self._solutions
        return [self._solution(answer) for answer in answers]

    @hookimpl
    def heuristic_fallback(self) -> Solution | None:
        """Return the given solution, or None."""
        return None if self._heuristic is None else self._solution(self._heuristic)

    @hookimpl
    def invariant_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Ask the given function."""
        return self._invariant(shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Return a launcher of the given call; refuse a solution that is not listed."""
        chosen = self.heuristic_fallback(), self.invariant_fallback(shape, device)
        if solution not in [*self.enumerate_solutions(shape, device), *chosen]:
            return Unsupported(f"{self._libtype} has no kernel {solution.kernel_name!r} with splitK {solution.split_k}")
        seconds = self._sleep.get(solution.kernel_name, 0.0)

        def launch(*operands: Any) -> Any:
            if seconds:
                time.sleep(seconds)
            return self._call(solution, shape, *operands)

        return Launcher(launch, graph_safe=False)

    def _solution(self, answer: Solution | str) -> Solution:
        return Solution(self._libtype, answer) if isinstance(answer, str) else answer


def exact(solution: Solution, shape: Shape, *operands: Any) -> Any:
    """Compute the op's reference, rounded once to the output dtype, for any leading dimensions."""
    del solution
    op, dtype = op_named(shape.op), torch_dtype(shape.outdtype)
    operands = _typed(op, shape, operands)
    return op.reference(shape, operands).to(dtype).reshape(op.fake(*operands, otype=dtype).shape)


def _typed(op: Op, shape: Shape, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return operands as callers pass them: references need the type of shuffled weights.

    Launchers get those as plain tensors.
    """
    if shape.layout == "row":
        return operands
    from tunedgemm.ops.formats.shuffle import as_shuffled

    def typed(index: int, operand: Any) -> Any:
        return as_shuffled(operand, shape.layout) if index in op.matrices and operand is not None else operand

    return tuple(typed(index, operand) for index, operand in enumerate(operands))


def fake_backend(libtype: str, **answers: Any) -> Backend:
    """Make a backend of the given answers, with the checks of an installed one.

    Args:
        libtype: its name.
        answers: fields of `Backend`; by default ``ops`` is a16w16, and ``hooks`` are `FakeHooks`
            of the other answers. Those are ``solutions``, kernel names or Solutions, or a function
            of (shape, device) that returns them; ``call``, a function of (solution, shape,
            *operands) that returns the output, `exact` by default; ``supports``, a function of
            (shape, device); ``heuristic``, a kernel name or Solution; ``invariant``, a function of
            (shape, device) that returns a Solution or None; ``sleep``, seconds that a call takes
            longer, by kernel name.

    Raises:
        PluginError: an answer breaks the contract.
        TypeError: an unknown kind of answer.
    """
    stated = {name: answers.pop(name) for name in attrs.fields_dict(Backend) if name in answers}
    fields: dict[str, Any] = {"hooks": FakeHooks(libtype, **answers), "ops": ("a16w16",), "distribution": f"fake-{libtype}", "version": "1"}
    return Backend(libtype, **fields | stated)


def with_hooks(backend: Backend, **functions: Callable[..., Any]) -> Backend:
    """Return a backend with other functions for some hooks, each of any subset of the hook's arguments."""
    kept = {name: getattr(backend.hooks, name) for name in backend.functions}
    return attrs.evolve(backend, hooks=SimpleNamespace(**kept | {name: hookimpl(function) for name, function in functions.items()}))


def fake_registry(*backends: Backend) -> Registry:
    """Return a registry of these backends and the built-in one, without installed ones."""
    registry = Registry(entries=())
    for backend in backends:
        registry.add(backend)
    return registry
