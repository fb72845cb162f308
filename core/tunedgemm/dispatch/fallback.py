"""torch's implementation of an op: the fallback when no other solution may serve."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.offer import NATIVE, Offer, examine
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.op import Function, Op
from tunedgemm.shape import Shape

_TORCHS = Offer(NATIVE, "builtin", "torch's own call")


def torch_serves(shape: Shape, device: Device, registry: Registry) -> bool:
    """Check whether torch implements a shape."""
    return isinstance(examine(_TORCHS, shape, device, registry), Backend)


def torch_fallback(op: Op, shape: Shape, device: Device, registry: Registry) -> Function:
    """Return torch's implementation, which keeps gradients and can be captured.

    It accepts tensor subclasses and any strides.

    Raises:
        UserError: torch does not implement this op.
    """
    backend = registry.get(BUILTIN)
    if isinstance(backend, Backend) and op.name not in backend.ops and shape.m == 0:
        otype = torch_dtype(shape.outdtype)
        return lambda *operands: op.fake(*operands, otype=otype)  # the result is empty
    able = examine(_TORCHS, shape, device, registry)
    launcher = able.bind(NATIVE, shape, device) if isinstance(able, Backend) else able
    if not isinstance(launcher, Launcher):
        raise UserError(
            f"{shape} on {device}: this call is torch's (it needs a gradient, has operands of other types or strides, or is "
            f"captured in a graph before prewarm()), and torch has none: {launcher.reason}"
        )
    return outside_autocast(launcher, op, shape, device).call


class TorchFailed(Exception):
    """An error of torch's fallback inside a launcher, which is not to blame for it."""


def blaming_torch(native: Function) -> Function:
    """Wrap torch's fallback inside a launcher, so that its errors veto no solution."""

    def blamed(*operands: torch.Tensor | None) -> torch.Tensor:
        try:
            return native(*operands)
        except Exception as error:
            raise TorchFailed from error

    return blamed


def outside_autocast(launcher: Launcher, op: Op, shape: Shape, device: Device) -> Launcher:
    """Disable autocast inside torch's launcher, since it does not change the dtypes of kernels.

    So the dtype and precision of a result do not depend on the rows of a table. Callers that check
    autocast themselves find the unwrapped function in attribute ``torch_call``.
    """
    call = launcher.call
    # The second check takes twice as long; calls on a GPU need only the first.
    enabled = torch.is_autocast_enabled if device.kind != "cpu" else torch._C._is_any_autocast_enabled

    def of_any(*operands: torch.Tensor | None) -> Any:
        if not enabled():
            return call(*operands)
        with torch._C._DisableAutocast():
            return call(*operands)

    # Named operands cost 0.1 us less than *args.
    def of_two(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return of_any(x, weight) if enabled() else call(x, weight)

    def of_three(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return of_any(x, weight, bias) if enabled() else call(x, weight, bias)

    float_product = op.operands[:3] == ("x", "weight", "bias?") and shape.scale == "none"
    outside: Any = of_any if not float_product else of_three if shape.bias else of_two
    outside.torch_call = call
    return attrs.evolve(launcher, call=outside)
