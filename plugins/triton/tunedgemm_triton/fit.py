"""Fit: how a kernel lies on a shape and a device: its grid, its memory, and why it cannot serve."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.limits import ARCHITECTURES, MAX_GRID_YZ, MAX_PARTIAL_BYTES, MAX_TILES
from tunedgemm_triton.names import Gemm, Gemv, Kernel, Tma


def ceil_div(size: int, step: int) -> int:
    """Steps that cover a size."""
    return -(-size // step)


def rows_of(kernel: Kernel) -> int:
    """Rows of activations of one tile."""
    return kernel.rows if isinstance(kernel, Gemv) else kernel.block_m


def step_of(kernel: Kernel) -> int:
    """Elements of K that one trip of the loop takes."""
    return kernel.block_k * kernel.unroll if isinstance(kernel, Gemv) else kernel.block_k


def tiles_of(kernel: Kernel, shape: Shape) -> int:
    """Output tiles of the shape."""
    return ceil_div(shape.m, rows_of(kernel)) * ceil_div(shape.n, kernel.block_n)


def grid_of(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> tuple[int, int, int]:
    """Programs along the three axes."""
    if isinstance(kernel, Gemv):
        return ceil_div(shape.n, kernel.block_n), split_k, ceil_div(shape.m, kernel.rows)
    if isinstance(kernel, Tma):
        resident = min(max(ARCHITECTURES[device.gfx].shared_bytes // shared_bytes(kernel, device.gfx), 1), 2)
        return min(tiles_of(kernel, shape) * split_k, device.cu_num * resident), 1, 1
    return tiles_of(kernel, shape), split_k, 1


def partial_bytes(kernel: Kernel, split_k: int, shape: Shape) -> int:
    """Bytes of float32 partial tiles that a split product keeps between its programs."""
    if split_k == 1:
        return 0
    rows = 1 << (rows_of(kernel) - 1).bit_length()
    return 4 * split_k * tiles_of(kernel, shape) * rows * kernel.block_n


def shared_bytes(kernel: Kernel, gfx: str) -> int:
    """Estimate of the shared memory that Triton 3.6 allots for 16-bit operands; `bind` checks the real figure.

    The loop's buffers: one a stage where the matrix instruction reads shared memory, else one fewer. A specialised
    or flattened loop cannot lend them to the output tile, which takes about a byte an element (at least 16 KiB).
    """
    if isinstance(kernel, Gemv):
        return 0 if kernel.stages == 1 else 2 * kernel.stages * (kernel.rows + kernel.block_n) * kernel.block_k
    buffer = 2 * (kernel.block_m + kernel.block_n) * kernel.block_k
    if isinstance(kernel, Tma):
        return kernel.stages * buffer + max(kernel.block_m * kernel.block_n, 16 << 10) + 256
    side = kernel.block_n if kernel.swap else kernel.block_m
    from_shared = ARCHITECTURES[gfx].matrix in ("wgmma", "tcgen05") and side >= 64 and kernel.warps >= 4
    return max(kernel.stages - (not from_shared), 1) * buffer


def registers(kernel: Kernel, gfx: str) -> int:
    """32-bit registers a thread for the float32 sums, for gemv also for the loads of one trip."""
    threads = kernel.warps * ARCHITECTURES[gfx].warp_size
    if isinstance(kernel, Gemv):
        sums = kernel.rows * kernel.block_n * kernel.block_k // (8 * threads)
        return sums + (kernel.rows + kernel.block_n) * kernel.block_k * kernel.unroll // (2 * threads)
    # Two of three warp groups hold sums where warps are specialised.
    groups = 2 if isinstance(kernel, Tma) and kernel.specialize else 1
    return kernel.block_m * kernel.block_n // (threads * groups)


def refusal(kernel: Kernel, split_k: int, shape: Shape, device: Device) -> str:
    """Why the kernel cannot serve the shape on the device, or an empty text."""
    architecture = ARCHITECTURES[device.gfx]
    if isinstance(kernel, Tma):
        if not architecture.tma:
            return f"{device.gfx} has no tensor memory accelerator"
        if shape.k % 8:
            return f"tensor descriptors need rows of 16-byte multiples (K={shape.k} is not a multiple of 8)"
        if kernel.specialize and not architecture.specialize:
            return f"Triton does not specialise warps on {device.gfx}"
        if kernel.specialize and kernel.warps != 4:
            return f"warps are specialised with 4 of them only, not {kernel.warps}"
        if kernel.specialize and split_k > 1:
            return "a kernel with specialised warps does not split K"
        if kernel.specialize and (kernel.block_m, kernel.block_n) == (64, 256):
            return "Triton 3.6 does not compile a 64x256 tile with specialised warps"
    if isinstance(kernel, Gemm) and device.kind != "amd" and (kernel.nonkdim or kernel.kpack > 1 or kernel.waves):
        return f"{kernel.name} uses options of AMD's compiler"
    if isinstance(kernel, Gemm) and device.gfx == "gfx950" and kernel.kpack > 1:
        return "gfx950 packs K by itself: kpack 2 is the same kernel as kpack 1"
    tiles = tiles_of(kernel, shape)
    if split_k > 1 and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > ceil_div(shape.k, step_of(kernel)):
        return f"K={shape.k} has fewer than splitK={split_k} steps of {step_of(kernel)}"
    if partial_bytes(kernel, split_k, shape) > MAX_PARTIAL_BYTES:
        return f"splitK={split_k} keeps {partial_bytes(kernel, split_k, shape)} bytes of partial sums; {MAX_PARTIAL_BYTES} are the most"
    groups = grid_of(kernel, split_k, shape, device)[2]
    return "" if groups <= MAX_GRID_YZ else f"M={shape.m} makes {groups} groups of rows; a grid ends at {MAX_GRID_YZ}"
