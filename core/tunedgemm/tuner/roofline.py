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

#: Op, or kind of scales -> what torch's call takes beyond the best kernel: microseconds where
#: memory bounds, and shares of the best time where memory and where arithmetic bounds. Between both
#: bounds they blend. Less the 1 % by which a winner must be faster. Set by torch and the best of
#: some 600 products on an H100 and an H200, 22 to 26 November 2026. In 16 bits with M = 4096, torch
#: was within 1 % of the best; with experts it took 1.8 to 4 times as long.
_OF_TORCH = {
    "none": (2.0, 0.08, -0.01), "tensor": (2.0, 0.08, -0.01), "row": (13.0, 0.07, 0.14), "block": (3.5, 0.24, 0.2),
    "fmoe": (20.0, 1.0, 2.0),
}  # fmt: skip
#: The same for the choice of a backend: most are within 5 % of the best.
_OF_CHOICE = 0.05

#: Products a second relative to those of 16-bit floats, by operand dtype; others count as 16 bits.
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


def bounds_us(op: Op, shape: Shape, device: Device, rates: tuple[float, float]) -> tuple[float, float]:
    """Return the microseconds of memory traffic and of arithmetic, at bytes/s and 16-bit FLOP/s."""
    return 1e6 * op.bytes_moved(shape) / rates[0], 1e6 * op.flops(shape) / (rates[1] * pace(shape, device))


def floor_us(op: Op, shape: Shape, device: Device) -> float:
    """Return the roofline lower bound of a call in microseconds; 0 if the ceilings are unknown."""
    ceilings = ceilings_of(device)
    return 0.0 if ceilings is None else LAUNCH_US + max(bounds_us(op, shape, device, ceilings))


def patience_s(op: Op, shape: Shape, device: Device) -> float:
    """Return the seconds of a very slow call, which a deadline must allow."""
    bytes_per_s, flops_per_s = _SLOW[device.kind]
    return op.bytes_moved(shape) / bytes_per_s + op.flops(shape) / flops_per_s


def guess_us(op: Op, shape: Shape, device: Device) -> float:
    """Return the microseconds of a typical call, by which samples are sized."""
    *rates, launch_us = _MIDDLING[device.kind]
    return launch_us + max(bounds_us(op, shape, device, (rates[0], rates[1])))


def saving_us(op: Op, shape: Shape, device: Device, *, is_chosen: bool) -> float:
    """Return the microseconds that tuning is expected to save of a call that is untuned now.

    Args:
        is_chosen: whether a backend or another row serves the call now, not torch.
    """
    memory, arithmetic = bounds_us(op, shape, device, ceilings_of(device) or _MIDDLING[device.kind][:2])
    best = max(memory, arithmetic)
    share = memory / best if best else 1.0
    launch, of_memory, of_arithmetic = _OF_TORCH.get(shape.op) or _OF_TORCH[shape.scale]
    saved = share * (launch + of_memory * best) + (1 - share) * of_arithmetic * best
    return max(min(saved, _OF_CHOICE * (LAUNCH_US + best)) if is_chosen else saved, 0.0)


def cost(op: Op, shape: Shape, device: Device) -> float:
    """Return the roofline cost of a call in equivalent bytes of memory traffic, to rank shapes."""
    return max(op.bytes_moved(shape), op.flops(shape) / (_BALANCE[device.kind] * pace(shape, device)))
