"""Repack weights of `a16wn` to the layouts of `tunedgemm.ops.repacked`, and decode them.

Marlin's scales are in its order: within 64 rows, transposed as 8 x 8, or within 32 as 4 x 4 pairs
where one scale serves the row. Those of fp8 contain the difference of the exponents' biases of fp8
and x. nvfp4's are e4m3 scales as five bits of exponent and three of mantissa, 2^7 times as large:
smaller ones than 2^-6 and negative ones become 0. Its global scale compensates for that. Machete's
scales are in order. Its zero points are minus scale times zero point, rounded to the dtype of x.
Humming's scales are in Marlin's order, with the checkpoint's values of 8 bits and global scale.
"""

from __future__ import annotations

import attrs
import torch

from tunedgemm.dtype import short_dtype, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.quant import slices, work_dtype
from tunedgemm.ops.formats.scales import E8M0
from tunedgemm.ops.formats.shuffle import as_shuffled, plain_weight
from tunedgemm.ops.formats.weight_only import Weight, _by_row, _values_of, unpack
from tunedgemm.ops.layout import CHECKPOINT, note_order
from tunedgemm.ops.repacked import HUMMING, MACHETE, MARLIN, PACKINGS, kind_of, misfit, stored_as
from tunedgemm.ops.weight_formats import WeightFormat, format_named, format_of
from tunedgemm.shape import Shape

#: Exponents of 2 by dtype of x: what Marlin's scales of fp8 and global scales of nvfp4 contain.
_OF_FP8 = {torch.bfloat16: 120, torch.float16: 8}
_OF_NVFP4 = {torch.bfloat16: 119, torch.float16: 7}
#: Largest e4m3 scale, the factor of nvfp4's scales, and the bits of fp16 below exponent and top 3.
_E4M3, _FACTOR, _LOW = 448.0, 128.0, 7


def repack_weight(stored: Weight, w_format: str, layout: str, dtype: torch.dtype = torch.bfloat16) -> Weight:
    """Repack the operands of a weight, which the checkpoint's format states, to another layout.

    The result is a second weight; free the first one. Call it when a layer is loaded: with
    act-order it reads the index, which waits for the device. The memory of both sides' operands is
    noted, so that `a16wn` refuses a mixture of them. Copies lose the note, as do operands that are
    written to where torch counts it.

    Args:
        stored: the weight as the checkpoint stores it.
        w_format: name of its format.
        layout: ``marlin``, ``machete`` or ``humming``.
        dtype: dtype of x.

    Raises:
        OperandError: the layout lacks the format, group, sizes or dtype, or the groups of an index
            differ in size.
    """
    form = format_named(w_format)
    if dtype not in _OF_FP8:
        raise OperandError(f"repack_weight: dtype must be {' or '.join(map(str, _OF_FP8))} (got {dtype}); pass the dtype of x")
    _check_given(stored, form)
    codes = unpack(stored.weight, form, form.along)
    (n, k), scale = codes.shape, _by_row(stored.w_scale, form, codes.shape[0])
    order, group = None, 0 if scale.shape[1] == 1 else k // scale.shape[1]
    extra = {"w_format": w_format, "w_group": group}
    if fault := misfit(Shape("a16wn", 1, n, k, short_dtype(dtype), layout=layout, extra=extra)):  # type: ignore[arg-type]
        raise OperandError(f"repack_weight: {fault}")
    if stored.w_index is not None:
        order = _order(stored.w_index, scale.shape[1])
        codes = codes[:, order]
    zeros = None
    if stored.w_zeros is not None:
        zeros = (unpack(stored.w_zeros, form, "n")[:n] + (form.zeros or 0)) & ((1 << form.bits) - 1)
    factor = stored.w_global_scale
    if layout == MACHETE:
        scale = scale.t().to(dtype).contiguous()
        zeros = None if zeros is None else (-scale * zeros.t().to(dtype)).contiguous()
    elif layout == HUMMING:
        scale = _humming_scales(form, stored, scale.t(), dtype)
        zeros = None if zeros is None else _pack_zeros(zeros.t(), alternate=False)
    else:
        scale, factor = _marlin_scales(form, stored, scale.t(), dtype)
        zeros = None if zeros is None else _pack_zeros(zeros.t())
    weight = as_shuffled(_packed(codes, form, layout).view(*stored.weight.shape[:-1], -1).view(stored.weight.dtype), layout)
    repacked = Weight(weight, scale, zeros, None if order is None else order.to(torch.int32), factor)
    for one, other in zip(attrs.astuple(stored, recurse=False)[1:], attrs.astuple(repacked, recurse=False)[1:], strict=True):
        if one is not None and other is not None and one.data_ptr() != other.data_ptr():  # else both layouts share it
            note_order(one, CHECKPOINT, until_written=True)
            note_order(other, layout, until_written=True)
    return repacked


