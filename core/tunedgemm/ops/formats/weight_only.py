"""Decode and quantise weights of any `tunedgemm.ops.weight_formats.WeightFormat`."""

from __future__ import annotations

import attrs
import torch

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.mxfp4 import e2m1_codes, e2m1_values, power_of
from tunedgemm.ops.formats.quant import as_rows, slices, work_dtype
from tunedgemm.ops.formats.scales import E8M0
from tunedgemm.ops.weight_formats import E2M1, WeightFormat, format_named


@attrs.frozen(eq=False)
class Weight:
    """A weight as its format stores it; the fields are operands of ``a16wn`` in their order."""

    weight: torch.Tensor
    w_scale: torch.Tensor
    w_zeros: torch.Tensor | None = None
    w_index: torch.Tensor | None = None
    w_global_scale: torch.Tensor | None = None


def unpack(stored: torch.Tensor, form: WeightFormat, along: str) -> torch.Tensor:
    """Return the codes of a packed tensor as uint8 [N, …], or a tensor of a native dtype [N, K]."""
    stored = stored.t() if form.is_kn else stored
    if form.per == 1:
        return stored
    stored = stored.view(torch.uint8) if stored.element_size() == 1 else stored
    dim, mask = int(along == "k"), (1 << form.bits) - 1
    parts = [((stored >> form.bits * form.order.index(place)) & mask).to(torch.uint8) for place in range(form.per)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def pack(codes: torch.Tensor, form: WeightFormat, along: str) -> torch.Tensor:
    """Invert `unpack`; zeros fill up the last element."""
    dim, short = int(along == "k"), -codes.shape[along == "k"] % form.per
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, short) if dim else (0, 0, 0, short)).unflatten(dim, (-1, form.per))
    shifts = torch.tensor([form.bits * form.order.index(place) for place in range(form.per)], device=codes.device)
    words = (codes << (shifts if dim else shifts[:, None])).sum(dim + 1).to(torch_dtype(form.dtypes[-1]))  # wraps
    return (words.t() if form.is_kn else words).contiguous()


