"""Quantise in the formats of the ops, and back: pure torch on CPU and GPU, without a synchronisation.

Names, scales and rounding are those of AITER's aiter/ops/quant.py and aiter/utility/fp4_utils.py,
with two differences: int8 is rounded to nearest (ties to even) where AITER's torch route truncates,
and everything saturates instead of wrapping.

For all of them:

* a group (tensor, row or block) that is all zero has the scale 1 (mxfp4: byte 0) and the values 0;
* a group with a NaN or an infinity has a scale that is not finite (mxfp4: 255) and the values 0:
  all of it reads back as NaN;
* with a scale that the caller gives, infinities saturate; NaN stays NaN in fp8 and becomes 0 in
  int8;
* large tensors are worked on in slices, so the memory needed beyond the result is about 100 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.scales import E8M0, as_bytes, shuffle_scale

FP4 = torch.float4_e2m1fn_x2
#: Elements that are worked on at a time: 16 MiB as float32.
_SLICE = 1 << 22
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
#: Elements of K that share a scale in mxfp4, and the largest magnitude of e2m1.
_MX = 32


def pertoken_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    quant_dtype: torch.dtype = torch.int8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale a row; the arguments are AITER's, in its order.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        scale: one float32 value a row, [..., 1] or [...]; by default amax of the row / largest
            value of quant_dtype.
        x_scale: [K], what x is multiplied by first, as in smooth quantisation.
        scale_dtype: of the scales that are returned.
        quant_dtype: torch.int8 or a torch.float8.

    Returns:
        (q [..., K] of quant_dtype, scale [..., 1] of scale_dtype)

    Raises:
        OperandError: x or quant_dtype is none of these, or a scale does not fit.
    """
    rows, limit = _rows(x), _limit(quant_dtype)
    smooth = None if x_scale is None else _per_column(x_scale, x)
    row_scales = None if scale is None else _per_row(scale, x)
    scales = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=x.device) if row_scales is None else row_scales
    q = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    flat = q.view(rows.shape)
    for part in _slices(*rows.shape):
        values = rows[part].to(torch.float32, copy=True)
        if smooth is not None:
            values *= smooth
        if row_scales is None:
            scales[part] = _scale(values.abs().amax(-1, keepdim=True), limit)
        flat[part] = _cast(values, scales[part], quant_dtype, own=row_scales is None)
    return q, scales.view(*x.shape[:-1], 1).to(scale_dtype)


def per_tensor_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    quant_dtype: torch.dtype = torch.int8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale; the arguments are AITER's, in its order.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        scale: one float32 value; by default amax / largest value of quant_dtype.
        scale_dtype: of the scale that is returned.
        quant_dtype: torch.int8 or a torch.float8.

    Returns:
        (q [..., K] of quant_dtype, scale [1] of scale_dtype)

    Raises:
        OperandError: x or quant_dtype is none of these, or scale is not one value.
    """
    rows, limit = _rows(x), _limit(quant_dtype)
    if scale is not None and scale.numel() != 1:
        raise OperandError(f"the scale of a tensor is one value (got shape {tuple(scale.shape)}); pertoken_quant takes one a row")
    if scale is not None:
        tensor_scale = scale.detach().to(torch.float32).view(1)
    else:
        tops = [rows[part].abs().amax() for part in _slices(*rows.shape)]
        top = torch.stack(tops).amax() if tops else torch.zeros((), device=x.device)
        tensor_scale = _scale(top.to(torch.float32), limit).view(1)
    q = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    flat = q.view(rows.shape)
    for part in _slices(*rows.shape):
        flat[part] = _cast(rows[part].to(torch.float32, copy=True), tensor_scale, quant_dtype, own=scale is None)
    return q, tensor_scale.to(scale_dtype)


def per_1x128_quant(x: torch.Tensor, quant_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale for each 128 elements of a row; the last group may be shorter.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        quant_dtype: torch.int8 or a torch.float8.

    Returns:
        (q [..., K] of quant_dtype, scale [..., ceil(K/128)] float32)

    Raises:
        OperandError: x or quant_dtype is none of these.
    """
    rows = _rows(x)
    q, scale = per_block_quant(rows, quant_dtype, (1, 128))
    return q.view(x.shape), scale.view(*x.shape[:-1], scale.shape[-1])


