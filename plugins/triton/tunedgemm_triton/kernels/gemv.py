"""gemv: multiply and sum on the vector units, for up to four rows of activations at a time.

A tensor-core tile has at least 16 rows of activations, of which ``tl.dot`` would waste most. The
weight is read exactly once either way, so the number of its loads in flight decides.
"""

# ruff: noqa: PLR0917, PLR1714, SIM108 (Triton kernels have many parameters, branches and no sets)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero, sum_parts
from tunedgemm_triton.kernels.tile import scale_of_row


@triton.jit
def _weight(at, k, left, EVEN_K: tl.constexpr):
    """Load a tile [BLOCK_N, BLOCK_K] of the weight in float32; each byte is read once, so the
    caches need not keep it.
    """
    if EVEN_K:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=(k < left)[None, :], other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@triton.jit
def _row(at, k, left, EVEN_K: tl.constexpr):
    """Load a piece [1, BLOCK_K] of one row of activations in float32; every program reads it."""
    if EVEN_K:
        piece = tl.load(at, eviction_policy="evict_last")
    else:
        piece = tl.load(at, mask=k < left, other=0.0, eviction_policy="evict_last")
    return piece.to(tl.float32)[None, :]


@triton.jit
def _products(w, row, PACK: tl.constexpr):
    """Return products [BLOCK_N, BLOCK_K / PACK], each a sum of a thread's PACK neighbours, which
    saves registers.
    """
    return tl.sum(tl.reshape(w * row, [w.shape[0], w.shape[1] // PACK, PACK]), 2)


@triton.jit
def _scaled_products(w, x, k, left, x_scale, w_scale, row, first_n, at, M, K, SCALE: tl.constexpr, EVEN_K: tl.constexpr):
    """Return sums of PACK products of the weight's tile and a row of x, times their block scales, if
    any.

    Scales of x are [M, blocks of 128 along K], or as in `tile.block_scales`; those of the weight
    [blocks of rows, blocks]. The tile is within one block of rows.
    """
    pack: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    sums = _products(w, _row(x, k, left, EVEN_K), pack)
    if SCALE == "block" or SCALE == "column" or SCALE == "padded":
        blocks = tl.cdiv(K, 128)
        block = tl.minimum((at + pack * tl.arange(0, w.shape[1] // pack)) // 128, blocks - 1)
        by_row = tl.load(x_scale + scale_of_row(tl.minimum(row, M - 1).to(tl.int64), block, blocks, M, SCALE))
        sums *= (by_row * tl.load(w_scale + (first_n // 128) * blocks + block))[None, :]
    return sums


@triton.jit
def _totals(acc0, acc1, acc2, acc3, ROWS: tl.constexpr):
    """Sum [BLOCK_N, lanes] for each row in one exchange between warps; return [BLOCK_N, 1, 2 or 4]
    in the order of rows.
    """
    if ROWS == 1:
        totals = tl.sum(acc0, 1)[:, None]
    elif ROWS == 2:
        totals = tl.sum(tl.join(acc0, acc1), 1)
    else:
        totals = tl.sum(tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)), 1)
        totals = tl.reshape(totals, [acc0.shape[0], 4])
    return totals


@triton.jit
def _store(totals, x_scale, w_scale, out, bias, n, row, M, N, ROWS: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store float32 sums [BLOCK_N, 1, 2 or 4] transposed, scaled and with bias, in the output's
    dtype.
    """
    j = tl.arange(0, totals.shape[1])
    if SCALE == "tensor":
        totals *= tl.load(x_scale) * tl.load(w_scale)
    if SCALE == "row":
        by_m = tl.load(x_scale + tl.minimum(row + j, M - 1))
        totals = totals * by_m[None, :] * tl.load(w_scale + tl.minimum(n, N - 1))[:, None]
    if HAS_BIAS:
        totals += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & ((j < ROWS) & (row + j < M))[None, :]
    tl.store(out + (row + j).to(tl.int64)[None, :] * N + n[:, None], totals.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemv(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, ONE_TRIP: tl.constexpr, SCALE: tl.constexpr, BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ weight[N, K].T, scaled (+ bias[N]); with BATCHED for each of B
    products.

    Grid: (tiles of BLOCK_N weight rows, SPLIT_K, B x groups of ROWS activation rows). One trip of
    the loop reads UNROLL chunks of BLOCK_K; ONE_TRIP promises that each program makes exactly one.
    EVEN_K promises that K is a multiple of SPLIT_K trips. BLOCK_K = 16 bytes x warp size x
    num_warps: every thread holds 16 consecutive bytes of both operands at the same offset. The
    loop then does not use shared memory.
    """
    tile, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = group * tl.num_programs(0) + tile
    if BATCHED:
        groups = tl.cdiv(M, ROWS)
        batch = (group // groups).to(tl.int64)
        group = group % groups
        x += batch * M * K
        weight += batch * N * K
        out += batch * M * N
        bias += batch * N
        x_scale += batch * M
        w_scale += batch * N
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past an edge repeat the last row and are not stored, so only a ragged K needs a mask.
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    row = group * ROWS
    x0 = x + tl.minimum(row, M - 1).to(tl.int64) * K + k
    x1 = x + tl.minimum(row + 1, M - 1).to(tl.int64) * K + k
    x2 = x + tl.minimum(row + 2, M - 1).to(tl.int64) * K + k
    x3 = x + tl.minimum(row + 3, M - 1).to(tl.int64) * K + k
    # Sums over the 16 adjacent bytes that a thread holds.
    acc0 = tl.zeros([BLOCK_N, BLOCK_K * x.dtype.element_ty.primitive_bitwidth // 128], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    trips = 1 if ONE_TRIP else tl.cdiv(tl.cdiv(K, BLOCK_K * UNROLL), SPLIT_K)
    for trip in tl.range(0, trips, num_stages=STAGES):
        for chunk in tl.static_range(UNROLL):
            at = (part * trips + trip) * (BLOCK_K * UNROLL) + chunk * BLOCK_K
            left = K - at
            w = _weight(weight + at, k, left, EVEN_K)
            acc0 += _scaled_products(w, x0 + at, k, left, x_scale, w_scale, row, tile * BLOCK_N, at, M, K, SCALE, EVEN_K)
            if ROWS > 1:
                acc1 += _scaled_products(w, x1 + at, k, left, x_scale, w_scale, row + 1, tile * BLOCK_N, at, M, K, SCALE, EVEN_K)
            if ROWS > 2:
                acc2 += _scaled_products(w, x2 + at, k, left, x_scale, w_scale, row + 2, tile * BLOCK_N, at, M, K, SCALE, EVEN_K)
            if ROWS > 3:
                acc3 += _scaled_products(w, x3 + at, k, left, x_scale, w_scale, row + 3, tile * BLOCK_N, at, M, K, SCALE, EVEN_K)
    totals = _totals(acc0, acc1, acc2, acc3, ROWS)
    if SPLIT_K == 1:
        _store(totals, x_scale, w_scale, out, bias, n, row, M, N, ROWS, SCALE, HAS_BIAS)
    else:
        width: tl.constexpr = totals.shape[1]
        within = tl.arange(0, BLOCK_N)[:, None] * width + tl.arange(0, width)[None, :]
        partial += slot.to(tl.int64) * (SPLIT_K * BLOCK_N * width)
        tl.store(partial + part * (BLOCK_N * width) + within, totals)
        if arrives_last(counters + slot, SPLIT_K):
            leave_zero(counters + slot)
            totals = sum_parts(partial + within, BLOCK_N * width, SPLIT_K)
            _store(totals, x_scale, w_scale, out, bias, n, row, M, N, ROWS, SCALE, HAS_BIAS)
