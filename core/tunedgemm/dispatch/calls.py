"""Cache keys of calls, and the wrappers of launchers: copies, captures, autocast and counters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch.autograd import forward_ad

from tunedgemm.backends.launcher import Launcher
from tunedgemm.dispatch.gradients import needs_gradient
from tunedgemm.dispatch.operands import in_memory
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, PluginError
from tunedgemm.ops.formats.contents import duplicate
from tunedgemm.ops.formats.scales import ShuffledScale
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.ops.formats.twofold import PLAIN_TYPES
from tunedgemm.ops.layout import SHUFFLED_ADDRESSES
from tunedgemm.ops.op import Call, Op, Serving
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from tunedgemm.device import Device
    from tunedgemm.dispatch.choice import Explanation


class Binding(Serving, Protocol):
    """The part of a dispatcher that binds shapes; `dispatcher.Dispatcher` implements it."""

    above: tuple[Path, ...]
    preferences: dict[tuple[Any, ...], bool]

    def torch_fallback(self, shape: Shape, device: Device) -> Call:
        """Return torch's own call for a shape."""

    def is_bound(self, shape: Shape, device: Device) -> bool:
        """Tell whether a shape is bound on a device."""

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape and return the launcher that serves it."""


def call_key(op: Op, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any]) -> tuple[Any, ...] | None:
    """Make the cache key of a call of any op.

    Returns None where a field cannot be hashed, or memory does not hold an operand's values.

    Raises:
        OperandError: an operand is not a tensor.
    """
    key: list[Any] = [otype, forward_ad._current_level, tuple(fields.items())]
    aligned = True
    for position, operand in enumerate(operands):
        if operand is None:
            key.append(None)
            continue
        if not isinstance(operand, torch.Tensor):
            name = op.operands[position] if position < len(op.operands) else f"operand {position + 1}"
            raise OperandError(f"{op.name}: {name.rstrip('?')} must be a tensor (got {type(operand).__name__})")
        try:
            address, sizes = operand.data_ptr(), operand.shape
        except RuntimeError:
            return None
        if operand.is_neg() or not (address or operand.numel() == 0):
            return None
        # An op may refuse one operand that is not contiguous and take another.
        order = operand.is_contiguous() or (operand.stride() if position in op.strided else False)
        key += (sizes, operand.dtype, operand.get_device(), type(operand), order)
        aligned = address % 16 == 0 and aligned
        if position in op.matrices:  # AITER marks a plain tensor; an assignment to `data` loses our type
            key.append(getattr(operand, "is_shuffled", None) is True or address in SHUFFLED_ADDRESSES)
    key += (aligned, needs_gradient(operands))
    try:
        hash(key[2])
    except TypeError:
        return None
    return tuple(key)


def plain(operands: tuple[Any, ...]) -> bool:
    """Check that launchers know the operands' types: tensors, parameters, shuffled weights and scales."""
    for operand in operands:
        if operand is not None and type(operand) not in PLAIN_TYPES and not isinstance(operand, (ShuffledWeight, ShuffledScale)):
            return False
    return True


def torch_only(shape: Shape, operands: tuple[Any, ...]) -> str:
    """Return why torch serves a call, whatever tables and heuristics say; "" where they decide."""
    if needs_gradient(operands):
        return "the call needs a gradient"
    if shape.m == 0:
        return "the batch is empty"
    return "" if plain(operands) else "an operand has a type that kernels do not take"


@attrs.frozen(eq=False)
class OnDevice:
    """A call that runs with its operands' GPU as the current one.

    torch's own calls need no such guard. A kernel launched through a driver goes to a stream of the
    current device.
    """

    call: Call
    index: int

    def __call__(self, *operands: Any) -> torch.Tensor:
        """Make the device current for the call."""
        with torch.cuda.device(self.index):
            return self.call(*operands)


def is_elsewhere(device: Device) -> bool:
    """Return whether another GPU than this one is current."""
    return device.index >= 0 and torch.cuda.current_device() != device.index


