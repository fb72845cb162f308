"""The production op as something that can be verified and timed: dispatch over the tables that one asks about.

It stands in the place of a backend in the tuner's session, so it is verified and timed as solutions
are, in a process that may die. What is timed is what a call of the op runs: the choice among
tables, heuristics and torch included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend, Registry, make_backend
from tunedgemm.device import Device
from tunedgemm.dispatch.choice import Explanation, choose, offers
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, TableError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import Row, key_shape, read_rows
from tunedgemm.table.folders import table_layers
from tunedgemm.table.lookup import Table
from tunedgemm.table.sheet import present
from tunedgemm.tuner.session import Session

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Side:
    """The production op over certain tables.

    Attributes:
        name: the word for it.
        only: the one file to read, and of it only the rows for the device; None for the layers as
            configured.
        swap: (file, another): the layers as configured, with another in the file's place; on top of
            them where the file is in none.
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z]+"))
    only: Path | None = None
    swap: tuple[Path, Path] | None = None

    @property
    def solution(self) -> Solution:
        """What stands for it among the things that a session times."""
        return Solution(self.name, "dispatch")

    def table(self, op: Op, device: Device) -> Table | None:
        """The table to dispatch through; None for the configured one.

        Raises:
            TableError: the file asked for cannot be read.
        """
        if self.only is not None:
            return Table(op, [rows_for(device, read_rows(self.only, op)[0])])
        if self.swap is None:
            return None
        file, other = self.swap
        layers = [[other if _same(path, file) else path for path in layer.paths] for layer in table_layers(op)]
        if not any(other in paths for paths in layers):
            layers.insert(0, [other])
        return Table(op, [[row for path in paths if present(path) for row in _rows(path, op)] for paths in layers])


def rows_for(device: Device, rows: list[Row]) -> list[Row]:
    """Of a table's rows those that may serve on a device: of its kind, of its name or of none, with a time."""
    return [
        row
        for row in rows
        if row.valid and row.gfx in ("", device.gfx) and row.cu_num in (0, device.cu_num) and row.device in ("", device.name)
    ]


@attrs.frozen
class Choice:
    """What dispatch chose for a shape.

    Attributes:
        first: its choice before anything ran.
        now: its choice after that; another one where the first has failed meanwhile.
        err_ratio: share of wrong elements that the row of the first choice was tuned with; 0 where
            it is no row.
    """

    first: Explanation
    now: Explanation
    err_ratio: float = 0.0

    @property
    def failure(self) -> str:
        """Why the first choice is not used any more, or ""."""
        reasons = [reason for offer, reason in self.now.passed_over if offer.solution == self.first.offer.solution]
        return reasons[0] if reasons else ""


@attrs.define(eq=False)
class Production(Session):
    """A session whose backends are the production op over each of its sides, by their names.

    Attributes:
        sides: the tables.
        installed: the backends that dispatch chooses from.
    """

    sides: tuple[Side, ...] = ()
    installed: Registry = attrs.field(factory=Registry)
    _dispatched: dict[str, _Dispatched] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.registry = Registry(entries=())
        for side in self.sides:
            plugin = _Dispatched(op_named(self.op_name), side, self.installed)
            self._dispatched[side.name] = plugin
            made = make_backend(side.name, plugin)
            self.registry.add(_Callers(**{field.name: getattr(made, field.name) for field in attrs.fields(Backend)}))

    def choice(self, shape: Shape, name: str) -> Choice:
        """What the side of that name chose for a shape; to be asked after `bind`."""
        return self._dispatched[name].choice(shape, self.device)


class _Callers(Backend):
    """A backend whose launchers get operands as a caller of the op gives them: shuffled weights in their type."""

    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """As given."""
        return self.bind_as_given(solution, shape, device)


class _Dispatched:
    """The hooks of a backend, answered by dispatch over one side's tables."""

    def __init__(self, op: Op, side: Side, installed: Registry) -> None:
        self.OPS = (op.name,)
        self._op, self._side, self._installed = op, side, installed
        self._dispatcher: Dispatcher | None = None
        self._chosen: dict[Shape, Explanation] = {}

    @hookimpl
    def supports(self) -> bool:
        """Dispatch answers for every shape of its op, or says why not when it binds."""
        return True

    @hookimpl
    def enumerate_solutions(self) -> list[Solution]:
        """The one that stands for the op."""
        return [self._side.solution]

    @hookimpl
    def bind(self, shape: Shape, device: Device) -> Launcher | Unsupported:
        """The op's call, which may be captured where what it runs may be."""
        dispatcher = self._for(device)
        found = offers(shape, device, dispatcher.table, dispatcher.registry, dispatcher.settings.untuned)
        explanation, launcher = choose(found, shape, device, dispatcher.registry, lambda _: "")
        self._chosen[shape] = explanation
        if launcher is None:
            return Unsupported(f"no backend takes it: {explanation}")
        return Launcher(_call(dispatcher, shape), launcher.graph_safe, launcher.workspace_bytes)

    def choice(self, shape: Shape, device: Device) -> Choice:
        dispatcher = self._for(device)
        now = dispatcher.explain(shape, device)
        first = self._chosen.get(shape, now)
        rows = [match.row for match in dispatcher.table.candidates(shape, device)] if first.tuned else []
        ratios = [row.err_ratio for row in rows if row.solution == first.offer.solution]
        return Choice(first, now, ratios[0] if ratios else 0.0)

    def _for(self, device: Device) -> Dispatcher:
        if self._dispatcher is None:
            settings, table = Settings.from_environment().passive, self._side.table(self._op, device)
            self._dispatcher = Dispatcher(self._op, self._installed, settings=settings, table=table)
        return self._dispatcher


def _call(dispatcher: Dispatcher, shape: Shape) -> Callable[..., Any]:
    """The op's entry for one shape: a look-up and a call, and dispatch's own way where either fails."""
    op, otype, key = dispatcher.op, torch_dtype(shape.outdtype), (shape,)
    fields = op.fields(shape)

    def call(*operands: Any) -> Any:
        launcher = dispatcher.launchers.get(key)
        if launcher is None:
            seen = op.shape_of(*operands, otype=otype, **fields)
            if key_shape(seen) != key_shape(shape):
                raise OperandError(f"operands made for {shape} are {seen} to dispatch")
            return dispatcher.resolve(key, operands, otype, **fields)
        try:
            return launcher(*operands)
        except Exception as error:  # a kernel of a plugin may raise anything
            return dispatcher.demote(error, key, operands, otype, **fields)

    return call


def _same(one: Path, other: Path) -> bool:
    return one.expanduser().resolve() == other.expanduser().resolve()


def _rows(path: Path, op: Op) -> list[Row]:
    """The rows of a file; of a broken one none, as in dispatch."""
    try:
        return read_rows(path, op)[0]
    except TableError as error:
        _log.warning("table left out: %s", error)
        return []
