"""Dispatch over chosen tables as a backend of the tuner's session.

So dispatched calls are verified and timed like solutions, in a process that may crash.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.choice import Explanation, choose, offers
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, TableError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import Row, key_shape, read_rows
from tunedgemm.table.folders import table_layers, table_paths
from tunedgemm.table.lookup import Table
from tunedgemm.table.sheet import present
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.verify import Verifier

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Side:
    """Dispatch over certain tables.

    Attributes:
        name: its libtype in the session.
        only: the only files to read; () for the configured layers.
        swap: (file, replacement) in the configured layers; without *file* in them, the replacement
            ranks above all.
        builtin: torch's own call, without tables and guesses.
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z]+"))
    only: tuple[Path, ...] = attrs.field(default=(), converter=table_paths)
    swap: tuple[Path, Path] | None = None
    builtin: bool = False

    @property
    def solution(self) -> Solution:
        """Return the solution that represents this side in a session."""
        return Solution(self.name, "dispatch")

    def table(self, op: Op, device: Device) -> Table | None:
        """Return the table for dispatch; None for the configured one.

        Raises:
            TableError: a file of *only* cannot be read.
        """
        if self.builtin:
            return Table(op)
        if self.only:
            return Table(op, [[row for path in self.only for row in rows_for(device, read_rows(path, op)[0])]])
        if self.swap is None:
            return None
        file, other = self.swap
        layers = [
            [other if os.path.realpath(path) == os.path.realpath(file) else path for path in layer.paths] for layer in table_layers(op)
        ]
        if not any(other in paths for paths in layers):
            layers.insert(0, [other])
        return Table(op, [[row for path in paths if present(path) for row in _rows(path, op)] for paths in layers])


def rows_for(device: Device, rows: list[Row]) -> list[Row]:
    """Return the valid rows for a device, with its name or none."""
    return [
        row
        for row in rows
        if row.valid and row.gfx in ("", device.gfx) and row.cu_num in (0, device.cu_num) and row.device in ("", device.name)
    ]


@attrs.frozen
class Choice:
    """The choice of dispatch for a shape, before and after running it.

    Attributes:
        first: the choice before the run.
        now: the choice afterwards, another one if the first failed.
        err_ratio: error ratio at which the first choice's row was tuned; 0 without a row.
    """

    first: Explanation
    now: Explanation
    err_ratio: float = 0.0

    @property
    def failure(self) -> str:
        """Return why the first choice is not used any more, or ""."""
        reasons = [reason for offer, reason in self.now.passed_over if offer.solution == self.first.offer.solution]
        return reasons[0] if reasons else ""


@attrs.define(eq=False)
class Production(Session):
    """A session whose backends are the production op over each side, by the sides' names.

    Attributes:
        sides: the tables.
        installed: the backends among which dispatch chooses.
        err_ratio: largest fraction of elements outside the tolerance of another op, whose product
            a row may name.
    """

    sides: tuple[Side, ...] = ()
    installed: Registry = attrs.field(factory=Registry)
    err_ratio: float = MAX_ERROR_RATIO
    _dispatched: dict[str, _Dispatched] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.registry = Registry(entries=())
        for side in self.sides:
            plugin = _Dispatched(op_named(self.op_name), side, self.installed)
            self._dispatched[side.name] = plugin
            self.registry.add(_Callers(side.name, plugin, ops=(self.op_name,)))

    def choice(self, shape: Shape, name: str) -> Choice:
        """Return the named side's choice for a shape, after `bind`."""
        return self._dispatched[name]._choice(shape, self.device)

    def _judging(self, solution: Solution) -> Verifier:
        """Return the verifier that judges a side's choice for the open shape."""
        chosen = self._dispatched[solution.libtype]._chosen.get(self._checks.shape)
        return self._checks if chosen is None else self._checks.of(chosen.offer.solution, self.err_ratio)


class _Callers(Backend):
    """A backend whose launchers get a caller's operands, with shuffled weights in their type."""

    def bind(self, solution: Solution, shape: Shape, device: Device, *, asked: bool = False) -> Launcher | Unsupported:
        """Bind without unwrapping shuffled weights."""
        return self.bind_unwrapped(solution, shape, device, asked=asked)


class _Dispatched:
    """Hooks of a backend that dispatches over one side's tables."""

    def __init__(self, op: Op, side: Side, installed: Registry) -> None:
        self._op, self._side, self._installed = op, side, installed
        self._dispatcher: Dispatcher | None = None
        self._chosen: dict[Shape, Explanation] = {}

    @hookimpl
    def supports(self) -> None:
        """Accept every shape of the op; `bind` refuses with a reason."""

    @hookimpl
    def enumerate_solutions(self) -> list[Solution]:
        """List the one solution that means the op."""
        return [self._side.solution]

    @hookimpl
    def bind(self, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Bind the op's call; it is graph-safe if its launcher is."""
        dispatcher = self._for(device)
        offered = offers(shape, device, dispatcher.table, dispatcher.registry, dispatcher.settings.untuned)
        explanation, launcher = choose(offered, shape, device, dispatcher.registry, lambda _: "")
        self._chosen[shape] = explanation
        if launcher is None:
            return Unsupported(f"no backend supports it: {explanation}")
        return attrs.evolve(launcher, call=_call(dispatcher, shape))

    def _choice(self, shape: Shape, device: Device) -> Choice:
        dispatcher = self._for(device)
        now = dispatcher.explain(shape, device)
        first = self._chosen.get(shape, now)
        rows = [match.row for match in dispatcher.table.candidates(shape, device)] if first.tuned else []
        ratios = [row.err_ratio for row in rows if row.solution == first.offer.solution]
        return Choice(first, now, ratios[0] if ratios else 0.0)

    def _for(self, device: Device) -> Dispatcher:
        if self._dispatcher is None:
            settings, table = Settings.from_environment().passive, self._side.table(self._op, device)
            if self._side.builtin:
                settings = attrs.evolve(settings, untuned=())
            self._dispatcher = Dispatcher(self._op, self._installed, settings=settings, table=table)
        return self._dispatcher


def _call(dispatcher: Dispatcher, shape: Shape) -> Callable[..., Any]:
    """Return the op's entry for one shape: a look-up and a call, with dispatch's handling of failures."""
    op, otype, key = dispatcher.op, torch_dtype(shape.outdtype), (shape,)
    fields = op.fields(shape)

    def call(*operands: Any) -> Any:
        launcher = dispatcher.launchers.get(key)
        if launcher is None:
            served = Call.of(op, operands, otype, fields, key)
            if key_shape(served.shape) != key_shape(shape):
                raise OperandError(f"operands of {shape}: dispatch reads them as {served.shape}")
            return dispatcher.resolve(served)
        try:
            return launcher(*operands)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return dispatcher.demote(Call.of(op, operands, otype, fields, key), error, launcher)

    return call


def _rows(path: Path, op: Op) -> list[Row]:
    """Return the rows of a file; [] for a broken one, as in dispatch."""
    try:
        return read_rows(path, op)[0]
    except TableError as error:
        _log.warning("table left out: %s", error)
        return []
