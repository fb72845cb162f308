"""Static limits: what an architecture has, as data; answers for devices that are not present."""

from __future__ import annotations

import functools
import re

import attrs
from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm.tools import dtype_bits


@attrs.frozen
class Architecture:
    """What the kernels must fit into.

    Attributes:
        shared_bytes: shared memory (LDS) that one block may take.
        wave: threads of a warp or wavefront.
        columns: rows of x that one matrix instruction takes.
        registers: 32-bit registers that one thread may hold; on CDNA vector registers alone.
        register_file: those of a multiprocessor or compute unit, which one block may fill.
        warps: warps that a multiprocessor or compute unit can have at a time.
        fp8: the kind of 8-bit floating-point numbers that it multiplies or converts; "" for none.
        cluster: blocks of a cluster at most, 0 where there are none.
        overlaps: whether a kernel may begin while the one before it ends (programmatic dependent launch).
        wgmma: whether it has Hopper's asynchronous matrix instructions.
    """

    shared_bytes: int
    wave: int
    columns: int
    registers: int
    register_file: int
    warps: int
    fp8: str
    cluster: int = 0
    overlaps: bool = False
    wgmma: bool = False


def _nvidia(shared: int, warps: int, fp8: str = "fp8_e4m3fn", cluster: int = 0, *, wgmma: bool = False) -> Architecture:
    return Architecture(
        shared << 10,
        wave=32,
        columns=8,
        registers=255,
        register_file=1 << 16,
        warps=warps,
        fp8=fp8,
        cluster=cluster,
        overlaps=cluster > 0,
        wgmma=wgmma,
    )


def _cdna(shared: int, fp8: str) -> Architecture:
    return Architecture(shared << 10, wave=64, columns=16, registers=256, register_file=1 << 17, warps=32, fp8=fp8)


#: CUDA programming guide, table of technical specifications (shared memory per block, opt-in; resident warps; portable size of a
#: cluster); PTX ISA, cvt (e4m3x2); AMD's CDNA 2, 3 and 4 ISA guides (LDS per work-group, VGPRs, waves, FP8).
ARCHITECTURES = {
    "sm_80": _nvidia(163, 64, ""),
    "sm_86": _nvidia(99, 48, ""),
    "sm_89": _nvidia(99, 48),
    "sm_90": _nvidia(227, 64, cluster=8, wgmma=True),
    "sm_100": _nvidia(227, 64, cluster=8),
    "sm_120": _nvidia(99, 48, cluster=8),
    "gfx90a": _cdna(64, ""),
    "gfx942": _cdna(64, "fp8_e4m3fnuz"),
    "gfx950": _cdna(160, "fp8_e4m3fn"),
}

