"""wnv: product of a few rows of 16-bit activations by a packed weight, on the vector units.

Threads read a weight packed along K in the order of a row, and one packed or stored along N in the
order of columns. Codes become float32 numbers by their bits alone, so every product is exact.
"""

# ruff: noqa: PLR0917, SIM108 (Triton kernels have many parameters and branch on constexprs)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.tile import finish, tile_of
from tunedgemm_triton.kernels.wn import _scales, _shifts


@triton.jit
def _integers(words, place, zero, BITS: tl.constexpr):
    """Return the codes at bits *place* minus zero points in float32, exactly.

    A code stays where it is in the mantissa of a float whose exponent makes it whole; only places
    past the mantissa are shifted.
    """
    far = place + BITS > 23
    words = tl.where(far, words >> 12, words)
    place = tl.where(far, place - 12, place)
    one = (150 - place) << 23  # 2 ** (23 - place)
    bits = (words & (((1 << BITS) - 1) << place)) | one
    return bits.to(tl.float32, bitcast=True) - (one.to(tl.float32, bitcast=True) + zero)


@triton.jit
def _pairs(bits, dtype: tl.constexpr):
    """Return the two 16-bit floats in each of uint32 [R, T, V] as float32 [R, T, 2 * V]."""
    low = (bits & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    high = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), [bits.shape[0], bits.shape[1], 2 * bits.shape[2]])


