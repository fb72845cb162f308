"""Fit: how a kernel lies on a shape and an architecture: its grid, its memory, its registers, and why it cannot serve."""

from __future__ import annotations

from tunedgemm.plugin import Shape

from tunedgemm_skinny.limits import ARCHITECTURES, MAX_SPLITS, MAX_THREADS
from tunedgemm_skinny.names import Kernel, Rows, Wgmma

#: Rows of x that the family `rows` is made for: one accumulator each, for every row of the weight that a warp has.
MAX_ROWS = 8
#: Elements of K that a warp of the family `tiles` multiplies in one step.
_STEP = 32
#: The same of the family `wgmma`, and rows of x that its programs serve.
_WGMMA_STEP, _WGMMA_ROWS = 64, (8, 16, 32, 64)
#: Elements of K that a lane has of each row in one step.
EIGHT = 8


def ceil_div(size: int, step: int) -> int:
    """Steps that cover a size."""
    return -(-size // step)


def vec_of(k: int) -> int:
    """Elements of one load: as many as divide K, so that each row begins at a multiple of them; 16 bytes at most."""
    return next(vec for vec in (8, 4, 2, 1) if k % vec == 0)


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
    return ceil_div(shape.n, kernel.per_block), splits, 1


def span_of(kernel: Kernel, gfx: str) -> int:
    """Elements of K that a warp has in flight: `unroll` steps of 8 for each lane, in tiles for each of its groups of four lanes."""
    if isinstance(kernel, Wgmma):
        return kernel.unroll * _WGMMA_STEP
    return kernel.unroll * (EIGHT * ARCHITECTURES[gfx].wave if isinstance(kernel, Rows) else _STEP)


def per_split(kernel: Kernel, splits: int, k: int, gfx: str) -> int:
    """Elements of K that each split but the last has: whole spans, so that only the last has a ragged end."""
    span = span_of(kernel, gfx)
    return k if splits == 1 else ceil_div(ceil_div(k, splits), span) * span


def held(kernel: Kernel, gfx: str) -> int:
    """Rows of the weight that a lane has of each warp's: of a tile of 16, two where the lanes lie in eight groups of four."""
    columns = ARCHITECTURES[gfx].columns
    return kernel.n_each * (1 if isinstance(kernel, Rows) else 16 // columns)


def shared_bytes(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> int:
    """Dynamic shared memory of a block: the ring and x where they are there, in the end the sums of its warps.

    The sums are float32 [warps_k][M][pitch], the pitch being that of ``kernels/portable.h``.
    """
    rows = compiled_rows(kernel, shape.m, gfx)
    if isinstance(kernel, Wgmma):
        slot = 2 * kernel.warps_k * span_of(kernel, gfx) * (kernel.per_block + rows)
        return max(kernel.stages * slot, 4 * kernel.warps_k * rows * (kernel.per_block + 4))
    if isinstance(kernel, Rows):
        pitch, length = kernel.per_block, ceil_div(per_split(kernel, splits, shape.k, gfx), EIGHT) * EIGHT
    else:
        whole = ceil_div(per_split(kernel, splits, shape.k, gfx), _STEP) * _STEP
        pitch, length = kernel.per_block + 4, kernel.stages * kernel.warps_k * span_of(kernel, gfx) or whole
    x = 2 * rows * length if kernel.x_shared else 0
    ring = kernel.stages * kernel.unroll * held(kernel, gfx) * threads_of(kernel, gfx) * 2 * EIGHT
    return max(x + ring, 4 * kernel.warps_k * rows * pitch)


def partial_bytes(kernel: Kernel, splits: int, shape: Shape) -> int:
    """Bytes of the float32 sums of all splits, [splits][M][N]; none without a split, and where splits meet in a cluster."""
    return 4 * splits * shape.m * shape.n if splits > 1 and not kernel.cluster else 0


def registers(kernel: Kernel, m: int, gfx: str) -> int:
    """Estimate of the 32-bit registers a thread: sums, loads, x, addresses. NVRTC 13.5 for sm_90 takes up to 60 more or fewer.

    Compilers keep the loads of about four steps at a time, also those from a ring.
    """
    architecture, rows, mine = ARCHITECTURES[gfx], compiled_rows(kernel, m, gfx), held(kernel, gfx)
    if isinstance(kernel, Wgmma):
        return kernel.n_each * rows // 2 + 8 * kernel.n_each + 48
    loads = 4 * mine * min(kernel.unroll, 4)
    if isinstance(kernel, Rows):
        return rows * (kernel.n_each + 4) + loads + 2 * mine + 32
    tiles = rows // architecture.columns
    return 4 * kernel.n_each * tiles + loads + 2 * (mine + tiles) + 32


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
    if kernel.stages and shape.k % 2:
        return f"asynchronous copies need an even K (K={shape.k})"
    if kernel.cluster and not 2 <= splits <= architecture.cluster:
        most = architecture.cluster
        return f"{kernel.name} needs splitK in 2..{most} (got {splits})" if most else f"{kernel.name} needs clusters; {gfx} has none"
    if not 1 <= splits <= MAX_SPLITS:
        return f"splitK must be in 0..{MAX_SPLITS} (got {splits})"
    if (splits - 1) * per_split(kernel, splits, shape.k, gfx) >= shape.k:
        return f"K={shape.k} has fewer than splitK={splits} parts of whole steps of {span_of(kernel, gfx)}"
    wanted = shared_bytes(kernel, splits, shape, gfx)
    if wanted > architecture.shared_bytes:
        return f"{kernel.name} needs {wanted} bytes of shared memory; {gfx} has {architecture.shared_bytes}"
    return ""
