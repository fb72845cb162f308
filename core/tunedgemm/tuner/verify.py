"""Stage 4, verify: check that outputs are correct, complete and repeatable, operands unchanged.

Outputs and workspaces are filled with NaN between canaries before the launch, which detects
elements that are never written and out-of-bounds writes. The reference is computed from the same
operands in float32 or float64.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tunedgemm.backends.kept_weights import cost, renew
from tunedgemm.backends.launcher import Launcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.accuracy import LIFTED, errors, same_bits
from tunedgemm.ops.both_sides import judged_as
from tunedgemm.ops.formats.tensor_bytes import duplicate, fingerprint, overwrite, raw
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import WrongOutput, failed
from tunedgemm.tuner.watching import Poisoned, Traced, storages_of

#: Consecutive calls that are compared bitwise and checked for leaks.
REPEATS = 4


@attrs.frozen(eq=False)
class Variant:
    """One call to verify.

    Attributes:
        what: description that follows "wrong" in messages; key of its reference.
        shape: the shape that the launcher is bound to.
        operands: the operands.
        change: changes the operands in place during the call; None for no change.
        expected: the reference [rows, N]; None to compute it.
        by_row: whether rows are normalised before the comparison.
        spoiled: whether rows contain NaN or infinity, which the output must show.
    """

    what: str
    shape: Shape
    operands: tuple[Any, ...]
    change: Callable[[tuple[Any, ...]], None] | None = None
    expected: torch.Tensor | None = None
    by_row: bool = False
    spoiled: bool = False

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Change the operands, and restore them on exit."""
        if self.change is None:
            yield
            return
        before = [(operand, duplicate(operand)) for operand in self.operands if operand is not None]
        try:
            self.change(self.operands)
            renew(self.operands)  # torch does not count these writes
            yield
        finally:
            for operand, contents in before:
                overwrite(operand, contents)
            renew(self.operands)


