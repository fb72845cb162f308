"""tma: a persistent kernel fed by the tensor memory accelerator (sm_90 and later), one program a multiprocessor.

The descriptors are made on the host and passed by value, so a captured graph keeps its own copies.
"""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters; a branch on a constexpr is no ternary)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero, sum_parts
from tunedgemm_triton.kernels.gemm import store_tile, tile_of


@triton.jit
def tma(
    x, weight, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPECIALIZE: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]); x and weight are tensor descriptors of [BLOCK, BLOCK_K] boxes.

    Grid: (programs,), each taking every grid-th of tiles x SPLIT_K items, the parts of a tile side by side.
    SPECIALIZE gives loads and products to different warps; on sm_90 Triton 3.6 does so only with num_warps = 4 and an
    unflattened loop. A flattened loop loads the next tile while this one is stored.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    flatten: tl.constexpr = not SPECIALIZE and SPLIT_K == 1
    # The store counts tiles by itself: where warps are specialised Triton 3.6 moves the first row of a load by half a
    # tile for the second consumer, and would move a shared value once more where that consumer's rows are stored.
    stored = tl.program_id(0) - tl.num_programs(0)
    for item in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT_K, tl.num_programs(0), flatten=flatten, warp_specialize=SPECIALIZE):
        tile, part = item // SPLIT_K, item % SPLIT_K
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(part * each, tl.minimum(part * each + each, blocks)):
            a = x.load([tile_m * BLOCK_M, block * BLOCK_K])
            b = weight.load([tile_n * BLOCK_N, block * BLOCK_K])
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        if SPECIALIZE:
            stored += tl.num_programs(0)
            tile_m, tile_n = tile_of(stored, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if SPLIT_K == 1:
            store_tile(acc, out, bias, m, n, M, N, HAS_BIAS, False)
        else:
            size = BLOCK_M * BLOCK_N
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            parts = partial + tile * (SPLIT_K * size) + within
            tl.store(parts + part * size, acc)
            if arrives_last(counters + tile, SPLIT_K):
                leave_zero(counters + tile)
                store_tile(sum_parts(parts, size, SPLIT_K), out, bias, m, n, M, N, HAS_BIAS, False)
