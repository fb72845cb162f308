"""wn: product of 16-bit activations by a weight in a format that is a record of the core.

The record's fields are constants, and the weight is decoded in registers. A code and its zero point
become numbers by their bits alone, exact in the dtype of x. So are the scales of some formats.
Others multiply the float32 sums of a group, or of the whole row.
"""

# ruff: noqa: PLR0917, SIM108 (Triton kernels have many parameters and branch on constexprs)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.gemm import places
from tunedgemm_triton.kernels.tile import finish, product, tile_of, within, zeros


@triton.jit
def _typed(bits, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return bits as a 16-bit float, or its value as float32 for the interpreter."""
    wide = bits.to(tl.uint16).to(dtype, bitcast=True)
    if UPCAST:
        wide = wide.to(tl.float32)
    return wide


@triton.jit
def _shifts(place, BITS: tl.constexpr, ORDER: tl.constexpr):
    """Return the bits below the codes of places; ORDER has four bits for the position of each."""
    return ((ORDER >> (4 * place)) & 15) * BITS


@triton.jit
def _unpacked(words, ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr):
    """Return the codes [R, C] of words, of which each has PER along one dimension.

    Joined halves stay in the thread that has the word. A place is the sum of its bits' places.
    """
    codes = words.to(tl.int32)
    if PER > 4:
        codes = tl.join(codes, codes >> ((ORDER >> 16) & 15) * BITS)
    if PER > 2:
        codes = tl.join(codes, codes >> ((ORDER >> 8) & 15) * BITS)
    codes = tl.join(codes, codes >> ((ORDER >> 4) & 15) * BITS)
    codes = tl.reshape(codes & ((1 << BITS) - 1), [words.shape[0], words.shape[1], PER])
    if ALONG_N:
        codes = tl.reshape(tl.permute(codes, [0, 2, 1]), [words.shape[0] * PER, words.shape[1]])
    else:
        codes = tl.reshape(codes, [words.shape[0], words.shape[1] * PER])
    return codes


@triton.jit
def _lifted(number, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return numbers below 128, plus 128 in bf16 or 1024 in fp16, where they are the last bits."""
    return _typed(number | (0x4300 if dtype == tl.bfloat16 else 0x6400), dtype, UPCAST)


@triton.jit
def _e2m1(codes, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return the values of e2m1: a code is a tiny float of the dtype, whose exponent has another bias."""
    low: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
    return _typed((codes & 7) << low | (codes & 8) << 12, dtype, UPCAST) * (2.0**126 if dtype == tl.bfloat16 else 2.0**14)


@triton.jit
def _numbers(
    words, dtype: tl.constexpr, ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr,
    VALUES: tl.constexpr, ZERO: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the values [R, C] of words before zero points and scales; integers lifted, or minus
    ZERO.
    """
    codes = _unpacked(words, ALONG_N, PER, BITS, ORDER) if PER > 1 else words
    if VALUES == "integer":
        found = _lifted(codes, dtype, UPCAST)
        if ZERO >= 0:
            found -= (128 if dtype == tl.bfloat16 else 1024) + ZERO
    elif VALUES == "e2m1":
        found = _e2m1(codes, dtype, UPCAST)
    else:
        found = codes.to(tl.float32 if UPCAST else dtype)
    return found


@triton.jit
def _scales(stored, dtype: tl.constexpr, POWER: tl.constexpr, UPCAST: tl.constexpr):
    """Return stored scales in a dtype; POWER: bytes of e8m0, 255 for NaN."""
    if POWER:
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
        if dtype == tl.bfloat16:
            scale = _typed(bits, dtype, UPCAST)
        else:
            scale = (bits << 16).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32 if UPCAST else dtype)
    return scale


@triton.jit
def _at(row, group, rows, groups, IS_KN: tl.constexpr):
    """Return offsets [R, G] of the last rows and groups that there are, in [rows, groups] or its
    transpose.
    """
    row, group = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(group, groups - 1).to(tl.int64)
    if IS_KN:
        found = group[None, :] * rows + row[:, None]
    else:
        found = row[:, None] * groups + group[None, :]
    return found


@triton.jit
def _zeros(base, n, group, N, groups, IS_KN: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr, ADDED: tl.constexpr):
    """Load zero points [R, G], which are packed along N."""
    words = tl.load(base + _at(n // PER, group, tl.cdiv(N, PER), groups, IS_KN))
    return ((words >> _shifts(n % PER, BITS, ORDER)[:, None]) + ADDED) & ((1 << BITS) - 1)


@triton.jit
def _tile(at, n, k, rows, columns, IS_KN: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a tile [n, k] of the stored weight; rows along K of a transposed one are contiguous."""
    if IS_KN:
        found = tl.load(at, mask=(n < rows)[:, None] & (k < columns)[None, :], other=0.0)
    elif EVEN_K:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(k < columns)[None, :], other=0.0)
    return found


@triton.jit
def wn(
    x, weight, w_scale, w_zeros, w_index, w_global_scale, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    IS_KN: tl.constexpr, ALONG_N: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, ORDER: tl.constexpr,
    VALUES: tl.constexpr, ZERO: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, POWER: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ decoded(weight).T (+ bias[N]).

    Grid: (tiles, SPLIT_K). An element of the stored weight has PER codes of BITS bits along N or K.
    VALUES are ``native``, ``e2m1`` or ``integer``: code minus ZERO, or where ADDED is not negative
    minus its zero point, which is a stored one plus ADDED. GROUP elements of K and ROWS rows share
    a scale; 0 for all. SCALED is what it multiplies: the ``weight`` where that is exact, a group's
    ``sums``, the ``row``'s, or an ``element`` of the weight. BLOCK_K is whole groups, or with
    ``sums`` a part of one. HAS_INDEX: w_index has the group of each element of K. A scaled element
    is two numbers of the dtype of x, whose sum is exact.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = x.dtype.element_ty
    per_n: tl.constexpr = PER if ALONG_N else 1
    per_k: tl.constexpr = 1 if ALONG_N else PER
    rows, columns = N // per_n, K // per_k
    of_n = tile_n * (BLOCK_N // per_n) + tl.arange(0, BLOCK_N // per_n)
    of_k = tl.arange(0, BLOCK_K // per_k)
    x = places(x, m, k, M, K, 0)
    if IS_KN:
        weight += of_k.to(tl.int64)[None, :] * rows + of_n[:, None]
    else:
        weight += within(of_n, rows).to(tl.int64)[:, None] * columns + of_k[None, :]
    count: tl.constexpr = BLOCK_K if HAS_INDEX else BLOCK_K // GROUP if GROUP > 0 and BLOCK_K > GROUP else 1
    groups = K // GROUP if GROUP > 0 else 1
    owner = n if ROWS == 1 else n // ROWS if ROWS > 0 else n * 0
    owners = tl.cdiv(N, ROWS) if ROWS > 0 else 1
    acc = zeros(BLOCK_M, BLOCK_N, SWAP, tl.float32)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        at = block * BLOCK_K
        to = (at // per_k).to(tl.int64) * rows if IS_KN else at // per_k
        if HAS_INDEX:
            group = tl.load(w_index + at + k, mask=at + k < K, other=0)
            known = (group >= 0) & (group < groups)
            group = tl.where(known, group, 0)
        else:
            group = (at // GROUP if GROUP > 0 else 0) + tl.arange(0, count)
        if EVEN_K:
            a = tl.load(x + at)
        else:
            a = tl.load(x + at, mask=(at + k < K)[None, :], other=0.0)
        w = _tile(weight + to, of_n, at // per_k + of_k, rows, columns, IS_KN, EVEN_K)
        w = _numbers(w, dtype, ALONG_N, PER, BITS, ORDER, VALUES, ZERO if ADDED < 0 else -1, UPCAST)
        if ADDED >= 0 or SCALED == "weight":
            w = tl.reshape(w, [BLOCK_N, count, BLOCK_K // count])
            if ADDED >= 0:
                zero = _zeros(w_zeros, n, group, N, groups, IS_KN, PER, BITS, ORDER, ADDED)
                w -= _lifted(zero + ZERO, dtype, UPCAST)[:, :, None]
            if SCALED == "weight":
                w *= _scales(tl.load(w_scale + _at(owner, group, owners, groups, IS_KN)), dtype, POWER, UPCAST)[:, :, None]
            w = tl.reshape(w, [BLOCK_N, BLOCK_K])
        if SCALED == "element":
            by_k = tl.load(w_scale + _at(owner, group, owners, groups, IS_KN)).to(tl.float32)
            exact = w.to(tl.float32) * tl.where(known[None, :], by_k, float("nan"))
            high = exact.to(dtype)
            acc = product(a, high, acc, SWAP, 0, UPCAST)
            acc = product(a, (exact - high.to(tl.float32)).to(dtype), acc, SWAP, 0, UPCAST)
        elif SCALED == "sums":
            by_n = _scales(tl.load(w_scale + _at(owner, group, owners, groups, IS_KN)), tl.float32, POWER, UPCAST)
            sums = product(a, w, zeros(BLOCK_M, BLOCK_N, SWAP, tl.float32), SWAP, 0, UPCAST)
            acc += sums * (by_n if SWAP else by_n.T)
        else:
            acc = product(a, w, acc, SWAP, 0, UPCAST)
    if SCALED == "row":
        by_n = _scales(tl.load(w_scale + _at(owner, tl.arange(0, 1), owners, 1, IS_KN)), tl.float32, POWER, UPCAST)
        acc *= by_n if SWAP else by_n.T
    if HAS_GLOBAL:
        acc *= tl.load(w_global_scale)
    if SPLIT_K > 1:
        partial += tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    finish(acc, w_scale, w_scale, bias, out, partial, counters + tile, part, m, n, M, N, SPLIT_K, "none", HAS_BIAS, SWAP)
