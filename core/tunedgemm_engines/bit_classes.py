"""Bit classes of an engine's weights in batch-invariant mode.

The class of a weight is the `bit_class` of its class rows. Without such rows it is the order of
sums that a backend declares for untuned calls. All M of a weight have one class, or the weight is
left to the engine's kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from tunedgemm import dispatcher, set_batch_invariant
from tunedgemm.integrations import read
from tunedgemm.plugin import Device, Shape, UserError

from tunedgemm_engines.scales import at_m, explain_row
from tunedgemm_engines.start import INVARIANT

#: M at which the class of every weight is looked up.
PROBES = (1, 8, 32, 256, 512, 4096)
#: Why a weight has no class.
_TORCH = "its class row names torch, whose products an engine's mode replaces or runs without a workspace"


class ClassMissing(UserError):
    """A weight has no class, or a kernel of another: the engine's kernel serves it, for this reason."""


def enter() -> None:
    """Turn the mode on for the dispatchers of this process and for processes that it starts."""
    if not read(INVARIANT):
        set_batch_invariant()


def is_on(op: str = "a16w16") -> bool:
    """Check whether the dispatcher of an op is in the mode."""
    return bool(dispatcher(op).settings.batch_invariant)


def class_at(shape: Shape, device: Device, m: int) -> tuple[str, str]:
    """Return the class of the kernel that serves a weight at M, or "" and the reason.

    Args:
        shape: the shape of the weight's products at M = 1.
        device: the weight's device; one without an index binds nothing.
        m: the M of the product.
    """
    explanation = explain_row(dispatcher(shape.op), at_m(shape, m), device)
    offer = explanation.offer
    if explanation.refused:
        return "", explanation.refused
    if offer.origin == "builtin":
        passed = next((f"{skipped.solution}: {why}" for skipped, why in explanation.passed_over), "")
        return "", f"a kernel of the class cannot be used: {passed}" if passed else f"no class ({offer.why})"
    if offer.solution.libtype == "torch":
        return "", _TORCH
    if offer.bit_class:
        return offer.bit_class, ""
    if offer.origin == "unbiased":
        name, reason = class_at(attrs.evolve(shape, epilogue="none", bias_dtype=""), device, m)
        return (f"{name}+add", "") if name else ("", reason)
    name = offer.match.row.bit_class if offer.match is not None else offer.solution.sum_order
    return name, "" if name else f"{offer.solution} has no bit class"


def class_of(shape: Shape, device: Device) -> tuple[str, str]:
    """Return the one class of a weight at all M that are probed, or "" and the reason.

    Args:
        shape: the shape of the weight's products at M = 1.
        device: the weight's device.
    """
    found: dict[str, int] = {}
    for m in PROBES:
        name, reason = class_at(shape, device, m)
        if not name:
            return "", f"M={m}: {reason}"
        found.setdefault(name, m)
    if len(found) > 1:
        return "", "its kernels have several bit classes: " + ", ".join(f"{name} at M={m}" for name, m in found.items())
    return next(iter(found)), ""


def require_class(name: str, shape: Shape, device: Device, sizes: Iterable[int]) -> None:
    """Check that the kernels of a weight are of a class at some M, after binding them.

    Nothing is checked while a graph is captured, since binding could break the capture.

    Raises:
        ClassMissing: a kernel is of another class, or of none.
    """
    for m in () if _is_capturing(device) else sizes:
        found, reason = class_at(shape, device, m)
        if found != name:
            raise ClassMissing(f"M={m}: {reason or f'its kernel is of class {found}'}")


def is_unbound_in_capture(shape: Shape, device: Device, m: int) -> bool:
    """Check whether a graph is captured in which M cannot be bound: a dispatcher would run torch."""
    return _is_capturing(device) and not any(
        dispatcher(shape.op).is_bound(ordered, device) for ordered in (at_m(shape, m), shape.with_m(m))
    )


def _is_capturing(device: Device) -> bool:
    return device.index >= 0 and torch.cuda.is_current_stream_capturing()


def unbound(device: Device) -> Device:
    """Return a device as described only, for which nothing is bound."""
    return attrs.evolve(device, index=-1)