@attrs.frozen(eq=False)
class Verifier:
    """Checks launchers of one shape against the reference on several sets of operands.

    Attributes:
        op, shape: the op and the shape.
        operand_sets: two or more operand tuples with different weights.
        err_ratio: largest fraction of elements outside the op's tolerance.
        own: the verifier by the op's own reference, where another op's judges; see `of`.
    """

    op: Op
    shape: Shape
    operand_sets: Sequence[tuple[Any, ...]]
    err_ratio: float
    own: Verifier | None = None
    _references: dict[str, torch.Tensor] = attrs.field(factory=dict, init=False)
    _renewed: list[tuple[Any, ...]] = attrs.field(factory=list, init=False)
    _sums: dict[tuple[Solution, str], tuple[Any, ...]] = attrs.field(factory=dict, init=False)
    _others: dict[str, Verifier] = attrs.field(factory=dict, init=False)

    def of(self, solution: Solution, err_ratio: float | None = None) -> Verifier:
        """Return the verifier that judges a solution: this one, or that of another op's product.

        Args:
            solution: the solution.
            err_ratio: that of the other op's, by default this one's.
        """
        if (op := judged_as(self.op, solution)) is self.op:
            return self
        name = solution.kernel_name
        if name not in self._others:
            self._others[name] = attrs.evolve(self, op=op, own=self, err_ratio=self.err_ratio if err_ratio is None else err_ratio)
        return self._others[name]

    def prepare(self) -> None:
        """Compute the references ahead, since they take longer than a kernel."""
        for variant in (*self._checked, self.variant(-1)):
            self.expected(variant)

    @property
    def _checked(self) -> tuple[Variant, ...]:
        return self.variant(0), self.variant(1), self.variant(0, renewed=True)

    def variant(self, index: int, *, renewed: bool = False) -> Variant:
        """Return the variant of an operand set, with its own or new activations."""
        index %= len(self.operand_sets)
        what = f"with the operands of set {index}" + (", renewed" if renewed else "")
        return Variant(what, self.shape, self.operand_sets[index], self._renew if renewed else None)

    def renewed(self) -> tuple[Any, ...]:
        """Return new operands, drawn with another seed."""
        if not self._renewed:
            self._renewed.append(self.op.make_inputs(self.shape, self.operand_sets[0][0].device, 11))
        return self._renewed[0]

    def _renew(self, operands: tuple[Any, ...]) -> None:
        """Overwrite the activations, to detect memoised results."""
        for position, (operand, other) in enumerate(zip(operands, self.renewed(), strict=False)):
            if position not in self.op.weights and operand is not None:
                overwrite(operand, other)

    def expected(self, variant: Variant) -> torch.Tensor:
        """Return the cached reference of a variant."""
        if variant.expected is not None and self.own is None:  # it is of the op's own reference
            return variant.expected
        if variant.what not in self._references:
            with variant.changed():
                self._references[variant.what] = self.op.reference(variant.shape, variant.operands)
        return self._references[variant.what]

    def check_first(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify one call on one operand set."""
        return self.verify(solution, launcher.call, self.variant(0))

    def check(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify on two operand sets, with activations changed in place, and repeatedly.

        Returns:
            A Timing without a time, with status ``ok``, ``wrong``, ``leaks``, or that of the
            failure.
        """
        worst = Timing(self.shape, solution, "ok")
        for variant in self._checked:
            timing = self.verify(solution, launcher.call, variant)
            if timing.status != "ok":
                return timing
            worst = worse_of(worst, timing)
        again = self._verify_repeats(solution, launcher)
        if again.status != "ok":
            return again
        detail = cost(self.operand_sets[1]) if launcher.keeps_weights else ""  # the first loaded modules
        found = attrs.evolve(worse_of(worst, again), deterministic=again.deterministic, detail=detail)
        return found if self.own is None else self.own.with_errors(found, launcher)

    def with_errors(self, timing: Timing, launcher: Launcher) -> Timing:
        """Replace the errors by those against the op's own reference, for a row that says so."""
        variant, tolerance = self.variant(0), self.op.tolerance(self.shape)
        with torch.no_grad():
            ratio, row = errors(launcher.call(*variant.operands), self.expected(variant), tolerance)
        detail = f"other numbers than {self.op.name}: {ratio:.2%} of elements off, worst row {row:.1e}"
        return attrs.evolve(timing, err_ratio=ratio, row_error=row, detail=detail)

    def check_again(self, solution: Solution, launcher: Launcher, *, graphed: bool) -> Timing:
        """Verify after many calls, since a kernel may leave state that breaks later ones.

        Args:
            solution: the solution.
            launcher: its launcher.
            graphed: also replay a graph twice, to detect counters that only host code resets.
        """
        timing = self.verify(solution, launcher.call, self.variant(-1))
        if timing.status == "ok" and graphed and self.operand_sets[0][0].is_cuda:
            timing = self._verify_replays(solution, launcher, (0, -1))
            when = "outside a graph, but not in one that is replayed"
        else:
            when = "at first, wrong later"
        return timing if timing.status == "ok" else attrs.evolve(timing, detail=f"right {when}: {timing.detail}"[:500])

    def judge(self, solution: Solution, out: torch.Tensor, variant: Variant, when: str = "after timed calls") -> None:
        """Check an output of timed calls, quickly if its bits were verified before.

        Args:
            solution: the solution.
            out: its output.
            variant: the call, without a change.
            when: words after "wrong" in the message.

        Raises:
            WrongOutput: the output is wrong.
        """
        key, bits = (solution, variant.what), fingerprint([out])
        if self._sums.get(key) == bits:
            return
        timing = self._compare(solution, out, variant)
        if timing.status != "ok":
            raise WrongOutput(f"right at first, wrong {when}: {timing.detail}")
        self._sums[key] = bits

    def _verify_replays(self, solution: Solution, launcher: Launcher, indices: Sequence[int]) -> Timing:
        """Verify the second replay of a captured call on each of these operand sets."""
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
            timing = worse_of(timing, self._compare(solution, out, self.variant(index)))
        return timing

    def verify(self, solution: Solution, call: Callable[..., Any], variant: Variant) -> Timing:
        """Verify one call, with its output and workspace filled with NaN between canaries."""
        try:
            expected = self.expected(variant)
            with variant.changed():
                out, fault = self._run(call, variant.operands)
        except Exception as error:  # a kernel may raise anything
            return failed(self.shape, solution, error)
        if fault:
            return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail=fault)
        return self._compare(solution, out, attrs.evolve(variant, expected=expected))

    def _compare(self, solution: Solution, out: torch.Tensor, variant: Variant) -> Timing:
        tolerance = self.op.tolerance(self.shape)
        exact = self.expected(variant)
        rows, exact_rows = out.reshape(-1, out.shape[-1]), exact.reshape(-1, exact.shape[-1])
        narrow = out.element_size() == 1  # fp8: torch cannot test it for NaN, and infinity may saturate
        rows = rows.float() if narrow else rows
        if variant.spoiled:
            whole = exact_rows.isfinite().all(dim=-1)
            same = narrow or torch.equal(rows[~whole].isfinite(), exact_rows[~whole].isfinite())
            if not same or not rows[exact_rows.isnan()].isnan().all():  # partial sums may turn infinity into NaN
                return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail="it hides NaN or infinity of its operands")
            rows, exact_rows = rows[whole], exact_rows[whole]
        if variant.by_row:
            sizes = exact_rows.double().norm(dim=-1, keepdim=True)
            rows, exact_rows = (each.double() / sizes * exact.shape[-1] ** 0.5 for each in (rows, exact_rows))
        ratio, row = errors(rows, exact_rows, tolerance)
        if ratio > self.err_ratio or not row <= tolerance.row_error:
            bound = "any finite" if tolerance.row_error == LIFTED else f"{tolerance.row_error:.1e}"
            allowed = f"allowed {self.err_ratio:.2%} and {bound}"
            detail = f"{ratio:.2%} of elements off, worst row {row:.1e} ({allowed})"
            return Timing(self.shape, solution, "wrong", err_ratio=ratio, row_error=min(row, 1e30), detail=detail)
        if (
            tolerance.row_error >= 1 and exact_rows.any() and not (out.any() if out.element_size() > 1 else raw(out).any())
        ):  # within these bounds, zeros would pass
            return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail="it returned zeros alone")
        return Timing(self.shape, solution, "ok", err_ratio=ratio, row_error=row)

    def _run(self, call: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, str]:
        """Return the output and any fault other than wrong values; restore changed operands."""
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

    def memory_fault(self, launcher: Launcher, count: int, operands: tuple[Any, ...] | None = None) -> str:
        """Return how outputs share memory with each other or with operands; "" if they do not.

        An output must be new memory that nothing else uses, and that is freed with it.

        Args:
            launcher: the launcher.
            count: number of outputs kept alive.
            operands: the operands of every call; None to alternate between two sets.
        """
        outs: list[torch.Tensor] = []
        contents: list[tuple[Any, ...]] = []
        for number in range(count):
            given = self.operand_sets[number % 2] if operands is None else operands
            with Traced() as traced, torch.no_grad():
                out = launcher.call(*given)
            if out.untyped_storage().data_ptr() in {storage.data_ptr() for storage in storages_of(given)}:
                return "it returned the memory of an operand"
            if out.data_ptr() in {earlier.data_ptr() for earlier in outs}:
                return "it returned the memory of an earlier output"
            if not traced.made(out):
                return "it returned memory that it did not allocate in the call"
            outs.append(out)
            contents.append(fingerprint([out]))
            del out, traced
        if [fingerprint([out]) for out in outs] != contents:
            return "it changed an output that it had returned"
        references = [StorageWeakRef(out.untyped_storage()) for out in outs[:-1]]  # the last may be kept until the next
        outs.clear()
        return "" if all(each.expired() for each in references) else "it keeps the memory of an output that it had returned"

    def _verify_repeats(self, solution: Solution, launcher: Launcher) -> Timing:
        """Verify consecutive calls on the same operands, compare bits, and check for leaks."""
        operands = self.operand_sets[0]
        first, deterministic = None, True
        traces: list[Traced] = []
        held: list[int] = []  # bytes kept alive after each call
        worst = Timing(self.shape, solution, "ok")
        try:
            if fault := self.memory_fault(launcher, 2):
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
                    worst = worse_of(worst, self._compare(solution, copy, self.variant(0)))
                    first = copy if first is None else first
        except Exception as error:  # a kernel may raise anything
            return failed(self.shape, solution, error)
        if worst.status != "ok":
            return attrs.evolve(worst, detail=f"right at first, wrong later: {worst.detail}")
        # Caches filled at first and replaced buffers are no leaks; a leak grows at every call.
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


def rows_of(out: torch.Tensor, m: int) -> torch.Tensor:
    """Return an output as [batches, M, N]; one batch for an op without batches."""
    return out.reshape(out.numel() // max(1, m * out.shape[-1]), m, out.shape[-1])


def worse_of(first: Timing, second: Timing) -> Timing:
    """Return the second Timing if it failed, else the first with the larger errors."""
    if second.status != "ok":
        return second
    err_ratio, row_error = max(first.err_ratio, second.err_ratio), max(first.row_error, second.row_error)
    return attrs.evolve(first, err_ratio=err_ratio, row_error=row_error)
