"""Compute tiles and memory of products of mxfp4 weights, and check what fits."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton.limits import MAX_PARTIAL_BYTES, MAX_TILES
from tunedgemm_triton.mx.names import OPS, Mx
from tunedgemm_triton.resources import ceil_div, has_idle_part
from tunedgemm_triton.wn.names import Wn

LAYOUTS = ("row", "aiter16x16")


def unsupported_operands(shape: Shape, device: Device) -> str | None:
    """Return why no product of mxfp4 takes the operands on the architecture, or None."""
    if shape.dtype != OPS[shape.op]:
        return f"activations of {shape.op} must be {OPS[shape.op]}, which has the range of the scales (got {shape.dtype})"
    if shape.dtype == "bf16" and ARCHITECTURES[device.gfx].matrix == "wmma":
        return f"a kernel that decodes mxfp4 for bf16 activations spills its registers on {device.gfx}"
    if shape.layout not in LAYOUTS:
        return f"the weight of {shape.op} must have layout {' or '.join(LAYOUTS)} (got {shape.layout!r})"
    return None


def decodes(gfx: str, dtype: str = "fp4x2") -> tuple[bool, ...]:
    """Return the values of ``decode`` that are possible with activations of a dtype, best guess
    first.

    gfx950 and Blackwell multiply mxfp4 by mxfp4 directly (sm_121 since Triton 3.8). Triton 3.6
    computes wrong numbers for bf16 by mxfp4 on sm_90, and does not lower scaled products on CDNA 2
    and 3. On RDNA decoding in the kernel spills.
    """
    if dtype == "bf16":
        return (True,)
    if ARCHITECTURES[gfx].fp4 or ARCHITECTURES[gfx].matrix == "wmma":
        return (False,)
    return (True,) if ARCHITECTURES[gfx].matrix == "mfma" else (True, False)


def scaled_rows(gfx: str) -> int:
    """Return the multiple of rows that the first operand of mxfp4's instruction has.

    Of other rows, and with fewer than four warps, Triton decodes both operands to bf16.
    """
    return 128 if ARCHITECTURES[gfx].matrix == "tcgen05" else 1


def shares_registers(gfx: str, decode: bool) -> bool:
    """Return whether decoded operands and sums share the registers, as they do with mma."""
    return ARCHITECTURES[gfx].matrix == "mma" and (decode or not ARCHITECTURES[gfx].fp4)


def tiles_of(kernel: Mx | Wn, shape: Shape) -> int:
    """Return the number of output tiles."""
    return ceil_div(shape.m, kernel.block_m) * ceil_div(shape.n, kernel.block_n)


def partial_bytes(kernel: Mx | Wn, split_k: int, shape: Shape) -> int:
    """Return the bytes of float32 partial tiles that programs of a split product leave for each
    other.
    """
    return 4 * split_k * tiles_of(kernel, shape) * kernel.block_m * kernel.block_n if split_k > 1 else 0


def unfit(kernel: Mx, split_k: int, shape: Shape, device: Device) -> str | None:
    """Return why the kernel cannot serve the shape on the device, or None."""
    if not kernel.decode and False not in decodes(device.gfx, shape.dtype):
        return f"Triton 3.6 does not multiply {shape.dtype} by mxfp4 correctly on {device.gfx}; use a kernel with _d"
    return unfit_split(kernel, split_k, shape)


def unfit_split(kernel: Mx | Wn, split_k: int, shape: Shape) -> str | None:
    """Return why a tile kernel cannot split K into so many parts, or None."""
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, kernel.block_k)
    if split_k > 1 and tiles > MAX_TILES:
        return f"split-K counts at most {MAX_TILES} tiles (this shape has {tiles})"
    if split_k > steps:
        return f"K={shape.k} has fewer than splitK={split_k} steps of {kernel.block_k}"
    nbytes = partial_bytes(kernel, split_k, shape)
    if nbytes > MAX_PARTIAL_BYTES:
        return f"{kernel.name}: partial sums of splitK={split_k} take at most {MAX_PARTIAL_BYTES} bytes (got {nbytes})"
    return None


def shared_bytes(kernel: Mx, shape: Shape, device: Device) -> int:
    """Estimate the shared memory from what Triton 3.6 allotted; `bind` checks the real figure.

    There is a buffer for each step but one, and the tile in bf16, of even or of odd elements of K.
    On AMD these share memory.
    """
    bits = kernel.block_m * (4 if shape.dtype == "fp4x2" else 16) + kernel.block_n * 4
    packed = max(kernel.stages - 1, 1) * bits * kernel.block_k // 8
    decoded = 0 if ARCHITECTURES[device.gfx].fp4 else (kernel.block_m + kernel.block_n) * kernel.block_k
    return max(packed, decoded) if device.kind == "amd" else packed + decoded


def fits(kernel: Mx, split_k: int, shape: Shape, device: Device) -> bool:
    """Return whether a kernel is possible, fits the shared memory and the registers, and leaves no
    program idle.
    """
    architecture = ARCHITECTURES[device.gfx]
    if unfit(kernel, split_k, shape, device) or shared_bytes(kernel, shape, device) > architecture.shared_bytes:
        return False
    rows = 1 if kernel.decode else scaled_rows(device.gfx)
    if rows > 1 and ((kernel.block_n if kernel.swap else kernel.block_m) % rows or kernel.warps < 4):
        return False
    threads = kernel.warps * architecture.warp_size
    # Even and odd elements of K are decoded in turn.
    shared = shares_registers(device.gfx, kernel.decode)
    decoded = (kernel.block_m + kernel.block_n) * kernel.block_k // 2 if kernel.decode or shared else 0
    # More than this spills (Triton 3.6 to 3.9). On AMD accumulation registers take some of it.
    limit = 0.75 * architecture.registers if device.kind == "amd" else 96 if shared else 128
    if (kernel.block_m * kernel.block_n + decoded) // threads > limit:
        return False
    return not has_idle_part(split_k, ceil_div(shape.k, kernel.block_k))
