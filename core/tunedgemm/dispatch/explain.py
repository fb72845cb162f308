"""Explain which solution would serve a call, without running it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from tunedgemm.device import Device, as_present, current_device, device_of
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.choice import Explanation
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.gradients import has_two_products
from tunedgemm.dispatch.offer import NATIVE, Offer
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.dtype import FP8, fp8_of
from tunedgemm.errors import UserError
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.row import Row
from tunedgemm.text.printable import printable


def explain(
    what: Shape | torch.Tensor,
    *operands: torch.Tensor | None,
    op: str = DEFAULT_OP,
    otype: torch.dtype | None = None,
    device: Device | None = None,
    **fields: Any,
) -> Explanation:
    """Explain which solution serves a shape or a call's operands, and why others do not.

    A call that needs a gradient is served by torch; in batch-invariant mode torch serves the
    backward pass of float products only.

    Args:
        what: a Shape, or the first operand of a call.
        operands: the other operands of the call.
        op: op of the operands; a Shape names its own.
        otype, fields: as in `call`.
        device: by default that of the operands, else the current one; it need not be present.
    """
    if isinstance(what, Shape):
        return tgemm.of(what.op).explain(what, device)
    call = Call.of(op_named(op), (what, *operands), otype, fields)
    explanation = tgemm.of(op).explain(call.shape, device or call.device)
    reason = call.torch_reason if device is None else ""
    if not reason or explanation.offer.solution == NATIVE:
        return explanation
    if explanation.offer.bit_class and call.needs_gradient and has_two_products(call.op, call.shape):
        return attrs.evolve(
            explanation, offer=attrs.evolve(explanation.offer, why=f"{explanation.offer.why}; gradients by torch's products")
        )
    passed_over = (*explanation.passed_over, (explanation.offer, reason))
    return attrs.evolve(explanation, offer=Offer(NATIVE, "builtin", f"torch's own call: {reason}"), passed_over=passed_over)


@attrs.frozen
class RowExplanation:
    """What serves the shape of a table row, and whether the row is used."""

    row: Row
    explanation: Explanation
    verdict: str

    def __str__(self) -> str:
        return printable(f"{self.explanation}\n  {self.row.source}:{self.row.line} {self.verdict}")


def explain_row(op: Op, path: Path, line: int, device: Device | None = None, above: Sequence[Path] = ()) -> RowExplanation:
    """Explain one row of a tuned file, as if the file ranked above all other tables.

    Args:
        op: the op of the file.
        path: the file.
        line: line number of the row; the header is line 1.
        device: by default that of the row, or the current one for a row without a device.
        above: further files that rank above the other tables.

    Raises:
        UserError: the line holds no usable row.
    """
    rows, problems = read_rows(path, op)
    for problem in problems:
        if problem.line == line:
            raise UserError(f"{problem}; it serves no call")
    of_line = [row for row in rows if row.line == line]
    if not of_line:
        lines = [row.line for row in rows]
        raise UserError(f"{path}: no row in line {line}; use a line from {min(lines, default=0)} to {max(lines, default=0)}")
    device = device or _device_of(of_line[0])
    row = min(of_line, key=lambda row: row.shape.dtype.startswith(FP8) and row.shape.dtype != fp8_of(device.gfx))
    dispatcher = Dispatcher(op, above=(path, *above))
    shape = attrs.evolve(row.shape, m=row.shape.m or 1)  # a pin serves every M
    explanation = dispatcher.explain(shape, device)
    return RowExplanation(row, explanation, _verdict(row, explanation, dispatcher))


def _device_of(row: Row) -> Device:
    """Return the device of a row; the current one if the row names none."""
    if not row.gfx and not row.cu_num:
        return current_device()
    if not (row.gfx and row.cu_num):
        raise UserError(f"{row.source}:{row.line}: names no device in full; name one with --device, such as gfx942:304")
    return as_present(Device(row.gfx, row.cu_num, row.device))


def _verdict(row: Row, explanation: Explanation, dispatcher: Dispatcher) -> str:
    """Describe whether and why a row is used, given what serves its shape."""

    def is_row(match: Any) -> bool:
        return match is not None and (match.row.source, match.row.line) == (row.source, row.line)

    if is_row(explanation.offer.match):
        return "serves it" if explanation.certain else "would serve it"
    if any(is_row(offer.match) for offer, _ in explanation.passed_over):
        return "cannot serve it, as above"
    device = explanation.device
    if any(map(is_row, dispatcher.table.candidates(explanation.shape, device))):
        return f"is not needed: {explanation.offer.why} comes first"
    if row.gfx not in ("", device.gfx) or row.cu_num not in (0, device.cu_num):
        return f"is for another device: {row.gfx}, cu_num {row.cu_num}"
    return "is never found: it repeats a better row, or no call looks up its shape; `tunedgemm table check` tells"


def is_tuned(
    what: Shape | torch.Tensor,
    *operands: torch.Tensor | None,
    op: str = DEFAULT_OP,
    otype: torch.dtype | None = None,
    device: Device | None = None,
    **fields: Any,
) -> bool:
    """Check whether a table row serves a shape or a call's operands; arguments as in `explain`.

    Operands that need a gradient count as any others.
    """
    if isinstance(what, torch.Tensor):
        device = device or device_of(what.get_device())
    return explain(what, *operands, op=op, otype=otype, device=device, **fields).tuned


def fingerprint() -> str:
    """Return a digest of all tables and backends; equal digests make equal choices."""
    parts = [f"{op} {tgemm.of(op).fingerprint()}" for op in sorted(ops())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