def may_wait(operands: tuple[Any, ...]) -> bool:
    """Check that a call runs now, neither traced nor captured, so that it may wait for tuning."""
    if not plain(operands) or needs_gradient(operands) or operands[0].is_meta or torch.compiler.is_compiling():
        return False
    return not (operands[0].is_cuda and torch.cuda.is_current_stream_capturing())


def first_answer(op: Op, call: Call, shape: Shape, operands: tuple[Any, ...], otype: torch.dtype | None) -> torch.Tensor:
    """Call a key's new launcher, and check what it returns; later calls are not checked.

    Raises:
        PluginError: it is not a tensor of the op's shape, dtype and device.
    """
    out, x = call(*operands), operands[0]
    sizes = (*x.shape[:-1], shape.n)
    if not _is_tensor(out, sizes, torch_dtype(shape.outdtype), x.device):
        fake = op.fake(*operands, otype=otype)  # ops may have outputs of other sizes
        if not _is_tensor(out, tuple(fake.shape), fake.dtype, fake.device):
            got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else f"{out!r:.80}"
            raise PluginError(f"its output must be {tuple(fake.shape)} {fake.dtype} on {fake.device} (got {got})")
    return out


def _is_tensor(out: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(out, torch.Tensor) and out.shape == sizes and out.dtype == dtype and out.device == device


def is_ready(operand: torch.Tensor | None, strided: bool = False) -> bool:
    """Check that an operand is absent, or aligned to 16 bytes and, unless *strided*, contiguous."""
    return operand is None or ((strided or operand.is_contiguous()) and operand.data_ptr() % 16 == 0)


def copying(call: Call, native: Call | None, weights: tuple[int, ...], strided: tuple[int, ...] = ()) -> Call:
    """Wrap a launcher so that it gets contiguous, aligned copies of the activations.

    Args:
        call: the launcher.
        native: torch's call, which serves where a weight would have to be copied at each call; None
            where torch has none, so that weights are copied, too.
        weights: positions of the weights.
        strided: positions of the operands that keep their strides (`Op.strided`).
    """

    def ready(index: int, operand: torch.Tensor | None) -> torch.Tensor | None:
        keeps = index in strided
        return operand if operand is None or is_ready(operand, keeps) else duplicate(operand, contiguous=not keeps)

    def copied(*operands: torch.Tensor | None) -> torch.Tensor:
        if not in_memory(operands):  # they share the keys of misaligned operands, and are served without this launcher
            raise OperandError("the memory of an operand does not hold its values; pass a copy")
        if native is not None and not all(is_ready(operands[index]) for index in weights if index < len(operands)):
            return native(*operands)
        return call(*(ready(index, operand) for index, operand in enumerate(operands)))

    return copied


class TorchFailed(Exception):
    """Wraps the error of torch's own call where it stood in for a launcher, which is not to blame."""


def blaming_torch(native: Call) -> Call:
    """Wrap torch's call for use inside a launcher, so that its errors veto no solution."""

    def blamed(*operands: torch.Tensor | None) -> torch.Tensor:
        try:
            return native(*operands)
        except Exception as error:
            raise TorchFailed from error

    return blamed


def eager_only(call: Call, native: Call) -> Call:
    """Wrap a launcher that breaks a graph capture: torch's call serves while one is under way."""
    capturing = torch.cuda.is_current_stream_capturing

    def eager(*operands: torch.Tensor | None) -> torch.Tensor:
        return native(*operands) if capturing() else call(*operands)

    return eager


def outside_autocast(launcher: Launcher, op: Op, shape: Shape, device: Device) -> Launcher:
    """Wrap torch's launcher so that autocast changes none of its dtypes, as it changes no kernel's.

    Which rows a table has must not show in the dtype or precision of a result. Functions that check
    autocast themselves find torch's call as ``torch_call``.
    """
    call = launcher.call
    # The second takes twice as long; autocast of GPUs alone changes calls on a GPU.
    enabled = torch.is_autocast_enabled if device.kind != "cpu" else torch._C._is_any_autocast_enabled

    def of_any(*operands: torch.Tensor | None) -> Any:
        if not enabled():
            return call(*operands)
        with torch._C._DisableAutocast():
            return call(*operands)

    # Operands by name cost 0.1 us less than a tuple of them.
    def of_two(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return of_any(x, weight) if enabled() else call(x, weight)

    def of_three(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return of_any(x, weight, bias) if enabled() else call(x, weight, bias)

    float_product = op.operands[:3] == ("x", "weight", "bias?") and shape.scale == "none"
    outside: Any = of_any if not float_product else of_three if shape.bias else of_two
    outside.torch_call = call
    return Launcher(outside, launcher.graph_safe, launcher.workspace_bytes)


def adapted(op: Op, call: Call, native: Call | None, operands: tuple[Any, ...], ready: bool, breaks_capture: bool, is_torch: bool) -> Call:
    """Wrap a launcher for operands that are not *ready*, or for captures that it *breaks*.

    Args:
        op, operands: of a call that finds it; those of later calls are as ready.
        call: the launcher.
        native: torch's call, or None where torch has none.
        ready: whether all operands are as the launcher takes them.
        breaks_capture: whether the launcher may not be captured, as a later call may be.
        is_torch: whether the launcher is the built-in backend's.
    """
    call = eager_only(call, native) if breaks_capture and native is not None else call
    if ready:
        return call
    if native is not None and any(operand is not None and operand.element_size() == 1 for operand in operands):
        native = copying(native, None, (), op.strided)  # torch's products of bytes need contiguous, aligned operands, too
    return native if native and is_torch else copying(call, native, op.weights, op.strided)


#: Ids of the graphs being captured. While it is empty, calls skip the driver query (0.3 us).
_captures: set[int] = set()

#: Stands among them for a graph whose capture began before `watch_graphs`.
_UNSEEN = 0


@functools.cache
def watch_graphs() -> None:
    """Keep track of the graphs that torch captures, so that calls ask the driver only while there is one.

    Called when shapes are captured, and not before: it replaces two methods of
    `torch.cuda.CUDAGraph`. A capture that begins without that class is not seen, and its calls
    count as eager ones.
    """
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        _captures.add(id(self))
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _captures.discard(id(self))
            raise

    @functools.wraps(end)
    def capture_end(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _captures.discard(id(self) if id(self) in _captures else _UNSEEN)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end  # type: ignore[method-assign]
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _captures.add(_UNSEEN)


def capture_check(operand: torch.Tensor) -> Callable[[], bool] | None:
    """Return a function that detects whether a call on this operand is captured; None on a CPU."""
    return torch._C._cuda_isCurrentStreamCapturing if operand.is_cuda else None


def is_captured(ask: Callable[[], bool] | None) -> bool:
    """Call what `capture_check` returned, but only while `watch_graphs` knows of a capture."""
    return ask is not None and bool(_captures) and ask()


def may_synchronize(operand: torch.Tensor) -> bool:
    """Return whether a thread may wait for a tensor's GPU: not while any thread captures a graph."""
    return not operand.is_cuda or not (_captures or torch._C._cuda_isCurrentStreamCapturing())


def with_call_counter(call: Call, counter: list[int], ask: Callable[[], bool] | None, operands: int) -> Call:
    """Wrap a launcher so that the calls it serves are counted, while shapes are captured.

    A call that raises is not counted: whatever serves it instead counts it.

    Args:
        call: the launcher.
        counter: the numbers of calls that ran at once, and that were recorded into graphs.
        ask: what `capture_check` returned.
        operands: how many each call has.
    """
    if ask is None:

        def counting(*operands: torch.Tensor | None) -> torch.Tensor:
            out = call(*operands)
            counter[0] += 1
            return out

        return counting

    captures = _captures

    # Operands by name cost 40 ns less than a tuple of them, of the 300 that a call may.
    def of_two(x: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        out = call(x, weight)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_three(x: torch.Tensor | None, weight: torch.Tensor | None, third: torch.Tensor | None) -> torch.Tensor:
        out = call(x, weight, third)
        counter[1 if captures and ask() else 0] += 1
        return out

    def of_any(*operands: torch.Tensor | None) -> torch.Tensor:
        out = call(*operands)
        counter[1 if captures and ask() else 0] += 1
        return out

    by_number: dict[int, Call] = {2: of_two, 3: of_three}
    return by_number.get(operands, of_any)
