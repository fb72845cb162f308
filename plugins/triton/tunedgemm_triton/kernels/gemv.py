"""gemv: multiply and sum on the vector units, for up to four rows of activations at a time.

A tensor-core tile has at least 16 rows of activations, so ``tl.dot`` would idle there; the weight is read exactly once
either way, and what counts is how many of its loads are in flight.
"""

# ruff: noqa: PLR0917, SIM108 (Triton kernels take all they use as parameters; a branch on a constexpr is no ternary)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero


@triton.jit
def _weight(at, k, left, EVEN_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight in float32; each byte is read once, so the caches need not keep it."""
    if EVEN_K:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=(k < left)[None, :], other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@triton.jit
def _row(at, k, left, EVEN_K: tl.constexpr):
    """A piece [1, BLOCK_K] of one row of activations in float32; every program reads it again."""
    if EVEN_K:
        piece = tl.load(at, eviction_policy="evict_last")
    else:
        piece = tl.load(at, mask=k < left, other=0.0, eviction_policy="evict_last")
    return piece.to(tl.float32)[None, :]


@triton.jit
def _store(out, bias, total, row, n, M, N, HAS_BIAS: tl.constexpr):
    """Store one row of a tile: float32 sums [BLOCK_N], bias added, cast to the output's dtype."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=(n < N) & (row < M))


@triton.jit
def _gather(partial, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr):
    """Sum one row [BLOCK_N] over the parts in the order of K, whoever arrived last."""
    total = tl.zeros([BLOCK_N], tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(partial + part * ROWS * BLOCK_N + tl.arange(0, BLOCK_N), cache_modifier=".cg")
    return total


@triton.jit
def gemv(
    x, weight, bias, out, partial, counters, M, N, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, ONE_TRIP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]).

    Grid: (tiles of BLOCK_N weight rows, SPLIT_K, groups of ROWS activation rows).
    One trip of the loop reads UNROLL chunks of BLOCK_K; ONE_TRIP promises that each program makes exactly one.
    EVEN_K promises that K is a multiple of SPLIT_K trips. With BLOCK_K = 8 x warp size x num_warps every thread
    holds 16 consecutive bytes of both operands in the same place, and nothing passes through shared memory in the loop.
    """
    tile, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past an edge repeat the last row and are not stored: no mask in the loop but for a ragged K.
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    row = group * ROWS
    x0 = x + tl.minimum(row, M - 1).to(tl.int64) * K + k
    x1 = x + tl.minimum(row + 1, M - 1).to(tl.int64) * K + k
    x2 = x + tl.minimum(row + 2, M - 1).to(tl.int64) * K + k
    x3 = x + tl.minimum(row + 3, M - 1).to(tl.int64) * K + k
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    trips = 1 if ONE_TRIP else tl.cdiv(tl.cdiv(K, BLOCK_K * UNROLL), SPLIT_K)
    for trip in tl.range(0, trips, num_stages=STAGES):
        for chunk in tl.static_range(UNROLL):
            at = (part * trips + trip) * (BLOCK_K * UNROLL) + chunk * BLOCK_K
            left = K - at
            w = _weight(weight + at, k, left, EVEN_K)
            acc0 += w * _row(x0 + at, k, left, EVEN_K)
            if ROWS > 1:
                acc1 += w * _row(x1 + at, k, left, EVEN_K)
            if ROWS > 2:
                acc2 += w * _row(x2 + at, k, left, EVEN_K)
            if ROWS > 3:
                acc3 += w * _row(x3 + at, k, left, EVEN_K)
    if SPLIT_K == 1:
        _store(out, bias, tl.sum(acc0, 1), row, n, M, N, HAS_BIAS)
        if ROWS > 1:
            _store(out, bias, tl.sum(acc1, 1), row + 1, n, M, N, HAS_BIAS)
        if ROWS > 2:
            _store(out, bias, tl.sum(acc2, 1), row + 2, n, M, N, HAS_BIAS)
        if ROWS > 3:
            _store(out, bias, tl.sum(acc3, 1), row + 3, n, M, N, HAS_BIAS)
    else:
        slot = group * tl.num_programs(0) + tile
        partial += slot.to(tl.int64) * (SPLIT_K * ROWS * BLOCK_N)
        mine = partial + part * ROWS * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(mine, tl.sum(acc0, 1))
        if ROWS > 1:
            tl.store(mine + BLOCK_N, tl.sum(acc1, 1))
        if ROWS > 2:
            tl.store(mine + 2 * BLOCK_N, tl.sum(acc2, 1))
        if ROWS > 3:
            tl.store(mine + 3 * BLOCK_N, tl.sum(acc3, 1))
        if arrives_last(counters + slot, SPLIT_K):
            leave_zero(counters + slot)
            for j in tl.static_range(ROWS):
                _store(out, bias, _gather(partial + j * BLOCK_N, ROWS, BLOCK_N, SPLIT_K), row + j, n, M, N, HAS_BIAS)
