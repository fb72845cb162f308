"""tma with specialised warps of which two groups share a tile, half its rows each.

The compiler halves the boxes that they load. It changes those of a descriptor that the kernel
makes, and cannot change the host's.
"""

# ruff: noqa: PLR0917 (Triton kernels have many parameters)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.persistent import tma


@triton.jit
def tma_halves(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    SPECIALIZE: tl.constexpr, SPLIT_K: tl.constexpr, SCALE: tl.constexpr, BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PROMOTE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute what `tma` does, with x as a pointer."""
    rows = tl.make_tensor_descriptor(x, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    tma(
        rows, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAP,
        SPECIALIZE, SPLIT_K, SCALE, BATCHED, HAS_BIAS, PROMOTE, UPCAST,
    )  # fmt: skip
