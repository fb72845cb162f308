"""Compute grid, shared memory and registers of a kernel, and check whether it fits a device."""

from __future__ import annotations

import math

from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import ARCHITECTURES, format_of

from tunedgemm_skinny.limits import (
    FORMATTED,
    MAX_SPLITS,
    MAX_THREADS,
    batches_of,
    code_order,
    columns_of,
    depth_of,
    depth_of_step,
    format_fault,
    has_tiles,
    rows_fault,
    weight_of,
    width_of,
    x_pieces,
)
from tunedgemm_skinny.names import KernelConfig, Packed, Rows, Tiles, Wgmma

#: Rows of x of the matrix instructions that take fp8 converted to fp16.
_HALVES = 8
#: Bytes along K of each row that a lane loads in one step.
PIECE = 16
#: Least bytes of an asynchronous copy.
COPY = 4
#: Bytes along K of a step of the family `wgmma`, and rows of x that its programs serve.
_WGMMA_STEP, _WGMMA_ROWS = 128, (8, 16, 32, 64)


def ceil_div(size: int, step: int) -> int:
    """Return the number of steps that cover a size."""
    return -(-size // step)


def piece_of(dtype: str) -> int:
    """Return the elements along K of each row that a lane loads in one step."""
    return PIECE // width_of(dtype)


def vec_of(shape: Shape) -> int:
    """Return the elements of one load: at most 16 bytes, and a divisor of K for alignment."""
    return math.gcd(depth_of(shape), piece_of(weight_of(shape)))


def compiled_rows(kernel: KernelConfig, m: int, gfx: str) -> int:
    """Return the rows of x that a program serves: M, rounded up to whole matrix instructions."""
    columns = columns_of(gfx)
    if isinstance(kernel, Wgmma):
        return next(rows for rows in _WGMMA_ROWS if m <= rows)
    return m if isinstance(kernel, Rows) else ceil_div(m, columns) * columns


def threads_of(kernel: KernelConfig, gfx: str) -> int:
    """Return the threads of a block."""
    return kernel.warps * ARCHITECTURES[gfx].warp_size


def grid_of(kernel: KernelConfig, splits: int, shape: Shape) -> tuple[int, int, int]:
    """Return the blocks along the three axes: N, splits, batch."""
    return ceil_div(shape.n, kernel.per_block), splits, batches_of(shape)


def span_of(kernel: KernelConfig, shape: Shape, gfx: str) -> int:
    """Return the weight elements along K that a warp has in flight.

    They are `unroll` steps of 16 bytes per lane in `rows`, per four lanes in `tiles`, and of 128
    bytes in `wgmma`. A step of `packed` follows from the format.
    """
    if isinstance(kernel, Packed):
        return kernel.unroll * depth_of_step(shape)
    if isinstance(kernel, Wgmma):
        return kernel.unroll * _WGMMA_STEP // width_of(weight_of(shape))
    groups = ARCHITECTURES[gfx].warp_size if isinstance(kernel, Rows) else 4
    return kernel.unroll * piece_of(weight_of(shape)) * groups


def per_split(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> int:
    """Return the weight elements along K of each split but the last, in whole spans."""
    span, depth = span_of(kernel, shape, gfx), depth_of(shape)
    return depth if splits == 1 else ceil_div(ceil_div(depth, splits), span) * span


def held(kernel: KernelConfig, gfx: str) -> int:
    """Return the weight rows of a lane; with 8 columns two per 16-row tile."""
    columns = columns_of(gfx)
    return kernel.n_each * (1 if isinstance(kernel, Rows) else 16 // columns)


def shared_bytes(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> int:
    """Return the bytes of dynamic shared memory of a block: ring and x, then its warps' sums.

    The sums are float32 [warps_k][M][PITCH], with PITCH of ``kernels/portable.h``.
    """
    rows = compiled_rows(kernel, shape.m, gfx)
    width, span, share = width_of(weight_of(shape)), span_of(kernel, shape, gfx), per_split(kernel, splits, shape, gfx)
    sums = 4 * kernel.warps_k * rows * (kernel.per_block + (0 if isinstance(kernel, Rows) else 4))
    if isinstance(kernel, Wgmma):
        return max(kernel.stages * width * kernel.warps_k * span * (kernel.per_block + rows), sums)
    if isinstance(kernel, Packed):
        pieces = ceil_div(share, 64) * 8 + 4  # `stride` of ``kernels/packed.h``
        return max(PIECE * shape.m * pieces, sums)
    if isinstance(kernel, Rows):
        length = ceil_div(share * width, PIECE) * PIECE
    else:
        step = 4 * PIECE
        length = kernel.stages * kernel.warps_k * span * width or ceil_div(share * width, step) * step
    x = rows * length * x_pieces(shape) if kernel.x_shared else 0
    ring = kernel.stages * kernel.unroll * held(kernel, gfx) * threads_of(kernel, gfx) * PIECE
    return max(x + ring, sums)


def partial_bytes(kernel: KernelConfig, splits: int, shape: Shape) -> int:
    """Return the bytes of the partials, float32 or int32 [B][splits][M][N].

    There are none without splits, and where the splits meet in a cluster.
    """
    return 4 * batches_of(shape) * splits * shape.m * shape.n if splits > 1 and not kernel.cluster else 0


def registers(kernel: KernelConfig, shape: Shape, gfx: str) -> int:
    """Estimate the 32-bit registers of a thread: accumulators, loads, x, addresses.

    NVRTC 13.5 for sm_90 takes up to 60 more or fewer. Compilers keep the loads of about four steps
    in registers, also of those from a ring. For a ring of narrow copies they keep addresses.
    """
    columns, rows, mine = columns_of(gfx), compiled_rows(kernel, shape.m, gfx), held(kernel, gfx)
    if isinstance(kernel, Wgmma):
        own_sums = rows // 2 if shape.dtype.startswith("fp8") else 0
        return kernel.n_each * (rows // 2 + own_sums + 8) + (rows // 2 if shape.scale == "block" else 0) + 48
    if isinstance(kernel, Packed):
        return _registers_of_packed(kernel, rows // columns, shape)
    parts = piece_of(weight_of(shape)) // vec_of(shape)  # loads per piece
    if kernel.stages:
        loads = 4 * mine * min(kernel.unroll, 4) + (parts - 1) * mine * kernel.unroll
    else:
        loads = 4 * mine * min(kernel.unroll, 4) if parts <= 4 else parts * mine * kernel.unroll
    if isinstance(kernel, Rows):
        return rows * (kernel.n_each + 4) + loads + 2 * mine + 32
    tiles = rows // columns
    if weight_of(shape) == "fp4x2":  # per row four words of bfloat16, the scales of two steps, and their address
        x = 8 * tiles if x_pieces(shape) == 1 else 0 if kernel.x_shared else 12 * tiles
        return 4 * kernel.n_each * tiles + loads + 10 * mine + x + 2 * (mine + tiles) + 40
    # Block scales take a register for each row of x of a lane's accumulators, and x of some steps
    # from L1.
    blocks = (4 if kernel.x_shared else 12 + 4 * max(kernel.unroll - 4, 0)) * tiles if shape.scale == "block" else 0
    widened = 8 * (mine + 1) if shape.dtype.startswith("fp8") and columns == _HALVES else 0  # fp8 as fp16
    return 4 * kernel.n_each * tiles + loads + widened + blocks + 2 * (mine + tiles) + 32


def _registers_of_packed(kernel: Packed, tiles: int, shape: Shape) -> int:
    """Estimate the same for `packed`: sums, those of a step of integers, two turns of loads, x."""
    integers = not format_of(shape).scale
    halves = 2 * kernel.n_each
    loads = 2 * kernel.unroll * halves * (depth_of_step(shape) // 32 + 1)
    return (4 + 4 * integers) * kernel.n_each * tiles + loads + 4 * tiles + halves + 40


def unfit(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> str | None:
    """Return why the kernel cannot serve the shape on the architecture; None where it can."""
    if (threads := threads_of(kernel, gfx)) > MAX_THREADS:
        return f"{kernel.name}: threads of a block must be at most {MAX_THREADS} (got {threads} on {gfx})"
    if isinstance(kernel, Packed) is not (shape.op == FORMATTED):
        return f"{kernel.name}: {FORMATTED}, and no other op, needs the family packed (got {shape.op})"
    if isinstance(kernel, Packed) and (fault := format_fault(shape, gfx)):
        return f"{kernel.name}: {fault}"
    if isinstance(kernel, Packed) and kernel.n_each < (least := 1 << code_order(shape)):  # a load has codes of so many tiles
        return f"{kernel.name}: n must be at least {least} for {format_of(shape).name}"
    if isinstance(kernel, Wgmma) and ARCHITECTURES[gfx].matrix != "wgmma":
        return f"{kernel.name}: wgmma needs sm_90 (got {gfx})"
    if not isinstance(kernel, Rows) and not has_tiles(gfx):
        return f"{kernel.name}: the family {kernel.family} needs mma or mfma (got {gfx})"
    if kernel.stages and gfx.startswith("gfx"):
        return f"{kernel.name}: asynchronous copies need an NVIDIA GPU (got {gfx})"
    if kernel.stages and shape.k * width_of(shape.dtype) % COPY:
        return f"{kernel.name}: asynchronous copies need K in multiples of {COPY // width_of(shape.dtype)} (got K={shape.k})"
    if weight_of(shape) == "fp4x2" and not isinstance(kernel, Tiles):
        return f"{kernel.name}: mxfp4 weights need the family tiles (got {kernel.family})"
    if isinstance(kernel, Rows) and (fault := rows_fault(shape)):
        return f"{kernel.name}: {fault}"
    return _split_fault(kernel, splits, shape, gfx) or _memory_fault(kernel, splits, shape, gfx)


def _split_fault(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> str | None:
    """Return why K cannot be split like that."""
    most = ARCHITECTURES[gfx].cluster
    if kernel.cluster and not 2 <= splits <= most:
        return (
            f"{kernel.name}: splitK of a cluster must be in 2..{most} (got {splits})"
            if most
            else f"{kernel.name}: clusters need sm_90 or later (got {gfx})"
        )
    if not 1 <= splits <= MAX_SPLITS:
        return f"splitK must be in 0..{MAX_SPLITS} (got {splits})"
    if (splits - 1) * per_split(kernel, splits, shape, gfx) >= depth_of(shape):
        step = span_of(kernel, shape, gfx) * shape.k // depth_of(shape)
        return f"{kernel.name}: splitK must leave each split a step of {step} of K={shape.k} (got {splits})"
    return None


def _memory_fault(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> str | None:
    """Return by how much the kernel exceeds the shared memory of a block."""
    needed, available = shared_bytes(kernel, splits, shape, gfx), ARCHITECTURES[gfx].shared_bytes
    return f"{kernel.name}: shared memory on {gfx} must be at most {available} bytes (got {needed})" if needed > available else None
