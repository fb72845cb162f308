"""Fit: how a kernel lies on a shape and an architecture: its grid, its memory, its registers, and why it cannot serve."""

from __future__ import annotations

import math

from tunedgemm.plugin import Shape

from tunedgemm_skinny.limits import (
    ARCHITECTURES,
    MAX_SPLITS,
    MAX_THREADS,
    batches_of,
    depth_of,
    shuffled_rows,
    weight_of,
    width_of,
    x_pieces,
)
from tunedgemm_skinny.names import Kernel, Rows, Tiles, Wgmma

#: Rows of x of the matrix instructions that take fp8 as fp16.
_HALVES = 8
#: Rows of x that the family `rows` is made for: one accumulator each, for every row of the weight that a warp has.
MAX_ROWS = 8
#: Bytes along K that a lane has of each row in one step.
PIECE = 16
#: Bytes that an asynchronous copy has at least.
COPY = 4
#: Bytes along K of a step of the family `wgmma`, and rows of x that its programs serve.
_WGMMA_STEP, _WGMMA_ROWS = 128, (8, 16, 32, 64)


def ceil_div(size: int, step: int) -> int:
    """Steps that cover a size."""
    return -(-size // step)


def piece_of(dtype: str) -> int:
    """Elements of K that a lane has of each row in one step."""
    return PIECE // width_of(dtype)


def vec_of(shape: Shape) -> int:
    """Elements of one load: as many as divide K, so that each row begins at a multiple of them; 16 bytes at most."""
    return math.gcd(depth_of(shape), piece_of(weight_of(shape)))


def compiled_rows(kernel: Kernel, m: int, gfx: str) -> int:
    """Rows of x that a program serves: M itself, or for matrix instructions what they have in wholes."""
    columns = ARCHITECTURES[gfx].columns
    if isinstance(kernel, Wgmma):
        return next(rows for rows in _WGMMA_ROWS if m <= rows)
    return m if isinstance(kernel, Rows) else ceil_div(m, columns) * columns


def threads_of(kernel: Kernel, gfx: str) -> int:
    """Threads of a block."""
    return kernel.warps * ARCHITECTURES[gfx].wave


def grid_of(kernel: Kernel, splits: int, shape: Shape) -> tuple[int, int, int]:
    """Blocks along the three axes."""
    return ceil_div(shape.n, kernel.per_block), splits, batches_of(shape)


def span_of(kernel: Kernel, shape: Shape, gfx: str) -> int:
    """Elements of the weight along K that a warp has in flight: `unroll` steps of 16 bytes for each lane, in tiles for each four lanes."""
    if isinstance(kernel, Wgmma):
        return kernel.unroll * _WGMMA_STEP // width_of(weight_of(shape))
    groups = ARCHITECTURES[gfx].wave if isinstance(kernel, Rows) else 4
    return kernel.unroll * piece_of(weight_of(shape)) * groups


def per_split(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> int:
    """Elements of the weight along K that each split but the last has: whole spans, so that only the last has a ragged end."""
    span, depth = span_of(kernel, shape, gfx), depth_of(shape)
    return depth if splits == 1 else ceil_div(ceil_div(depth, splits), span) * span


def held(kernel: Kernel, gfx: str) -> int:
    """Rows of the weight that a lane has of each warp's: of a tile of 16, two where the lanes lie in eight groups of four."""
    columns = ARCHITECTURES[gfx].columns
    return kernel.n_each * (1 if isinstance(kernel, Rows) else 16 // columns)


def shared_bytes(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> int:
    """Dynamic shared memory of a block: the ring and x where they are there, in the end the sums of its warps.

    The sums are float32 [warps_k][M][pitch], the pitch being that of ``kernels/portable.h``.
    """
    rows = compiled_rows(kernel, shape.m, gfx)
    width, span, share = width_of(weight_of(shape)), span_of(kernel, shape, gfx), per_split(kernel, splits, shape, gfx)
    sums = 4 * kernel.warps_k * rows * (kernel.per_block + (0 if isinstance(kernel, Rows) else 4))
    if isinstance(kernel, Wgmma):
        return max(kernel.stages * width * kernel.warps_k * span * (kernel.per_block + rows), sums)
    if isinstance(kernel, Rows):
        length = ceil_div(share * width, PIECE) * PIECE
    else:
        step = 4 * PIECE
        length = kernel.stages * kernel.warps_k * span * width or ceil_div(share * width, step) * step
    x = rows * length * x_pieces(shape) if kernel.x_shared else 0
    ring = kernel.stages * kernel.unroll * held(kernel, gfx) * threads_of(kernel, gfx) * PIECE
    return max(x + ring, sums)


def partial_bytes(kernel: Kernel, splits: int, shape: Shape) -> int:
    """Bytes of the float32 or int32 sums of all splits, [B][splits][M][N]; none without a split, and where splits meet in a cluster."""
    return 4 * batches_of(shape) * splits * shape.m * shape.n if splits > 1 and not kernel.cluster else 0


def registers(kernel: Kernel, shape: Shape, gfx: str) -> int:
    """Estimate of the 32-bit registers a thread: sums, loads, x, addresses. NVRTC 13.5 for sm_90 takes up to 60 more or fewer.

    Compilers keep the loads of about four steps at a time, also those from a ring, each load in registers of its own; of a ring of narrow
    copies they keep addresses.
    """
    architecture, rows, mine = ARCHITECTURES[gfx], compiled_rows(kernel, shape.m, gfx), held(kernel, gfx)
    if isinstance(kernel, Wgmma):
        made = rows // 2 if shape.dtype.startswith("fp8") else 0
        return kernel.n_each * (rows // 2 + made + 8) + (rows // 2 if shape.scale == "block" else 0) + 48
    parts = piece_of(weight_of(shape)) // vec_of(shape)  # loads of a piece
    if kernel.stages:
        loads = 4 * mine * min(kernel.unroll, 4) + (parts - 1) * mine * kernel.unroll
    else:
        loads = 4 * mine * min(kernel.unroll, 4) if parts <= 4 else parts * mine * kernel.unroll
    if isinstance(kernel, Rows):
        return rows * (kernel.n_each + 4) + loads + 2 * mine + 32
    tiles = rows // architecture.columns
    # With scales of blocks those of each row of x whose sums a lane has, and, from L1, x of some steps.
    if weight_of(shape) == "fp4x2":  # four words of each row as bfloat16, of two steps their scales, and where those of a row begin
        x = 8 * tiles if x_pieces(shape) == 1 else 0 if kernel.x_shared else 12 * tiles
        return 4 * kernel.n_each * tiles + loads + 10 * mine + x + 2 * (mine + tiles) + 40
    blocks = (4 if kernel.x_shared else 12 + 4 * max(kernel.unroll - 4, 0)) * tiles if shape.scale == "block" else 0
    widened = 8 * (mine + 1) if shape.dtype.startswith("fp8") and architecture.columns == _HALVES else 0  # fp8 as fp16
    return 4 * kernel.n_each * tiles + loads + widened + blocks + 2 * (mine + tiles) + 32


def refusal(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> str:
    """Why the kernel cannot serve the shape on the architecture, or an empty text."""
    architecture = ARCHITECTURES[gfx]
    if isinstance(kernel, Rows) and shape.m > MAX_ROWS:
        return f"{kernel.name} is for M <= {MAX_ROWS} (M={shape.m})"
    if threads_of(kernel, gfx) > MAX_THREADS:
        return f"{kernel.name} has blocks of {threads_of(kernel, gfx)} threads on {gfx}; {MAX_THREADS} are the most"
    if isinstance(kernel, Wgmma) and not architecture.wgmma:
        return f"{kernel.name} is made of instructions that {gfx} has not"
    if kernel.stages and gfx.startswith("gfx"):
        return f"{kernel.name} copies asynchronously; {gfx} cannot"
    if kernel.stages and shape.k * width_of(shape.dtype) % COPY:
        return f"asynchronous copies need K in wholes of {COPY // width_of(shape.dtype)} (K={shape.k})"
    if weight_of(shape) == "fp4x2" and not isinstance(kernel, Tiles):
        return f"{kernel.name} does not multiply mxfp4; the family tiles does"
    if shuffled_rows(shape.layout) and isinstance(kernel, Rows):
        return f"{kernel.name} reads whole rows; those of a shuffled weight lie in pieces"
    if shape.scale == "block" and isinstance(kernel, Rows):
        return f"{kernel.name} sums all of K at once; scales of blocks need products of 128 elements"
    if kernel.cluster and not 2 <= splits <= architecture.cluster:
        most = architecture.cluster
        return f"{kernel.name} needs splitK in 2..{most} (got {splits})" if most else f"{kernel.name} needs clusters; {gfx} has none"
    if not 1 <= splits <= MAX_SPLITS:
        return f"splitK must be in 0..{MAX_SPLITS} (got {splits})"
    if (splits - 1) * per_split(kernel, splits, shape, gfx) >= depth_of(shape):
        return (
            f"K={shape.k} has fewer than splitK={splits} parts of whole steps of {span_of(kernel, shape, gfx) * shape.k // depth_of(shape)}"
        )
    wanted = shared_bytes(kernel, splits, shape, gfx)
    if wanted > architecture.shared_bytes:
        return f"{kernel.name} needs {wanted} bytes of shared memory; {gfx} has {architecture.shared_bytes}"
    return ""
