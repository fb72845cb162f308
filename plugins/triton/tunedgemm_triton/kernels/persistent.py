"""tma: persistent kernel fed by the tensor memory accelerator (sm_90 and later).

The host makes the descriptors and passes them by value, so a captured graph keeps copies.
"""

# ruff: noqa: PLR0917, PLR1714, SIM108 (Triton kernels have many parameters, branches and no sets)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.tile import block_scales, factors, finish, product, tile_of, zeros

#: Cycles in which the tensor memory accelerator fills a row outside an operand (H100).
#: Rows of x times rows of the weight that a multiprocessor multiplies in a cycle, a byte deep.
_OUTSIDE, _PRODUCTS = tl.constexpr(12), tl.constexpr(4096)


@triton.jit
def box(operand, batch, row, k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BATCHED: tl.constexpr):
    """Load the box [BLOCK, BLOCK_K] of an operand at (row, k), of one product of a batch."""
    if BATCHED:
        found = tl.reshape(operand.load([batch, row, k]), [BLOCK, BLOCK_K])
    else:
        found = operand.load([row, k])
    return found


@triton.jit
def tma(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    SPECIALIZE: tl.constexpr, SPLIT_K: tl.constexpr, SCALE: tl.constexpr, BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PROMOTE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ weight[N, K].T, scaled (+ bias[N]); x and weight are
    descriptors of [BLOCK, BLOCK_K] boxes.

    Grid: (programs,); each takes every grid-th of B x tiles x SPLIT_K items, in which the parts of
    a tile are adjacent. SPECIALIZE gives loads and products to different warps; on sm_90 Triton 3.6
    does so only with num_warps = 4 and an unflattened loop. A flattened loop loads the next tile
    while this one is stored. SWAP as in `gemm`.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    flatten: tl.constexpr = not SPECIALIZE and SPLIT_K == 1
    items = tiles_m * tiles_n * SPLIT_K
    if BATCHED:
        items *= B
    # The tensor memory accelerator takes _OUTSIDE cycles for a row outside x. Where that is longer
    # than a step's products, the last tile of M ends with x instead. It repeats its neighbour's
    # rows, with the same bits. Elsewhere rows outside cost no time, and zeros take less power.
    outside = tiles_m * BLOCK_M - M
    last = tl.where(_OUTSIDE * _PRODUCTS * outside > 128 * BLOCK_M * BLOCK_N, tl.maximum(M - BLOCK_M, 0), M)
    # Scales and stores count tiles separately. With specialised warps Triton 3.6 moves the first
    # row of a descriptor's load by half a tile for the second consumer. It would move a shared
    # value twice.
    own = tl.program_id(0) - tl.num_programs(0)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=flatten, warp_specialize=SPECIALIZE):
        tile, part = item // SPLIT_K, item % SPLIT_K
        batch = tile // (tiles_m * tiles_n) if BATCHED else 0
        tile_m, tile_n = tile_of(tile % (tiles_m * tiles_n) if BATCHED else tile, tiles_m, tiles_n, GROUP_M)
        if SPECIALIZE:
            own += tl.num_programs(0)
            own_m, own_n = tile_of(own, tiles_m, tiles_n, GROUP_M)
        else:
            own_m, own_n = tile_m, tile_n
        acc = zeros(BLOCK_M, BLOCK_N, SWAP, x.dtype)
        for block in range(part * each, tl.minimum(part * each + each, blocks)):
            a = box(x, batch, tl.minimum(tile_m * BLOCK_M, last), block * BLOCK_K, BLOCK_M, BLOCK_K, BATCHED)
            b = box(weight, batch, tile_n * BLOCK_N, block * BLOCK_K, BLOCK_N, BLOCK_K, BATCHED)
            if SCALE == "block" or SCALE == "column" or SCALE == "padded":
                m = tl.minimum(own_m * BLOCK_M, last) + tl.arange(0, BLOCK_M)
                by_m, by_n = block_scales(x_scale, w_scale, m, own_n * BLOCK_N, block * BLOCK_K // 128, M, N, K, SCALE, BLOCK_N)
                sums = product(a, b, zeros(BLOCK_M, BLOCK_N, SWAP, x.dtype), SWAP, PROMOTE, UPCAST)
                acc += sums * factors(by_m, by_n, SWAP, BLOCK_N)
            else:
                acc = product(a, b, acc, SWAP, PROMOTE, UPCAST)
        m = tl.minimum(own_m * BLOCK_M, last) + tl.arange(0, BLOCK_M)
        n = own_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if BATCHED:
            first = tl.zeros([], tl.int64) + batch
            target = out + first * M * N
            added, by_m, by_n = bias + first * N, x_scale + first * M, w_scale + first * N
        else:
            target, added, by_m, by_n = out, bias, x_scale, w_scale
        parts = partial + tile * (SPLIT_K * BLOCK_M * BLOCK_N)
        finish(acc, by_m, by_n, added, target, parts, counters + tile, part, m, n, M, N, SPLIT_K, SCALE, HAS_BIAS, SWAP)
