"""Launches of the conformance suite: operands, references and bound launchers."""

from __future__ import annotations

import contextlib
import resource
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from tunedgemm.backends import native
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, errors
from tunedgemm.ops.both_sides import judged_as
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.formats.tensor_bytes import duplicate
from tunedgemm.ops.op import Op, Tolerance
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.tuner.watching import Poisoned

#: Most bytes of cached operands and references, for later checks and other backends.
KEPT_BYTES = 1 << 29
#: Cycles for which the default stream is kept busy: about 10 ms, longer than a kernel.
_BUSY_CYCLES = 20_000_000


@contextlib.contextmanager
def without_extension() -> Iterator[None]:
    """Launch through ctypes in this block, as where the C extension was not built."""
    extension, native._extension = native._extension, None
    try:
        yield
    finally:
        native._extension = extension


@attrs.frozen(eq=False)
class Drawn:
    """Operands of one shape and their float64 reference."""

    operands: tuple[Any, ...]
    reference: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.operands, self.reference) if tensor is not None)


class DrawnCache:
    """Operands and references by shape, device and seed: an LRU cache of limited bytes."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._held = limit, 0
        self._drawn: OrderedDict[tuple[Shape, str, int], Drawn] = OrderedDict()

    def draw(self, shape: Shape, device: Device, seed: int) -> Drawn:
        """Return the operands of a seed and their reference, made at the first call."""
        key = (shape, str(device.torch_device), seed)
        drawn = self._drawn.get(key)
        if drawn is None:
            op = op_named(shape.op)
            operands = op.make_inputs(shape, device.torch_device, seed)
            drawn = self._drawn[key] = Drawn(operands, op.reference(shape, operands))
            self._held += drawn.nbytes
            while self._held > self._limit and len(self._drawn) > 1:
                self._held -= self._drawn.popitem(last=False)[1].nbytes
        self._drawn.move_to_end(key)
        return drawn


_drawn = DrawnCache()


def output_fault(shape: Shape, out: Any, reference: Any, tolerance: Tolerance | None = None) -> str:
    """Return how an output exceeds a tolerance of a reference, by default the op's; "" for a right one."""
    tolerance = tolerance or op_named(shape.op).tolerance(shape)
    ratio, row = errors(out, reference, tolerance)
    if ratio <= MAX_ERROR_RATIO and row <= tolerance.row_error:
        return ""
    return f"error ratio {ratio:.3g} (bound {MAX_ERROR_RATIO}), worst row error {row:.3g} (bound {tolerance.row_error:.3g})"


