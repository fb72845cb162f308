"""Check which shapes the kernels support on each architecture; absent devices included."""

from __future__ import annotations

import functools
import re

from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits, format_of

#: Families of kernels by what they need: `wgmma` that instruction, `tiles` mma or mfma, `rows`
#: none. A clang compiles `rows` for RDNA, whose compute units torch counts in pairs.
_TILES_BY = ("mma", "wgmma", "tcgen05", "mfma")
TILED = ARCHITECTURES.having(matrix=_TILES_BY)
UNTILED = ARCHITECTURES.having(matrix="wmma", units=2)

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
    "a16wn": (_FLOATS, _BLOCK),
}
_NEEDS = {"nvidia": ("NVRTC, which torch has",), "amd": ("HIPRTC of ROCm, which torch has",)}
#: The op of weight-only formats, of which `packed` serves those of 4 bits with NVIDIA's mma.
FORMATTED = "a16wn"
_WITHOUT_FP8 = tuple(op for op, (dtypes, _) in OPS.items() if dtypes != _FP8)
_OF_AMD = tuple(op for op in OPS if op != FORMATTED)
_OF_AMD_WITHOUT_FP8 = tuple(op for op in _WITHOUT_FP8 if op != FORMATTED)
_OF_ROWS = tuple(op for op, (_, scales) in OPS.items() if scales != _BLOCK and not op.endswith("_bpreshuffle"))
PLATFORMS = (
    Platform(("sm_90",), needs=_NEEDS["nvidia"], ran=("H200",), ranked=("a16w16", "a8w8", "a8w8_blockscale")),
    *(
        Platform(gfx, needs=_NEEDS["amd" if gfx[0].startswith("gfx") else "nvidia"], ops=ops)
        for gfx, ops in (
            (ARCHITECTURES.having(matrix=("mma", "tcgen05"), fp8=_FP8), ()),
            (ARCHITECTURES.having(matrix="mma", fp8=""), _WITHOUT_FP8),
            (ARCHITECTURES.having(matrix="mfma", fp8=_FP8), _OF_AMD),
            (ARCHITECTURES.having(matrix="mfma", fp8=""), _OF_AMD_WITHOUT_FP8),
            (UNTILED, _OF_ROWS),
        )
    ),
)
#: Ops whose weight is mxfp4, whatever x is.
_FP4_WEIGHTS = ("a4w4_blockscale", "a16w4_blockscale")
#: AITER's weight orders: rows whose pieces of 16 bytes are adjacent, and bytes along K of one unit.
_SHUFFLED = re.compile(r"aiter([1-9]\d*)x([1-9]\d*)")
OUTPUTS = ("bf16", "fp16", "fp32")
#: Formats of `FORMATTED` -> order of the codes: 0 for eight along K in a word, 1 for the same
#: transposed, 2 for eight along N.
ORDERS = {
    "ct_int4": 0, "ct_int4_zp": 0, "mxfp4": 0, "nvfp4": 0,
    "gptq_int4": 1, "gptq_int4_zp": 1, "gptq_int4_zp_v2": 1,
    "awq_int4": 2,
}  # fmt: skip

