"""Compute blocks, tiles and memory of the fused mixture of experts, and check what fits."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits, unusual_experts

from tunedgemm_triton import installed
from tunedgemm_triton.limits import MAX_GRID_YZ, MAX_TILES, unsupported_fp8
from tunedgemm_triton.moe.names import Moe, Tile
from tunedgemm_triton.packed.resources import decodes, scaled_rows
from tunedgemm_triton.resources import ceil_div, has_idle_part

#: Most experts that the sort counts in one program.
MAX_EXPERTS = 2048

#: Most registers of accumulators and decoded operands: more spill 4 to 136 (sm_90, Triton 3.6).
_MOST_DECODED = 176

#: Kind of quantisation in the shape -> kind of scales in the kernel.
SCALES = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block", "per_1x32": "mx"}


def unsupported_operands(shape: Shape, device: Device) -> str | None:
    """Return why no `fmoe` kernel takes the operands on the architecture, or None."""
    if unusual := unusual_experts(shape):
        return f"kernels of fmoe do not take {unusual}"
    if reason := unsupported_fp8(str(shape["q_dtype_w"]), device.gfx):
        return reason
    if int(shape["expert"]) > MAX_EXPERTS:
        return f"the sort takes at most {MAX_EXPERTS} experts (got expert={shape['expert']})"
    return None


def scale_of(shape: Shape) -> str:
    """Return the kind of scales in the kernel."""
    return SCALES[str(shape["q_type"])]


def rows_of(shape: Shape, gfx: str, decode: bool) -> int:
    """Return the multiple of rows that the first operand of the matrix instruction has."""
    return scaled_rows(gfx) if scale_of(shape) == "mx" and not decode and not _gate_fault(shape, gfx) else 1


def _gate_fault(shape: Shape, gfx: str) -> str:
    """Return why two products that share scales do not compile to one instruction each."""
    return installed.target_fault(gfx, f"{ARCHITECTURES[gfx].matrix} by gated mxfp4") if shape["g1u1"] else ""


def _has_rows(kernel: Moe, shape: Shape, gfx: str) -> bool:
    """Return whether the first operands have the rows that the instruction takes.

    An older Triton compiles gated experts where it decodes them, from 64 rows without spills.
    """
    first, second = (kernel.first.block_n, kernel.second.block_n) if kernel.swap else (kernel.block_m, kernel.block_m)
    if scale_of(shape) == "mx" and not kernel.decode and _gate_fault(shape, gfx):
        return first == 64 <= second
    return first % rows_of(shape, gfx, kernel.decode) == second % rows_of(shape, gfx, kernel.decode) == 0


def pairs_of(shape: Shape) -> int:
    """Return the number of (token, expert) pairs."""
    return shape.m * int(shape["topk"])


def blocks_of(kernel: Moe, shape: Shape) -> int:
    """Return the most blocks of pairs that any routing makes: each expert with pairs may have one
    that is not full.
    """
    pairs = pairs_of(shape)
    hit = min(pairs, int(shape["expert"]))
    return pairs if kernel.alone else hit + (pairs - hit) // kernel.block_m


def tiles_of(kernel: Moe, shape: Shape) -> tuple[int, int]:
    """Return the most output tiles of both stages."""
    blocks = blocks_of(kernel, shape)
    return blocks * ceil_div(shape.k, kernel.first.block_n), blocks * ceil_div(shape.n, kernel.second.block_n)


def counters_of_stages(kernel: Moe, split_k: int, shape: Shape) -> tuple[int, int]:
    """Return the counters that the first stage's split and the second stage's sum need."""
    first = tiles_of(kernel, shape)[0] if split_k > 1 else 0
    return first, shape.m * ceil_div(shape.n, kernel.second.block_n) if kernel.alone else 0


def shared_bytes(kernel: Moe, shape: Shape, gfx: str) -> int:
    """Estimate the shared memory of the larger stage; `bind` checks the real figure.

    There is a buffer for each step of the pipeline, on AMD one fewer. For mxfp4 see
    `mx.resources.shared_bytes`.
    """
    width, halves, amd = dtype_bits(str(shape["q_dtype_w"])), 2 if shape["g1u1"] else 1, gfx.startswith("gfx")

    def needed(tile: Tile, high: int) -> int:
        elements = (kernel.block_m + high) * tile.block_k
        packed = (max(tile.stages - 1, 1) if amd else tile.stages) * elements * width // 8
        decoded = elements if width == 4 and not ARCHITECTURES[gfx].fp4 else 0
        return max(packed, decoded) if amd else packed + decoded

    return max(needed(kernel.first, halves * kernel.first.block_n), needed(kernel.second, kernel.second.block_n))


def unfit(kernel: Moe, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why the kernel cannot serve the shape on the device, or None."""
    scale = scale_of(shape)
    if kernel.decode and scale != "mx":
        return f"{kernel.name} decodes mxfp4 weights (got {shape['q_dtype_w']})"
    if scale == "mx":
        if not kernel.decode and False not in decodes(device.gfx):
            return f"Triton 3.6 does not lower scaled products on {device.gfx}; use a kernel with _d"
        if min(kernel.first.block_k, kernel.second.block_k) < 64:
            return "products of mxfp4 take steps of at least 64 elements of K"
    if scale == "block" and max(kernel.first.block_k, kernel.second.block_k) > 128:
        return "a step along K cannot be longer than 128 elements, which share a scale"
    if split_k > ceil_div(shape.n, kernel.first.block_k):
        return f"model_dim {shape.n} has fewer than splitK={split_k} steps of {kernel.first.block_k}"
    if kernel.alone and pairs_of(shape) > MAX_GRID_YZ:
        return f"a block for each pair takes at most {MAX_GRID_YZ} pairs (got {pairs_of(shape)})"
    counted = sum(ceil_div(count, 4) * 4 for count in counters_of_stages(kernel, split_k, shape))
    return f"a launch counts at most {MAX_TILES} tiles (this shape has {counted})" if counted > MAX_TILES else None


def fits(kernel: Moe, split_k: int, shape: Shape, device: Device) -> bool:
    """Return whether a kernel is possible, fits the shared memory and the registers, and leaves no
    part of K idle.
    """
    architecture = ARCHITECTURES[device.gfx]
    if unfit(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device.gfx) > architecture.shared_bytes:
        return False
    if not _has_rows(kernel, shape, device.gfx):
        return False
    # Products that are scaled step by step have separate accumulators.
    fresh = 1 if scale_of(shape) == "block" else 0
    accumulators = []
    for count, tile in ((2 if shape["g1u1"] else 1, kernel.first), (1, kernel.second)):
        threads = tile.warps * architecture.warp_size
        accumulators.append((count + fresh) * kernel.block_m * tile.block_n // threads)
        decoded = (kernel.block_m + count * tile.block_n) * tile.block_k // 2 // threads
        if kernel.decode and device.kind != "amd" and accumulators[-1] + decoded > _MOST_DECODED:
            return False
    steps = ceil_div(shape.n, kernel.first.block_k)
    # RDNA 3, which has no fp8, holds the operands of a wmma twice.
    limit = 160 if architecture.matrix != "wmma" else 48 if scale_of(shape) == "mx" or not architecture.fp8 else 80
    return max(accumulators) <= limit and not has_idle_part(split_k, steps)
