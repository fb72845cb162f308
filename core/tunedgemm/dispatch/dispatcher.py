"""shape → launcher: one flat tuple, one dict hit, one call.

The first call of a key is resolved by table, heuristics and torch (`choice`), bound, and cached. A launcher that
raises is demoted once for its shape and the next offer takes over, so every call ends in a kernel that works.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device, current_device, device_of
from tunedgemm.dispatch.calls import (
    Call,
    call_key,
    copying,
    dense,
    eager_only,
    may_wait,
    memoryless,
    needs_gradient,
    noted,
    out_of_memory,
    plain,
    recording,
    watch_graphs,
    with_gradient,
)
from tunedgemm.dispatch.choice import NATIVE, Explanation, Offer, choose, examine, offers
from tunedgemm.dispatch.duals import levels, watch
from tunedgemm.dispatch.hot import Place, note, without_memory
from tunedgemm.dispatch.preshuffle import preferred_weight
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.lookup import Table
from tunedgemm.workload.capture import Capture, recorder

_log = logging.getLogger("tunedgemm")

#: Launchers kept by one process; a workload that meets more keys than this starts over, which rebinds what it uses.
MAX_LAUNCHERS = 65_536

_TORCHS = Offer(NATIVE, "builtin", "torch's own call")
#: What fills `Dispatcher.on_miss`: above dispatch, and so loaded by its name, where the environment asks for it.
_ONLINE = "tunedgemm.dispatch.online"


class Dispatcher:
    """The tables, backends and bound launchers of one op.

    Args:
        op: the op.
        registry, settings: other backends and settings than the installed ones and the environment's.
        above: tuned files that rank above all layers.
        table: the table to use in place of the layers.

    Attributes:
        on_miss: asked about a shape and a device that no row serves, before their call: whether a table has a row now. None unless
            online tuning is asked for.
        unbound: shapes that were met first while a graph was captured, and how many captured calls of each torch serves. A shape
            leaves it when it is prewarmed.
        preferences: of calls that have a weight in two orders, whether they get the shuffled one; see `tunedgemm.dispatch.preshuffle`.
        above: the tuned files that rank above all layers.
    """

    def __init__(
        self,
        op: Op,
        registry: Registry | None = None,
        *,
        above: Sequence[Path] = (),
        settings: Settings | None = None,
        table: Table | None = None,
    ) -> None:
        self.op = op
        self.launchers: dict[tuple[Any, ...], Call] = {}
        self.above = tuple(above)
        self._given = (registry, settings, table)
        self._lock = threading.RLock()
        self._clear()
        watch(self, Dispatcher._forget)

    def _clear(self) -> None:
        registry, settings, self._table = self._given
        self.registry = registry or Registry()
        self.settings = settings or Settings.from_environment()
        self._bound: dict[tuple[Shape, int], tuple[Explanation, Launcher]] = {}
        self.unbound: dict[Shape, int] = {}
        self.preferences: dict[tuple[Any, ...], bool] = {}
        self._vetoed: dict[tuple[Shape, int, Solution], str] = {}
        self._capture: Capture | None = recorder(self.op) if self.settings.capture else None
        if self._capture is not None:
            watch_graphs()
        self.on_miss: Callable[[Shape, Device], bool] | None = None
        if self._table is None and self.settings.tunes_online(self.op.name):  # no row gets into a table that was given
            self.on_miss = importlib.import_module(_ONLINE).Online(self.op, self.settings)
        self.launchers.clear()

    def _forget(self) -> None:
        """Drop what calls find by their keys; what is bound stays so."""
        with self._lock:
            self.launchers.clear()

    def reload(self) -> None:
        """Read the environment, the tables and the installed backends again."""
        with self._lock:
            self._clear()

    def load(self, path: str | Path) -> None:
        """Put one tuned file above all other layers of this instance."""
        path = Path(path)
        with self._lock:
            table = Table.load(self.op, above=(*self.above, path))
            self.above = (*self.above, path)
            self._clear()
            self._table = table

    @property
    def table(self) -> Table:
        """The merged table, read at the first use."""
        if self._table is None:
            with self._lock:
                if self._table is None:
                    self._table = Table.load(self.op, above=self.above)
        return self._table

    def explain(self, shape: Shape, device: Device | None = None) -> Explanation:
        """What would serve this shape, and why not the others; binds nothing for a device that is not present."""
        device = device or current_device()
        found = offers(shape, device, self.table, self.registry, self.settings.untuned)
        return choose(found, shape, device, self.registry, self._veto(shape, device))[0]

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """The way of every op, whatever its operands: slower by a microsecond or two than the functions that ops have of their own.

        Args:
            operands: in the op's order; absent ones are None, or left out at the end.
            otype: dtype of the output, the op's default if absent.
            fields: what the op's `shape_of` takes beside them.

        Raises:
            OperandError: the operands do not form this op.
        """
        while operands and operands[-1] is None:
            operands = operands[:-1]
        key = call_key(self.op, operands, otype, fields)
        call = self.launchers.get(key) if key is not None else None
        if call is None:
            return self.resolve(key, operands, otype, **fields)
        try:
            return call(*operands)
        except Exception as error:  # a kernel of a plugin may raise anything
            return self.demote(error, key, operands, otype, **fields)

    def hot(self, inner: Call, place: Place) -> Call:
        """Note an entry's function (`tunedgemm.dispatch.hot`), whose arguments *place* turns into those of `call`; returns inner."""
        return note(inner, self, place)

    def resolve(
        self, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None = None, **fields: Any
    ) -> torch.Tensor:
        """Serve a call whose key is new: choose, bind, cache, run.

        Args:
            key: what tells this call from others; None where nothing does, and nothing is to be cached.
            operands: in the op's order.
            otype: dtype of the output, or None.
            fields: what the op's `shape_of` takes beside them.

        Raises:
            OperandError: the operands do not form this op.
        """
        if (key is None or torch.compiler.is_exporting()) and memoryless(operands):
            return without_memory(self, operands, otype, fields)
        shape = self.op.shape_of(*operands, otype=otype, **fields)
        while operands[-1] is None:
            operands = operands[:-1]
        device = device_of(operands[0].get_device())
        if self.on_miss is not None and shape.m and may_wait(operands):
            self._missed(self.on_miss, shape, device)
        with self._lock:
            call, solution = self._call_for(shape, device, operands)
            call = self.with_capture(call, shape, operands)
            # Only a choice that holds for the next call of the key, too, is kept.
            if key is not None and solution is not None and not levels:
                if len(self.launchers) >= MAX_LAUNCHERS:
                    self.launchers.clear()
                    self._bound.clear()
                self.launchers[key] = call
        try:
            return call(*operands)
        except Exception as error:  # a kernel of a plugin may raise anything
            return self.demote(error, key, operands, otype, **fields)

    def with_capture(self, call: Call, shape: Shape, operands: tuple[Any, ...]) -> Call:
        """Wrap a call, of this library or of an engine, so that capture counts it; without capture it stays as it is."""
        return call if self._capture is None else noted(call, self._capture, shape, operands)

    def _missed(self, on_miss: Callable[[Shape, Device], bool], shape: Shape, device: Device) -> None:
        """Ask about a shape that no row answers for, usable or not, and read the tables again where one does now."""
        if next(self.table.candidates(shape, device), None) is None and on_miss(shape, device):
            with self._lock:  # what is bound for other shapes stays
                self._table = Table.load(self.op, above=self.above)
                self._bound.pop((shape, device.index), None)
                self.preferences.clear()

    def demote(
        self, error: Exception, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None = None, **fields: Any
    ) -> torch.Tensor:
        """Veto the solution that just raised for its shape and serve the call with the next offer; torch's errors stand."""
        if memoryless(operands):  # no solution is to blame
            return without_memory(self, operands, otype, fields)
        shape = self.op.shape_of(*operands, otype=otype, **fields)
        device = device_of(operands[0].get_device())
        with self._lock:
            _, solution = self._call_for(shape, device, operands)
            if solution in (None, NATIVE) or out_of_memory(error):
                raise error
            self._vetoed[shape, device.index, solution] = f"failed in this process: {type(error).__name__}: {error}"
            self._bound.pop((shape, device.index), None)
            self.preferences.clear()
            if key is not None:
                self.launchers.pop(key, None)
        _log.warning("%s failed for %s and will not be used for it again: %s: %s", solution, shape, type(error).__name__, error)
        return self.resolve(key, operands, otype, **fields)

    def prewarm(self, shapes: Iterable[Shape] | None = None, device: Device | None = None) -> int:
        """Bind and run each shape once, so that graphs may be captured afterwards; returns how many.

        Args:
            shapes: those to expect; without them every row of the tables that this device uses.
            device: where; the present default one if absent.
        """
        device = device or current_device()
        expected = (row.shape for row in self.table.rows_for(device) if row.shape.m > 0) if shapes is None else shapes
        return sum(self.warm(shape, device) for shape in dict.fromkeys(expected))

    def warm(self, shape: Shape, device: Device, operands: tuple[Any, ...] = ()) -> bool:
        """Bind one shape and run it, on these operands or on random ones; whether there was memory to run it."""
        with self._lock:
            _, launcher = self._bind(shape, device)
            self.unbound.pop(shape, None)
        try:
            operands = operands or self.op.make_inputs(shape, device.torch_device, 0)
            launcher.call(*operands)
        except (torch.OutOfMemoryError, MemoryError) as error:  # experts of a whole model, beside a model
            _log.warning("%s is bound, but was not run: no memory for its operands: %s", shape, error)
            return False
        except Exception as error:  # a kernel of a plugin may raise anything
            self.demote(error, None, operands, torch_dtype(shape.outdtype), **self.op.fields(shape))
        return True

    def fingerprint(self) -> str:
        """A digest of the merged table and the backends' versions: equal on all ranks that dispatch alike."""
        parts, device = [self.table.fingerprint()], current_device()
        for libtype in self.registry.libtypes:
            backend = self.registry.get(libtype)
            versions = (backend.version, backend.library_version(device)) if isinstance(backend, Backend) else str(backend)
            parts.append(f"{libtype} {versions}")
        return hashlib.sha256("\n".join([*parts, *self.settings.untuned]).encode()).hexdigest()[:16]

    def _veto(self, shape: Shape, device: Device) -> Callable[[Solution], str]:
        return lambda solution: self._vetoed.get((shape, device.index, solution), "")

    def knows(self, shape: Shape, device: Device) -> bool:
        """Whether a shape is bound on a device."""
        return (shape, device.index) in self._bound

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape on a device that is present, and say what serves it.

        Raises:
            UserError: nothing does.
        """
        with self._lock:
            return self._bind(shape, device)[0]

    def preferred(self, x: Any, weight: Any, shuffled_weight: Any, *rest: Any, otype: torch.dtype | None = None) -> Any:
        """Of a weight in two orders the one for this call; see `tunedgemm.dispatch.preshuffle.preferred_weight`."""
        return preferred_weight(self, x, weight, shuffled_weight, rest, otype)

    def _bind(self, shape: Shape, device: Device) -> tuple[Explanation, Launcher]:
        found = self._bound.get((shape, device.index))
        if found is None:
            if len(self._bound) >= MAX_LAUNCHERS:
                self._bound.clear()
            untried = offers(shape, device, self.table, self.registry, self.settings.untuned)
            explanation, launcher = choose(untried, shape, device, self.registry, self._veto(shape, device))
            if launcher is None:
                raise UserError(f"{shape} on {device}: no backend takes it\n{explanation}")
            found = self._bound[shape, device.index] = explanation, launcher
            if self.settings.log_choices:
                _log.warning("%s", explanation)
        return found

    def _call_for(self, shape: Shape, device: Device, operands: tuple[Any, ...]) -> tuple[Call, Solution | None]:
        """The function for these operands, and the solution it belongs to, None where it serves this one call only."""
        x = operands[0]
        grad = needs_gradient(operands)
        if not plain(operands) or grad or shape.m == 0:
            call = self.torchs(shape, device)
            return with_gradient(self.op.name, call) if grad and shape.m else call, NATIVE
        ask = recording(x)
        capturing = ask is not None and ask()
        if capturing and not self.knows(shape, device):
            if shape not in self.unbound:
                _log.warning("%s met first while a graph is captured: torch serves it there; prewarm() avoids that", shape)
            self.unbound[shape] = self.unbound.get(shape, 0) + 1
            return self.torchs(shape, device), None
        explanation, launcher = self._bind(shape, device)
        solution = explanation.offer.solution
        if capturing and not launcher.graph_safe:
            return self.torchs(shape, device), None
        all_dense, spoils = all(map(dense, operands)), x.is_cuda and not launcher.graph_safe and solution != NATIVE
        if all_dense and not spoils:
            return launcher.call, solution
        covered = isinstance(examine(_TORCHS, shape, device, self.registry), Backend)
        native = self.torchs(shape, device) if covered else None
        # A later call of the same key may be captured.
        call = eager_only(launcher.call, native) if spoils and native is not None else launcher.call
        if all_dense:
            return call, solution
        if native is not None and any(operand is not None and operand.element_size() == 1 for operand in operands):
            native = copying(native, None, ())  # torch's products of bytes want them contiguous and aligned, too
        return native if native and solution.libtype == BUILTIN else copying(call, native, self.op.weights), solution

    def torchs(self, shape: Shape, device: Device) -> Call:
        """Torch's own call: what keeps gradients, takes subclasses and any strides, and is safe to capture."""
        backend = self.registry.get(BUILTIN)
        if isinstance(backend, Backend) and self.op.name not in backend.ops and shape.m == 0:
            op, otype = self.op, torch_dtype(shape.outdtype)
            return lambda *operands: op.fake(*operands, otype=otype)  # it is empty, and so all there is of it
        able = examine(_TORCHS, shape, device, self.registry)
        launcher = able.bind(NATIVE, shape, device) if isinstance(able, Backend) else able
        if not isinstance(launcher, Launcher):
            raise UserError(
                f"{shape} on {device}: this call is torch's (it needs a gradient, has operands of other types or strides, or is "
                f"captured in a graph before prewarm()), and torch has none: {launcher.reason}"
            )
        return launcher.call
