"""Static limits: what an architecture has, as data; answers for devices that are not present."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm.tools import dtype_bits


@attrs.frozen
class Architecture:
    """What the kernels must fit into.

    Attributes:
        shared_bytes: shared memory (LDS) that one block may take.
        warp_size: threads of a warp or wavefront.
        registers: 32-bit registers that one thread may hold; on CDNA vector and accumulation registers together.
        matrix: the matrix instruction that a tile of ordinary size uses: mma, wgmma, tcgen05, mfma or wmma.
        fp8: the kind of 8-bit floating-point numbers that it multiplies; "" for none.
        tma: whether the tensor memory accelerator loads tiles through descriptors.
        specialize: whether Triton 3.6 gives loads and products to different warps.
    """

    shared_bytes: int
    warp_size: int
    registers: int
    matrix: str
    fp8: str = ""
    tma: bool = False
    specialize: bool = False


_FN, _FNUZ = "fp8_e4m3fn", "fp8_e4m3fnuz"

#: CUDA programming guide, table of technical specifications (shared memory per block, opt-in); PTX ISA, mma and wgmma (e4m3);
#: AMD's CDNA 3, CDNA 4, RDNA 3 and RDNA 4 ISA guides (LDS per work-group, FP8).
ARCHITECTURES = {
    "sm_80": Architecture(163 << 10, 32, 255, "mma"),
    "sm_86": Architecture(99 << 10, 32, 255, "mma"),
    "sm_89": Architecture(99 << 10, 32, 255, "mma", _FN),
    "sm_90": Architecture(227 << 10, 32, 255, "wgmma", _FN, tma=True, specialize=True),
    "sm_100": Architecture(227 << 10, 32, 255, "tcgen05", _FN, tma=True),
    "sm_120": Architecture(99 << 10, 32, 255, "mma", _FN, tma=True),
    "gfx90a": Architecture(64 << 10, 64, 512, "mfma"),
    "gfx942": Architecture(64 << 10, 64, 512, "mfma", _FNUZ),
    "gfx950": Architecture(160 << 10, 64, 512, "mfma", _FN),
    "gfx1100": Architecture(64 << 10, 32, 256, "wmma"),
    "gfx1201": Architecture(64 << 10, 32, 256, "wmma", _FN),
}


@attrs.frozen
class Operands:
    """What an op's kernels take.

    Attributes:
        dtypes: of x and the weight.
        scales: kinds of scales.
        layouts: of the weight.
        families: of the kernels that multiply them.
    """

    dtypes: tuple[str, ...]
    scales: tuple[str, ...] = ("none",)
    layouts: tuple[str, ...] = ("row",)
    families: tuple[str, ...] = ("gemv", "gemm", "tma")


FLOATS = ("bf16", "fp16")
FP8 = (_FN, _FNUZ)
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

#: A grid's second and third axes (split-K, groups of rows, products of a batch) end at 65535.
MAX_GRID_YZ = 65535

#: 2^31 over the largest product of two int8 numbers, 2^14, less one.
MAX_INT8_K = (1 << 17) - 1

#: Tiles that one split-K launch may count.
MAX_TILES = 1024

#: Partial sums of one launch: their offsets are 32-bit, and more would cost more traffic than the split saves.
MAX_PARTIAL_BYTES = 1 << 30


def batches_of(shape: Shape) -> int:
    """Products of a batch; 1 for an op that has one."""
    return int(shape["B"]) if shape.op.startswith("batched_") else 1


@functools.cache
def width_of(dtype: str) -> int:
    """Bytes of an element of the operands."""
    return dtype_bits(dtype) // 8


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """True, or why no kernel of the families that `names` has takes the shape on the architecture."""
    return answer(shape, device, _operands)


def answer(shape: Shape, device: Device, operands: Callable[[Shape, Device], str]) -> bool | Unsupported:
    """True, or why no kernel takes the shape on the architecture; *operands* says so of the operands, or nothing."""
    if device.kind == "cpu":
        return Unsupported("Triton compiles for NVIDIA and AMD GPUs, not for a CPU")
    if device.gfx not in ARCHITECTURES:
        return Unsupported(f"no limits are known for {device.gfx}; known: {', '.join(ARCHITECTURES)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    reason = operands(shape, device) or _output(shape)
    return Unsupported(reason) if reason else True


def _operands(shape: Shape, device: Device) -> str:
    if shape.op not in OPS:
        return f"op {shape.op} is not covered; covered: {', '.join(OPS)}"
    taken = OPS[shape.op]
    if shape.dtype not in taken.dtypes:
        return f"operands of {shape.op} must be {' or '.join(taken.dtypes)}, not {shape.dtype}"
    if shape.dtype in FP8 and shape.dtype != (wanted := ARCHITECTURES[device.gfx].fp8):
        return f"{device.gfx} multiplies {wanted}, not {shape.dtype}" if wanted else f"{device.gfx} multiplies no fp8"
    if shape.dtype == "int8" and shape.k > MAX_INT8_K:
        return f"sums of int8 products fit int32 up to K={MAX_INT8_K} (K={shape.k})"
    if shape.scale not in taken.scales:
        return f"scales of {shape.op} must be {' or '.join(taken.scales)}, not {shape.scale}"
    if shape.layout not in taken.layouts:
        return f"the weight of {shape.op} must be of layout {' or '.join(taken.layouts)}, not {shape.layout!r}"
    if batches_of(shape) > MAX_GRID_YZ:
        return f"a batch has {MAX_GRID_YZ} products at most (B={batches_of(shape)})"
    return ""


def _output(shape: Shape) -> str:
    if shape.outdtype not in OUTPUTS:
        return f"the output must be {', '.join(OUTPUTS)}, not {shape.outdtype}"
    if shape.bias and shape.bias_dtype not in OUTPUTS:
        return f"the bias must be {', '.join(OUTPUTS)}, not {shape.bias_dtype}"
    return ""