#: Dtypes of weights in the order of their numbers in the sources, as are scales.
INPUTS = ("bf16", "fp16", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4x2")
SCALES = ("none", "tensor", "row", "block")
#: Op -> dtypes of x and kinds of scales.
_FLOATS, _BYTES, _FP8, _BLOCK = INPUTS[:2], INPUTS[2:5], INPUTS[3:5], ("block",)
OPS = {
    "a16w16": (_FLOATS, ("none",)),
    "a8w8": (_BYTES, ("tensor", "row")),
    "a8w8_bpreshuffle": (_BYTES, ("tensor", "row")),
    "a8w8_blockscale": (_FP8, _BLOCK),
    "a8w8_blockscale_bpreshuffle": (_FP8, _BLOCK),
    "a4w4_blockscale": (("fp4x2",), _BLOCK),
    "a16w4_blockscale": (("bf16",), _BLOCK),
    "batched_bf16": (_FLOATS, ("none",)),
    "batched_a8w8": (_BYTES, ("row",)),
}
#: Ops whose weight is mxfp4, whatever x is.
_FP4_WEIGHTS = ("a4w4_blockscale", "a16w4_blockscale")
#: AITER's orders of a weight: rows whose pieces of 16 bytes lie side by side, and bytes along K that make a whole.
_SHUFFLED = re.compile(r"aiter([1-9]\d*)x([1-9]\d*)")
OUTPUTS = ("bf16", "fp16", "fp32")

#: Rows of x at most: beyond, a tile of the weight would be read more than once, and other backends are made for that.
MAX_ROWS = 64
#: Threads of a block at most.
MAX_THREADS = 1024
#: Parts of K at most: more would add up longer than they multiply.
MAX_SPLITS = 64
#: Elements of an operand at most, so that no address computed in 64 bits overflows.
MAX_ELEMENTS = 1 << 40
#: Products of a batch at most: blocks of a grid along its third axis.
MAX_BATCHES = 65535


def batches_of(shape: Shape) -> int:
    """Products of a batch; 1 for an op that has one."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1


@functools.cache
def width_of(dtype: str) -> int:
    """Bytes of an element of a weight; of mxfp4 two values are one element."""
    return dtype_bits(dtype) // 8


def weight_of(shape: Shape) -> str:
    """The dtype of the weight."""
    return "fp4x2" if shape.op in _FP4_WEIGHTS else shape.dtype


def depth_of(shape: Shape) -> int:
    """Elements of the weight along K, two values of mxfp4 being one."""
    return shape.k // 2 if shape.op in _FP4_WEIGHTS else shape.k


def x_pieces(shape: Shape) -> int:
    """Pieces of x for one of the weight: 16 bytes of mxfp4 are as many values as 64 bytes of bf16."""
    return 4 if weight_of(shape) == "fp4x2" and shape.dtype == "bf16" else 1


@functools.cache
def shuffled_rows(layout: str) -> int:
    """Rows of a weight whose pieces lie side by side; 0 for a plain weight, -1 for an order that is not AITER's."""
    found = _SHUFFLED.fullmatch(layout)
    return int(found[1]) if found else 0 if layout == "row" else -1


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no kernel here takes the shape on the architecture."""
    if device.kind == "cpu":
        return Unsupported("the kernels are for NVIDIA and AMD GPUs, not for a CPU")
    if device.gfx not in ARCHITECTURES:
        return Unsupported(f"no limits are known for {device.gfx}; known: {', '.join(ARCHITECTURES)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    if shape.m > MAX_ROWS:
        return Unsupported(f"the kernels are for M <= {MAX_ROWS} (M={shape.m})")
    reason = _operands(shape, device) or _output(shape)
    return Unsupported(reason) if reason else True


def _operands(shape: Shape, device: Device) -> str:
    if shape.op not in OPS:
        return f"op {shape.op} is not covered; covered: {', '.join(OPS)}"
    dtypes, scales = OPS[shape.op]
    if shape.dtype not in dtypes:
        operands = "x" if shape.op == "a16w4_blockscale" else "operands"
        return f"{operands} of {shape.op} must be {' or '.join(dtypes)}, not {shape.dtype}"
    if shape.dtype.startswith("fp8") and shape.dtype != (wanted := ARCHITECTURES[device.gfx].fp8):
        return f"{device.gfx} multiplies {wanted}, not {shape.dtype}" if wanted else f"{device.gfx} multiplies no fp8"
    if shape.scale not in scales:
        return f"scales of {shape.op} must be {' or '.join(scales)}, not {shape.scale}"
    if shuffled_rows(shape.layout) < 0:
        return f"weights must be plain [N, K] or in an order of AITER's, not layout {shape.layout!r}"
    if batches_of(shape) > MAX_BATCHES:
        return f"a batch has {MAX_BATCHES} products at most (B={batches_of(shape)})"
    if max(shape.n, shape.m) * shape.k * batches_of(shape) > MAX_ELEMENTS:
        return f"a weight of {shape.n} x {shape.k} elements is too large; {MAX_ELEMENTS} are the most"
    return ""


def _output(shape: Shape) -> str:
    if shape.outdtype not in OUTPUTS:
        return f"the output must be {', '.join(OUTPUTS)}, not {shape.outdtype}"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"the bias must be {', '.join(OUTPUTS)}, not {shape.bias_dtype}"
    return ""