def _check_given(stored: Weight, form: WeightFormat) -> None:
    """Check that a weight has the operands of its format, whose sizes the layout cannot tell from others."""
    given = {"w_zeros": form.zeros is not None, "w_index": form.has_index, "w_global_scale": form.has_global}
    for name, has in given.items():
        if (getattr(stored, name) is not None) is not has:
            raise OperandError(f"repack_weight: {form.name} {'needs' if has else 'has no'} {name}; pass the operands of its format")


def decode_repacked(shape: Shape, stored: Weight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return value times scale [N, K] in *dtype* of a weight in the shape's layout, and its global scale."""
    form, (n, k), inner = format_of(shape), (shape.n, shape.k), work_dtype(dtype)
    codes, scale, zeros, factor = _unpacked(plain_weight(stored.weight), form, shape), stored.w_scale, None, stored.w_global_scale
    if shape.layout == MARLIN:
        scale, factor = _scales_of_marlin(form, stored, torch_dtype(shape.dtype))
    elif shape.layout == HUMMING:
        scale = _moved((scale.view(E8M0) if "e8m0" in form.scale else scale).float())
        factor = None if factor is None else factor.reshape(())
    if shape.layout != MACHETE and stored.w_zeros is not None:
        zeros = _unpack_zeros(stored.w_zeros, alternate=shape.layout == MARLIN)
    scale = scale.to(torch.float32).t()
    out = torch.zeros(n, k, dtype=dtype, device=codes.device)
    for part in slices(n, k):
        values = _values_of(codes[part], form).to(inner).view(-1, scale.shape[1], k // scale.shape[1])
        if zeros is not None:
            values -= zeros.t()[part, :, None]
        values *= scale[part, :, None]
        if zeros is None and stored.w_zeros is not None:
            values += stored.w_zeros.t()[part, :, None].to(inner)
        rows = values.view(-1, k).to(dtype)
        out[part] = rows if stored.w_index is None else out[part].index_add(1, stored.w_index, rows)
    return out, factor


def _order(index: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the columns of K sorted by group."""
    counts = torch.bincount(index.clamp(0, groups), minlength=groups + 1)
    if int(index.amin()) < 0 or counts[groups] or counts[:groups].amin() != counts[:groups].amax():
        raise OperandError(
            f"repack_weight: w_index must name each of {groups} groups equally often; of a sharded weight with act-order, "
            "pass the weight as the checkpoint stores it"
        )
    return torch.argsort(index, stable=True)


def _packed(codes: torch.Tensor, form: WeightFormat, layout: str) -> torch.Tensor:
    """Return the bytes of codes [N, K] in a layout's order."""
    packing = PACKINGS[layout]
    values = codes.contiguous().view(torch.uint8) ^ (128 if "int8" in form.dtypes else 0)
    moved = values.view(*packing.n, *_with_rest(packing.k, codes.shape[1])).permute(packing.orders[form.bits]).reshape(-1)
    return moved if form.bits == 8 else moved[::2] | (moved[1::2] << 4)


def _unpacked(weight: torch.Tensor, form: WeightFormat, shape: Shape) -> torch.Tensor:
    """Invert `_packed`: return codes as uint8, or values of a native dtype, [N, K]."""
    packing, order = PACKINGS[shape.layout], PACKINGS[shape.layout].orders[form.bits]
    flat = weight.view(torch.uint8).view(-1)
    flat = flat if form.bits == 8 else torch.stack([flat & 15, flat >> 4], -1).view(-1)
    sizes = (*_with_rest(packing.n, shape.n), *_with_rest(packing.k, shape.k))
    inverse = [order.index(part) for part in range(len(order))]
    codes = flat.view([sizes[part] for part in order]).permute(inverse).reshape(shape.n, shape.k)
    if "int8" in form.dtypes:
        codes = codes ^ 128
    return codes if form.values else codes.view(torch_dtype(form.dtypes[0]))


def _with_rest(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    rest = size
    for part in sizes[1:]:
        rest //= part
    return (rest, *sizes[1:])


def _moved(scale: torch.Tensor) -> torch.Tensor:
    """Bring [groups, N] into or out of Marlin's order, which is its own inverse."""
    sides = (8, 8, 1) if scale.shape[0] > 1 else (4, 4, 2)
    return scale.reshape(scale.shape[0], -1, *sides).transpose(2, 3).reshape(scale.shape)


def _swapped(scale: torch.Tensor) -> torch.Tensor:
    """Swap the middle ones of each four columns, as Marlin reads scales of 8 bits."""
    return scale.reshape(scale.shape[0], -1, 2, 2).transpose(2, 3).reshape(scale.shape)


def _marlin_scales(form: WeightFormat, stored: Weight, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scales [groups, N] of a weight as Marlin reads them, and its global scale."""
    if "e8m0" in form.scale:
        return _swapped(_moved(stored.w_scale.view(torch.uint8).t())).view(E8M0), None
    if stored.w_global_scale is None:
        moved = _moved(scale).to(dtype)
        return (moved * 2.0 ** _OF_FP8[dtype] if kind_of(form) == "float8_e4m3fn" else moved), None
    top = scale.amax()
    lift = torch.exp2(torch.floor(torch.log2(_E4M3 / top))).clamp(min=1).where((top > 0) & (dtype == torch.bfloat16), 1.0)
    large = (_swapped(_moved(scale)) * lift).to(torch.float16) * _FACTOR
    large = large.where(~(large < 2), 0.0)
    five_bits = ((large.view(torch.int16) >> _LOW) & 255).to(torch.uint8).view(torch.float8_e4m3fn)
    return five_bits, stored.w_global_scale.reshape(()) * 2.0 ** _OF_NVFP4[dtype] / lift


def _humming_scales(form: WeightFormat, stored: Weight, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales [groups, N] of a weight as Humming reads them: those of 8 bits are kept."""
    if not (kept := stored_as(form, HUMMING).scale):
        return _moved(scale).to(dtype)
    return _moved(stored.w_scale.view(torch.uint8).t()).view(torch_dtype(kept[0]))


def _scales_of_marlin(form: WeightFormat, stored: Weight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Invert `_marlin_scales`, in float32 and in order."""
    scale, factor = stored.w_scale, stored.w_global_scale
    if factor is not None:
        values = (scale.view(torch.uint8).to(torch.int16) << _LOW).view(torch.float16).float() / _FACTOR
        return _moved(_swapped(values)), factor.reshape(()) / 2.0 ** _OF_NVFP4[dtype]
    if "e8m0" in form.scale:
        return _moved(_swapped(scale.view(E8M0).float())), None
    exponent = _OF_FP8[dtype] if kind_of(form) == "float8_e4m3fn" else 0
    return _moved(scale.float()) / 2.0**exponent, None


def _pack_zeros(zeros: torch.Tensor, *, alternate: bool = True) -> torch.Tensor:
    """Pack zero points [groups, N] into int32 [groups, N/8]: 8 x 8 transposed, each 8 in alternation."""
    groups = zeros.shape[0]
    moved = zeros.reshape(groups, -1, 8, 8).transpose(2, 3).reshape(groups, -1)
    moved = moved.reshape(groups, -1, 4, 2).transpose(2, 3).reshape(groups, -1) if alternate else moved
    return (moved[:, ::2] | (moved[:, 1::2] << 4)).contiguous().view(torch.int32)


def _unpack_zeros(packed: torch.Tensor, *, alternate: bool = True) -> torch.Tensor:
    """Invert `_pack_zeros`."""
    groups, flat = packed.shape[0], packed.view(torch.uint8)
    moved = torch.stack([flat & 15, flat >> 4], -1).view(groups, -1)
    moved = moved.view(groups, -1, 2, 4).transpose(2, 3) if alternate else moved
    return moved.reshape(groups, -1, 8, 8).transpose(2, 3).reshape(groups, -1)
