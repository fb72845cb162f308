"""Quantise a stage's input as `tunedgemm.ops.formats.quant` does: a scale for a tensor, a row, or
128 or 32 elements of a row.

A group of zeros has the scale 1 (mxfp4: byte 0). One with a NaN or an infinity has a scale that is
not finite (mxfp4: byte 255) and values 0.
"""

# ruff: noqa: PLR0917 (Triton kernels take all they use as parameters)
import triton
import triton.language as tl


@triton.jit
def _row_is_there(row, ids, experts, OF_PAIRS: tl.constexpr):
    """Return whether a row holds values; rows of pairs without an expert were never stored."""
    there = row >= 0
    if OF_PAIRS:
        expert = tl.load(ids + row)
        there = (expert >= 0) & (expert < experts)
    return there


@triton.jit
def _size_bits(values):
    """Return the bits of float32 magnitudes, which have the same order; NaN is the largest."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(top, LIMIT: tl.constexpr):
    """Return the scale for the bits of the largest magnitude: 1 where the quotient is 0."""
    scale = tl.div_rn(top.to(tl.float32, bitcast=True), LIMIT)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _cast(values, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """Return values / scale, saturated and rounded, ties to even; 0 for a scale that is not finite."""
    values = tl.div_rn(values.to(tl.float32), scale + tl.zeros_like(values).to(tl.float32))
    values = tl.where(scale < float("inf"), values, 0.0)
    values = tl.minimum(tl.maximum(values, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if dtype.is_int():
        # Adding and subtracting 1.5 * 2^23 rounds to whole numbers.
        values = (values + 12582912.0) - 12582912.0
    return values.to(dtype)


@triton.jit
def moe_top(x, ids, tops, rows, experts, K, BLOCK: tl.constexpr, OF_PAIRS: tl.constexpr):
    """Store to tops[program] the bits of the largest magnitude of every programs-th row of x [rows,
    K].

    Grid: (programs,).
    """
    top = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        there = _row_is_there(row, ids, experts, OF_PAIRS)
        for at in range(0, K, BLOCK):
            k = at + tl.arange(0, BLOCK)
            values = tl.load(x + row.to(tl.int64) * K + k, mask=there & (k < K), other=0.0)
            top = tl.maximum(top, _size_bits(values))
    tl.store(tops + tl.program_id(0), tl.max(top, 0))


@triton.jit
def moe_quantise(
    x, ids, tops, q, scale, experts, K, programs,
    KIND: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, TOPS: tl.constexpr, OF_PAIRS: tl.constexpr,
):  # fmt: skip
    """Quantise x[rows, K] to q[rows, K] and its scales.

    Grid: (rows, tiles of BLOCK along K, or 1 for KIND "row").

    KIND "tensor" takes the largest of tops[:programs], which TOPS covers; "given" takes the scale
    tops[0]. Both store it to scale[0]. "row" stores scale[rows]; "block" stores scale[rows, ceil(K
    / 128)].
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    there = _row_is_there(row, ids, experts, OF_PAIRS)
    x += row.to(tl.int64) * K
    q += row.to(tl.int64) * K
    dtype: tl.constexpr = q.dtype.element_ty
    if KIND == "block":
        groups = tl.cdiv(K, 128)
        group = tile * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        values = tl.load(x + k, mask=there & (k < K), other=0.0)
        by_group = _scale_of(tl.max(_size_bits(values), 1), LIMIT)
        tl.store(scale + row.to(tl.int64) * groups + group, by_group, mask=group < groups)
        tl.store(q + k, _cast(values, by_group[:, None], dtype, LIMIT), mask=k < K)
    elif KIND == "row":
        top = tl.zeros([BLOCK], tl.int32)
        for at in range(0, K, BLOCK):
            k = at + tl.arange(0, BLOCK)
            top = tl.maximum(top, _size_bits(tl.load(x + k, mask=there & (k < K), other=0.0)))
        one = _scale_of(tl.max(top, 0), LIMIT)
        tl.store(scale + row, one)
        for at in range(0, K, BLOCK):
            k = at + tl.arange(0, BLOCK)
            values = tl.load(x + k, mask=there & (k < K), other=0.0)
            tl.store(q + k, _cast(values, one, dtype, LIMIT), mask=k < K)
    else:
        if KIND == "given":
            one = tl.load(tops)
        else:
            place = tl.arange(0, TOPS)
            one = _scale_of(tl.max(tl.load(tops + place, mask=place < programs, other=0), 0), LIMIT)
        if (row == 0) & (tile == 0):
            tl.store(scale, one)
        k = tile * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + k, mask=there & (k < K), other=0.0)
        tl.store(q + k, _cast(values, one, dtype, LIMIT), mask=k < K)


@triton.jit
def _codes(values):
    """Return 4-bit codes of float32 values: sign, then 0, .5, 1, 1.5, 2, 3, 4, 6; ties to the even
    code.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def moe_quantise_mx(x, ids, q, scale, experts, K, BLOCK: tl.constexpr, OF_PAIRS: tl.constexpr):
    """Quantise x[rows, K] to mxfp4 q[rows, K / 2], even elements in low nibbles, and e8m0
    scale[rows, K / 32].

    Grid: (rows, tiles of BLOCK along K). The scale is amax / 6 rounded up to a power of two, found
    from the bits of amax.
    """
    row = tl.program_id(0).to(tl.int64)
    there = _row_is_there(row, ids, experts, OF_PAIRS)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = byte < K // 2
    even = tl.load(x + row * K + byte * 2, mask=there & inside, other=0.0).to(tl.float32)
    odd = tl.load(x + row * K + byte * 2 + 1, mask=there & inside, other=0.0).to(tl.float32)
    top = tl.max(tl.maximum(_size_bits(even), _size_bits(odd)), 1)
    power = tl.maximum((top >> 23) - 2 + ((top & 0x7FFFFF) > 0x400000).to(tl.int32), 1)
    power = tl.where(top >= 0x7F800000, 255, tl.where(top <= 3, 0, power))
    tl.store(scale + row * (K // 32) + group, power.to(tl.uint8), mask=group < K // 32)
    # 1 / 2^(b - 127) has the exponent field 254 - b; values of a group that is not finite are 0.
    inverse = (tl.maximum(254 - power, 0) << 23).to(tl.float32, bitcast=True)[:, None]
    finite = (power < 255)[:, None]
    low = tl.where(finite, _codes(even * inverse), 0)
    high = tl.where(finite, _codes(odd * inverse), 0)
    tl.store(q + row * (K // 2) + byte, (low | (high << 4)).to(tl.uint8), mask=inside)
