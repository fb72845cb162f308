"""Stage 4, verify: is the output right, complete and repeatable, and are operands unchanged?

Outputs and workspaces are filled with NaN between canaries before the launch. This finds elements
that are never written, and writes out of bounds. The reference is computed from the operands
as given, in float32 or float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tunedgemm.backends.launcher import Launcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.formats.contents import duplicate, overwrite
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.accuracy import LIFTED, errors, same_bits
from tunedgemm.tuner.trial import failed

#: Consecutive calls whose bits are compared, and which may not leak memory.
REPEATS = 4
#: M whose rows are compared for batch invariance: both sides of every kernel tile size.
INVARIANT_M = (1, 2, 5, 16, 17, 64, 65, 130, 257)

#: operand sets of a check: which one, and whether with other activations at the same addresses
_SETS = ((0, False), (1, False), (0, True))
_GUARD = 512  # bytes before and after each allocation; a multiple of every alignment that kernels ask for
_CANARY = 0xA5
_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
)


@classmethod  # type: ignore[misc]
def _never_compiled(cls: type) -> bool:
    """Return False, lest torch wrap each mode for its compiler, whose import takes a second."""
    del cls
    return False


class Poisoned(TorchDispatchMode):
    """Makes every fresh allocation a NaN-filled view between canaries.

    Types without NaN get bytes 0xFF.
    """

    _should_skip_dynamo = _never_compiled

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS or fresh.layout is not torch.strided or fresh.is_meta:
            return fresh
        extent = fresh.untyped_storage().nbytes()
        buffer = torch.full((extent + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=fresh.device)
        buffer[:_GUARD] = _CANARY
        buffer[_GUARD + extent :] = _CANARY
        self._buffers.append(buffer)
        typed = buffer[_GUARD : _GUARD + extent].view(fresh.dtype)
        return typed.as_strided(fresh.size(), fresh.stride(), _GUARD // fresh.element_size())

    def overwritten(self) -> bool:
        """Return whether a canary was overwritten."""
        return any(bool((end != _CANARY).any()) for buffer in self._buffers for end in (buffer[:_GUARD], buffer[-_GUARD:]))


class Traced(TorchDispatchMode):
    """Records the storages that operations make, to count those that stay alive."""

    _should_skip_dynamo = _never_compiled

    def __init__(self) -> None:
        super().__init__()
        self._allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        of_arguments = {storage._cdata for storage in _storages([*args, *(kwargs or {}).values()])}
        for storage in _storages(results if isinstance(results, tuple | list) else [results]):
            if storage._cdata not in of_arguments:  # neither a view of an argument nor the argument, changed in place
                self._allocated[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def held(self) -> int:
        """Return the bytes of the storages that are still alive."""
        return sum(size for reference, size in self._allocated.values() if not reference.expired())


def _storages(values: Sequence[Any]) -> list[torch.UntypedStorage]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]


@attrs.frozen(eq=False)
class Verifier:
    """Checks launchers of one shape against the reference on several sets of operands.

    Attributes:
        op, shape: the problem.
        operand_sets: two or more operand tuples; their weights differ.
        err_ratio: largest share of elements outside the op's tolerance.
    """

    op: Op
    shape: Shape
    operand_sets: Sequence[tuple[Any, ...]]
    err_ratio: float
    _references: dict[tuple[int, bool], torch.Tensor] = attrs.field(factory=dict, init=False)
    _activations: dict[bool, tuple[tuple[int, torch.Tensor], ...]] = attrs.field(factory=dict, init=False)

    def prepare(self) -> None:
        """Compute the references, which take longer than a kernel."""
        for index, renewed in (*_SETS, (len(self.operand_sets) - 1, False)):
            self._reference(index, renewed)

    def check_first(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify one call on one set of operands: a wrong solution need not be timed."""
        return self._verify_poisoned(solution, launcher, *_SETS[0])

    def check(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify on two sets of operands, new activations at old addresses, and repeated calls.

        Returns:
            A Timing without a time, with status ``ok``, ``wrong``, ``leaks``, or that of the
            failure.
        """
        worst = Timing(self.shape, solution, "ok")
        for index, renewed in _SETS:
            timing = self._verify_poisoned(solution, launcher, index, renewed)
            if timing.status != "ok":
                return timing
            worst = _worse_of(worst, timing)
        again = self._verify_repeats(solution, launcher)
        return attrs.evolve(_worse_of(worst, again), deterministic=again.deterministic) if again.status == "ok" else again

    def check_again(self, solution: Solution, launcher: Launcher, *, graphed: bool) -> Timing:
        """Verify after many calls: a kernel may leave a state that makes later calls wrong.

        Args:
            solution: the solution.
            launcher: its launcher.
            graphed: also replay a graph twice, which shows a counter that only a host launch
                clears.
        """
        last = len(self.operand_sets) - 1
        timing = self._verify_poisoned(solution, launcher, last, False)
        if timing.status == "ok" and graphed and self.operand_sets[0][0].is_cuda:
            timing = self._verify_replays(solution, launcher, (0, last))
            when = "outside a graph, but not in one that is replayed"
        else:
            when = "at first, wrong later"
        return timing if timing.status == "ok" else attrs.evolve(timing, detail=f"right {when}: {timing.detail}"[:500])

    def _verify_replays(self, solution: Solution, launcher: Launcher, indices: Sequence[int]) -> Timing:
        """Verify a captured call of each of these operand sets after its second replay."""
        timing = Timing(self.shape, solution, "ok")
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                outs = [launcher.call(*self.operand_sets[index]) for index in indices]
            for _ in range(2):
                for out in outs:
                    out.view(torch.uint8).fill_(0xFF)  # NaN in every floating type
                graph.replay()
            torch.cuda.synchronize()
        except Exception as error:  # a kernel may raise anything
            return failed(self.shape, solution, error)
        for index, out in zip(indices, outs, strict=True):
            timing = _worse_of(timing, self._compare(solution, out, index, False))
        return timing

    def batch_invariant(self, bind: Callable[[Shape], Launcher | Unsupported]) -> str:
        """Return why the bits of rows depend on M, "" if they do not.

        Args:
            bind: returns the solution's launcher at another M.
        """
        sizes = sorted({*INVARIANT_M, self.shape.m})
        largest = attrs.evolve(self.shape, m=sizes[-1])
        operands = self.op.make_inputs(largest, self.operand_sets[0][0].device, 5)
        rows: torch.Tensor | None = None
        for m in reversed(sizes):
            launcher = bind(attrs.evolve(self.shape, m=m))
            if isinstance(launcher, Unsupported):
                return f"it refuses M = {m}: {launcher.reason}"
            with torch.no_grad():
                out = launcher.call(*self.op.first_rows(largest, operands, m))
            leading = rows_of(out, m)
            rows = leading if rows is None else rows
            if not same_bits(leading, rows[:, :m]):
                return f"the first rows differ between M = {m} and M = {sizes[-1]}"
        return ""

    def _verify_poisoned(self, solution: Solution, launcher: Launcher, index: int, renewed: bool) -> Timing:
        try:
            with _Renewed(self, index, renewed):
                out, fault = self._run(launcher.call, self.operand_sets[index])
        except Exception as error:  # a kernel may raise anything
            return failed(self.shape, solution, error)
        if fault:
            return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail=fault)
        return self._compare(solution, out, index, renewed)

    def _compare(self, solution: Solution, out: torch.Tensor, index: int, renewed: bool) -> Timing:
        tolerance = self.op.tolerance(self.shape)
        exact = self._reference(index, renewed)
        ratio, row = errors(out, exact, tolerance)
        if ratio > self.err_ratio or not row <= tolerance.row_error:
            bound = "any finite" if tolerance.row_error == LIFTED else f"{tolerance.row_error:.1e}"
            allowed = f"allowed {self.err_ratio:.2%} and {bound}"
            detail = f"{ratio:.2%} of elements off, worst row {row:.1e} ({allowed})"
            return Timing(self.shape, solution, "wrong", err_ratio=ratio, row_error=min(row, 1e30), detail=detail)
        return Timing(self.shape, solution, "ok", err_ratio=ratio, row_error=row)

    def _run(self, call: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, str]:
        """Return the output and the fault of a call apart from its numbers; restore changed
        operands.
        """
        present = [operand for operand in operands if operand is not None]
        before = [duplicate(operand) for operand in present]
        with Poisoned() as poisoned, torch.no_grad():
            out = call(*operands)
        if present[0].is_cuda:
            torch.cuda.synchronize(present[0].device)
        if poisoned.overwritten():
            return out, "it wrote outside its output or workspace"
        changed = [(now, was) for now, was in zip(present, before, strict=True) if not same_bits(now, was)]
        for now, was in changed:
            overwrite(now, was)
        return out, "it changed its operands" if changed else self._shape_fault(out, operands)

    def _memory_fault(self, launcher: Launcher) -> str:
        """Return how an output shares memory with an operand or the next output, "" if it does not."""
        operands = self.operand_sets[0]
        with torch.no_grad():
            outs = [launcher.call(*operands) for _ in range(2)]
        first, second = (out.untyped_storage().data_ptr() for out in outs)
        if first == second:
            return "it returned the memory of an earlier output"
        addresses = {storage.data_ptr() for storage in _storages(operands)}
        return "it returned the memory of an operand" if first in addresses else ""

    def _verify_repeats(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify consecutive calls on the same operands, compare their bits, and look for leaks."""
        operands = self.operand_sets[0]
        first, deterministic = None, True
        traces: list[Traced] = []
        held: list[int] = []  # bytes that all calls so far keep
        worst = Timing(self.shape, solution, "ok")
        try:
            if fault := self._memory_fault(launcher):
                return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail=fault)
            for _ in range(REPEATS):
                with Traced() as traced, torch.no_grad():
                    out = launcher.call(*operands)
                traces.append(traced)
                copy = out.clone()
                size = out.nbytes
                del out
                held.append(sum(trace.held() for trace in traces))
                if first is None or not same_bits(copy, first):
                    deterministic = first is None
                    worst = _worse_of(worst, self._compare(solution, copy, 0, False))
                    first = copy if first is None else first
        except Exception as error:  # a kernel may raise anything
            return failed(self.shape, solution, error)
        if worst.status != "ok":
            return attrs.evolve(worst, detail=f"right at first, wrong later: {worst.detail}")
        # A cache that fills at the first calls does not leak, nor does a buffer that each call
        # replaces. A leak grows at every call.
        grown = min(later - earlier for earlier, later in itertools.pairwise(held))
        if grown >= max(size // 2, 1):
            return Timing(self.shape, solution, "leaks", detail=f"every call keeps {grown} bytes")
        return attrs.evolve(worst, deterministic=deterministic)

    def _shape_fault(self, out: Any, operands: tuple[Any, ...]) -> str:
        dtype = torch_dtype(self.shape.outdtype)
        expected = self.op.fake(*operands, otype=dtype)
        wanted = f"{tuple(expected.shape)} {dtype} on {expected.device}"
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else repr(out)[:80]
        if got == wanted and out.layout is torch.strided and not out.is_contiguous():
            return f"it returned strides {out.stride()} instead of contiguous rows"
        return "" if got == wanted else f"it returned {got} instead of {wanted}"

    def _reference(self, index: int, renewed: bool) -> torch.Tensor:
        if (index, renewed) not in self._references:
            with _Renewed(self, index, renewed):
                self._references[index, renewed] = self.op.reference(self.shape, self.operand_sets[index])
        return self._references[index, renewed]

    def contents(self, renewed: bool) -> tuple[tuple[int, torch.Tensor], ...]:
        """Return activations by position: copies of the given ones, or others of the same kind."""
        if renewed not in self._activations:
            operands = self.operand_sets[0]
            source = self.op.make_inputs(self.shape, operands[0].device, 11) if renewed else operands
            kept = [(p, t if renewed else duplicate(t)) for p, t in enumerate(source) if p not in self.op.weights and t is not None]
            self._activations[renewed] = tuple(kept)
        return self._activations[renewed]


@attrs.frozen(eq=False)
class _Renewed:
    """Gives the activations other contents at the same addresses, which shows a memoised result."""

    verifier: Verifier
    index: int
    renewed: bool

    def __enter__(self) -> None:
        self._fill(True)

    def __exit__(self, *_: object) -> None:
        self._fill(False)

    def _fill(self, renewed: bool) -> None:
        if self.renewed:
            self.verifier.contents(False)
            for position, values in self.verifier.contents(renewed):
                overwrite(self.verifier.operand_sets[self.index][position], values)


def rows_of(out: torch.Tensor, m: int) -> torch.Tensor:
    """Return an output as [batches, M, N]; one batch for an op without batches."""
    return out.reshape(out.numel() // max(1, m * out.shape[-1]), m, out.shape[-1])


def _worse_of(first: Timing, second: Timing) -> Timing:
    if second.status != "ok":
        return second
    err_ratio, row_error = max(first.err_ratio, second.err_ratio), max(first.row_error, second.row_error)
    return attrs.evolve(first, err_ratio=err_ratio, row_error=row_error)