#: Most rows of x. Beyond them a tile of the weight would be read more than once; other backends do
#: better there.
MAX_ROWS = 64
#: Most rows of x of the family `rows`: each row of x times each weight row of a warp is an
#: accumulator.
FEW_ROWS = 8
#: Most rows of x of the family `packed`: each weight row of a warp times each is an accumulator.
PACKED_ROWS = 16
#: Elements of K that `packed` takes at once, and rows that its loads of transposed weights need.
PACKED_K, PACKED_N = (32, 64, 128), 8
#: Most elements of a packed weight, whose offsets have 32 bits.
MAX_PACKED = 1 << 34
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


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no kernel serves the shape on the architecture; None where one does."""
    if device.kind == "cpu":
        return f"device must be an NVIDIA or AMD GPU (got {device.gfx})"
    tiled = has_tiles(device.gfx)
    if not tiled and not set(ARCHITECTURES.stand_ins(device.gfx)) & set(UNTILED):
        return f"architecture must be one of {', '.join((*TILED, *UNTILED))} (got {device.gfx})"
    if not 1 <= shape.m <= MAX_ROWS:
        return f"M must be in 1..{MAX_ROWS} (got {shape.m})"
    reason = _operand_fault(shape, device) or _output_fault(shape)
    return reason or (None if tiled else rows_fault(shape))


def has_tiles(gfx: str) -> bool:
    """Return whether the architecture has the matrix instructions of `tiles`."""
    return gfx in ARCHITECTURES and ARCHITECTURES[gfx].matrix in _TILES_BY


def columns_of(gfx: str) -> int:
    """Return the rows of x that one matrix instruction takes: 8 of mma, 16 of mfma."""
    return 8 if gfx.startswith("sm_") else 16


def rows_fault(shape: Shape) -> str | None:
    """Return why no kernel of the family `rows` serves the shape."""
    if shape.m > FEW_ROWS:
        return f"M must be at most {FEW_ROWS} (got {shape.m})"
    if shuffled_rows(shape.layout):
        return f"the family rows needs a plain weight (got layout {shape.layout!r})"
    if shape.scale == "block":
        return "the family rows sums all of K before scaling (got block scales); use tiles or wgmma"
    return None


def code_order(shape: Shape) -> int:
    """Return the number of the order of a packed weight's codes; see `ORDERS`."""
    return ORDERS[format_of(shape).name]


def group_of(shape: Shape) -> int:
    """Return the elements of K that share a scale of a packed weight; 0 for the whole row."""
    return int(shape["w_group"])


def depth_of_step(shape: Shape) -> int:
    """Return the elements of K of a step of `packed`: integers of one scale, at most 128."""
    return min(group_of(shape) or PACKED_K[-1], PACKED_K[-1]) if not format_of(shape).scale else PACKED_K[-1]


def format_fault(shape: Shape, gfx: str) -> str | None:
    """Return why `packed` does not serve the format or its sizes on an architecture."""
    form = format_of(shape)
    if ARCHITECTURES[gfx].matrix not in ("mma", "wgmma", "tcgen05"):
        return f"{FORMATTED} needs NVIDIA's mma (got {gfx})"
    if form.name not in ORDERS:
        return f"{FORMATTED}: format must be one of {', '.join(ORDERS)} (got {form.name})"
    if form.scale and shape.dtype != "bf16":
        return f"{form.name}: x must be bf16, which holds each value times its scale (got {shape.dtype})"
    if "fp8_e4m3fn" in form.scale and not ARCHITECTURES[gfx].fp8:
        return f"{form.name}: {gfx} has no fp8, which its scales are"
    if shape.m > PACKED_ROWS:
        return f"{FORMATTED}: M must be at most {PACKED_ROWS} (got {shape.m})"
    if shape.n * shape.k > MAX_PACKED:
        return f"{form.name}: N x K must be at most {MAX_PACKED} (got {shape.n} x {shape.k})"
    if (step := depth_of_step(shape)) not in PACKED_K or shape.k % step:
        return f"{form.name}: K must be a multiple of {max(PACKED_K)}, or a group of 32 or 64 (got {shape.k})"
    if ORDERS[form.name] and shape.n % PACKED_N:
        return f"{form.name}: N must be a multiple of {PACKED_N} (got {shape.n})"
    return None if shape.layout == "row" else f"{form.name}: the weight must be as the checkpoint has it (got layout {shape.layout!r})"


def _operand_fault(shape: Shape, device: Device) -> str | None:
    dtypes, scales = OPS[shape.op]
    if shape.dtype not in dtypes:
        operands = "x" if shape.op == "a16w4_blockscale" else "operands"
        return f"{shape.op}: {operands} must be {' or '.join(dtypes)} (got {shape.dtype})"
    if shape.dtype.startswith("fp8") and shape.dtype != (native := ARCHITECTURES[device.gfx].fp8):
        return f"fp8 on {device.gfx} must be {native} (got {shape.dtype})" if native else f"{device.gfx} has no fp8 (got {shape.dtype})"
    if shape.scale not in scales:
        return f"{shape.op}: scales must be {' or '.join(scales)} (got {shape.scale})"
    if shape.op == FORMATTED and (fault := format_fault(shape, device.gfx)):
        return fault
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
