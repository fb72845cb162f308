"""moe: one stage of a mixture of experts as a grouped product: blocks of (token, expert) pairs by
their expert's matrix.

The first stage includes the activation, the second the weight of the routing. The grid covers the
most blocks of any routing. The pairs of a block are found on the device (`kernels.moe_sort`), so a
captured graph serves any routing.
"""

# ruff: noqa: PLR0917, SIM108 (Triton kernels have many parameters and branch on constexprs)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero, sum_parts
from tunedgemm_triton.kernels.gemm import places
from tunedgemm_triton.kernels.mx import mx_dot, scales_at
from tunedgemm_triton.kernels.tile import product, tile_of, zeros


@triton.jit
def _spread(rows, SWAP: tl.constexpr):
    """Broadcast a value for each row of x over the tile."""
    return rows[None, :] if SWAP else rows[:, None]


@triton.jit
def _added(
    acc, a, b, of_x, of_w, n, first, at, height, K,
    SCALE: tl.constexpr, ALIKE: tl.constexpr, SWAP: tl.constexpr, DECODE: tl.constexpr, SHUFFLED: tl.constexpr, PROMOTE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return acc + a @ b.T of one step of K at *at*, scaled where each step has separate scales.

    of_x has the scales of the step: of the rows [BLOCK_M], or for mxfp4 of their groups [BLOCK_M,
    BLOCK_K / 32]. of_w is the address of the expert's scales (for mxfp4 of all experts'). n are the
    weight's rows from *first*; ALIKE: they share a block of scales.
    """
    if SCALE == "mx":
        group = at // 32 + tl.arange(0, of_x.shape[1])
        b_scale = tl.load(of_w + scales_at(n, group, K // 32, SHUFFLED), mask=(group * 32 < K)[None, :], other=0)
        acc = mx_dot(acc, a, of_x, b, b_scale, False, SWAP, DECODE, UPCAST)
    elif SCALE == "block":
        fresh = product(a, b, zeros(a.shape[0], b.shape[0], SWAP, a.dtype), SWAP, PROMOTE, UPCAST)
        of_w += at // 128
        if ALIKE:
            acc += fresh * _spread(of_x * tl.load(of_w + (first // 128) * tl.cdiv(K, 128)), SWAP)
        else:
            by_n = tl.load(of_w + (tl.minimum(n, height - 1) // 128) * tl.cdiv(K, 128))
            acc += fresh * _spread(of_x, SWAP) * _spread(by_n, not SWAP)
    else:
        acc = product(a, b, acc, SWAP, PROMOTE, UPCAST)
    return acc


@triton.jit
def _sums(acc, of_x, of_w, n, height, SCALE: tl.constexpr, SWAP: tl.constexpr):
    """Return sums in float32, times the scales of whole tensors or of rows."""
    acc = acc.to(tl.float32)
    if SCALE == "tensor":
        acc *= of_x * tl.load(of_w)
    if SCALE == "row":
        acc = acc * _spread(of_x, SWAP) * _spread(tl.load(of_w + tl.minimum(n, height - 1)), not SWAP)
    return acc


@triton.jit
def activated(gate, up, ACT: tl.constexpr, GATED: tl.constexpr):
    """Return the op's activation of stage 1's sums; *up* is the factor of a gate."""
    if ACT == "swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        found = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        if ACT == "silu":
            found = gate * tl.sigmoid(gate)
        else:
            found = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        if GATED:
            found *= up
    return found


@triton.jit
def _finish(
    acc, more, of_x, of_w, factor, out, rows, n, pairs, N, height,
    ACT: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, SCALE: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Scale, weight and activate a tile's sums; store them to the rows of their pairs."""
    acc = _sums(acc, of_x, of_w, n, height, SCALE, SWAP)
    if WEIGHTED:
        acc *= factor
    if GATED:
        more = _sums(more, of_x, of_w, N + n, height, SCALE, SWAP)
        if WEIGHTED:
            more *= factor
    if ACT != "":
        acc = activated(acc, more, ACT, GATED)
    at = _spread(rows.to(tl.int64) * N, SWAP) + _spread(n, not SWAP)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=_spread(rows < pairs, SWAP) & _spread(n < N, not SWAP))


