"""streamk: all programs share the last tiles, which would not fill all multiprocessors, in equal
numbers of steps along K.
"""

# ruff: noqa: PLR0917, SIM102 (Triton kernels have many parameters and evaluate all of an `and`)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero
from tunedgemm_triton.kernels.gemm import places
from tunedgemm_triton.kernels.tile import product, store_tile, tile_of, zeros


@triton.jit
def _plan(tiles, blocks):
    """Return a program's work: (its whole tiles, all programs' whole tiles, steps of a share, the
    share's first step and end).

    Programs share the last wave, and the one before as well where the last fills less than an
    eighth of them. So with more tiles than programs a shared tile has at most nine parts. Steps of
    shared tiles are numbered across tiles.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    rounds = tl.maximum(tiles // programs - (tiles % programs * 8 < programs).to(tl.int32), 0)
    steps = (tiles - rounds * programs) * blocks
    share = tl.cdiv(steps, programs)
    return rounds, rounds * programs, share, tl.minimum(program * share, steps), tl.minimum(program * share + share, steps)


@triton.jit
def _piece(item, rounds, whole, begin, end, blocks):
    """Return a program's piece of work: its tile, first step along K and end.

    Whole tiles come before the share.
    """
    shared = begin // blocks + item - rounds
    if item < rounds:
        tile = item * tl.num_programs(0) + tl.program_id(0)
        first = 0
        last = blocks
    else:
        tile = whole + shared
        first = tl.maximum(begin - shared * blocks, 0)
        last = tl.minimum(end - shared * blocks, blocks)
    return tile, first, last


@triton.jit
def _sums(
    x, weight, tile_m, tile_n, first, last, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums [BLOCK_M, BLOCK_N] of a tile over the steps first..last - 1, of operands without
    descriptors.
    """
    k = tl.arange(0, BLOCK_K)
    acc = zeros(BLOCK_M, BLOCK_N, False, x.dtype.element_ty)
    x = places(x, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), k, M, K, 0)
    weight = places(weight, tile_n * BLOCK_N + tl.arange(0, BLOCK_N), k, N, K, 0)
    for block in range(first, last):
        at = block * BLOCK_K
        if EVEN_K:
            a = tl.load(x + at)
            b = tl.load(weight + at)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(weight + at, mask=inside, other=0.0)
        acc = product(a, b, acc, False, 0, UPCAST)
    return acc


@triton.jit
def _halves(acc):
    """Return the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, acc.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def _keep(acc, partial, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Store columns of a tile of WIDTH columns to a slot; storing one of PARTS at a time takes less
    shared memory.
    """
    if PARTS == 1:
        rows, columns = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        tl.store(partial + rows[:, None] * WIDTH + columns[None, :], acc)
    else:
        left, right = _halves(acc)
        _keep(left, partial, WIDTH, PARTS // 2)
        _keep(right, partial + acc.shape[1] // 2, WIDTH, PARTS // 2)


@triton.jit
def _leave(
    acc, out, bias, partial, tile_m, tile_n, whole, slot, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store the sums of a whole tile to the output, those of a part to a slot."""
    if whole:
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_tile(acc, out, bias, m, n, M, N, HAS_BIAS, False)
    else:
        _keep(acc, partial + slot * (BLOCK_M * BLOCK_N), BLOCK_N, PARTS)


@triton.jit
def _meet(
    out, bias, partial, counters, whole, share, begin, end, blocks, tiles_m, tiles_n, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Arrive at the tiles of which this program has a part; the last to arrive adds the parts in
    the order of K.
    """
    size: tl.constexpr = BLOCK_M * BLOCK_N
    strip: tl.constexpr = BLOCK_M // 2
    within = tl.arange(0, strip)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for shared in range(begin // blocks, tl.cdiv(end, blocks)):
        step = shared * blocks
        one, other = step // share, (step + blocks - 1) // share
        if one < other:
            if arrives_last(counters + shared, other - one + 1):
                leave_zero(counters + shared)
                # Only the first of a tile's programs can have begun with another tile.
                start = partial + (2 * one + (one * share < step).to(tl.int32)) * size
                tile_m, tile_n = tile_of(whole + shared, tiles_m, tiles_n, GROUP_M)
                n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                # Half a tile at a time leaves registers for two parts in flight.
                for row in range(0, BLOCK_M, strip):
                    at = row * BLOCK_N + within
                    total = tl.load(start + at, cache_modifier=".cg")
                    for third in tl.range(one + 1, other + 1, loop_unroll_factor=2):
                        total += tl.load(partial + 2 * third * size + at, cache_modifier=".cg")
                    store_tile(total, out, bias, tile_m * BLOCK_M + row + tl.arange(0, strip), n, M, N, HAS_BIAS, False)


@triton.jit
def streamk(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]) (Osama et al., Stream-K, 2023).

    Grid: (programs,). Each program takes whole tiles, then an equal share of the last one or two
    waves' steps along K. The programs of a shared tile leave partial sums, two slots a program:
    slot 0 where its share begins with the piece, else slot 1. They meet when all their steps are
    done, and none waits. The last adds the parts in the order of K, so that the bits never change.
    With descriptors one loop covers all of a program's steps: the next piece is loaded while one is
    stored. It is flattened by hand, since Triton 3.6 does not flatten loops whose bounds vary.
    """
    tiles_m, tiles_n, blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    rounds, whole, share, begin, end = _plan(tiles_m * tiles_n, blocks)
    slot = 2 * tl.program_id(0)
    if DESCRIBED:
        item, block, first, last, tile_m, tile_n = -1, -1, 0, 0, 0, 0
        acc = zeros(BLOCK_M, BLOCK_N, False, x.dtype)
        for _ in range(rounds * blocks + end - begin):
            block += 1
            if block == last:
                item += 1
                tile, first, last = _piece(item, rounds, whole, begin, end, blocks)
                block = first
                tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
            a = x.load([tile_m * BLOCK_M, block * BLOCK_K])
            b = weight.load([tile_n * BLOCK_N, block * BLOCK_K])
            acc = product(a, b, acc, False, 0, UPCAST)
            if block == last - 1:
                kept = slot + (item > rounds).to(tl.int32)
                _leave(acc, out, bias, partial, tile_m, tile_n, last - first == blocks, kept, M, N, BLOCK_M, BLOCK_N, 4, HAS_BIAS)
                acc = zeros(BLOCK_M, BLOCK_N, False, x.dtype)
    else:
        for item in range(rounds + tl.cdiv(end, blocks) - begin // blocks):
            tile, first, last = _piece(item, rounds, whole, begin, end, blocks)
            tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
            acc = _sums(x, weight, tile_m, tile_n, first, last, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, UPCAST)
            kept = slot + (item > rounds).to(tl.int32)
            _leave(acc, out, bias, partial, tile_m, tile_n, last - first == blocks, kept, M, N, BLOCK_M, BLOCK_N, 1, HAS_BIAS)
    _meet(out, bias, partial, counters, whole, share, begin, end, blocks, tiles_m, tiles_n, M, N, BLOCK_M, BLOCK_N, GROUP_M, HAS_BIAS)
