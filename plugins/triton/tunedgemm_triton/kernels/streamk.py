"""streamk: the last tiles, which would not fill all multiprocessors, are shared by all of them in equal numbers of steps along K."""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters; a branch on a constexpr is no ternary)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.arrival import arrives_last, leave_zero
from tunedgemm_triton.kernels.gemm import places
from tunedgemm_triton.kernels.tile import product, store_tile, tile_of, zeros


@triton.jit
def _sums(
    x, weight, tile_m, tile_n, first, last, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_M, BLOCK_N] of a tile over the steps first..last - 1; operands are tensor descriptors where DESCRIBED."""
    k = tl.arange(0, BLOCK_K)
    if DESCRIBED:
        acc = zeros(BLOCK_M, BLOCK_N, False, x.dtype)
    else:
        acc = zeros(BLOCK_M, BLOCK_N, False, x.dtype.element_ty)
        x = places(x, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), k, M, K, 0)
        weight = places(weight, tile_n * BLOCK_N + tl.arange(0, BLOCK_N), k, N, K, 0)
    for block in range(first, last):
        at = block * BLOCK_K
        if DESCRIBED:
            a = x.load([tile_m * BLOCK_M, at])
            b = weight.load([tile_n * BLOCK_N, at])
        elif EVEN_K:
            a = tl.load(x + at)
            b = tl.load(weight + at)
        else:
            inside = (at + k < K)[None, :]
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(weight + at, mask=inside, other=0.0)
        acc = product(a, b, acc, False, 0, UPCAST)
    return acc


@triton.jit
def streamk(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]).

    Grid: (programs,). Of more tiles than programs, each program first shares those of the last one or two rounds, then takes
    whole ones. A shared tile's programs leave partial sums, two slots a program: slot 0 where its share begins with the piece, else
    slot 1. The last to arrive adds them in the order of K, so that the bits never change (Osama et al., Stream-K, 2023).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles, blocks = tiles_m * tiles_n, tl.cdiv(K, BLOCK_K)
    whole = tl.maximum(tiles // programs - 1, 0) * programs
    shared = (tiles - whole) * blocks
    share = tl.cdiv(shared, programs)
    begin, end = tl.minimum(program * share, shared), tl.minimum(program * share + share, shared)
    size: tl.constexpr = BLOCK_M * BLOCK_N
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for piece in range(begin // blocks, tl.cdiv(end, blocks)):
        first, last = tl.maximum(begin, piece * blocks), tl.minimum(end, piece * blocks + blocks)
        tile_m, tile_n = tile_of(piece, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = _sums(
            x, weight, tile_m, tile_n, first - piece * blocks, last - piece * blocks, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, DESCRIBED, EVEN_K, UPCAST,
        )  # fmt: skip
        if last - first == blocks:
            store_tile(acc, out, bias, m, n, M, N, HAS_BIAS, False)
        else:
            slot = 2 * program + (first != begin).to(tl.int32)
            tl.store(partial + slot * size + within, acc)
            one = piece * blocks // share
            other = (piece * blocks + blocks - 1) // share
            if arrives_last(counters + piece, other - one + 1):
                leave_zero(counters + piece)
                # Only the first of a tile's programs can have begun with another one.
                start = 2 * one + (one * share < piece * blocks).to(tl.int32)
                total = tl.load(partial + start * size + within, cache_modifier=".cg")
                for third in range(one + 1, other + 1):
                    total += tl.load(partial + 2 * third * size + within, cache_modifier=".cg")
                store_tile(total, out, bias, m, n, M, N, HAS_BIAS, False)
    for tile in range(tiles - whole + program, tiles, programs):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = _sums(x, weight, tile_m, tile_n, 0, blocks, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIBED, EVEN_K, UPCAST)
        store_tile(acc, out, bias, m, n, M, N, HAS_BIAS, False)
