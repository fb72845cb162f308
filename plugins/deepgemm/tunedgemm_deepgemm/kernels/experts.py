"""Route pairs of token and expert to rows, quantise rows, and sum them: the steps around two products.

Rows are those of the products' operands. Each expert has consecutive rows, and each row of a pair
has its place in `places`, -1 for a pair without an expert. Rows without a pair are never read.
Scales are float32, one for 128 elements of a row, and M-major in each matrix of PER rows.

No function adds atomically, so outputs repeat bit by bit.
"""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters)
import triton
import triton.language as tl


@triton.jit
def count_pairs(ids, counts, pairs, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Store counts[segment, EXPERTS], the pairs of each expert in each CHUNK of pairs.

    Grid: (segments,).
    """
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1)
    known = (expert >= 0) & (expert < experts)
    found = tl.histogram(tl.where(known, expert, 0), EXPERTS, mask=known)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit
def place_pairs(
    ids, counts, places, groups, pairs, experts, rows, segments,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr, ALIGNMENT: tl.constexpr, MASKED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store places[pairs], the row of each pair, and groups, which tells the product whose a row is.

    Grid: (experts, segments). STEP 0 counts the only segment here, without `count_pairs`; else that
    many segments are read at a time. MASKED experts have *rows* rows each, and groups[experts] are
    their pairs. Else experts have multiples of ALIGNMENT of *rows* rows, and groups[rows] are
    experts, -1 for rows without a pair.
    """
    mine, segment = tl.program_id(0), tl.program_id(1)
    at = segment * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1)
    known = (expert >= 0) & (expert < experts)
    every = tl.arange(0, EXPERTS)
    before = 0
    if STEP == 0:
        counted = tl.histogram(tl.where(known, expert, 0), EXPERTS, mask=known)
    else:
        counted = tl.zeros([EXPERTS], tl.int32)
        for first_segment in range(0, segments, STEP):
            other = first_segment + tl.arange(0, STEP)
            found = tl.load(counts + other[:, None] * EXPERTS + every[None, :], mask=(other < segments)[:, None], other=0)
            counted += tl.sum(found, 0)
            before += tl.sum(tl.where((other < segment)[:, None] & (every == mine)[None, :], found, 0))
    count = tl.sum(tl.where(every == mine, counted, 0))
    padded = (counted + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    first = mine * rows if MASKED else tl.sum(tl.where(every < mine, padded, 0))
    hit = expert == mine
    rank = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(places + at, first + before + rank, mask=hit)
    if mine == 0:
        tl.store(places + at, tl.zeros([CHUNK], tl.int32) - 1, mask=(at < pairs) & (known == 0))
    if segment == 0:
        if MASKED:
            tl.store(groups + mine, count)
        else:
            here = tl.arange(0, ALIGNMENT)
            for row in range(first, first + count, ALIGNMENT):
                tl.store(groups + row + here, tl.where(row + here < first + count, mine, -1))
            # The rows after the last expert's: every expert's program stores a share of them.
            for row in range(tl.sum(padded) + mine * ALIGNMENT, rows, experts * ALIGNMENT):
                tl.store(groups + row + here, tl.zeros([ALIGNMENT], tl.int32) - 1)


@triton.jit
def quantised_groups(values, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Return values [groups, 128] in an 8-bit dtype, and the scale of each group.

    A group of zeros has the scale 1. One with a NaN or an infinity has a scale that is not finite,
    and values 0.
    """
    # Bits of magnitudes have the order of the magnitudes; NaN is the largest.
    top = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, LIMIT)
    scale = tl.where(scale == 0.0, 1.0, scale)
    values = tl.div_rn(values, scale[:, None] + tl.zeros_like(values))
    values = tl.where(scale[:, None] < float("inf"), values, 0.0)
    return tl.minimum(tl.maximum(values, -LIMIT), LIMIT).to(dtype), scale


@triton.jit
def quantise_tokens(
    x, places, q, scale, K, PER,
    TOPK: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Quantise x[tokens, K] to q[rows, K] and its scales, each token to the rows of its TOPK pairs.

    Grid: (tokens, tiles of GROUPS * 128 along K).
    """
    token, count = tl.program_id(0).to(tl.int64), tl.cdiv(K, 128)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    quantised, by_group = quantised_groups(values, LIMIT, q.dtype.element_ty)
    for j in tl.static_range(TOPK):
        row = tl.load(places + token * TOPK + j).to(tl.int64)
        tl.store(q + row * K + k, quantised, mask=(k < K) & (row >= 0))
        column = scale + row // PER * PER * count + row % PER
        tl.store(column + group.to(tl.int64) * PER, by_group, mask=(group < count) & (row >= 0))


@triton.jit
def activate_pairs(
    product, places, weight, q, scale, pairs, K, PER,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Quantise silu(gate) * up of product[rows, 2 * K] to q[rows, K] and its scales.

    Grid: (tiles of ROWS pairs, tiles of GROUPS * 128 along K). WEIGHTED multiplies the product by
    each pair's weight first.
    """
    index = tl.arange(0, ROWS * GROUPS)
    pair, group, count = tl.program_id(0) * ROWS + index // GROUPS, tl.program_id(1) * GROUPS + index % GROUPS, tl.cdiv(K, 128)
    row = tl.load(places + pair, mask=pair < pairs, other=-1).to(tl.int64)
    there = (row >= 0) & (group < count)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = there[:, None] & (k < K)
    address = product + row[:, None] * (2 * K) + k
    gate = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(address + K, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        factor = tl.load(weight + pair, mask=there, other=0.0)[:, None]
        gate, up = gate * factor, up * factor
    quantised, by_group = quantised_groups(gate / (1.0 + tl.exp(-gate)) * up, LIMIT, q.dtype.element_ty)
    tl.store(q + row[:, None] * K + k, quantised, mask=inside)
    tl.store(scale + row // PER * PER * count + group.to(tl.int64) * PER + row % PER, by_group, mask=there)


@triton.jit
def combine_pairs(
    product, places, weight, out, N,
    TOPK: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum product[rows, N] over the TOPK pairs of each token to out[tokens, N], in their order.

    Grid: (tokens, tiles of BLOCK_N). WEIGHTED multiplies by each pair's weight.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.static_range(TOPK):
        row = tl.load(places + token * TOPK + j).to(tl.int64)
        values = tl.load(product + row * N + n, mask=(n < N) & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weight + token * TOPK + j, mask=row >= 0, other=0.0)
        total += values
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def multiply_spilled(
    x, scale, weight, w_scale, groups, out, first, N, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store out[row] = x[row] @ weight[expert].T for rows from *first* on, ROWS of one expert each.

    Grid: (blocks, programs along N). Blocks without a pair are left out. Both factors have a scale
    for 128 of K, the weight for BLOCK_N = 128 rows, too. Matrices of scales of x have *first* rows.
    """
    start = first + tl.program_id(0) * ROWS
    expert = tl.load(groups + start)
    if expert >= 0:
        row, k, count = (start + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, 128), tl.cdiv(K, 128)
        rows = x + row[:, None] * K + k[None, :]
        column = scale + row // first * first * count + row % first
        for tile in range(tl.program_id(1), tl.cdiv(N, BLOCK_N), tl.num_programs(1)):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = weight + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
            total = tl.zeros([ROWS, BLOCK_N], tl.float32)
            for step in range(count):
                inside = (step * 128 + k < K)[None, :]
                a = tl.load(rows + step * 128, mask=inside, other=0.0)
                b = tl.load(columns + step * 128, mask=inside & (n < N)[:, None], other=0.0)
                by_row = tl.load(column + step * first)
                by_block = tl.load(w_scale + (expert.to(tl.int64) * tl.cdiv(N, BLOCK_N) + tile) * count + step)
                total += tl.dot(a, b.T) * by_row[:, None] * by_block
            tl.store(out + row[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=(n < N)[None, :])