@triton.jit
def moe(
    x, weight, x_scale, w_scale, factors, ids, order, owners, used, out, partial, counters, pairs, experts, blocks, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    TOPK: tl.constexpr, BY_TOKEN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, WEIGHTED: tl.constexpr,
    SCALE: tl.constexpr, SHUFFLED: tl.constexpr, ALONE: tl.constexpr, JOINED: tl.constexpr, DECODE: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PROMOTE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out[pair, N] = act(x[row, K] @ weight[expert, N, K].T), scaled, weighted, of *pairs*
    pairs in *blocks* blocks.

    Grid: (blocks * tiles of N, SPLIT_K). row is the pair's token BY_TOKEN, else the pair. GATED:
    the expert has 2 N rows; the second half multiplies the first. K counts elements, of which mxfp4
    (SCALE "mx") has two in a byte. ALONE: block b is pair b, and its expert ids[b]. Otherwise block
    b has the pairs order[b * BLOCK_M :] of expert owners[b], and used[0] blocks are valid. JOINED
    (ALONE only): out is [tokens, N]; the last program to arrive sums a token's pairs in their
    order.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    block, tile_n = tile_of(tile, blocks, tiles_n, GROUP_M)
    if ALONE:
        rows = tl.where(tl.arange(0, BLOCK_M) == 0, block, pairs)
        expert = tl.load(ids + block)
        here = (expert >= 0) & (expert < experts)
    else:
        here = block < tl.load(used)
        expert = tl.load(owners + block, mask=here, other=0)
        rows = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M), mask=here, other=pairs)
    if not JOINED and not here:
        return
    expert = tl.where(here, expert, 0).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    height = N * 2 if GATED else N
    width = K // 2 if SCALE == "mx" else K  # elements as stored
    step: tl.constexpr = BLOCK_K // 2 if SCALE == "mx" else BLOCK_K
    k = tl.arange(0, step)
    # Rows of padding repeat the block's first and are not stored. One row for all blocks would make
    # all of them read one slice of L2.
    first = block if ALONE else tl.load(order + block * BLOCK_M, mask=here, other=0)
    place = tl.where(rows < pairs, rows, first).to(tl.int64)
    if BY_TOKEN:
        place = place // TOPK
    a_at = x + place[:, None] * width + k[None, :]
    weight += expert * height * width
    b_at = places(weight, n, k, height, width, SHUFFLED)
    c_at = places(weight, N + n, k, height, width, SHUFFLED)
    first_n = n
    if SCALE == "mx":  # their scales have one order over all experts
        first_n = (expert * height).to(tl.int32) + tl.minimum(n, N - 1)
        group = tl.arange(0, BLOCK_K // 32)
    elif SCALE == "block":
        w_scale += expert * (tl.cdiv(height, 128) * tl.cdiv(K, 128))
    elif SCALE == "row":
        w_scale += expert * height
    elif SCALE == "tensor":
        w_scale += expert
    acc = zeros(BLOCK_M, BLOCK_N, SWAP, tl.float32 if SCALE == "mx" else x.dtype.element_ty)
    more = acc
    of_x = place
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLIT_K)
    last = tl.minimum(part * each + each, steps)
    if JOINED:
        last = tl.where(here, last, 0)
    for index in range(part * each, last):
        at = index * BLOCK_K
        stored = at // 2 if SCALE == "mx" else at
        to = stored * SHUFFLED if SHUFFLED > 0 else stored
        inside = (stored + k < width)[None, :]
        if EVEN_K:
            a = tl.load(a_at + stored)
            b = tl.load(b_at + to)
        else:
            a = tl.load(a_at + stored, mask=inside, other=0.0)
            b = tl.load(b_at + to, mask=inside, other=0.0)
        if SCALE == "mx":
            of = x_scale + place[:, None] * (K // 32) + (at // 32 + group)[None, :]
            by_m = tl.load(of, mask=(at + group * 32 < K)[None, :], other=0)
        elif SCALE == "block":
            by_m = tl.load(x_scale + place * tl.cdiv(K, 128) + at // 128)
        else:
            by_m = of_x
        acc = _added(
            acc, a, b, by_m, w_scale, first_n, tile_n * BLOCK_N, at, height, K, SCALE, BLOCK_N <= 128, SWAP, DECODE, SHUFFLED, PROMOTE, UPCAST
        )  # fmt: skip
        if GATED:
            c = tl.load(c_at + to) if EVEN_K else tl.load(c_at + to, mask=inside, other=0.0)
            more = _added(
                more, a, c, by_m, w_scale, N + first_n, N + tile_n * BLOCK_N, at, height, K,
                SCALE, BLOCK_N <= 128 and EVEN_N, SWAP, DECODE, SHUFFLED, PROMOTE, UPCAST,
            )  # fmt: skip
    by_row = tl.load(x_scale) if SCALE == "tensor" else tl.load(x_scale + place) if SCALE == "row" else 0.0
    factor = tl.load(factors + tl.where(rows < pairs, rows, 0)) if WEIGHTED else rows.to(tl.float32)
    if JOINED:
        acc = _sums(acc, by_row, w_scale, n, height, SCALE, SWAP)
        if WEIGHTED:
            acc *= _spread(factor, SWAP)
        # The only pair of the block is in its first row; one without an expert adds 0, even if its
        # weight is NaN.
        line = tl.sum(tl.where(_spread((rows < pairs) & here, SWAP), acc, 0.0), 1 if SWAP else 0)
        token = block // TOPK
        partial += (token * tiles_n + tile_n).to(tl.int64) * (TOPK * BLOCK_N) + tl.arange(0, BLOCK_N)
        tl.store(partial + (block % TOPK) * BLOCK_N, line)
        if arrives_last(counters + token * tiles_n + tile_n, TOPK):
            leave_zero(counters + token * tiles_n + tile_n)
            total = sum_parts(partial, BLOCK_N, TOPK)
            tl.store(out + token.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=n < N)
    elif SPLIT_K == 1:
        _finish(acc, more, by_row, w_scale, _spread(factor, SWAP), out, rows, n, pairs, N, height, ACT, GATED, WEIGHTED, SCALE, SWAP)
    else:
        size: tl.constexpr = BLOCK_M * BLOCK_N
        halves: tl.constexpr = 2 if GATED else 1
        within = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        partial += tile.to(tl.int64) * (SPLIT_K * size * halves) + within
        # Where sums of int8 have more bits than float32, the rounding is far below that of the
        # output.
        tl.store(partial + part * size, acc.to(tl.float32))
        if GATED:
            tl.store(partial + (SPLIT_K + part) * size, more.to(tl.float32))
        if arrives_last(counters + tile, SPLIT_K):
            leave_zero(counters + tile)
            whole = sum_parts(partial, size, SPLIT_K)
            other = sum_parts(partial + SPLIT_K * size, size, SPLIT_K) if GATED else whole
            _finish(whole, other, by_row, w_scale, _spread(factor, SWAP), out, rows, n, pairs, N, height, ACT, GATED, WEIGHTED, SCALE, SWAP)