def per_block_quant(
    w: torch.Tensor, quant_dtype: torch.dtype = torch.float8_e4m3fn, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale for each block; blocks at the end are smaller where N or K does not divide.

    Args:
        w: [..., N, K] of a float dtype of 16 bits or more.
        quant_dtype: torch.int8 or a torch.float8.
        block: (rows, columns) that share a scale.

    Returns:
        (q [..., N, K] of quant_dtype, scale [..., ceil(N/rows), ceil(K/columns)] float32)

    Raises:
        OperandError: w or quant_dtype is none of these.
    """
    high, wide = block
    rows, limit = _rows(w, dims=2), _limit(quant_dtype)
    count, (n, k) = w.shape[:-2].numel(), w.shape[-2:]
    down, across = -(-n // high), -(-k // wide)
    q = torch.empty(w.shape, dtype=quant_dtype, device=w.device)
    scale = torch.empty(*w.shape[:-2], down, across, dtype=torch.float32, device=w.device)
    for source, target, scales in zip(rows.view(count, n, k), q.view(count, n, k), scale.view(count, down, across), strict=True):
        for part in _slices(down, high * k):
            lines = slice(part.start * high, min(part.stop * high, n))
            values = _blocks(source[lines].to(torch.float32, copy=True), high, wide)
            scales[part] = _scale(values.abs().amax((1, 3)), limit)
            values = _cast(values, scales[part][:, None, :, None], quant_dtype, own=True)
            target[lines] = values.reshape(-1, across * wide)[: lines.stop - lines.start, :k]
    return q, scale


def per_1x32_f4_quant(
    x: torch.Tensor, scale: torch.Tensor | None = None, quant_dtype: torch.dtype = FP4, shuffle: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to mxfp4: e2m1 values, ties to even, with one power of two for each 32 elements of a row.

    The scale is amax / 6 rounded up to a power of two (AITER's RoundUp, torchao's RCEIL), so
    nothing saturates.

    Args:
        x: [..., K] of a float dtype of 16 bits or more; K a multiple of 32.
        scale, quant_dtype: AITER's arguments: None, the scales being taken from the values, and
            torch.float4_e2m1fn_x2.
        shuffle: give the scales as `shuffle_scale` does, over all rows of x.

    Returns:
        (q [..., K/2] torch.float4_e2m1fn_x2, the even element in the low nibble;
        scale [..., K/32] torch.float8_e8m0fnu, or shuffled [ceil256(rows), ceil8(K/32)])

    Raises:
        OperandError: x is none of these, or a scale or another dtype is given.
    """
    if scale is not None or quant_dtype is not FP4:
        arguments = f"scale {type(scale).__name__}, quant_dtype {quant_dtype}"
        raise OperandError(f"per_1x32_f4_quant takes its scales from the values and gives {FP4} (got {arguments})")
    rows = _rows(x)
    k = x.shape[-1]
    if k % _MX:
        raise OperandError(f"mxfp4 has one scale for each {_MX} elements: K must be a multiple of {_MX} (got K={k}); pad K with zeros")
    q = torch.empty(rows.shape[0], k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], k // _MX, dtype=torch.uint8, device=x.device)
    for part in _slices(*rows.shape):
        values = rows[part].to(torch.float32).view(-1, k // _MX, _MX)
        power = _power(values.abs().amax(-1))
        scale[part] = power.to(torch.uint8)
        # 1 / 2^(b - 127) has the exponent field 254 - b; a group that is not finite is multiplied
        # by 0
        inverse = (254 - power).clamp_(min=0).mul_(1 << 23).view(torch.float32)
        codes = _e2m1(values * inverse[..., None]).view(-1, k // 2, 2)
        q[part] = codes[..., 0] | (codes[..., 1] << 4)
    if shuffle:
        return as_fp4(q.view(*x.shape[:-1], k // 2)), shuffle_scale(scale.view(E8M0))
    return as_fp4(q.view(*x.shape[:-1], k // 2)), scale.view(*x.shape[:-1], k // _MX).view(E8M0)


def as_fp4(q: torch.Tensor) -> torch.Tensor:
    """View [..., K/2] bytes as torch.float4_e2m1fn_x2, the same memory.

    Raises:
        OperandError: q is of another dtype.
    """
    return as_bytes(q, FP4, "two e2m1 values a byte").view(FP4)


def dequant_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute q * scale in float32 (float64 for that dtype), rounded once to dtype.

    Args:
        q: [..., K], torch.int8 or a torch.float8.
        scale: one value, or one a row in any shape.

    Raises:
        OperandError: scale has another number of values, or q is none of these.
    """
    _limit(q.dtype)
    rows = _matrix(q)
    factors = scale.detach().reshape(1, 1).expand(rows.shape[0], 1) if scale.numel() == 1 else _per_row(scale, q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    flat = out.view(rows.shape)
    for part in _slices(*rows.shape):
        flat[part] = rows[part].to(_work(dtype)).mul_(factors[part]).to(dtype)
    return out


def dequant_blocks(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, block: tuple[int, int] = (1, 128)
) -> torch.Tensor:
    """Compute q * scale of each block in float32 (float64 for that dtype), rounded once to dtype.

    Args:
        q: [..., N, K], torch.int8 or a torch.float8.
        scale: [..., ceil(N/rows), ceil(K/columns)].
        block: (rows, columns) that share a scale: (1, 128) of activations, (128, 128) of weights.

    Raises:
        OperandError: scale has another shape, or q is none of these.
    """
    _limit(q.dtype)
    high, wide = block
    lines = _matrix(q) if high == 1 else q.detach()
    if lines.dim() < 2:
        raise OperandError(f"blocks of {high}x{wide} are of a tensor [..., N, K] (got {tuple(q.shape)})")
    count, (n, k) = lines.shape[:-2].numel(), lines.shape[-2:]
    down, across = -(-n // high), -(-k // wide)
    wanted = (*q.shape[:-1], across) if high == 1 else (*q.shape[:-2], down, across)
    if tuple(scale.shape) != wanted:
        raise OperandError(f"scales of {high}x{wide} blocks of {tuple(q.shape)} are {list(wanted)} (got {tuple(scale.shape)})")
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    work = _work(dtype)
    parts = zip(lines.reshape(count, n, k), out.view(count, n, k), scale.detach().reshape(count, down, across), strict=True)
    for source, target, scales in parts:
        for part in _slices(down, high * k):
            some = slice(part.start * high, min(part.stop * high, n))
            values = _blocks(source[some].to(work), high, wide) * scales[part].to(work)[:, None, :, None]
            target[some] = values.view(-1, across * wide)[: some.stop - some.start, :k].to(dtype)
    return out


def dequant_fp4(q: torch.Tensor, e8m0: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of mxfp4: e2m1 * 2^(byte - 127), byte 255 being NaN; rounded once to dtype.

    Args:
        q: [..., K/2], torch.float4_e2m1fn_x2 or torch.uint8, the even element in the low nibble.
        e8m0: [..., K/32] in plain order, torch.float8_e8m0fnu or torch.uint8.

    Returns:
        [..., K] of dtype.

    Raises:
        OperandError: the operands are none of these or do not fit together.
    """
    codes, bytes_ = as_bytes(q, FP4, "two e2m1 values a byte"), as_bytes(e8m0, E8M0, "e8m0 scales")
    k = 2 * q.shape[-1] if q.dim() else 0
    if not k or k % _MX or tuple(e8m0.shape) != (*q.shape[:-1], k // _MX):
        fits = f"{[*q.shape[:-1], k // _MX]}" if k % _MX == 0 else f"none: K={k} is no multiple of {_MX}"
        raise OperandError(
            f"e8m0 scales of fp4 values {tuple(q.shape)}: {fits} (got {tuple(e8m0.shape)}); unshuffle_scale(s, rows, K/32) first"
        )
    rows, powers = codes.reshape(-1, k // 2), bytes_.reshape(-1, k // _MX)
    out = torch.empty(*q.shape[:-1], k, dtype=dtype, device=q.device)
    flat = out.view(-1, k)
    for part in _slices(rows.shape[0], k):
        pairs = rows[part]
        values = _values(torch.stack((pairs & 15, pairs >> 4), -1).view(-1, k // _MX, _MX)).to(_work(dtype))
        values *= powers[part].view(E8M0).to(torch.float32).to(values.dtype)[..., None]
        flat[part] = values.view(-1, k).to(dtype)
    return out


def _rows(x: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """Reshape x to [rows, K] without a gradient; raise OperandError where it cannot be quantised."""
    if x.dtype not in _FLOATS:
        raise OperandError(f"quantisation takes bf16, fp16, fp32 or fp64 (got {x.dtype})")
    if x.dim() < dims or not x.shape[-1]:
        raise OperandError(
            f"quantisation needs a tensor of {dims} or more dimensions and a last one that is not empty (got {tuple(x.shape)})"
        )
    return _matrix(x)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., K] to [rows, K], without a gradient."""
    if not x.dim():
        raise OperandError("a tensor of one or more dimensions is needed (got a scalar)")
    return x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])


def _limit(dtype: torch.dtype) -> float:
    """Return the largest value of a dtype to quantise to."""
    if dtype is torch.int8:
        return 127.0
    if dtype not in _FP8:
        raise OperandError(f"quantised dtypes with a float32 scale are int8 and {', '.join(str(d)[6:] for d in _FP8)} (got {dtype})")
    return torch.finfo(dtype).max


def _per_row(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape a caller's scale to [rows, 1]."""
    rows = x.shape[:-1].numel()
    if scale.numel() != rows:
        raise OperandError(f"a scale a row of {tuple(x.shape)} has {rows} values (got shape {tuple(scale.shape)})")
    return scale.detach().to(torch.float32).reshape(rows, 1)


def _per_column(x_scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x_scale.numel() != x.shape[-1]:
        raise OperandError(f"x_scale of {tuple(x.shape)} has {x.shape[-1]} values, one a column (got shape {tuple(x_scale.shape)})")
    return x_scale.detach().to(torch.float32).reshape(1, -1)


def _slices(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that cover all rows, of about `_SLICE` elements each."""
    step = max(1, _SLICE // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _blocks(values: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """Reshape [n, k] to [blocks down, high, blocks across, wide], padded with zeros."""
    n, k = values.shape
    full = pad(values, (0, -k % wide, 0, -n % high)) if n % high or k % wide else values
    return full.reshape(full.shape[0] // high, high, full.shape[1] // wide, wide)


def _scale(top: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the scale for an amax; 1 where amax is 0 or vanishes when divided."""
    scale = top / limit
    return torch.where(scale == 0, 1.0, scale)


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, own: bool) -> torch.Tensor:
    """Compute values / scale, saturated and rounded (ties to even); overwrite values if possible.

    The result is 0 where a scale that was computed here is not finite.
    """
    limit = _limit(dtype)
    values = values.div_(scale)
    if own:
        values = values.masked_fill_(~scale.isfinite(), 0.0)
    if dtype is torch.int8:
        values = values.round_().nan_to_num_(nan=0.0)
    return values.clamp_(-limit, limit).to(dtype)


def _power(top: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 byte of amax / 6 rounded up to a power of two, as int32.

    It is 255 for values that are not finite and 0 for zero. It is read off the bits of
    amax = f * 2^e: f / 1.5 * 2^(e - 2) rounds up to 2^(e - 2) up to f = 1.5, beyond to 2^(e - 1). A
    division on the device may multiply by 1/6 instead, which is another number.
    """
    bits = top.contiguous().view(torch.int32) & 0x7FFFFFFF
    field, fraction = bits >> 23, bits & 0x7FFFFF
    power = (field - 2 + (fraction > 0x400000).to(torch.int32)).clamp_(min=1)
    # 3 units of the smallest subnormal and less vanish when divided by 6
    return torch.where(field == 255, 255, torch.where(bits <= 3, 0, power))


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 values in 4 bits: sign, then 0, .5, 1, 1.5, 2, 3, 4, 6.

    Ties go to the even code, NaN to 0.
    """
    size = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for half, even_below in ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)):
        code += size > half if even_below else size >= half
    return code


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Decode 4-bit codes to float32 without a table on the device.

    The bits of a normal code are those of a float, shifted.
    """
    size = (codes & 7).to(torch.int32)
    bits = torch.where(size > 1, (size + (126 << 1)) << 22, size * (126 << 23))
    return bits.view(torch.float32) * (1 - 2 * (codes >> 3).to(torch.float32))


def _work(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
