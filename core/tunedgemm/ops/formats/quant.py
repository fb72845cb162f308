"""int8 and fp8 quantisation and dequantisation in torch, on CPU and GPU, without synchronisation.

Names, scales and rounding are those of AITER's aiter/ops/quant.py and aiter/utility/fp4_utils.py,
with two differences: int8 is rounded to nearest (ties to even), where AITER's torch code truncates,
and values saturate instead of wrapping.

In all formats:

* an all-zero group (tensor, row or block) has scale 1 (mxfp4: byte 0) and values 0;
* a group with NaN or infinity has a non-finite scale (mxfp4: 255) and values 0, so it dequantises
  to NaN;
* with a given scale, infinities saturate; NaN stays NaN in fp8 and becomes 0 in int8;
* large tensors are processed in slices, so temporary memory is about 100 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from tunedgemm.dtype import fp8_of, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.scale_order import BLOCK, M_MAJOR_PADDED, ORDERS, ROW, blocks, padded

#: Elements processed at a time: 16 MiB as float32.
_SLICE = 1 << 22
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def pertoken_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    quant_dtype: torch.dtype = torch.int8,
    dtypeMax: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per row; the arguments are AITER's.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        scale: one float32 value per row, [..., 1] or [...]; by default the row's amax / largest
            value of quant_dtype.
        x_scale: [K], multiplied into x first, as in SmoothQuant.
        scale_dtype: dtype of the returned scales.
        quant_dtype: torch.int8 or a torch.float8.
        dtypeMax: the largest value to use instead of the dtype's.

    Returns:
        (q [..., K] of quant_dtype, scale [..., 1] of scale_dtype)

    Raises:
        OperandError: x or quant_dtype is not supported, or a scale has another size.
    """
    rows, limit = as_rows(x), _largest(quant_dtype, dtypeMax)
    smooth = None if x_scale is None else _per_column(x_scale, x)
    row_scales = None if scale is None else _per_row(scale, x)
    scales = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=x.device) if row_scales is None else row_scales
    q = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    flat = q.view(rows.shape)
    for part in slices(*rows.shape):
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
    dtypeMax: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per tensor; the arguments are AITER's.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        scale: one float32 value; by default amax / largest value of quant_dtype.
        scale_dtype: dtype of the returned scale.
        quant_dtype: torch.int8 or a torch.float8.
        dtypeMax: the largest value to use instead of the dtype's.

    Returns:
        (q [..., K] of quant_dtype, scale [1] of scale_dtype)

    Raises:
        OperandError: x or quant_dtype is not supported, or scale is not one value.
    """
    rows, limit = as_rows(x), _largest(quant_dtype, dtypeMax)
    if scale is not None and scale.numel() != 1:
        raise OperandError(f"the scale of a tensor is one value (got shape {tuple(scale.shape)}); pertoken_quant takes one a row")
    if scale is not None:
        tensor_scale = scale.detach().to(torch.float32).view(1)
    else:
        tops = [rows[part].abs().amax() for part in slices(*rows.shape)]
        top = torch.stack(tops).amax() if tops else torch.zeros((), device=x.device)
        tensor_scale = _scale(top.to(torch.float32), limit).view(1)
    q = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    flat = q.view(rows.shape)
    for part in slices(*rows.shape):
        flat[part] = _cast(rows[part].to(torch.float32, copy=True), tensor_scale, quant_dtype, own=scale is None)
    return q, tensor_scale.to(scale_dtype)


def per_1x128_quant(x: torch.Tensor, quant_dtype: torch.dtype | None = None, scale_order: str = ROW) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per 128 elements of K; the last group may be partial.

    Args:
        x: [..., K] of a float dtype of 16 bits or more.
        quant_dtype: torch.int8 or a torch.float8; None for the current device's fp8.
        scale_order: ``row`` for row-major scales; ``m_major`` for strides (1, M);
            ``m_major_padded`` for strides (1, 4 * ceil(M/4)), with undefined padding.

    Returns:
        (q [..., K] of quant_dtype, scale [..., ceil(K/128)] float32)

    Raises:
        OperandError: x, quant_dtype or scale_order is not supported.
    """
    rows, quant_dtype = as_rows(x), quant_dtype or torch_dtype(fp8_of())
    m, count = rows.shape[0], blocks(rows.shape[1])
    if scale_order not in ORDERS:
        raise OperandError(f"per_1x128_quant: scale_order must be {', '.join(ORDERS)} (got {scale_order!r})")
    if scale_order == ROW:
        scale = torch.empty(m, count, dtype=torch.float32, device=x.device)
    else:
        column = padded(m) if scale_order == M_MAJOR_PADDED else m
        scale = torch.empty(count, column, dtype=torch.float32, device=x.device)[:, :m].t()
    q = _quantise_blocks(rows, quant_dtype, (1, BLOCK), scale)
    return q.view(x.shape), scale.view(*x.shape[:-1], count)


