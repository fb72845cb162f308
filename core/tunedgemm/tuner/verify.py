"""Stages before and after timing: is a solution's output right, whole, and all that it wrote?

Outputs and workspaces are filled with NaN between canaries before the launch, so an element that is never written, or
a write out of bounds, shows. The reference is computed from the operands as given, in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tunedgemm.accuracy import error_ratio, same_bits, worst_row_error
from tunedgemm.launcher import Launcher
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import Candidate, failed

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


class Poisoned(TorchDispatchMode):
    """While on, every fresh allocation is a NaN-filled view between canaries (bytes 0xFF for types without NaN)."""

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
        """Whether any canary was touched."""
        return any(bool((end != _CANARY).any()) for buffer in self._buffers for end in (buffer[:_GUARD], buffer[-_GUARD:]))


@attrs.frozen(eq=False)
class Verifier:
    """Checks launchers of one shape against the reference on several sets of operands.

    Attributes:
        op, shape: the problem.
        operand_sets: operand tuples with different contents.
        err_ratio: largest share of elements outside the op's tolerance.
    """

    op: Op
    shape: Shape
    operand_sets: Sequence[tuple[Any, ...]]
    err_ratio: float
    _references: dict[int, torch.Tensor] = attrs.field(factory=dict, init=False)

    def check(self, solution: Solution, launcher: Launcher, places: Sequence[int] = (0, 1)) -> Timing:
        """Run on some of the operand sets; a Timing without a time, its status ``ok``, ``wrong`` or how it failed."""
        tolerance = self.op.tolerance(self.shape)
        worst_ratio = worst_row = 0.0
        for place in places:
            try:
                out, fault = self._run(launcher.call, self.operand_sets[place])
            except Exception as error:  # a kernel may raise anything
                return failed(self.shape, solution, error)
            if fault:
                return Timing(self.shape, solution, "wrong", err_ratio=1.0, detail=fault)
            flat, exact = out.reshape(-1, self.shape.n), self._reference(place)
            ratio, row = error_ratio(flat, exact, tolerance), worst_row_error(flat, exact)
            if ratio > self.err_ratio or not row <= tolerance.row_error:
                allowed = f"allowed {self.err_ratio:.2%} and {tolerance.row_error:.1e}"
                detail = f"{ratio:.2%} of elements off, worst row {row:.1e} ({allowed})"
                return Timing(self.shape, solution, "wrong", err_ratio=ratio, row_error=min(row, 1e30), detail=detail)
            worst_ratio, worst_row = max(worst_ratio, ratio), max(worst_row, row)
        return Timing(self.shape, solution, "ok", err_ratio=worst_ratio, row_error=worst_row)

    def _run(self, call: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, str]:
        """The output and what is wrong with the call beside its numbers; operands that it changed are put back."""
        present = [operand for operand in operands if operand is not None]
        before = [operand.clone() for operand in present]
        with Poisoned() as poisoned, torch.no_grad():
            out = call(*operands)
        if present[0].is_cuda:
            torch.cuda.synchronize(present[0].device)
        if poisoned.overwritten():
            return out, "it wrote outside its output or workspace"
        changed = [(now, was) for now, was in zip(present, before, strict=True) if not same_bits(now, was)]
        for now, was in changed:
            now.copy_(was)
        return out, "it changed its operands" if changed else self._misshapen(out, operands)

    def _misshapen(self, out: Any, operands: tuple[Any, ...]) -> str:
        from tunedgemm.dtype import torch_dtype

        dtype = torch_dtype(self.shape.outdtype)
        expected = self.op.fake(*operands, otype=dtype)
        wanted = f"{tuple(expected.shape)} {dtype} on {expected.device}"
        got = f"{tuple(out.shape)} {out.dtype} on {out.device}" if isinstance(out, torch.Tensor) else repr(out)[:80]
        return "" if got == wanted else f"it returned {got} instead of {wanted}"

    def _reference(self, place: int) -> torch.Tensor:
        if place not in self._references:
            self._references[place] = self.op.reference(self.shape, self.operand_sets[place])
        return self._references[place]


def bind(candidate: Candidate, shape: Shape, device: Any) -> Candidate | Timing:
    """Bind a candidate; a refusal becomes the Timing that says so."""
    answer = candidate.backend.bind(candidate.solution, shape, device)
    if isinstance(answer, Unsupported):
        status = "out_of_resources" if "OutOfResources" in answer.reason else "unsupported"
        return Timing(shape, candidate.solution, status, detail=answer.reason[:500])
    return attrs.evolve(candidate, launcher=answer)
