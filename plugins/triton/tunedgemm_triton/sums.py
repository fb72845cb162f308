"""Name the order in which a kernel adds products, which decides an output's bits."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, PRODUCT, X_THEN_W, sum_order

from tunedgemm_triton.limits import width_of
from tunedgemm_triton.names import Gemm, Gemv, KernelConfig, Streamk, Tma
from tunedgemm_triton.resources import ceil_div, promotes, step_of

#: Rows, and multiples of warps, from which Triton multiplies by the instructions of Hopper and
#: Blackwell that read shared memory; smaller tiles get ``mma``.
_SIDE, _WARPS = 64, 4


def order_of(kernel: KernelConfig, split_k: int, shape: Shape, device: Device) -> str:
    """Return the name of the kernel's order of sums; "" where it depends on M or is unknown.

    The compiler fuses the multiplication by the last scale and the addition of the bias. Parts of K
    are whole steps, added in the order of K.
    """
    if isinstance(kernel, Streamk):
        return ""
    part = ceil_div(ceil_div(shape.k, step_of(kernel)), split_k) * step_of(kernel) if split_k > 1 else 0
    scales = PRODUCT if shape.scale == "tensor" else X_THEN_W
    if isinstance(kernel, Gemv):
        # Sums of a thread's elements, then of threads: all parameters take part.
        return sum_order(shape, kernel.name, part=part, scales=scales, fused=True) if shape.dtype != "int8" else ""
    products = products_of(kernel, shape, device)
    promoted = kernel.block_k if shape.scale == "block" else promotes(kernel, shape, device.gfx)
    return sum_order(shape, products, promoted=promoted, part=part, scales=scales, fused=True) if products else ""


def products_of(kernel: Gemm | Tma, shape: Shape, device: Device) -> str:
    """Return the matrix instruction and its elements of K; on AMD what decides their order; or ""."""
    matrix = ARCHITECTURES[device.gfx].matrix
    if matrix in ("mma", "wgmma", "tcgen05"):
        rows = kernel.block_n if kernel.swap else kernel.block_m
        whole = rows % _SIDE == 0 and kernel.warps % _WARPS == 0
        return f"{matrix if whole else 'mma'}-k{32 // width_of(shape.dtype)}"
    if isinstance(kernel, Tma):
        return ""
    if matrix == "wmma":
        return f"wmma-b{kernel.block_k}"
    fixed = 0 < kernel.nonkdim <= min(kernel.block_m, kernel.block_n)
    return f"mfma{kernel.nonkdim}-b{kernel.block_k}q{kernel.kpack}" if fixed else ""
