"""torch's own call of a shape, which serves where no other solution may."""

from __future__ import annotations

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.calls import outside_autocast
from tunedgemm.dispatch.choice import NATIVE, Offer, examine
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.op import Call, Op
from tunedgemm.shape import Shape

_TORCHS = Offer(NATIVE, "builtin", "torch's own call")


def torch_serves(shape: Shape, device: Device, registry: Registry) -> bool:
    """Check whether torch has a call for a shape."""
    return isinstance(examine(_TORCHS, shape, device, registry), Backend)


def torch_fallback(op: Op, shape: Shape, device: Device, registry: Registry) -> Call:
    """Return torch's call, which keeps gradients and is safe to capture.

    It takes subclasses and any strides.

    Raises:
        UserError: torch has none for this op.
    """
    backend = registry.get(BUILTIN)
    if isinstance(backend, Backend) and op.name not in backend.ops and shape.m == 0:
        otype = torch_dtype(shape.outdtype)
        return lambda *operands: op.fake(*operands, otype=otype)  # an empty output is the whole result
    able = examine(_TORCHS, shape, device, registry)
    launcher = able.bind(NATIVE, shape, device) if isinstance(able, Backend) else able
    if not isinstance(launcher, Launcher):
        raise UserError(
            f"{shape} on {device}: this call is torch's (it needs a gradient, has operands of other types or strides, or is "
            f"captured in a graph before prewarm()), and torch has none: {launcher.reason}"
        )
    return outside_autocast(launcher, op, shape, device).call
