"""gemm: the general masked product on the matrix units, with split-K summed by the last program to arrive."""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters; a branch on a constexpr is no ternary)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero, sum_parts


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Index of a program -> (tile of M, tile of N): GROUP_M tiles of M side by side share the weight in L2."""
    width = GROUP_M * tiles_n
    first_m = (index // width) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (index % width) % height, (index % width) // height


@triton.jit
def store_tile(acc, out, bias, m, n, M, N, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr):
    """Store float32 sums [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] with SWAP, bias added, in the output's dtype."""
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        acc += added[:, None] if SWAP else added[None, :]
    if SWAP:
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        inside = (m < M)[None, :] & (n < N)[:, None]
    else:
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemm(
    x, weight, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]).

    Grid: (tiles, SPLIT_K). SWAP computes the transposed tile, weight @ x.T, so that the long side of the matrix
    instruction lies along N where M is small. UPCAST is for the interpreter, whose bfloat16 dot is wrong.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past an edge repeat the last row and are not stored: no mask in the loop but for a ragged K.
    x += tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        at = block * BLOCK_K
        if EVEN_K:
            a = tl.load(x + at)
            b = tl.load(weight + at)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(weight + at, mask=inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(b, a.T, acc) if SWAP else tl.dot(a, b.T, acc)
    if SPLIT_K == 1:
        store_tile(acc, out, bias, m, n, M, N, HAS_BIAS, SWAP)
    else:
        size = BLOCK_M * BLOCK_N
        partial += tile.to(tl.int64) * (SPLIT_K * size)
        if SWAP:
            within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(partial + part * size + within, acc)
        if arrives_last(counters + tile, SPLIT_K):
            leave_zero(counters + tile)
            store_tile(sum_parts(partial + within, size, SPLIT_K), out, bias, m, n, M, N, HAS_BIAS, SWAP)