def decode(form: WeightFormat, stored: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return value times scale [N, K] in *dtype*, without the global scale.

    It is computed in float64 for float64, else in float32. An index beyond the groups gives NaN.
    """
    (n, k), inner, weight = form.sizes(tuple(stored.weight.shape)), work_dtype(dtype), stored.weight
    whole = unpack(weight, form, "n") if form.along == "n" else None  # else in slices, which takes less memory
    scale, zeros, index = _by_row(stored.w_scale, form, n), None, stored.w_index
    if stored.w_zeros is not None:
        zeros = (unpack(stored.w_zeros, form, "n")[:n] + (form.zeros or 0)) & ((1 << form.bits) - 1)
    if index is not None:
        scale = torch.nn.functional.pad(scale, (0, 1), value=torch.nan)
        index = index.where((index >= 0) & (index < scale.shape[1]), -1) % scale.shape[1]
        zeros = None if zeros is None else torch.nn.functional.pad(zeros, (0, 1))
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    for part in slices(n, k):
        scales = scale[part] if index is None else scale[part][:, index]
        codes = unpack(weight[:, part] if form.is_kn else weight[part], form, "k") if whole is None else whole[part]
        values = _values_of(codes, form).to(inner).view(-1, scales.shape[1], k // scales.shape[1])
        if zeros is not None:
            values -= (zeros[part] if index is None else zeros[part][:, index])[..., None]
        out[part] = (values * scales[..., None].to(inner)).view(-1, k)
    return out


def _values_of(codes: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Return the values of codes in float32, without a copy from the host, so that graphs can capture it."""
    if not form.values:
        return codes.to(torch.float32)
    if form.values == E2M1:
        return e2m1_values(codes)
    first = form.values[0]
    if form.values == tuple(first + code for code in range(len(form.values))):
        return codes.to(torch.float32) + first
    table = torch.cat([torch.full((1,), value, dtype=torch.float32, device=codes.device) for value in form.values])
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _by_row(scale: torch.Tensor, form: WeightFormat, n: int) -> torch.Tensor:
    """Return scales as float32 [N, groups]."""
    scale = (scale.view(E8M0) if scale.dtype is torch.uint8 else scale).to(torch.float32)
    if not form.rows:
        return scale.reshape(1, 1).expand(n, 1)
    scale = scale.t() if form.is_kn else scale
    return scale if form.rows == 1 else scale.repeat_interleave(form.rows, 0)[:n]


def quantise(
    w_format: str, weight: torch.Tensor, group: int | None = None, *, dtype: torch.dtype = torch.bfloat16, index: torch.Tensor | None = None
) -> Weight:
    """Quantise a weight [N, K] to a format, each value to its nearest code.

    Scales are amax over the largest value, e8m0 rounded up. int4 and int8 have GPTQ's and
    compressed-tensors' rule: 2 amax / (2^bits - 1), or with zero points the range of the values
    and 0 over 2^bits - 1. A global scale is amax / 2688, which multiplies (decode convention).

    Args:
        w_format: name of the format.
        weight: [N, K] of a float dtype of 16 bits or more.
        group: elements of K per scale; 0 for the row; by default the format's largest.
        dtype: dtype of scales that have that of the activations.
        index: the group of each element of K as int32, each equally often, for act-order.

    Raises:
        OperandError: a wrong argument, or sizes that the group or the packing does not divide.
    """
    form, values = format_named(w_format), as_rows(weight, dims=2).float()
    (n, k), group = values.shape, max(form.groups) if group is None else group
    if group not in form.groups or form.has_index is (index is None):
        groups, has = " or ".join(map(str, form.groups)), "an" if form.has_index else "no"
        raise OperandError(f"quantise: {w_format} has {has} index and groups of {groups} (got group={group}, index={index is not None})")
    if k % (group or k) or (n if form.along == "n" else k) % form.per:
        needs = f"K must be a multiple of {group or 1} and {form.along.upper()} of {form.per}"
        raise OperandError(f"quantise: {w_format}: {needs} (got N={n}, K={k}); pad the weight with zeros")
    order = None if index is None else torch.argsort(index, stable=True)
    grouped = (values if order is None else values[:, order]).view(n, k // (group or k), group or k)
    scale, zeros, factor = _scales(form, grouped, dtype)
    divisor = _by_row(scale, attrs.evolve(form, is_kn=False), n)[..., None] * (1 if factor is None else factor)
    scaled = torch.nan_to_num(grouped / divisor) + (0 if zeros is None else zeros[..., None])
    codes = _codes(form, scaled).view(n, k)
    codes = codes if order is None else codes[:, torch.argsort(order)]
    packed = None if zeros is None else pack((zeros.to(torch.int64) - (form.zeros or 0)) & ((1 << form.bits) - 1), form, "n")
    scale = scale.t().contiguous() if form.is_kn else scale
    return Weight(pack(codes, form, form.along) if form.per > 1 else codes, scale, packed, index, factor)


def _scales(form: WeightFormat, grouped: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the scales [N, groups], zero points and global scale of values [N, groups, group]."""
    stored, last = torch_dtype(form.scale[0]) if form.scale else dtype, (1 << form.bits) - 1
    if form.zeros is not None:
        low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
        scale = _nonzero(((high - low) / last).to(stored))
        return scale, torch.nan_to_num(-low / scale.float()).round_().clamp_(0, last), None
    top, limit = grouped.abs().amax(-1), _limit(form)
    if form.rows != 1:
        rows = form.rows or top.shape[0]
        top = torch.nn.functional.pad(top, (0, 0, 0, -top.shape[0] % rows)).unflatten(0, (-1, rows)).amax(1)
    if stored is E8M0:
        return power_of(top, limit).to(torch.uint8).view(E8M0), None, None
    if form.has_global:
        factor = global_scale_of(top, limit, stored)
        return scales_of(top, factor, limit, stored), None, factor
    scale = _nonzero((top / limit).to(stored))
    return scale if form.rows else scale.view(()), None, None


def global_scale_of(top: torch.Tensor, limit: float, stored: torch.dtype) -> torch.Tensor:
    """Return the global scale of amaxima: amax over the largest value and the largest scale, 1 for zeros."""
    amax = top.amax().float() if top.numel() else torch.zeros((), device=top.device)
    return _nonzero(amax / (limit * torch.finfo(stored).max))


def scales_of(top: torch.Tensor, factor: torch.Tensor, limit: float, stored: torch.dtype) -> torch.Tensor:
    """Return the scales of amaxima below a global scale, to nearest; NaN for infinity and NaN."""
    top = top.where(top.isfinite(), torch.nan)
    return (top / (limit * factor)).clamp_(max=torch.finfo(stored).max).to(stored)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    return scale.where(scale != 0, 1.0)


def _limit(form: WeightFormat) -> float:
    """Return half of the range of a format's values."""
    if form.values:
        return (max(form.values) - min(form.values)) / 2
    stored = torch_dtype(form.dtypes[0])
    return 127.5 if stored is torch.int8 else torch.finfo(stored).max


def _codes(form: WeightFormat, scaled: torch.Tensor) -> torch.Tensor:
    """Round scaled values to the nearest codes, or to a native dtype."""
    if not form.values:
        stored = torch_dtype(form.dtypes[0])
        integral = stored is torch.int8
        return scaled.round().clamp_(-128, 127).to(stored) if integral else scaled.clamp(-_limit(form), _limit(form)).to(stored)
    if form.values == E2M1:
        return e2m1_codes(scaled)
    table, order = torch.tensor(form.values, dtype=torch.float32, device=scaled.device).sort()
    return order[torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)].to(torch.uint8)
