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
def _integers(words, zero, mask, place: tl.constexpr, BITS: tl.constexpr):
    """Return the codes at bits *place* minus zero points in float32, exactly.

    A code stays where it is in the mantissa of a float whose exponent makes it whole; only places
    past the mantissa are shifted.
    """
    near: tl.constexpr = place - 12 if place + BITS > 23 else place
    if near < place:
        words = words >> 12
    bits = (words & (mask << near)) | ((150 - near) << 23)
    return bits.to(tl.float32, bitcast=True) - ((1 << (23 - near)) + zero)


@triton.jit
def _values(stored, zero, place: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr):
    """Return the values at bits *place* of stored elements in float32."""
    if stored.dtype == tl.int8:  # sm_80 converts 16 integers in a cycle, and does 64 of these operations
        values = _integers((stored.to(tl.int32) & 255) ^ 128, 128, 255, 0, BITS)
    elif VALUES == "native":
        values = stored.to(tl.float32)
    elif VALUES == "integer":
        values = _integers(stored.to(tl.int32), zero, (1 << BITS) - 1, place, BITS)
    else:  # e2m1: a code is a tiny float, whose exponent has another bias
        code = stored.to(tl.int32) >> place
        values = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    return values


@triton.jit
def _one_of(stored, index: tl.constexpr, dtype: tl.constexpr):
    """Return one of four activations of a dtype in 64 bits, or the only one, in float32."""
    if stored.dtype.primitive_bitwidth == 64:
        stored = (stored >> (16 * index)).to(tl.uint16).to(dtype, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def _along_k(
    x, weight, w_scale, w_zeros, row, first_n, part, N, K,
    LANES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr,
    ADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, POWER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums [rows, BLOCK_N] of a weight [N, K], of which each of LANES threads reads VECTOR
    bytes of one group in a row.

    Four codes of four bits are read as 16 bits, and their activations as 64. For one row both loads
    have one shape, hence one layout.
    """
    codes: tl.constexpr = 4 if BITS == 4 else 1
    dtype: tl.constexpr = x.dtype.element_ty
    if codes > 1:
        x = x.to(tl.pointer_type(tl.uint64))
        weight = weight.to(tl.pointer_type(tl.uint16))
    units: tl.constexpr = VECTOR * 8 // (BITS * codes)
    width, groups = K // codes, K // GROUP if GROUP > 0 else 1
    lane = tl.arange(0, LANES) * units
    unit = (lane[:, None] + tl.arange(0, units)[None, :])[None, :, :]
    x += row.to(tl.int64)[:, None, None] * width + unit
    column = tl.arange(0, BLOCK_N)[None, None, :]
    acc = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
    blocks = tl.cdiv(width, LANES * units * UNROLL)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        for chunk in tl.static_range(UNROLL):
            at = (block * UNROLL + chunk) * (LANES * units)
            inside = lane + at < width
            if EVEN_K:
                a = tl.load(x + at, eviction_policy="evict_last")
            else:
                a = tl.load(x + at, mask=inside[None, :, None], other=0)
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
                    zero += (((word >> _shifts(n % PER, BITS, ORDER)) + ADDED) & ((1 << BITS) - 1)).to(tl.float32)[None, :, None]
                products = _one_of(a, 0, dtype) * _values(stored, zero, 0, BITS, VALUES)
                for code in tl.static_range(1, codes):
                    products += _one_of(a, code, dtype) * _values(stored, zero, code * BITS, BITS, VALUES)
                sums = tl.sum(products, 2)
                if GROUP > 0:
                    of_n = w_scale + (n // ROWS) * groups + group
                    sums *= _scales(tl.load(of_n, mask=inside, other=0.0), tl.float32, POWER, UPCAST)[None, :]
                acc = tl.where(column == index, acc + sums[:, :, None], acc)
    return tl.sum(acc, 1)


@triton.jit
def _zero_points(w_zeros, group, n, N, ZERO: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, ADDED: tl.constexpr):
    """Return zero points of groups and columns; columns past the edge have those of the last."""
    words = tl.load(w_zeros + group * tl.cdiv(N, PER) + tl.minimum(n, N - 1) // PER)
    return ZERO + (((words >> _shifts(n % PER, BITS, ORDER)) + ADDED) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _half(words, mask, first: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr):
    """Return the codes of every other place from *first* on: [1, R, C, 2, 2]."""
    a = _integers(words, 0, mask, ((ORDER >> 4 * first) & 15) * BITS, BITS)
    b = _integers(words, 0, mask, ((ORDER >> 4 * first + 8) & 15) * BITS, BITS)
    c = _integers(words, 0, mask, ((ORDER >> 4 * first + 16) & 15) * BITS, BITS)
    d = _integers(words, 0, mask, ((ORDER >> 4 * first + 24) & 15) * BITS, BITS)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _columns(words, mask, BITS: tl.constexpr, ORDER: tl.constexpr):
    """Return the codes [1, R, 8 * C] of words [1, R, C] in float32; each word's stay in its thread."""
    codes = tl.join(_half(words, mask, 0, BITS, ORDER), _half(words, mask, 1, BITS, ORDER))
    return tl.reshape(codes, [1, words.shape[1], words.shape[2] * 8])


@triton.jit
def _along_n(
    x, weight, w_scale, w_zeros, w_index, row, first_n, part, M, N, K,
    LANES: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SPLIT_K: tl.constexpr,
    ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, ZERO: tl.constexpr, ADDED: tl.constexpr,
    GROUP: tl.constexpr, HAS_INDEX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums [rows, BLOCK_N] of a weight whose words are [K / 8, N], or ALONG_N [K, N / 8].

    Each of LANES rows of threads has SPAN elements of K, all or a part of a group, and scales their
    sums once. With an index, which has the group of each element, every product is scaled.
    """
    per_n: tl.constexpr = PER if ALONG_N else 1
    per_k: tl.constexpr = 1 if ALONG_N else PER
    dtype: tl.constexpr = x.dtype.element_ty
    n = (first_n + tl.arange(0, BLOCK_N))[None, None, :]
    word = (first_n // per_n + tl.arange(0, BLOCK_N // per_n))[None, None, :]
    mask = ((1 << BITS) - 1) + tl.minimum(M, 0)  # ptxas would move a known mask to a register at each use
    groups = K // GROUP if GROUP > 0 else 1
    spans, lane = tl.cdiv(K, SPAN), tl.arange(0, LANES)[None, :, None]
    acc = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
    if per_k > 1:
        x = x.to(tl.pointer_type(tl.uint64))
    x += row.to(tl.int64)[:, None, None] * (K if ALONG_N else K // 4)
    each = tl.cdiv(tl.cdiv(spans, LANES), SPLIT_K)
    for step in range(part * each, part * each + each):
        span = step * LANES + lane
        group = tl.minimum(span, spans - 1) * SPAN // GROUP if GROUP > 0 else lane * 0
        if ADDED >= 0 and not HAS_INDEX:
            zero = _zero_points(w_zeros, group, n, N, ZERO, PER, BITS, ORDER, ADDED)
        else:
            zero = ZERO
        sums = tl.zeros([row.shape[0], LANES, BLOCK_N], tl.float32)
        for first in range(0, SPAN // per_k, UNROLL):
            for index in tl.static_range(UNROLL):
                k = span * SPAN + (first + index) * per_k
                inside = k < K
                at = (k // per_k).to(tl.int64) * (N // per_n) + word
                words = tl.load(weight + at, mask=inside & (word < N // per_n), other=0, eviction_policy="evict_first")
                if ALONG_N:
                    a = tl.load(x + k, mask=inside, other=0).to(tl.float32)
                    sums += a * (_columns(words, mask, BITS, ORDER) - zero)
                else:
                    low = tl.load(x + k // 4, mask=inside, other=0)
                    high = tl.load(x + k // 4 + 1, mask=inside, other=0)
                    for code in tl.static_range(PER):
                        if HAS_INDEX:
                            of_k = tl.load(w_index + k + code, mask=inside, other=0)
                            known = (of_k >= 0) & (of_k < groups)
                            if ADDED >= 0:
                                own = _zero_points(w_zeros, tl.where(known, of_k, 0), n, N, ZERO, PER, BITS, ORDER, ADDED)
                            else:
                                own = zero
                            scale = tl.load(w_scale + of_k * N + n, mask=known & (n < N), other=float("nan")).to(tl.float32)
                            values = _integers(words, own, mask, ((ORDER >> 4 * code) & 15) * BITS, BITS) * scale
                        else:
                            values = _integers(words, zero, mask, ((ORDER >> 4 * code) & 15) * BITS, BITS)
                        sums += _one_of(low if code < 4 else high, code % 4, dtype) * values
        if GROUP > 0 and not HAS_INDEX:
            sums *= _scales(tl.load(w_scale + group * N + n, mask=(span < spans) & (n < N), other=0), tl.float32, False, UPCAST)
        acc += sums
    return tl.sum(acc, 1)


@triton.jit
def wnv(
    x, weight, w_scale, w_zeros, w_index, w_global_scale, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    IS_KN: tl.constexpr, ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr,
    VALUES: tl.constexpr, ZERO: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, POWER: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_INDEX: tl.constexpr,
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
            x, weight, w_scale, w_zeros, w_index, row, tile_n * BLOCK_N, part, M, N, K, LANES, SPAN, BLOCK_N, UNROLL, SPLIT_K, ALONG_N,
            PER, BITS, ORDER, ZERO, ADDED, GROUP, HAS_INDEX, UPCAST,
        )  # fmt: skip
    else:
        acc = _along_k(
            x, weight, w_scale, w_zeros, row, tile_n * BLOCK_N, part, N, K, LANES, VECTOR, BLOCK_N, UNROLL, SPLIT_K, EVEN_K,
            PER, BITS, ORDER, VALUES, ZERO, ADDED, GROUP, ROWS, POWER, UPCAST,
        )  # fmt: skip
    if SCALED == "row":
        owner = tl.minimum(n, N - 1) // ROWS if ROWS > 0 else n * 0
        acc *= _scales(tl.load(w_scale + owner), tl.float32, POWER, UPCAST)[None, :]
    if HAS_GLOBAL:
        acc *= tl.load(w_global_scale)
    if SPLIT_K > 1:
        partial += tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    finish(acc, w_scale, w_scale, bias, out, partial, counters + tile, part, m, n, M, N, SPLIT_K, "none", HAS_BIAS, False)
