"""Explain which solution would serve a call, without making it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.choice import Explanation
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import DEFAULT_OP, op_named, ops
from tunedgemm.shape import Shape


def explain(
    what: Shape | torch.Tensor,
    *operands: torch.Tensor | None,
    op: str = DEFAULT_OP,
    otype: torch.dtype | None = None,
    device: Device | None = None,
    **fields: Any,
) -> Explanation:
    """Explain which solution serves a shape (or the operands of a call), and why not the others.

    Args:
        what: a Shape, which names its op, or the first operand of a call; its other operands
            follow.
        op: the op of the operands.
        otype, fields: as in `call`.
        device: the operands' device or the default device if absent. May describe a device that is
            not present.
    """
    if isinstance(what, Shape):
        return tgemm.of(what.op).explain(what, device)
    shape = op_named(op).shape_of(what, *operands, otype=otype, **fields)
    return tgemm.of(op).explain(shape, device or device_of(what.get_device()))


def is_tuned(
    what: Shape | torch.Tensor,
    *operands: torch.Tensor | None,
    op: str = DEFAULT_OP,
    otype: torch.dtype | None = None,
    device: Device | None = None,
    **fields: Any,
) -> bool:
    """Check whether a table row serves a shape (or operands) on a device; arguments as in `explain`."""
    return explain(what, *operands, op=op, otype=otype, device=device, **fields).tuned


def fingerprint() -> str:
    """Return a short digest of every op's tables and the backends; equal digests dispatch alike."""
    parts = [f"{op} {tgemm.of(op).fingerprint()}" for op in sorted(ops())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
