"""shape → launcher: one flat tuple, one dict hit, one call.

The first call of a key is resolved by table, heuristics and torch (`choice`), bound, and cached. A launcher that
raises is demoted once for its shape and the next offer takes over, so every call ends in a kernel that works.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import is_grad_enabled

from tunedgemm.capture import Capture, recorder
from tunedgemm.choice import NATIVE, Explanation, choose, offers
from tunedgemm.device import Device, current_device, device_of
from tunedgemm.errors import UserError
from tunedgemm.launcher import Launcher
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.registry import Backend, Registry
from tunedgemm.settings import Settings
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import Table

_log = logging.getLogger("tunedgemm")

#: Launchers kept by one process; a workload that meets more keys than this starts over, which rebinds what it uses.
MAX_LAUNCHERS = 65_536

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Call = Callable[..., torch.Tensor]


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


class Dispatcher:
    """The tables, backends and bound launchers of one op.

    Args:
        op: the op.
        registry, settings: other backends and settings than the installed ones and the environment's.
        above: tuned files that rank above all layers.
        table: the table to use in place of the layers.
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
        self._above = tuple(above)
        self._given = (registry, settings, table)
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        registry, settings, self._table = self._given
        self.registry = registry or Registry()
        self.settings = settings or Settings.from_environment()
        self._bound: dict[tuple[Shape, int], tuple[Explanation, Launcher]] = {}
        self._vetoed: dict[tuple[Shape, int, Solution], str] = {}
        self._capture: Capture | None = recorder(self.op) if self.settings.capture else None
        self.launchers.clear()

    def reload(self) -> None:
        """Read the environment, the tables and the installed backends again."""
        with self._lock:
            self._clear()

    def load(self, path: str | Path) -> None:
        """Put one tuned file above all other layers of this instance."""
        path = Path(path)
        with self._lock:
            table = Table.load(self.op, above=(*self._above, path))
            self._above = (*self._above, path)
            self._clear()
            self._table = table

    @property
    def table(self) -> Table:
        """The merged table, read at the first use."""
        if self._table is None:
            with self._lock:
                if self._table is None:
                    self._table = Table.load(self.op, above=self._above)
        return self._table

    def explain(self, shape: Shape, device: Device | None = None) -> Explanation:
        """What would serve this shape, and why not the others; binds nothing for a device that is not present."""
        device = device or current_device()
        found = offers(shape, device, self.table, self.registry, self.settings.untuned)
        return choose(found, shape, device, self.registry, self._veto(shape, device))[0]

    def resolve(self, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None) -> torch.Tensor:
        """Serve a call whose key is new: choose, bind, cache, run.

        Raises:
            OperandError: the operands do not form this op.
        """
        shape = self.op.shape_of(*operands, otype=otype)
        while operands[-1] is None:
            operands = operands[:-1]
        device = device_of(operands[0].get_device())
        with self._lock:
            call, solution = self._call_for(shape, device, operands)
            if self._capture is not None:
                call = _counted(call, self._capture.meet(shape))
            # Only a choice that holds for the next call of the key, too, is kept.
            if key is not None and solution is not None:
                if len(self.launchers) >= MAX_LAUNCHERS:
                    self.launchers.clear()
                    self._bound.clear()
                self.launchers[key] = call
        try:
            return call(*operands)
        except Exception as error:  # a kernel of a plugin may raise anything
            return self.demote(error, key, operands, otype)

    def demote(self, error: Exception, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None) -> torch.Tensor:
        """Veto the solution that just raised for its shape and serve the call with the next offer; torch's errors stand."""
        shape = self.op.shape_of(*operands, otype=otype)
        device = device_of(operands[0].get_device())
        with self._lock:
            _, solution = self._call_for(shape, device, operands)
            if solution in (None, NATIVE) or _out_of_memory(error):
                raise error
            self._vetoed[shape, device.index, solution] = f"failed in this process: {type(error).__name__}: {error}"
            self._bound.pop((shape, device.index), None)
            if key is not None:
                self.launchers.pop(key, None)
        _log.warning("%s failed for %s and will not be used for it again: %s: %s", solution, shape, type(error).__name__, error)
        return self.resolve(key, operands, otype)

    def prewarm(self, shapes: Iterable[Shape] | None = None, device: Device | None = None) -> int:
        """Bind and run each shape once, so that graphs may be captured afterwards; returns how many.

        Args:
            shapes: those to expect; without them every row of the tables that this device uses.
        """
        device = device or current_device()
        rows = [row.shape for row in self.table.rows if row.gfx == device.gfx and row.cu_num == device.cu_num and row.shape.m > 0]
        count = 0
        for shape in dict.fromkeys(rows if shapes is None else shapes):
            with self._lock:
                _, launcher = self._bind(shape, device)
            launcher.call(*self.op.make_inputs(shape, device.torch_device, 0))
            count += 1
        return count

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

    def _bind(self, shape: Shape, device: Device) -> tuple[Explanation, Launcher]:
        found = self._bound.get((shape, device.index))
        if found is None:
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
        plain = all(type(operand) in _PLAIN for operand in operands if operand is not None)
        grad = is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
        if not plain or grad or shape.m == 0:
            return self._torch(shape, device), NATIVE
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and (shape, device.index) not in self._bound:
            _log.info("%s met first while a graph is captured: torch serves it there; prewarm() avoids that", shape)
            return self._torch(shape, device), None
        explanation, launcher = self._bind(shape, device)
        solution = explanation.offer.solution
        if capturing and not launcher.graph_safe:
            return self._torch(shape, device), None
        if all(map(_dense, operands)):
            return launcher.call, solution
        native = self._torch(shape, device)
        return native if solution.libtype == BUILTIN else _copying(launcher.call, native, self.op.weights), solution

    def _torch(self, shape: Shape, device: Device) -> Call:
        backend = self.registry.get(BUILTIN)
        launcher = backend.bind(NATIVE, shape, device) if isinstance(backend, Backend) else backend
        if not isinstance(launcher, Launcher):
            raise UserError(f"{shape} on {device}: {launcher.reason}")
        return launcher.call


