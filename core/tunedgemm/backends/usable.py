"""Usable: check whether a backend supports any sample shape on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.ops import ops
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from tunedgemm.backends.backend import Backend
    from tunedgemm.device import Device

#: M of sample shapes for an op without examples; some backends support only small or large M.
_ROWS = (64, 1, 16, 1024)


def sample_shapes(op: str) -> tuple[Shape, ...]:
    """Return the sample shapes of an op: its examples, else shapes of several M."""
    return ops()[op].examples or tuple(Shape(op, m, 1024, 1024) for m in _ROWS)


def served_sample(backend: Backend, op: str, device: Device) -> Shape | None:
    """Return the first sample shape that a backend supports on a device; None without one."""
    return next((shape for shape in sample_shapes(op) if not backend.refusal(shape, device)), None)


def unusable_reasons(backend: Backend, device: Device) -> tuple[str, ...]:
    """Return why a backend supports no sample shape on a device; () if it supports one."""
    reasons = set()
    for name in backend.ops:
        if name not in ops():
            continue
        refusals = [backend.refusal(shape, device) for shape in sample_shapes(name)]
        if None in refusals:
            return ()
        reasons.add(str(refusals[0]))
    return tuple(sorted(reasons)) or ("covers no installed op",)
