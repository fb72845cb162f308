"""gemm: general masked product on the matrix units; the last program to arrive sums split-K."""

# ruff: noqa: PLR0917, PLR1714 (Triton kernels take all they use as parameters, and have no sets)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.tile import block_scales, factors, finish, product, tile_of, within, zeros


@triton.jit
def places(base, row, k, rows, K, SHUFFLED: tl.constexpr):
    """Return addresses [row, k] of a plain operand, or of a weight whose packs of 16 bytes of
    SHUFFLED rows are adjacent.

    Rows past the edge are not stored, so the loop needs a mask only for a ragged K.
    """
    row = within(row, rows).to(tl.int64)
    if SHUFFLED > 0:
        pack: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
        start = (row // SHUFFLED) * SHUFFLED * K + (row % SHUFFLED) * pack
        found = base + start[:, None] + ((k // pack) * (SHUFFLED * pack) + k % pack)[None, :]
    else:
        found = base + row[:, None] * K + k[None, :]
    return found


@triton.jit
def gemm(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, SCALE: tl.constexpr, SHUFFLED: tl.constexpr, BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr, PROMOTE: tl.constexpr, CACHE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ weight[N, K].T, scaled (+ bias[N]); with BATCHED for each of B
    products.

    Grid: (tiles, SPLIT_K, B). SWAP computes the transposed tile, weight @ x.T, so that the long
    side of the matrix instruction is along N where M is small. CACHE is the cache modifier of the
    weight's loads. UPCAST is for the interpreter, whose bfloat16 dot is wrong.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    counter = tile
    if BATCHED:
        batch = tl.program_id(2).to(tl.int64)
        counter += tl.program_id(2) * tl.num_programs(0)
        x += batch * M * K
        weight += batch * N * K
        out += batch * M * N
        bias += batch * N
        x_scale += batch * M
        w_scale += batch * N
    tile_m, tile_n = tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = places(x, m, k, M, K, 0)
    weight = places(weight, n, k, N, K, SHUFFLED)
    acc = zeros(BLOCK_M, BLOCK_N, SWAP, x.dtype.element_ty)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        at = block * BLOCK_K
        to = at * SHUFFLED if SHUFFLED > 0 else at
        if EVEN_K:
            a = tl.load(x + at)
            b = tl.load(weight + to, cache_modifier=CACHE)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(weight + to, mask=inside, other=0.0, cache_modifier=CACHE)
        if SCALE == "block" or SCALE == "column" or SCALE == "padded":
            by_m, by_n = block_scales(x_scale, w_scale, m, tile_n * BLOCK_N, at // 128, M, N, K, SCALE, BLOCK_N)
            sums = product(a, b, zeros(BLOCK_M, BLOCK_N, SWAP, x.dtype.element_ty), SWAP, PROMOTE, UPCAST)
            acc += sums * factors(by_m, by_n, SWAP, BLOCK_N)
        else:
            acc = product(a, b, acc, SWAP, PROMOTE, UPCAST)
    if SPLIT_K > 1:
        partial += counter.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    finish(acc, x_scale, w_scale, bias, out, partial, counters + counter, part, m, n, M, N, SPLIT_K, SCALE, HAS_BIAS, SWAP)
