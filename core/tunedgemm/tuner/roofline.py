"""Roofline: how long a shape takes at best, about, and at worst, before anything is measured; rates of devices in one place."""

from __future__ import annotations

from tunedgemm.device import Device
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape

#: Device slug -> bytes/s that reading alone reaches, and dense 16-bit FLOP/s of large products, both measured there.
CEILINGS = {"nvidia-h200": (4.65e12, 8.0e14)}
#: A call's fixed share: launch and ramp, in microseconds.
LAUNCH_US = 1.5
#: Kind of device -> bytes/s and FLOP/s that any solution worth having exceeds.
_SLOW = {"nvidia": (1e11, 1e12), "amd": (1e11, 1e12), "cpu": (2e9, 2e9)}
#: Kind of device -> bytes/s, FLOP/s and microseconds of launch of a middling call.
_MIDDLING = {"nvidia": (1.5e12, 3e14, 3.0), "amd": (1.5e12, 3e14, 5.0), "cpu": (1e10, 2e11, 5.0)}
#: Operations for each byte of memory traffic at which both limits of a device meet, in 16-bit floats: about 206 for an H200
#: (990 TFLOP/s, 4.8 TB/s), 246 for an MI300X (1307 TFLOP/s, 5.3 TB/s); servers' CPUs are near 20.
_BALANCE = {"nvidia": 206, "amd": 246, "cpu": 20}


def floor_us(op: Op, shape: Shape, device: Device) -> float:
    """Microseconds below which no call can be on this device; 0 where its ceilings are not known."""
    ceilings = CEILINGS.get(device.name)
    if ceilings is None:
        return 0.0
    flops = ceilings[1] * (2 if shape.dtype.startswith("fp8") else 0.5 if shape.dtype == "fp32" else 1)
    return LAUNCH_US + 1e6 * max(op.bytes_moved(shape) / ceilings[0], op.flops(shape) / flops)


def patience_s(op: Op, shape: Shape, device: Device) -> float:
    """Seconds that a slow call of a shape takes: what a deadline has to allow for."""
    bytes_per_s, flops_per_s = _SLOW[device.kind]
    return op.bytes_moved(shape) / bytes_per_s + op.flops(shape) / flops_per_s


def guess_us(op: Op, shape: Shape, device: Device) -> float:
    """Microseconds that a middling call takes: what samples are sized by."""
    bytes_per_s, flops_per_s, launch_us = _MIDDLING[device.kind]
    return launch_us + 1e6 * max(op.bytes_moved(shape) / bytes_per_s, op.flops(shape) / flops_per_s)


def cost(op: Op, shape: Shape, device: Device) -> float:
    """What a call costs beside calls of other shapes, in bytes of memory traffic or as many operations as take as long."""
    return max(op.bytes_moved(shape), op.flops(shape) / _BALANCE[device.kind])
