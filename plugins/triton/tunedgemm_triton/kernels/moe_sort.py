"""Sort of (token, expert) pairs by expert, stable, with each expert's pairs padded to whole blocks.

It is a counting sort on the device: the host does not know how many pairs an expert has. So it
gives the same bits each time and is safe in a captured graph.
"""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters)
import triton
import triton.language as tl


@triton.jit
def _chunk(ids, segment, pairs, experts, CHUNK: tl.constexpr):
    """Return (index, expert, whether the expert exists) of the pairs of a segment."""
    at = segment * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1)
    return at, expert, (expert >= 0) & (expert < experts)


@triton.jit
def moe_count(ids, counts, pairs, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Store counts[segment, EXPERTS], the pairs of each expert in each CHUNK of pairs.

    Grid: (segments,).
    """
    segment = tl.program_id(0)
    _at, expert, known = _chunk(ids, segment, pairs, experts, CHUNK)
    found = tl.histogram(tl.where(known, expert, 0), EXPERTS, mask=known)
    tl.store(counts + segment * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit
def moe_sort(
    ids, counts, order, owners, used, pairs, experts,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, ONE_SEGMENT: tl.constexpr,
):  # fmt: skip
    """Store order [blocks * BLOCK_M], pairs by expert with *pairs* as padding, owners [blocks], and
    used [1], the valid blocks.

    Grid: (experts, segments of CHUNK pairs). A pair whose id is not an expert is in no block.
    ONE_SEGMENT needs no `moe_count`.
    """
    mine, segment = tl.program_id(0), tl.program_id(1)
    at, expert, known = _chunk(ids, segment, pairs, experts, CHUNK)
    every = tl.arange(0, EXPERTS)
    before = 0
    if ONE_SEGMENT:
        counted = tl.histogram(tl.where(known, expert, 0), EXPERTS, mask=known)
    else:
        counted = tl.zeros([EXPERTS], tl.int32)
        for other in range(tl.num_programs(1)):
            found = tl.load(counts + other * EXPERTS + every)
            counted += found
            before += tl.where(other < segment, tl.sum(tl.where(every == mine, found, 0)), 0)
    filled = (counted + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(every < mine, filled, 0))
    count = tl.sum(tl.where(every == mine, counted, 0))
    blocks = tl.cdiv(count, BLOCK_M)
    hit = expert == mine
    rank = tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(order + first * BLOCK_M + before + rank, at, mask=hit)
    if segment == 0:
        padding = count + tl.arange(0, BLOCK_M)
        tl.store(order + first * BLOCK_M + padding, pairs + tl.zeros([BLOCK_M], tl.int32), mask=padding < blocks * BLOCK_M)
        for block in range(blocks):
            tl.store(owners + first + block, mine)
        if mine == experts - 1:
            tl.store(used, first + blocks)


@triton.jit
def moe_join(parts, ids, out, experts, N, TOPK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum parts[token * TOPK + j, N] over pairs with an expert to out[token, N], in the order of j.

    Grid: (tokens, tiles of N).
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.static_range(TOPK):
        expert = tl.load(ids + token * TOPK + j)
        there = (expert >= 0) & (expert < experts)
        total += tl.load(parts + (token * TOPK + j) * N + n, mask=there & (n < N), other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)
