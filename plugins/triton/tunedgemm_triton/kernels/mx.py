"""mx: product of mxfp4 weights, e2m1 values with an e8m0 scale for each 32 of K, by activations in
mxfp4 or bf16.

With DECODE both operands become bf16 in registers, exactly, before an ordinary product. Otherwise
`tl.dot_scaled` multiplies them directly: one instruction on gfx950 and Blackwell. Triton lowers it
to others elsewhere. The two values of a byte need no reordering: even and odd elements of K are two
products.
"""

# ruff: noqa: PLR0917, SIM108 (Triton kernels have many parameters and branch on constexprs)
import triton
import triton.language as tl

from tunedgemm_triton.kernels.gemm import places
from tunedgemm_triton.kernels.tile import finish, tile_of, within, zeros


@triton.jit
def scales_at(row, group, width, SHUFFLED: tl.constexpr):
    """Return offsets [R, G] of the e8m0 scales of *row* [R] and *group* [G]; each row has *width*
    of them.

    In the order of AITER's e8m0_shuffle a row has ceil8(width) scales. Element (a * 16 + r,
    b * 4 + c) of each 32 rows and 8 groups is at ((c * 16 + r) * 2 + b) * 2 + a.
    """
    row = row.to(tl.int64)
    if SHUFFLED > 0:
        tiles = (row // 32) * (tl.cdiv(width, 8) * 256) + (row % 16) * 4 + (row // 16) % 2
        at = tiles[:, None] + ((group // 8) * 256 + (group % 4) * 64 + ((group // 4) % 2) * 2)[None, :]
    else:
        at = row[:, None] * width + group[None, :]
    return at


@triton.jit
def _widened(bits, UPCAST: tl.constexpr):
    """Return bits as bf16, or as float32 for the interpreter, whose bf16 product is wrong."""
    if UPCAST:
        wide = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return wide


@triton.jit
def _decoded(codes, powers, UPCAST: tl.constexpr):
    """Return the values of the low four bits of *codes* [R, C], e2m1, times *powers* [R, C]: exact
    in bf16.

    A code of 2 or more is the head of a float with another bias; 1 is a half.
    """
    codes = codes.to(tl.uint16)
    size = codes & 7
    bits = tl.where(size > 1, (size + (126 << 1)) << 6, size * (126 << 7)) | ((codes & 8) << 12)
    return _widened(bits, UPCAST) * powers


@triton.jit
def _powers(scale, UPCAST: tl.constexpr):
    """Return 2^(byte - 127) of e8m0 scales [R, G], NaN for 255, for each byte of two values: [R, 16
    * G].
    """
    scale = scale.to(tl.uint16)
    bits = tl.where(scale == 0, 0x40, tl.where(scale == 255, 0x7FC0, scale << 7))
    every = tl.broadcast_to(bits[:, :, None], [scale.shape[0], scale.shape[1], 16])
    return _widened(tl.reshape(every, [scale.shape[0], scale.shape[1] * 16]), UPCAST)


@triton.jit
def halves(packed, scale, PLAIN: tl.constexpr, UPCAST: tl.constexpr):
    """Return even and odd elements of K of a tile: of mxfp4 bytes and their scales, or of PLAIN
    bf16, two in 32 bits.
    """
    if PLAIN:
        even = _widened(packed & 0xFFFF, UPCAST)
        odd = _widened(packed >> 16, UPCAST)
    else:
        powers = _powers(scale, UPCAST)
        even = _decoded(packed & 15, powers, UPCAST)
        odd = _decoded(packed >> 4, powers, UPCAST)
    return even, odd


@triton.jit
def mx_dot(
    acc, x, x_scale, weight, w_scale,
    PLAIN: tl.constexpr, SWAP: tl.constexpr, DECODE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return acc + x @ weight.T, or with SWAP acc + weight @ x.T.

    weight [BLOCK_N, BLOCK_K / 2] and x [BLOCK_M, BLOCK_K / 2] are bytes of two e2m1 values each,
    the scales [rows, BLOCK_K / 32]. PLAIN x, which goes with DECODE, is bf16 without a scale:
    [BLOCK_M, BLOCK_K / 2] pairs of 32 bits.
    """
    if DECODE:
        x_even, x_odd = halves(x, x_scale, PLAIN, UPCAST)
        w_even, w_odd = halves(weight, w_scale, False, UPCAST)
        if SWAP:
            acc = tl.dot(w_odd, x_odd.T, tl.dot(w_even, x_even.T, acc))
        else:
            acc = tl.dot(x_odd, w_odd.T, tl.dot(x_even, w_even.T, acc))
    elif SWAP:
        acc = tl.dot_scaled(weight, w_scale, "e2m1", x.T, x_scale, "e2m1", acc)
    else:
        acc = tl.dot_scaled(x, x_scale, "e2m1", weight.T, w_scale, "e2m1", acc)
    return acc


@triton.jit
def mx(
    x, weight, x_scale, w_scale, bias, out, partial, counters, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    DECODE: tl.constexpr, PLAIN: tl.constexpr, SHUFFLED: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = x[M, K] @ weight[N, K].T (+ bias[N]) of mxfp4 operands; PLAIN: x is bf16
    and x_scale is not read.

    Grid: (tiles, SPLIT_K). K is a multiple of 32. SHUFFLED is the number of rows of the weight
    whose packs are adjacent; if it is not 0, the scales are in the order of AITER's e8m0_shuffle.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if PLAIN:
        x = x.to(tl.pointer_type(tl.uint32))
    pair, group = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
    x = places(x, m, pair, M, K // 2, 0)
    weight = places(weight, n, pair, N, K // 2, SHUFFLED)
    rows, columns = within(m, M), within(n, N)
    acc = zeros(BLOCK_M, BLOCK_N, SWAP, tl.float32)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    for block in range(part * each, tl.minimum(part * each + each, blocks)):
        at = block * BLOCK_K
        to = at // 2 * SHUFFLED if SHUFFLED > 0 else at // 2
        of_w = w_scale + scales_at(columns, at // 32 + group, K // 32, SHUFFLED)
        of_x = x_scale + scales_at(rows, at // 32 + group, K // 32, SHUFFLED)
        if EVEN_K:
            a = tl.load(x + at // 2)
            b = tl.load(weight + to)
            b_scale = tl.load(of_w)
            a_scale = b_scale if PLAIN else tl.load(of_x)
        else:
            left = K - at
            a = tl.load(x + at // 2, mask=(pair * 2 < left)[None, :], other=0)
            b = tl.load(weight + to, mask=(pair * 2 < left)[None, :], other=0)
            b_scale = tl.load(of_w, mask=(group * 32 < left)[None, :], other=0)
            a_scale = b_scale if PLAIN else tl.load(of_x, mask=(group * 32 < left)[None, :], other=0)
        acc = mx_dot(acc, a, a_scale, b, b_scale, PLAIN, SWAP, DECODE, UPCAST)
    if SPLIT_K > 1:
        partial += tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    finish(acc, x_scale, w_scale, bias, out, partial, counters + tile, part, m, n, M, N, SPLIT_K, "none", HAS_BIAS, SWAP)