def _dense(operand: torch.Tensor | None) -> bool:
    """Contiguous and 16-byte aligned, as launchers expect; an absent operand is."""
    return operand is None or (operand.is_contiguous() and operand.data_ptr() % 16 == 0)


def _copying(call: Call, native: Call, weights: tuple[int, ...]) -> Call:
    """The launcher behind one dense copy of the activations; torch where a weight would have to be copied each call."""

    def copied(*operands: torch.Tensor | None) -> torch.Tensor:
        if not all(_dense(operands[place]) for place in weights):
            return native(*operands)
        return call(
            *(
                operand if operand is None or _dense(operand) else operand.clone(memory_format=torch.contiguous_format)
                for operand in operands
            )
        )

    return copied


def _counted(call: Call, counter: list[int]) -> Call:
    """The launcher with a count of its calls, used while shapes are captured."""

    def counted(*operands: torch.Tensor | None) -> torch.Tensor:
        counter[0] += 1
        return call(*operands)

    return counted


def entry(dispatcher: Dispatcher) -> Call:
    """The hot path over a dispatcher's launchers, as a closure: no attribute look-ups, no locks."""
    get, resolve, demote = dispatcher.launchers.get, dispatcher.resolve, dispatcher.demote

    def gemm_a16w16(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        scale_c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x[..., K] @ weight[N, K].T (+ bias[N])`` by the solution that the tables choose for this shape.

        Args:
            x: activations in bf16, fp16, fp32 or fp8, any leading dimensions.
            weight: [N, K], of x's dtype; a [K, N] weight must be passed as ``weight.t()``.
            bias: [N] or absent.
            otype: dtype of the output; that of x if absent.
            scale_a, scale_b, scale_c: one-element float32 factors of x, weight and the output.

        Returns:
            A new tensor [..., N].

        Raises:
            OperandError: shapes, dtypes or devices that do not fit each other.
        """
        if scale_a is None and scale_b is None and scale_c is None:
            key: tuple[Any, ...]
            if bias is None:
                key = (
                    x.shape, weight.shape, x.dtype, weight.dtype, x.get_device(), weight.get_device(), otype, type(x), type(weight),
                    x.is_contiguous() and weight.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) & 15,
                    is_grad_enabled() and (x.requires_grad or weight.requires_grad),
                )  # fmt: skip
                call = get(key)
                if call is not None:
                    try:
                        return call(x, weight)
                    except Exception as error:
                        return demote(error, key, (x, weight), otype)
                return resolve(key, (x, weight), otype)
            key = (
                x.shape, weight.shape, x.dtype, weight.dtype, x.get_device(), weight.get_device(), otype, type(x), type(weight),
                x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
                and not (x.data_ptr() | weight.data_ptr() | bias.data_ptr()) & 15,
                is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad),
                bias.shape, bias.dtype, bias.get_device(), type(bias),
            )  # fmt: skip
            call = get(key)
            if call is not None:
                try:
                    return call(x, weight, bias)
                except Exception as error:
                    return demote(error, key, (x, weight, bias), otype)
            return resolve(key, (x, weight, bias), otype)
        return resolve(None, (x, weight, bias, scale_a, scale_b, scale_c), otype)

    return gemm_a16w16


class TunedGemm:
    """AITER's ``TunedGemm``: one set of tables behind `gemm_a16w16` and `mm`."""

    def __init__(self, registry: Registry | None = None, *, settings: Settings | None = None) -> None:
        self.dispatcher = Dispatcher(op_named("a16w16"), registry, settings=settings)
        #: the entry point of the op; see `tunedgemm.gemm_a16w16`
        self.gemm_a16w16 = entry(self.dispatcher)
        #: AITER's other name for the same call
        self.mm = self.gemm_a16w16

    def load_config(self, path: str | Path) -> None:
        """Put a tuned CSV above every other layer, for this instance alone.

        Raises:
            TableError: the file cannot be read as a table of this op.
        """
        self.dispatcher.load(path)


tgemm = TunedGemm()
gemm_a16w16 = tgemm.gemm_a16w16


def _shape(what: Shape | torch.Tensor, operands: tuple[Any, ...], otype: torch.dtype | None) -> tuple[Shape, int | None]:
    if isinstance(what, Shape):
        return what, None
    return tgemm.dispatcher.op.shape_of(what, *operands, otype=otype), what.get_device()


def explain(what: Shape | torch.Tensor, *operands: Any, otype: torch.dtype | None = None, device: Device | None = None) -> Explanation:
    """Say which solution serves a shape (or the operands of a call) on a device, and why not the others.

    Args:
        what: a Shape, or the first operand of a call; its other operands follow.
        device: where; the operands' device, or the present default one. May describe a device that is not present.
    """
    shape, index = _shape(what, operands, otype)
    return tgemm.dispatcher.explain(shape, device or (None if index is None else device_of(index)))


def is_tuned(what: Shape | torch.Tensor, *operands: Any, otype: torch.dtype | None = None, device: Device | None = None) -> bool:
    """Whether a table row serves this shape (or these operands) on the device."""
    return explain(what, *operands, otype=otype, device=device).tuned


def prewarm(shapes: Iterable[Shape] | None = None) -> int:
    """Bind and run every tuned shape of the present device (or those given) once; call it before graph capture."""
    return tgemm.dispatcher.prewarm(shapes)


def reload() -> None:
    """Read the environment, tables and backends again, and forget every bound launcher."""
    tgemm.dispatcher.reload()


def fingerprint() -> str:
    """A short digest of tables and backends; ranks that print the same one dispatch alike."""
    return tgemm.dispatcher.fingerprint()


__all__ = ["Dispatcher", "TunedGemm", "entry", "explain", "fingerprint", "gemm_a16w16", "is_tuned", "prewarm", "reload", "tgemm"]
