"""Check which shapes the kernels support on each architecture, as data; needs no device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits

from tunedgemm_triton import installed


@attrs.frozen
class Operands:
    """Operands that an op's kernels take.

    Attributes:
        dtypes: of x and the weight.
        scales: kinds of scales.
        layouts: of the weight.
        families: of the kernels.
    """

    dtypes: tuple[str, ...]
    scales: tuple[str, ...] = ("none",)
    layouts: tuple[str, ...] = ("row",)
    families: tuple[str, ...] = ("gemv", "gemm", "tma")


FLOATS = ("bf16", "fp16")
FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
BYTES = ("int8", *FP8)
SHUFFLED = ("aiter16x16", "aiter32x16")
OUTPUTS = ("bf16", "fp16", "fp32")
OPS = {
    "a16w16": Operands(FLOATS, layouts=("row", *SHUFFLED), families=("gemv", "gemm", "tma", "streamk")),
    "a8w8": Operands(BYTES, ("tensor", "row")),
    "a8w8_bpreshuffle": Operands(BYTES, ("tensor", "row"), SHUFFLED, ("gemm",)),
    "a8w8_blockscale": Operands(FP8, ("block",)),
    "a8w8_blockscale_bpreshuffle": Operands(FP8, ("block",), SHUFFLED, ("gemm",)),
    "batched_bf16": Operands(FLOATS),
    "batched_a8w8": Operands(BYTES, ("row",)),
}

#: Matrix instructions that the kernels are compiled to.
MATRIX = ("mma", "wgmma", "tcgen05", "mfma", "wmma")

#: Limit of a grid's second and third axes: split-K, groups of rows, products of a batch.
MAX_GRID_YZ = 65535

#: 2^31 over the largest product of two int8 numbers, 2^14, less one.
MAX_INT8_K = (1 << 17) - 1

#: Most tiles that one split-K launch counts.
MAX_TILES = 1024

#: Most bytes of partial sums: their offsets are 32-bit, and more would cost more traffic than the
#: split saves.
MAX_PARTIAL_BYTES = 1 << 30


def batches_of(shape: Shape) -> int:
    """Return the products of a batch; 1 for an op without batches."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1


@functools.cache
def width_of(dtype: str) -> int:
    """Return the bytes of an element of the operands."""
    return dtype_bits(dtype) // 8


def unsupported(operands: Callable[[Shape, Device], str | None], shape: Shape, device: Device) -> str | None:
    """Return why no kernel of a family takes the shape, or None; *operands* checks what the
    family's operands must be.
    """
    if device.kind == "cpu":
        return "Triton compiles for NVIDIA and AMD GPUs, not for a CPU"
    if device.gfx not in ARCHITECTURES or not ARCHITECTURES[device.gfx].matrix:
        return f"no matrix instructions are known of {device.gfx}; known: {', '.join(ARCHITECTURES.having(matrix=MATRIX))}"
    if reason := installed.target_fault(device.gfx):
        return reason
    if shape.m == 0:
        return "an empty batch needs no kernel"
    return operands(shape, device) or _unsupported_output(shape)


def unsupported_operands(shape: Shape, device: Device) -> str | None:
    """Return why no dense kernel takes the operands on the architecture, or None."""
    taken = OPS[shape.op]
    if shape.dtype not in taken.dtypes:
        return f"operands of {shape.op} must be {' or '.join(taken.dtypes)} (got {shape.dtype})"
    if reason := unsupported_fp8(shape.dtype, device.gfx):
        return reason
    if shape.dtype == "int8" and shape.k > MAX_INT8_K:
        return f"sums of int8 products fit int32 up to K={MAX_INT8_K} (got {shape.k})"
    if shape.scale not in taken.scales:
        return f"scales of {shape.op} must be {' or '.join(taken.scales)} (got {shape.scale})"
    if shape.layout not in taken.layouts:
        return f"the weight of {shape.op} must have layout {' or '.join(taken.layouts)} (got {shape.layout!r})"
    if batches_of(shape) > MAX_GRID_YZ:
        return f"a batch has at most {MAX_GRID_YZ} products (got B={batches_of(shape)})"
    return None


def unsupported_fp8(dtype: str, gfx: str) -> str | None:
    """Return why the architecture does not multiply a dtype, where that is a kind of fp8; else
    None.
    """
    own = ARCHITECTURES[gfx].fp8
    return f"{gfx} multiplies {own or 'no fp8'}, not {dtype}" if dtype in FP8 and dtype != own else None


def _unsupported_output(shape: Shape) -> str | None:
    if shape.outdtype not in OUTPUTS:
        return f"the output must be {', '.join(OUTPUTS)} (got {shape.outdtype})"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"the bias must be {', '.join(OUTPUTS)} (got {shape.bias_dtype})"
    return None
