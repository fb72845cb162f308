"""Check which shapes QuACK's kernels for Hopper support; needs neither QuACK nor a device."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import dtype_bits

OPS = ("a16w16",)
GFX = "sm_90"
INPUTS = ("bf16", "fp16")
OUTPUTS = ("bf16", "fp16", "fp32")
#: Alignment in bytes of the rows that the TMA loads and stores.
_ROW_BYTES = 16
#: Elements of K of one step: the K of four WGMMA instructions.
STEP_K = 64
MOST_SPLITS = 32


def unsupported(shape: Shape, device: Device) -> str:
    """Return why the kernels cannot serve the shape on the device; "" where they can."""
    if device.gfx != GFX:
        return f"device: QuACK's kernels here are for {GFX} (got {device.gfx})"
    if shape.m == 0:
        return "M: an empty batch needs no kernel (got 0)"
    if shape.dtype not in INPUTS:
        return f"dtype: must be {' or '.join(INPUTS)} (got {shape.dtype})"
    if shape.outdtype not in OUTPUTS:
        return f"outdtype: must be {', '.join(OUTPUTS)} (got {shape.outdtype})"
    if shape.layout != "row" or shape.scale != "none":
        return f"layout: needs a plain [N, K] weight without scales (got {shape.layout}, scale {shape.scale})"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"bias: must be {', '.join(OUTPUTS)} (got {shape.bias_dtype})"
    for size, value, dtype in (("K", shape.k, shape.dtype), ("N", shape.n, shape.outdtype)):
        step = 8 * _ROW_BYTES // dtype_bits(dtype)
        if value % step:
            return f"{size}: rows of {_ROW_BYTES} bytes need a multiple of {step} (got {value})"
    return ""


def unsupported_splits(splits: int, shape: Shape) -> str:
    """Return why K cannot be split so; "" where it can."""
    most = min(MOST_SPLITS, -(-shape.k // STEP_K))
    return "" if 0 <= splits <= most else f"splitK: must be 0 to {most} for K={shape.k} (got {splits})"
