"""Roofline: least, typical and worst times of a shape, without measurement."""

from __future__ import annotations

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.device import Device
from tunedgemm.dtype import parse_dtype
from tunedgemm.ops.op import Op
from tunedgemm.products import products
from tunedgemm.shape import Shape

#: Fixed cost of a call in microseconds: launch and ramp-up.
LAUNCH_US = 1.5
#: Kind of device -> bytes/s and FLOP/s that any useful solution exceeds.
_SLOW = {"nvidia": (1e11, 1e12), "amd": (1e11, 1e12), "cpu": (2e9, 2e9)}
#: Kind of device -> bytes/s, FLOP/s and launch microseconds of a typical call.
_MIDDLING = {"nvidia": (1.5e12, 3e14, 3.0), "amd": (1.5e12, 3e14, 5.0), "cpu": (1e10, 2e11, 5.0)}
#: Machine balance in FLOP per byte, for 16-bit floats: 206 for an H200 (990 TFLOP/s, 4.8 TB/s), 246
#: for an MI300X (1307 TFLOP/s, 5.3 TB/s), about 20 for server CPUs.
_BALANCE = {"nvidia": 206, "amd": 246, "cpu": 20}

#: FLOP/s relative to 16-bit floats, by operand dtype; others count as 16 bits.
_PACE = {"fp4x2": 4.0, "fp8_e4m3fn": 2.0, "fp8_e4m3fnuz": 2.0, "fp8_e5m2": 2.0, "fp8_e5m2fnuz": 2.0, "int8": 2.0, "fp32": 0.5, "fp64": 0.25}


def pace(shape: Shape, device: Device) -> float:
    """Return the FLOP/s of a shape's dtypes relative to 16-bit floats: the slower of both.

    On a CPU no dtype is faster, since narrow ones are widened.
    """
    declared = dict(shape.extra)
    dtypes = {parse_dtype(str(declared.get(name, shape.dtype))) for name in ("q_dtype_a", "q_dtype_w")}
    slowest = min(_PACE.get(dtype, 1.0) for dtype in dtypes)
    if device.kind == "cpu":
        return min(slowest, 1.0)
    known = ARCHITECTURES.get(device.gfx)
    # Elsewhere 4-bit floats count as 8 bits, to which they convert exactly.
    fastest = _PACE["fp4x2"] if known and known.fp4 else _PACE["int8"]
    return min(slowest, fastest)


def ceilings_of(device: Device) -> tuple[float, float] | None:
    """Return measured read bandwidth in bytes/s and dense 16-bit FLOP/s; None if not measured."""
    known = products().get(device.name)
    return (known.read_gb_s * 1e9, known.tflops * 1e12) if known and known.read_gb_s and known.tflops else None


def floor_us(op: Op, shape: Shape, device: Device) -> float:
    """Return the roofline lower bound of a call in microseconds; 0 if the ceilings are unknown."""
    ceilings = ceilings_of(device)
    if ceilings is None:
        return 0.0
    flops = ceilings[1] * pace(shape, device)
    return LAUNCH_US + 1e6 * max(op.bytes_moved(shape) / ceilings[0], op.flops(shape) / flops)


def patience_s(op: Op, shape: Shape, device: Device) -> float:
    """Return the seconds of a very slow call, which a deadline must allow."""
    bytes_per_s, flops_per_s = _SLOW[device.kind]
    return op.bytes_moved(shape) / bytes_per_s + op.flops(shape) / flops_per_s


def guess_us(op: Op, shape: Shape, device: Device) -> float:
    """Return the microseconds of a typical call, to choose the calls per sample."""
    bytes_per_s, flops_per_s, launch_us = _MIDDLING[device.kind]
    return launch_us + 1e6 * max(op.bytes_moved(shape) / bytes_per_s, op.flops(shape) / (flops_per_s * pace(shape, device)))


def cost(op: Op, shape: Shape, device: Device) -> float:
    """Return the roofline cost of a call in equivalent bytes of memory traffic, to rank shapes."""
    return max(op.bytes_moved(shape), op.flops(shape) / (_BALANCE[device.kind] * pace(shape, device)))
