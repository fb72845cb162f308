"""Check which shapes the kernels support on each architecture; absent devices included."""

from __future__ import annotations

import functools
import re

import attrs
from tunedgemm.plugin import Device, Platform, Shape, Unsupported
from tunedgemm.tools import dtype_bits


@attrs.frozen
class Architecture:
    """Limits of one architecture.

    Attributes:
        shared_bytes: shared memory (LDS) of one block.
        wave: threads of a warp or wavefront.
        columns: rows of x that one matrix instruction takes.
        registers: 32-bit registers of one thread; on CDNA vector registers alone.
        register_file: registers of a multiprocessor or compute unit; one block may use them all.
        warps: resident warps of a multiprocessor or compute unit.
        fp8: 8-bit floating-point dtype that it multiplies or converts; "" for none.
        cluster: blocks of a cluster at most; 0 without clusters.
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
        wgmma=wgmma,
    )


def _cdna(shared: int, fp8: str) -> Architecture:
    return Architecture(shared << 10, wave=64, columns=16, registers=256, register_file=1 << 17, warps=32, fp8=fp8)


#: Sources: CUDA programming guide, table of technical specifications (shared memory per block,
#: opt-in; resident warps; portable size of a cluster); PTX ISA, cvt (e4m3x2); AMD's CDNA 2, 3 and 4
#: ISA guides (LDS per work-group, VGPRs, waves, FP8).
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

#: Dtypes of weights and kinds of scales, in the order of their numbers in the kernel sources.
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
_NEEDS = {"nvidia": ("NVRTC, which torch has",), "amd": ("HIPRTC of ROCm, which torch has",)}
_WITHOUT_FP8 = tuple(op for op, (dtypes, _) in OPS.items() if dtypes != _FP8)
PLATFORMS = (
    Platform(("sm_90",), needs=_NEEDS["nvidia"], ran=("H200",)),
    Platform(("sm_89", "sm_100", "sm_120"), needs=_NEEDS["nvidia"]),
    Platform(("sm_80", "sm_86"), needs=_NEEDS["nvidia"], ops=_WITHOUT_FP8),
    Platform(("gfx942", "gfx950"), needs=_NEEDS["amd"]),
    Platform(("gfx90a",), needs=_NEEDS["amd"], ops=_WITHOUT_FP8),
)
#: Ops whose weight is mxfp4, whatever x is.
_FP4_WEIGHTS = ("a4w4_blockscale", "a16w4_blockscale")
#: AITER's weight orders: rows whose pieces of 16 bytes are adjacent, and bytes along K of one unit.
_SHUFFLED = re.compile(r"aiter([1-9]\d*)x([1-9]\d*)")
OUTPUTS = ("bf16", "fp16", "fp32")

#: Most rows of x. Beyond them a tile of the weight would be read more than once; other backends do
#: better there.
MAX_ROWS = 64
#: Most threads of a block.
MAX_THREADS = 1024
#: Most splits of K: adding more partials would take longer than the products.
MAX_SPLITS = 64
#: Most elements of an operand, so that addresses computed in 64 bits do not overflow.
MAX_ELEMENTS = 1 << 40
#: Most products of a batch: the grid's limit along its third axis.
MAX_BATCHES = 65535


def batches_of(shape: Shape) -> int:
    """Return the number of products of a batch; 1 for an op without a batch."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1


@functools.cache
def width_of(dtype: str) -> int:
    """Return the bytes of one element of a weight. Two values of mxfp4 are one element."""
    return dtype_bits(dtype) // 8


def weight_of(shape: Shape) -> str:
    """Return the dtype of the weight."""
    return "fp4x2" if shape.op in _FP4_WEIGHTS else shape.dtype


def depth_of(shape: Shape) -> int:
    """Return the elements of the weight along K. Two values of mxfp4 are one element."""
    return shape.k // 2 if shape.op in _FP4_WEIGHTS else shape.k


def x_pieces(shape: Shape) -> int:
    """Return the 16-byte pieces of x per piece of the weight: 4 for bf16 times mxfp4, else 1."""
    return 4 if weight_of(shape) == "fp4x2" and shape.dtype == "bf16" else 1


@functools.cache
def shuffled_rows(layout: str) -> int:
    """Return the weight rows whose pieces are adjacent.

    0 for a plain weight, -1 for an unknown order.
    """
    match = _SHUFFLED.fullmatch(layout)
    return int(match[1]) if match else 0 if layout == "row" else -1


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """Check whether some kernel serves the shape on the architecture."""
    reason = unsupported(shape, device)
    return True if reason is None else Unsupported(reason)


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no kernel serves the shape on the architecture; None where one does."""
    if device.kind == "cpu":
        return f"device must be an NVIDIA or AMD GPU (got {device.gfx})"
    if device.gfx not in ARCHITECTURES:
        return f"architecture must be one of {', '.join(ARCHITECTURES)} (got {device.gfx})"
    if not 1 <= shape.m <= MAX_ROWS:
        return f"M must be in 1..{MAX_ROWS} (got {shape.m})"
    return _operand_fault(shape, device) or _output_fault(shape)


def _operand_fault(shape: Shape, device: Device) -> str | None:
    if shape.op not in OPS:
        return f"op must be one of {', '.join(OPS)} (got {shape.op})"
    dtypes, scales = OPS[shape.op]
    if shape.dtype not in dtypes:
        operands = "x" if shape.op == "a16w4_blockscale" else "operands"
        return f"{shape.op}: {operands} must be {' or '.join(dtypes)} (got {shape.dtype})"
    if shape.dtype.startswith("fp8") and shape.dtype != (native := ARCHITECTURES[device.gfx].fp8):
        return f"fp8 on {device.gfx} must be {native} (got {shape.dtype})" if native else f"{device.gfx} has no fp8 (got {shape.dtype})"
    if shape.scale not in scales:
        return f"{shape.op}: scales must be {' or '.join(scales)} (got {shape.scale})"
    if shuffled_rows(shape.layout) < 0:
        return f"weight layout must be row or an AITER order (got {shape.layout!r})"
    if batches_of(shape) > MAX_BATCHES:
        return f"B must be at most {MAX_BATCHES} (got {batches_of(shape)})"
    if max(shape.n, shape.m) * shape.k * batches_of(shape) > MAX_ELEMENTS:
        return f"an operand must have at most {MAX_ELEMENTS} elements (got {shape.n} x {shape.k})"
    return None


def _output_fault(shape: Shape) -> str | None:
    if shape.outdtype not in OUTPUTS:
        return f"output must be {', '.join(OUTPUTS)} (got {shape.outdtype})"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"bias must be {', '.join(OUTPUTS)} (got {shape.bias_dtype})"
    return None
