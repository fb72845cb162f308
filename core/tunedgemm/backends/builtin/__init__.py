"""The built-in backend ``torch``: torch's implementations of every op, as routes.

It ranks last, and its route ``native`` supports every shape, so it is the final fallback.
"""

from __future__ import annotations

from typing import Any

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.builtin import hooks
from tunedgemm.backends.builtin.both_sides import OPTION
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device, device_of
from tunedgemm.dtype import torch_dtype
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.scale_order import E8M0_ORDERS, M_MAJOR, M_MAJOR_PADDED, TILE_ROWS
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

backend = Backend(
    BUILTIN,
    hooks,
    ops=tuple(hooks.FAMILIES),
    platforms=(Platform(("nvidia",), ran=("H200",)), Platform(("amd",)), Platform(("cpu",), ran=("x86-64",))),
    options=(OPTION,),
    scale_orders=(M_MAJOR, M_MAJOR_PADDED, *E8M0_ORDERS, *TILE_ROWS),
)


def torch_launcher(shape: Shape, device: Device) -> Launcher | Unsupported:
    """Bind torch's default call for a shape on a present device, as a placeholder or a baseline.

    Its call takes None for absent operands, even trailing ones. For a third-party op it computes
    the op's reference, rounded once, and rejects shuffled weights.
    """
    device = device_of(-1) if device.emulated else device
    launcher = (
        backend.bind_unwrapped(Solution(BUILTIN, hooks.NATIVE), shape, device) if shape.op in hooks.FAMILIES else _of_reference(shape)
    )
    if isinstance(launcher, Unsupported):
        return launcher
    call = launcher.call

    def shortened(*operands: Any) -> Any:
        while operands[-1] is None:
            operands = operands[:-1]
        return call(*operands)

    return Launcher(shortened, graph_safe=launcher.graph_safe)


def _of_reference(shape: Shape) -> Launcher | Unsupported:
    if shape.layout != "row":
        return Unsupported(f"torch has no call for op {shape.op!r} with weights in the layout {shape.layout}")
    op, dtype = op_named(shape.op), torch_dtype(shape.outdtype)

    def reference(*operands: Any) -> Any:
        return op.reference(shape, operands).to(dtype).reshape(op.fake(*operands, otype=dtype).shape)

    return Launcher(reference, graph_safe=False)