@attrs.frozen(eq=False)
class Case:
    """One shape on the current device, with the solutions that bind and those that do not.

    *changed* names process state that binding changed, which the suite restored.
    """

    shape: Shape
    device: Device
    op: Op
    launchers: tuple[tuple[Solution, Launcher], ...]
    refusals: tuple[tuple[Solution, Unsupported], ...]
    changed: tuple[str, ...] = ()
    _outputs: dict[Solution, Any] = attrs.field(factory=dict, init=False)
    _judged: dict[int, Drawn] = attrs.field(factory=dict, init=False)

    def of(self, solution: Solution) -> Case:
        """Return the case that judges a solution: this one, or that of another op's product."""
        op = judged_as(self.op, solution)
        return self if op is self.op else attrs.evolve(self, op=op)

    def drawn(self, seed: int) -> Drawn:
        """Return operands and their reference; the session's cache keeps those of the op itself."""
        drawn = _drawn.draw(self.shape, self.device, seed)
        if self.op.reference == op_named(self.shape.op).reference:
            return drawn
        if seed not in self._judged:
            self._judged[seed] = attrs.evolve(drawn, reference=self.op.reference(self.shape, drawn.operands))
        return self._judged[seed]

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the operands of seed 0."""
        return self.drawn(0).operands

    def output(self, solution: Solution, launcher: Launcher) -> Any:
        """Return the output of one call on the operands of seed 0, launched at the first call."""
        if solution not in self._outputs:
            self._outputs[solution] = launch(launcher, self.operands)
        return self._outputs[solution]

    @property
    def is_default(self) -> bool:
        """Tell whether the operands alone determine the shape, including its output dtype."""
        return bool(self.op.shape_of(*self.operands, **self.op.fields(self.shape)) == self.shape)

    def fault(self, out: Any, reference: Any = None) -> str:
        """Return the fault of an output's numbers; "" for a right one."""
        wanted = self.drawn(0).reference if reference is None else reference
        return output_fault(self.shape, out, wanted, self.op.tolerance(self.shape))

    def faults_of(self, out: Any, operands: tuple[Any, ...]) -> Iterator[str]:
        """Yield the faults of an output's shape, dtype and numbers, for any leading dimensions."""
        wanted = self.op.fake(*operands, otype=torch_dtype(self.shape.outdtype))
        form = f"{tuple(out.shape)} {out.dtype} on {out.device}" + ("" if out.is_contiguous() else ", not contiguous")
        expected = f"{tuple(wanted.shape)} {wanted.dtype} on {wanted.device}"
        if form != expected:
            yield f"{form} instead of {expected}"
        if fault := self.fault(out):
            yield fault

    def listed(self, solution: Solution, faults: Iterable[str]) -> Iterator[str]:
        """Yield faults with the shape and the solution before each; a launch that raises is one of them."""
        try:
            for fault in faults:
                yield f"{self.shape}: {solution} {fault}"
        except LaunchFault as error:
            yield f"{self.shape}: {solution} {error}"


class LaunchFault(AssertionError):
    """A launcher raised, or wrote outside its output."""


def launch(launcher: Launcher, operands: Sequence[Any]) -> Any:
    """Return the output of one call.

    Raises:
        LaunchFault: the launcher raised; the message names the operands.
    """
    try:
        return launcher.call(*operands)
    except Exception as error:  # a plugin may raise anything
        sizes = ", ".join("None" if operand is None else f"{tuple(operand.shape)} {operand.dtype}" for operand in operands)
        raise LaunchFault(f"raised {type(error).__name__} for {sizes}: {error}") from error


def bind_launcher(backend: Any, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Return a solution's launcher; fail with the reason where `bind` refuses it."""
    answer = backend.bind(solution, shape, device)
    assert isinstance(answer, Launcher), f"{shape}: {solution}: {answer}"
    return answer


def draw_operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    """Return random operands as a plugin's launchers get them: shuffled weights are plain."""
    return tuple(plain_weight(operand) for operand in op_named(shape.op).make_inputs(shape, device.torch_device, seed))


def poisoned_output(launcher: Launcher, operands: Sequence[Any]) -> Any:
    """Return the output of one call whose memory held NaN.

    Raises:
        LaunchFault: the launcher raised, or wrote outside its output and workspace.
    """
    with Poisoned() as poisoned:
        out = launch(launcher, operands)
    if poisoned.overwritten():
        raise LaunchFault("writes outside its output or workspace")
    return out


def fault_of(shape: Shape, out: Any, operands: tuple[Any, ...]) -> str:
    """Return how an output exceeds the op's tolerance of the product of its operands; "" for a right one."""
    return output_fault(shape, out, op_named(shape.op).reference(shape, operands))


def work_of_children() -> tuple[float, ...]:
    """Return what ended child processes have used so far; it grows when a compiler ends."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime, used.ru_minflt


def share_memory(one: Any, other: Any) -> bool:
    """Tell whether two outputs have any elements in the same memory."""
    return bool(one.numel() and other.numel() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def output_of_side_stream(launcher: Launcher, operands: Sequence[Any]) -> Any:
    """Return an output as another stream sees it after its own work, while the default stream is busy."""
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[attr-defined]
    with torch.cuda.stream(stream), Poisoned():
        seen = duplicate(launch(launcher, operands))
    torch.cuda.synchronize()
    return seen