@triton.jit
def _of_bytes(stored, zero, BITS: tl.constexpr, VALUES: tl.constexpr):
    """Return the values of stored bytes [1, T, V] as float32 [1, T, codes]; the low bits are first."""
    if VALUES == "native":
        values = stored.to(tl.float32)
    else:
        place = (tl.arange(0, 8 // BITS) * BITS)[None, None, None, :]
        words = stored.to(tl.int32)[:, :, :, None]
        if VALUES == "integer":
            values = _integers(words, place, zero, BITS)
        else:  # e2m1: a code is a tiny float, whose exponent has another bias
            code = words >> place
            values = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
        values = tl.reshape(values, [1, stored.shape[1], stored.shape[2] * (8 // BITS)])
    return values


@triton.jit
def _along_k(
    x, weight, w_scale, w_zeros, row, first_n, part, N, K,
    LANES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr,
    ADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, POWER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums [rows, BLOCK_N] of a weight [N, K], of which each of LANES threads reads VECTOR
    bytes of one group in a row.

    The loads of x have the shape of the weight's, or as many bytes in a thread, so that both have
    one layout.
    """
    codes: tl.constexpr = 8 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    if codes > 1:
        x = x.to(tl.pointer_type(tl.uint32))
        weight = weight.to(tl.pointer_type(tl.uint8))
    width, groups = K // codes, K // GROUP if GROUP > 0 else 1
    lane = tl.arange(0, LANES) * VECTOR
    unit = (lane[:, None] + tl.arange(0, VECTOR)[None, :])[None, :, :]
    x += row.to(tl.int64)[:, None, None] * width + unit
    column = tl.arange(0, BLOCK_N)[None, None, :]
    acc = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
    blocks = tl.cdiv(width, LANES * VECTOR * UNROLL)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        for chunk in tl.static_range(UNROLL):
            at = (block * UNROLL + chunk) * (LANES * VECTOR)
            inside = lane + at < width
            if EVEN_K:
                a = tl.load(x + at, eviction_policy="evict_last")
            else:
                a = tl.load(x + at, mask=inside[None, :, None], other=0)
            a = _pairs(a, dtype) if codes > 1 else a.to(tl.float32)
            group = (lane + at) * codes // GROUP if GROUP > 0 else lane * 0
            for index in tl.static_range(BLOCK_N):
                n = tl.minimum(first_n + index, N - 1)
                if EVEN_K:
                    stored = tl.load(weight + n.to(tl.int64) * width + at + unit, eviction_policy="evict_first")
                else:
                    stored = tl.load(weight + n.to(tl.int64) * width + at + unit, mask=inside[None, :, None], other=0.0)
                zero = ZERO
                if ADDED >= 0:
                    word = tl.load(w_zeros + (n // PER) * groups + group, mask=inside, other=0)
                    zero += (((word >> _shifts(n % PER, BITS, ORDER)) + ADDED) & ((1 << BITS) - 1)).to(tl.float32)[None, :, None, None]
                sums = tl.sum(a * _of_bytes(stored, zero, BITS, VALUES), 2)
                if GROUP > 0:
                    of_n = w_scale + (n // ROWS) * groups + group
                    sums *= _scales(tl.load(of_n, mask=inside, other=0.0), tl.float32, POWER, UPCAST)[None, :]
                acc = tl.where(column == index, acc + sums[:, :, None], acc)
    return tl.sum(acc, 1)


@triton.jit
def _zero_points(w_zeros, group, n, N, ZERO: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, ADDED: tl.constexpr):
    """Return zero points of groups and columns, whose last words are for the columns past the edge."""
    words = tl.load(w_zeros + group * tl.cdiv(N, PER) + tl.minimum(n, N - 1) // PER)
    return ZERO + (((words >> _shifts(n % PER, BITS, ORDER)) + ADDED) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _along_n(
    x, weight, w_scale, w_zeros, w_index, row, first_n, part, N, K,
    LANES: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SPLIT_K: tl.constexpr,
    ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, ZERO: tl.constexpr, ADDED: tl.constexpr,
    GROUP: tl.constexpr, HAS_INDEX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums [rows, BLOCK_N] of a weight whose words are [K / PER, N], or ALONG_N [K, N / PER].

    Each of LANES rows of threads has SPAN elements of K, a group or a part of the row, and scales
    their sums once. With an index, which has the group of each element, every product is scaled.
    """
    per_n: tl.constexpr = PER if ALONG_N else 1
    per_k: tl.constexpr = 1 if ALONG_N else PER
    words: tl.constexpr = BLOCK_N // per_n
    place = _shifts(tl.arange(0, PER), BITS, ORDER)[None, None, :]
    n, word = first_n + tl.arange(0, BLOCK_N), first_n // per_n + tl.arange(0, words)
    spans, lane = tl.cdiv(K, SPAN), tl.arange(0, LANES)
    acc = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
    x += row.to(tl.int64)[:, None] * K
    each = tl.cdiv(tl.cdiv(spans, LANES), SPLIT_K)
    for step in range(part * each, part * each + each):
        span = step * LANES + lane
        group = tl.minimum(span, spans - 1) if GROUP > 0 else lane * 0
        if ADDED >= 0 and not HAS_INDEX:
            zero = _zero_points(w_zeros, group[:, None], n[None, :], N, ZERO, PER, BITS, ORDER, ADDED)
            zero = tl.reshape(zero, [LANES, words, per_n])
        else:
            zero = ZERO
        sums = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
        for first in range(0, SPAN // per_k, UNROLL):
            for index in tl.static_range(UNROLL):
                k = span * SPAN + (first + index) * per_k
                inside = k < K
                at = (k // per_k).to(tl.int64)[:, None] * (N // per_n) + word[None, :]
                codes = tl.load(weight + at, mask=inside[:, None] & (word < N // per_n)[None, :], other=0, eviction_policy="evict_first")
                if ALONG_N:
                    a = tl.load(x + k[None, :], mask=inside[None, :], other=0).to(tl.float32)
                    values = _integers(codes[:, :, None], place, zero, BITS)
                    sums += a[:, :, None] * tl.reshape(values, [LANES, BLOCK_N])[None, :, :]
                else:
                    ks = k[:, None] + tl.arange(0, PER)[None, :]
                    a = tl.load(x[:, :, None] + ks[None, :, :], mask=inside[None, :, None], other=0).to(tl.float32)
                    if HAS_INDEX:
                        of_k = tl.load(w_index + ks, mask=inside[:, None], other=0)[:, None, :]
                        known = (of_k >= 0) & (of_k < spans)
                        if ADDED >= 0:
                            own = _zero_points(w_zeros, tl.where(known, of_k, 0), n[None, :, None], N, ZERO, PER, BITS, ORDER, ADDED)
                        else:
                            own = zero
                        of_n = w_scale + of_k * N + n[None, :, None]
                        scale = tl.load(of_n, mask=known & (n < N)[None, :, None], other=float("nan")).to(tl.float32)
                        values = _integers(codes[:, :, None], place, own, BITS) * scale
                    else:
                        values = _integers(codes[:, :, None], place, zero, BITS)
                    sums += tl.sum(a[:, :, None, :] * values[None, :, :, :], 3)
        if GROUP > 0 and not HAS_INDEX:
            scale = tl.load(w_scale + group[:, None] * N + n[None, :], mask=(span < spans)[:, None] & (n < N)[None, :], other=0)
            sums *= _scales(scale, tl.float32, False, UPCAST)[None, :, :]
        acc += sums
    return tl.sum(acc, 1)


@triton.jit
def wnv(
    x, weight, w_scale, w_zeros, w_index, w_global_scale, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    IS_KN: tl.constexpr, ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr,
    VALUES: tl.constexpr, ZERO: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    POWER: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ decoded(weight).T (+ bias[N]); the constants are those of `wn`.

    Grid: (tiles, SPLIT_K).
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 1)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(m, M - 1)
    if IS_KN:
        acc = _along_n(
            x, weight, w_scale, w_zeros, w_index, row, tile_n * BLOCK_N, part, N, K, LANES, SPAN, BLOCK_N, UNROLL, SPLIT_K, ALONG_N,
            PER, BITS, ORDER, ZERO, ADDED, GROUP, HAS_INDEX, UPCAST,
        )  # fmt: skip
    else:
        acc = _along_k(
            x, weight, w_scale, w_zeros, row, tile_n * BLOCK_N, part, N, K, LANES, VECTOR, BLOCK_N, UNROLL, SPLIT_K, EVEN_K,
            PER, BITS, ORDER, VALUES, ZERO, ADDED, GROUP, ROWS, POWER, UPCAST,
        )  # fmt: skip
    if GROUP == 0:
        owner = tl.minimum(n, N - 1) // ROWS if ROWS > 0 else n * 0
        acc *= _scales(tl.load(w_scale + owner), tl.float32, POWER, UPCAST)[None, :]
    if HAS_GLOBAL:
        acc *= tl.load(w_global_scale)
    if SPLIT_K > 1:
        partial += tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    finish(acc, w_scale, w_scale, bias, out, partial, counters + tile, part, m, n, M, N, SPLIT_K, "none", HAS_BIAS, False)
