"""Check which shapes Humming's kernels serve here; needs neither Humming nor a device."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import format_of, kind_of

OPS = ("a16wn",)
GFX = "sm_90"
#: Layouts whose operands Humming reads without a copy.
MARLIN, HUMMING = LAYOUTS = ("marlin", "humming")
DTYPES = ("bf16", "fp16")
#: Divisor of N and K: WGMMA's four warps have 32 rows of the weight each.
_STEP = 128


def unsupported(shape: Shape, device: Device) -> str:
    """Return why the kernels cannot serve the shape on the device; "" where they can."""
    if device.gfx != GFX:
        return f"device: Humming's kernels here are for {GFX} (got {device.gfx})"
    if shape.layout not in LAYOUTS:
        return f"layout: must be {' or '.join(LAYOUTS)} (got {shape.layout})"
    if not shape.m:
        return "M: an empty batch needs no kernel (got 0)"
    if shape.dtype not in DTYPES:
        return f"dtype: must be {' or '.join(DTYPES)} (got {shape.dtype})"
    if shape.outdtype != shape.dtype:
        return f"outdtype: must be {shape.dtype}, as x (got {shape.outdtype})"
    if shape.bias:
        return f"bias: the kernel adds none in its order (got one in {shape.bias_dtype})"
    if shape.n % _STEP or shape.k % _STEP:
        return f"N and K: must be multiples of {_STEP} (got {shape.n} and {shape.k})"
    kind, name = kind_of(format_of(shape)), format_of(shape).name
    if shape.layout == HUMMING or kind == "uint4b8":
        return ""
    if kind != "uint8b128":
        return f"layout: {name} needs {HUMMING}, whose scales or zero points are not Marlin's (got {MARLIN})"
    return "" if shape.dtype == "fp16" else f"dtype: {name} must be with fp16, since its codes for bf16 are not Marlin's (got bf16)"
