"""Dispatcher: maps an op's calls to launchers by one cache key and one dict look-up.

The first call of a key is resolved by table, heuristics and torch (`choice`), bound, and cached. A
solution that raises is vetoed for its shape and the next offer serves the call, so every call ends
in a working kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.autograd import forward_ad

from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device, device_of
from tunedgemm.dispatch.cache import LauncherCache, Served, Vetoes
from tunedgemm.dispatch.call import Call, Operands, checked
from tunedgemm.dispatch.captures import capture_check, is_captured, may_synchronize, watch_graphs, with_call_counter
from tunedgemm.dispatch.choice import Explanation, choose, digest, offers, with_elsewhere, with_source
from tunedgemm.dispatch.counters import counter_of
from tunedgemm.dispatch.fallback import TorchFailed, blaming_torch, outside_autocast, torch_fallback, torch_serves
from tunedgemm.dispatch.gradients import differentiable, has_two_products, with_torch_backward
from tunedgemm.dispatch.invariant import bit_class, report_no_class, warn_of_other_bits
from tunedgemm.dispatch.offer import NATIVE
from tunedgemm.dispatch.preshuffle import preferred_weight
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.traced import register_hot_function
from tunedgemm.dispatch.turns import Turns
from tunedgemm.dispatch.verification import with_samples
from tunedgemm.dispatch.warming import has_memory, prewarm_shapes, random_operands
from tunedgemm.dispatch.without_memory import product_of_none, serve_without_memory
from tunedgemm.dispatch.wrappers import OnDevice, adapted, is_elsewhere
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import ShapeError, UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.key import Key
from tunedgemm.ops.op import ArgumentOrder, Function, Op
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.interrupt import is_interrupt
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.lookup import Table
from tunedgemm.workload.capture import Capture, recorder

if TYPE_CHECKING:
    from tunedgemm.dispatch.online import Background

_log = logging.getLogger("tunedgemm")

#: Most launchers in the cache; when full, it is cleared and shapes are bound again as they come.
MAX_LAUNCHERS = 65_536

#: A bound shape: the choice, and its launcher.
Bound = tuple[Explanation, Launcher]


class Dispatcher:
    """The tables, backends and bound launchers of one op.

    Args:
        op: the op.
        registry: replaces the installed backends.
        settings: replace those of the environment.
        above: tuned files that rank above all layers.
        table: replaces all layers.

    Attributes:
        launchers: maps a cache key to its launcher; the dict of `cache`.
        cache: launchers with their shapes and solutions.
        on_miss: online tuning in the call: tunes a shape without a row, and returns whether it has
            one now. None unless the settings enable it, as is *background*.
        unbound: shapes first called during a graph capture, with the number of captured calls that
            torch serves. `prewarm` removes a shape.
        preferences: choices of `tunedgemm.dispatch.preshuffle` by cache key.
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
        self.call_of: Callable[..., Call] = Call.of
        self._lock = ForkSafeLock(awaited=True)
        self.cache = LauncherCache(self._lock)
        self.launchers = self.cache.launchers
        self.above = tuple(above)  # tuned files that rank above all layers
        self._configured = (registry, settings, table)
        self._turns = Turns()
        self._renewing = ForkSafeLock()
        self._clear()

    def _clear(self) -> None:
        registry, settings, table = self._configured
        self.registry = registry or Registry()
        self.settings = settings or Settings.from_environment()
        self._table = table.of_classes() if table is not None and self.settings.batch_invariant else table
        self._bound: dict[tuple[Shape, int], Bound] = {}
        self.unbound: dict[Shape, int] = {}
        self.preferences: dict[tuple[Any, ...], bool] = {}
        self._vetoes = Vetoes()
        self._capture: Capture | None = recorder(self.op) if self.settings.capture else None
        self.on_miss: Callable[[Shape, Device], bool] | None = None
        self.background: Background | None = None
        if self._table is None and self.settings.tunes_online(self.op.name):  # a table that was given gets no rows
            from tunedgemm.dispatch.online import attach  # imports that serving does not need

            self.on_miss, self.background = attach(self)
        if self._capture is not None or self.background is not None:
            watch_graphs()
        self.cache.clear()

    def reload(self) -> None:
        """Reread the environment, the tables and the installed backends."""
        with self._lock:
            self._clear()

    def load(self, path: str | Path) -> None:
        """Add a tuned file above all other layers of this instance."""
        path = Path(path)
        with self._lock:
            table = Table.load(self.op, above=(*self.above, path), invariant=self.settings.batch_invariant)
            self.above = (*self.above, path)
            self._clear()
            self._table = table

    @property
    def table(self) -> Table:
        """Return the merged table, read at the first use."""
        table = self._table  # another thread may reload
        if table is None:
            with self._lock:
                table = self._table = self._table or Table.load(self.op, above=self.above, invariant=self.settings.batch_invariant)
        return table

    def explain(self, shape: Shape, device: Device | None = None) -> Explanation:
        """Explain what would serve a shape and why; an absent device binds nothing."""
        device, shape = device or current_device(), self.op.as_asked(shape)
        candidates = offers(shape, device, self.table, self.registry, self.settings.untuned)
        found, _ = choose(candidates, shape, device, self.registry, self._vetoes.against(shape, device, self.registry))
        return with_source(with_elsewhere(found, self.table), self.registry)

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Serve a call by op; 1 to 2 us slower than the op's public functions.

        Args:
            operands: in the op's order; absent ones are None, or left out at the end.
            otype: output dtype; None for the op's default.
            fields: further keyword arguments of the op's `shape_of`.

        Raises:
            OperandError: the operands do not form this op.
        """
        while operands and operands[-1] is None:
            operands = operands[:-1]
        key: Key | None
        try:
            key = self.op.key_of(otype, tuple(fields.items()), *operands)
            launcher = None if key is None else self.launchers.get(key)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # Call.of raises the right error
            key = launcher = None
        if launcher is None:
            return self.resolve(Call.of(self.op, operands, otype, fields, key))
        try:
            return launcher(*operands)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return self.demote(Call.of(self.op, operands, otype, fields, key), error, launcher)

    def hot(self, inner: Function, arrange: ArgumentOrder) -> Function:
        """Register a hot function; see `tunedgemm.dispatch.traced.register_hot_function`."""
        return register_hot_function(inner, self, arrange)

    def resolve(self, call: Call) -> torch.Tensor:
        """Serve a cache miss: choose, bind, cache, run.

        Raises:
            OperandError: the operands do not form this op.
        """
        if not call.in_memory:
            return serve_without_memory(self, call)
        try:
            shape = call.shape
        except ShapeError as error:
            return product_of_none(call, error)
        tune = self.on_miss
        if tune and shape.m and call.may_wait and not self.table.has_row(shape, call.device) and tune(shape, call.device):
            self.renew()
        if self.cache.outdated and may_synchronize(call.operands[0]):
            self.cache.unbind(self._bound, (shape, call.device.index))
        chosen, solution, bound = self._choose_launcher(call)
        chosen = with_samples(self, chosen, call, solution) if self.settings.verify else chosen
        launcher = self.with_capture(chosen, shape, call.operands, is_tunable=bound is not None)
        if call.device.index >= 0 and is_elsewhere(call.device):
            launcher = OnDevice(launcher, call.device.index)
        counter = counter_of(self.cache, call, bound and bound[0].offer) if self.settings.metrics else None
        self._keep(call.key, served := Served(launcher, shape, call.device.index, solution, counter), bound)
        try:
            out = launcher(*call.operands)
            return out if solution in (None, NATIVE) else checked(call, out)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return self.retry(call, error, served)

    def _keep(self, key: Key | None, served: Served, bound: Bound | None) -> None:
        """Cache a launcher if later calls may reuse it; not inside forward-mode differentiation."""
        if key is None or served.solution is None or forward_ad._current_level >= 0:
            return
        with self._lock:
            if bound is not None and self._bound.get((served.shape, served.index)) is not bound:  # vetoed or reloaded meanwhile
                return
            if len(self.launchers) >= MAX_LAUNCHERS:
                self.cache.clear()
                self._bound.clear()
            self.cache.keep(key, served)

    def with_capture(self, launcher: Function, shape: Shape, operands: Operands, *, is_tunable: bool = True) -> Function:
        """Wrap a launcher, also an engine's, so that capture and online tuning count its calls.

        Returns the launcher unchanged if neither needs them.
        """
        if self.background is not None and is_tunable:
            launcher = self.background.with_count(launcher, self, shape, operands)
        if self._capture is None:
            return launcher
        ask = capture_check(operands[0])
        return with_call_counter(launcher, self._capture.register(shape, recorded=is_captured(ask)), ask, len(operands))

    def renew(self) -> None:
        """Read the tables again; shapes that got a row are bound again by their next calls.

        A call while a graph is captured keeps the earlier binding.
        """
        with self._renewing:
            before = self.table
            table = Table.load(self.op, above=self.above, invariant=before.invariant)  # the mode may be on by now
            with self._lock:
                if self._table is not before:  # `reload` or `load` came meanwhile
                    return
                self._table = table  # bindings in progress notice it
                self.preferences.clear()
            untuned = [(place, bound.device) for place, (bound, _) in list(self._bound.items()) if not bound.tuned]
            fresh = {place for place, on in untuned if table.has_row(place[0], on) and not before.has_row(place[0], on)}
            with self._lock:
                self.cache.outdate(fresh)

    def demote(self, call: Call, error: BaseException, launcher: Function) -> torch.Tensor:
        """Serve a call whose cached launcher raised, see `retry`; veto nothing if it was replaced."""
        return self.retry(call, error, self.cache.behind(call.key, launcher))

    def retry(self, call: Call, error: BaseException, served: Served | None) -> torch.Tensor:
        """Veto the solution that raised, for its shape, and serve the call with the next offer.

        Torch's own errors, out-of-memory errors and interrupts propagate.

        Args:
            call: the call.
            error: the exception.
            served: the launcher that raised; None to veto nothing.
        """
        if is_interrupt(error) or is_out_of_memory(error):
            raise error
        if isinstance(error, TorchFailed) and error.__cause__ is not None:
            raise error.__cause__
        if not call.in_memory:  # blames no solution
            return serve_without_memory(self, call)
        # A launcher bound while its device was current is rebound, not vetoed, while another is.
        if served is not None and (isinstance(served.launcher, OnDevice) or not is_elsewhere(device_of(served.index))):
            if served.solution in (None, NATIVE):
                raise error
            self.veto(served, error)
        return self.resolve(call)

    def veto(self, served: Served, error: BaseException) -> None:
        """Veto a solution for its shape, and drop its launchers."""
        place = served.shape, served.index
        with self._lock:
            new = self._vetoes.add(served, error)
            if place in self._bound and self._bound[place][0].offer.solution == served.solution:
                del self._bound[place]
            if not new:
                return
            self.preferences.clear()
            self.cache.drop(lambda other: (other.solution, other.shape, other.index) == (served.solution, *place))
        _log.warning("%s failed for %s and will not be used for it again: %s", served.solution, served.shape, described(error))

    def warm(self, shape: Shape, device: Device, operands: Operands = ()) -> bool:
        """Bind a shape and run it on these or random operands; return False without the memory."""
        self.cache.unbind(self._bound, (shape, device.index))
        explanation, launcher = self._bind(shape, device)
        self.unbound.pop(shape, None)
        drawn = operands or random_operands(self.op, shape, device)
        try:
            return drawn is not None and has_memory(shape, launcher.call, drawn)
        except BaseException as error:  # a kernel of a plugin may raise anything
            served = Served(launcher.call, shape, device.index, explanation.offer.solution)
            self.retry(Call.of(self.op, drawn or (), torch_dtype(shape.outdtype), self.op.fields(shape)), error, served)
        return True

    def fingerprint(self) -> str:
        """Return a digest of tables and backends' versions; ranks with equal digests choose equally."""
        return digest(self.table, self.registry, self.settings.untuned, current_device())

    def is_bound(self, shape: Shape, device: Device) -> bool:
        """Check whether a shape is bound on a device."""
        return (shape, device.index) in self._bound

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape on a present device, and return the choice.

        Raises:
            UserError: no backend supports it.
        """
        return self._bind(shape, device)[0]

    bit_class = bit_class
    preferred = preferred_weight
    prewarm = prewarm_shapes

    def _bind(self, shape: Shape, device: Device) -> Bound:
        # Read the tables here: they need the lock, which no holder of a turn may take.
        return self._bound.get(place := (shape, device.index)) or self._turns.run(place, self._bind_alone, shape, device, self.table)

    def _bind_alone(self, shape: Shape, device: Device, table: Table) -> Bound:
        place, shapes, vetoes = (shape, device.index), self._bound, self._vetoes
        if (present := shapes.get(place)) is not None:
            return present
        offer = (bound := self._choose(shape, device, table, vetoes))[0].offer
        if bound[0].lasting:
            if len(shapes) >= MAX_LAUNCHERS:
                shapes.clear()
            shapes[place] = bound
            # Stored before the check, so that either sees a concurrent veto, reload or failure.
            has_failed = (vetoes and (*place, offer.solution) in vetoes) or offer.bit_class != self.bit_class(shape, device)
            if self._table is not table or has_failed:
                shapes.pop(place, None)
        return bound

    def _choose(self, shape: Shape, device: Device, table: Table, vetoes: Vetoes) -> Bound:
        untried = offers(shape, device, table, self.registry, self.settings.untuned)
        explanation, launcher = choose(untried, shape, device, self.registry, vetoes.against(shape, device, self.registry))
        if table.invariant and not explanation.offer.bit_class:
            report_no_class(explanation, table, self.cache, self._bound)
        if launcher is None:
            raise UserError(f"{shape} on {device}: no backend supports it\n{explanation}")
        if explanation.libtype == BUILTIN:
            launcher = outside_autocast(launcher, self.op, shape, device)
        if self.settings.log_choices:
            _log.warning("%s", with_elsewhere(explanation, table))
        return explanation, launcher

    def _choose_launcher(self, call: Call) -> tuple[Function, Solution | None, Bound | None]:
        """Return the launcher of a call, its solution, and the bound choice if it came from one.

        The solution is None if the launcher serves this call only.
        """
        shape, device = call.shape, call.device
        bits = self.bit_class(shape, device) if self.settings.batch_invariant else None
        if call.torch_reason:
            if bits and call.is_plain and has_two_products(self.op, shape):
                forward, solution, bound = self._choose_launcher(attrs.evolve(call, needs_gradient=False))
                return with_torch_backward(forward), solution, bound
            warn_of_other_bits(shape, bits, call.torch_reason)
            native = self.torch_fallback(shape, device)
            return differentiable(shape, native) if call.needs_gradient else native, NATIVE, None
        if call.is_captured and not self.is_bound(shape, device):
            warn_of_other_bits(shape, bits, "first called during a graph capture")
            if shape not in self.unbound:
                _log.warning("%s: first called during a graph capture, so torch serves it there; call prewarm() before", shape)
            with self._lock:
                self.unbound[shape] = self.unbound.get(shape, 0) + 1
            return self.torch_fallback(shape, device), None, None
        explanation, launcher = bound = self._bind(shape, device)
        solution = explanation.offer.solution
        if bits and not launcher.graph_safe and device.index >= 0:
            warn_of_other_bits(shape, bits, "a graph capture cannot have its kernel")
        if call.is_captured and not launcher.graph_safe:
            return self.torch_fallback(shape, device), None, None
        breaks_capture = device.index >= 0 and not launcher.graph_safe and solution != NATIVE
        if call.is_ready and not breaks_capture:
            return launcher.call, solution, bound
        fallback = blaming_torch(self.torch_fallback(shape, device)) if torch_serves(shape, device, self.registry) else None
        is_torch, has_class = solution.libtype == BUILTIN and not launcher.is_nested, bool(explanation.offer.bit_class)
        function = adapted(call, launcher.call, fallback, breaks_capture=breaks_capture, is_torch=is_torch, keeps_bits=has_class)
        return function, solution, bound

    def torch_fallback(self, shape: Shape, device: Device) -> Function:
        """Return torch's implementation; see `tunedgemm.dispatch.fallback.torch_fallback`."""
        return torch_fallback(self.op, shape, device, self.registry)