def per_block_quant(
    w: torch.Tensor, quant_dtype: torch.dtype | None = None, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale per block; the last blocks of N and K may be partial.

    Args:
        w: [..., N, K] of a float dtype of 16 bits or more.
        quant_dtype: torch.int8 or a torch.float8; None for the current device's fp8.
        block: (rows, columns) per scale.

        Returns:
        (q [..., N, K] of quant_dtype, scale [..., ceil(N/rows), ceil(K/columns)] float32)

    Raises:
        OperandError: w or quant_dtype is not supported.
    """
    as_rows(w, dims=2)
    quant_dtype = quant_dtype or torch_dtype(fp8_of())
    sizes = [-(-size // side) for size, side in zip(w.shape[-2:], block, strict=True)]
    scale = torch.empty(*w.shape[:-2], *sizes, dtype=torch.float32, device=w.device)
    return _quantise_blocks(w, quant_dtype, block, scale), scale


def _quantise_blocks(w: torch.Tensor, quant_dtype: torch.dtype, block: tuple[int, int], scale: torch.Tensor) -> torch.Tensor:
    """Return q of `per_block_quant`; write the scales to *scale*, of any last two strides."""
    high, wide = block
    rows, limit = as_rows(w, dims=2), _limit(quant_dtype)
    count, (n, k) = w.shape[:-2].numel(), w.shape[-2:]
    down, across = scale.shape[-2:]
    q = torch.empty(w.shape, dtype=quant_dtype, device=w.device)
    for source, target, scales in zip(rows.view(count, n, k), q.view(count, n, k), scale.view(count, down, across), strict=True):
        for part in slices(down, high * k):
            lines = slice(part.start * high, min(part.stop * high, n))
            values = _blocks(source[lines].to(torch.float32, copy=True), high, wide)
            scales[part] = _scale(values.abs().amax((1, 3)), limit)
            values = _cast(values, scales[part][:, None, :, None], quant_dtype, own=True)
            target[lines] = values.reshape(-1, across * wide)[: lines.stop - lines.start, :k]
    return q


def dequant_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute q * scale in float32 (or float64), rounded once to *dtype*.

    Args:
        q: [..., K], torch.int8 or a torch.float8.
        scale: one value, or one per row, in any shape.

    Raises:
        OperandError: scale has another size, or q another dtype.
    """
    _limit(q.dtype)
    rows = _matrix(q)
    factors = scale.detach().reshape(1, 1).expand(rows.shape[0], 1) if scale.numel() == 1 else _per_row(scale, q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    flat = out.view(rows.shape)
    for part in slices(*rows.shape):
        flat[part] = rows[part].to(work_dtype(dtype)).mul_(factors[part]).to(dtype)
    return out


def dequant_blocks(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, block: tuple[int, int] = (1, 128)
) -> torch.Tensor:
    """Compute q * scale per block in float32 (or float64), rounded once to *dtype*.

    Args:
        q: [..., N, K], torch.int8 or a torch.float8.
        scale: [..., ceil(N/rows), ceil(K/columns)].
        block: (rows, columns) per scale: (1, 128) for activations, (128, 128) for weights.

    Raises:
        OperandError: scale has another shape, or q another dtype.
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
    work = work_dtype(dtype)
    parts = zip(lines.reshape(count, n, k), out.view(count, n, k), scale.detach().reshape(count, down, across), strict=True)
    for source, target, scales in parts:
        for part in slices(down, high * k):
            some = slice(part.start * high, min(part.stop * high, n))
            values = _blocks(source[some].to(work), high, wide) * scales[part].to(work)[:, None, :, None]
            target[some] = values.view(-1, across * wide)[: some.stop - some.start, :k].to(dtype)
    return out


def as_rows(x: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """Detach and reshape x to [rows, K]; raise OperandError if it cannot be quantised."""
    if x.dtype not in _FLOATS:
        raise OperandError(f"quantisation takes bf16, fp16, fp32 or fp64 (got {x.dtype})")
    if x.dim() < dims or not x.shape[-1]:
        raise OperandError(
            f"quantisation needs a tensor of {dims} or more dimensions and a last one that is not empty (got {tuple(x.shape)})"
        )
    return _matrix(x)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Detach and reshape [..., K] to [rows, K]."""
    if not x.dim():
        raise OperandError("a tensor of one or more dimensions is needed (got a scalar)")
    return x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])


def _limit(dtype: torch.dtype) -> float:
    if dtype is torch.int8:
        return 127.0
    if dtype not in _FP8:
        raise OperandError(f"quantised dtypes with a float32 scale are int8 and {', '.join(str(d)[6:] for d in _FP8)} (got {dtype})")
    return torch.finfo(dtype).max


def _largest(dtype: torch.dtype, wanted: float | None) -> float:
    """Return the largest value to quantise to: the dtype's, or a smaller one.

    Raises:
        OperandError: the dtype is not supported, or its largest value is below *wanted*.
    """
    limit = _limit(dtype)
    if wanted is not None and not 0 < wanted <= limit:
        raise OperandError(f"dtypeMax must be above 0 and at most the {limit:g} of {dtype} (got {wanted})")
    return limit if wanted is None else wanted


def _per_row(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape a given scale to [rows, 1]."""
    rows = x.shape[:-1].numel()
    if scale.numel() != rows:
        raise OperandError(f"a scale a row of {tuple(x.shape)} has {rows} values (got shape {tuple(scale.shape)})")
    return scale.detach().to(torch.float32).reshape(rows, 1)


def _per_column(x_scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x_scale.numel() != x.shape[-1]:
        raise OperandError(f"x_scale of {tuple(x.shape)} has {x.shape[-1]} values, one a column (got shape {tuple(x_scale.shape)})")
    return x_scale.detach().to(torch.float32).reshape(1, -1)


def slices(rows: int, width: int) -> Iterator[slice]:
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
    """Compute values / scale, saturated and rounded (ties to even), in place if possible.

    The result is 0 where a computed (*own*) scale is not finite.
    """
    limit = _limit(dtype)
    values = values.div_(scale)
    if own:
        values = values.masked_fill_(~scale.isfinite(), 0.0)
    if dtype is torch.int8:
        values = values.round_().nan_to_num_(nan=0.0)
    return values.clamp_(-limit, limit).to(dtype)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
