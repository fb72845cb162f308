"""a16wn: ``out[..., N] = x[..., K] @ decoded(weight)[N, K].T (+ bias[N])``, 16-bit activations.

Field ``w_format`` of the shape names the weight's format (`tunedgemm.ops.weight_formats`), and
``w_group`` the elements of K that share a scale, 0 for the whole row. Weights, scales and zero
points are as checkpoints store them, or in a layout of `tunedgemm.ops.repacked`. A global scale
multiplies the float32 accumulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import short_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import decoding, quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.e8m0 import check_not_shuffled
from tunedgemm.ops.hot import hot, public
from tunedgemm.ops.layout import layout_of
from tunedgemm.ops.op import Factors, unbiased
from tunedgemm.ops.repacked import check_tied, misfit, stored_as
from tunedgemm.ops.schema import BIAS, MNK, Column, Dtype, Schema, Size, Word
from tunedgemm.ops.weight_formats import FORMAT, FORMATS, GROUP, WeightFormat, format_named, format_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

NAME = "a16wn"
_OPERANDS = decoding.OPERANDS[NAME]
#: Dtypes of the activations; the first is the default of rows without one.
_DTYPES = ("bf16", "fp16")

_SCHEMA = Schema(
    {"op": NAME, "scale": "block"},
    key=(
        *MNK,
        Dtype("x_dtype", "dtype", _DTYPES[0], allowed=_DTYPES),
        Word(FORMAT, FORMAT, None, allowed=lambda _: tuple(FORMATS)),
        Size(GROUP, GROUP),
    ),
    own=(Column("layout", "layout", "row"), quantised.OUTDTYPE, BIAS),
)
_example = quantised.example_of(_SCHEMA)


def _shape_of(  # noqa: PLR0913 - the op's operands
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    w_zeros: torch.Tensor | None = None,
    w_index: torch.Tensor | None = None,
    w_global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
    w_format: str = "",
) -> Shape:
    form = format_named(w_format)
    quantised.check_dtype(NAME, "x", x, _DTYPES)
    quantised.check_dtype(NAME, "weight", weight, form.dtypes)
    layout, dtype = layout_of(NAME, weight), short_dtype(x.dtype)
    check_tied(NAME, layout, w_scale=w_scale, w_zeros=w_zeros, w_index=w_index, w_global_scale=w_global_scale)
    n, k = _sizes(form, x, weight)
    form = stored_as(form, layout)
    group = _group(form, n, k, w_scale)
    check_not_shuffled(NAME, "w_scale", w_scale, "row-major", n, k // (group or k))
    scales = (form.scale_sizes(n, k, group), *(((1,),) if form.rows == 0 else ()))
    _check(form, x, "w_scale", w_scale, scales, form.scale or (dtype,))
    _check(form, x, "w_zeros", w_zeros, (form.zero_sizes(n, k, group),) if form.zeros is not None else (), form.dtypes or (dtype,))
    _check(form, x, "w_index", w_index, ((k,),) if form.has_index else (), ("int32",))
    _check(form, x, "w_global_scale", w_global_scale, ((), (1,)) if form.has_global else (), ("fp32",))
    bias_dtype = quantised.bias_dtype_of(NAME, bias, n, x.device)
    out, epilogue = quantised.outdtype_of(NAME, otype, dtype), "bias" if bias_dtype else "none"
    extra: Any = {FORMAT: w_format, GROUP: group}
    shape = Shape(NAME, quantised.rows_of(x), n, k, dtype, out, epilogue, bias_dtype, "block", layout, extra)
    if fault := _problem(shape):
        raise OperandError(f"{NAME}: {fault}")
    return shape


def _check(
    form: WeightFormat, x: torch.Tensor, name: str, operand: Any, sizes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> None:
    """Check an operand of the weight; without *sizes* the format has none."""
    if operand is None and sizes:
        remedy = {"w_zeros": "qzeros or weight_zero_point", "w_index": "g_idx"}.get(name, "scale")
        raise OperandError(f"{NAME}: {name}: {form.name} needs it (got None); pass the checkpoint's {remedy}")
    if operand is not None and not sizes:
        hints = {"w_zeros": "the constant ones of a symmetric weight are left out", "w_index": "formats with act-order end in _order"}
        remedy = f"; {hints[name]}" if name in hints else ""
        raise OperandError(f"{NAME}: {name}: {form.name} has none (got {quantised.describe(operand)}){remedy}")
    if name == "w_scale" and not form.scale and operand.dtype != x.dtype and tuple(operand.shape) in sizes:
        raise OperandError(f"{NAME}: w_scale must be {x.dtype} (got {operand.dtype}), the dtype of x; pass w_scale.to(x.dtype)")
    if operand is not None:
        quantised.check_scale(NAME, name, operand, sizes, dtypes, x.device)
        if not operand.is_contiguous():
            raise OperandError(f"{NAME}: {name} must be contiguous (got strides {operand.stride()}); pass {name}.contiguous()")


def _sizes(form: WeightFormat, x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """Return N and K; raise an error if x and the stored weight do not match."""
    n, k = form.sizes(tuple(weight.shape)) if weight.dim() == 2 else (0, 0)
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != k or x.device != weight.device:
        over = f"/{form.per}" if form.per > 1 else ""
        names = ["N", f"K{over}"] if form.along == "k" else [f"N{over}", "K"]
        wanted = ", ".join(reversed(names) if form.is_kn else names)
        raise OperandError(
            f"{NAME}: the weight of {form.name} must be [{wanted}] for x [..., K] on its device "
            f"(got x {quantised.describe(x)}, weight {quantised.describe(weight)})"
        )
    if not n or not k:
        raise ShapeError(f"{NAME}: N and K must be at least 1 (got N={n}, K={k})")
    return n, k


def _group(form: WeightFormat, n: int, k: int, w_scale: torch.Tensor) -> int:
    """Return the elements of K per scale, by the sizes of the scales; 0 for the whole row.

    One scale a row is group 0, also for a shard of K inside a larger group, since all of its
    columns share that scale.

    Raises:
        OperandError: no valid group has these scales.
    """
    if form.groups == (0,):
        return 0
    groups = [group for group in form.groups if k % (group or k) == 0]
    fits = [group for group in groups if tuple(w_scale.shape) == form.scale_sizes(n, k, group)]
    if not fits:
        wanted = " or ".join(f"{list(form.scale_sizes(n, k, group))} for group {group or 'K'}" for group in groups)
        fault = f"must be {wanted}" if wanted else f"needs a group of {' or '.join(map(str, form.groups))}, which must divide K={k}"
        hint = "; of a sharded weight with act-order, keep the scales of all groups" if form.has_index else ""
        raise OperandError(f"{NAME}: w_scale of {form.name} {fault} (got {quantised.describe(w_scale)}){hint}")
    return min(fits)


def check_values(w_index: torch.Tensor | None, w_global_scale: torch.Tensor | None, groups: int) -> None:
    """Check that an act-order index names groups that exist, and the convention of a global scale.

    Calls read no values, since that would wait for a GPU. Check a layer once, when it is loaded.

    Raises:
        OperandError: a group is outside, or the scale is not finite, not above 0, or above 1.
    """
    if w_index is not None:
        low, high = (int(end) for end in w_index.aminmax())
        if low < 0 or high >= groups:
            raise OperandError(
                f"{NAME}: w_index: groups must be from 0 to {groups - 1} (got {low} to {high}); "
                "of a sharded weight with act-order, keep the scales and zero points of all groups"
            )
    if w_global_scale is not None:
        quantised.check_global_scale(NAME, "w_global_scale", w_global_scale, 1.0)


def _problem(shape: Shape) -> str:
    """Return why a shape of known dtypes is impossible; "" if it is valid."""
    if shape[FORMAT] not in FORMATS:
        return f"{FORMAT} must be {' or '.join(FORMATS)} (got {shape[FORMAT]})"
    form, group = format_of(shape), shape[GROUP]
    if group not in form.groups and not (group == shape.k and 0 in form.groups):
        return f"{GROUP} must be {' or '.join(map(str, form.groups))} (got {group})"
    if shape.k % (int(group) or shape.k):
        return f"K must be a multiple of {group}, which share a scale (got K={shape.k})"
    size, name = (shape.k, "K") if form.along == "k" else (shape.n, "N")
    if size % form.per:
        return f"{name} must be a multiple of {form.per}, which share an element (got {name}={size})"
    least = form.per if form.is_kn else 0  # else `_fake` could not tell the weight's orientation
    return f"K must be more than {least} (got K={shape.k})" if shape.k <= least else misfit(shape)


def _canonical(shape: Shape) -> Shape:
    """Return a shape with group 0 where one group is the whole row."""
    if shape[GROUP] != shape.k or 0 not in format_of(shape).groups:
        return shape
    return shape.with_extra(tuple((name, 0 if name == GROUP else value) for name, value in shape.extra))


def _factors(shape: Shape) -> tuple[Factors, ...]:
    """Return x and the weight; zero points that contain the scales are another factor."""
    zeros = stored_as(format_of(shape), shape.layout)
    contains = zeros.zeros is not None and not zeros.dtypes
    return (Factors((0,), (1, 2, 3, 4, 5)), Factors((), (3,)))[: 1 + contains]


def _fake(x: torch.Tensor, weight: torch.Tensor, w_scale: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    """Make an empty output [..., N].

    Scales [groups, N] have fewer rows than the weight that they belong to, [K/8, N] or [K, N/8],
    or as many for K = 0; others have N rows, as their weight.
    """
    import torch

    is_empty = not weight.shape[0] and not x.shape[-1]
    is_kn = weight.dtype is torch.int32 and (w_scale.shape[0] != weight.shape[0] or is_empty)
    return x.new_empty((*x.shape[:-1], w_scale.shape[1] if is_kn else weight.shape[0]), dtype=otype or x.dtype)


def gemm_a16wn(  # noqa: PLR0913, PLR0917 - the op's operands
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    w_zeros: torch.Tensor | None = None,
    w_index: torch.Tensor | None = None,
    w_global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    w_format: str,
) -> torch.Tensor:
    """Compute ``x[..., K] @ decoded(weight).T (+ bias)`` by the solution that the tables choose.

    Args:
        x: activations [..., K] in bf16 or fp16.
        weight: the weight as the checkpoint stores it.
        w_scale: its scales as the checkpoint stores them, those of int4 in the dtype of x.
        w_zeros: packed zero points, for formats with them.
        w_index: the group of each element of K as int32 (``g_idx``), for formats with act-order.
        w_global_scale: one float32 value that multiplies the product (decode convention).
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        dtype: output dtype: bf16, fp16 or fp32; None for that of x.
        w_format: name of the format, such as ``gptq_int4``; docs/ops.md lists them.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: an unknown format, or mismatched sizes, dtypes or devices.
    """
    return hot(x, weight, w_scale, w_zeros, w_index, w_global_scale, bias, w_format, dtype)


def _examples() -> tuple[Shape, ...]:
    grouped = [
        _example(m, 96, 256, w_format=name, w_group=str(group), x_dtype=dtype, outdtype=dtype)
        for name, form in FORMATS.items()
        for m, dtype, groups in ((1, "bf16", form.groups), (5, "fp16", form.groups[-1:]))
        for group in groups
    ]
    return (
        *grouped,
        _example(3, 64, 256, w_format="gptq_int4", w_group="64", layout="marlin"),
        _example(1, 128, 64, w_format="gptq_int4_zp_order", w_group="32", layout="marlin"),
        _example(5, 192, 128, w_format="awq_int4", w_group="0", layout="marlin", x_dtype="fp16", outdtype="fp16"),
        _example(4, 64, 128, w_format="int8_channel", w_group="0", layout="marlin"),
        _example(2, 128, 256, w_format="fp8_block", w_group="128", layout="marlin", x_dtype="fp16", outdtype="fp32"),
        _example(3, 64, 128, w_format="mxfp4", w_group="32", layout="marlin", bias="True"),
        _example(4, 64, 256, w_format="nvfp4", w_group="16", layout="marlin", x_dtype="fp16", outdtype="fp16"),
        _example(3, 128, 128, w_format="ct_int4", w_group="64", layout="machete"),
        _example(2, 256, 128, w_format="gptq_int4_zp_order", w_group="64", layout="machete"),
        _example(5, 128, 64, w_format="awq_int4", w_group="0", layout="machete", x_dtype="fp16", outdtype="fp32", bias="True"),
        _example(3, 128, 128, w_format="fp8_channel", w_group="0", layout="humming"),
        _example(2, 128, 256, w_format="ct_int4_zp", w_group="64", layout="humming", x_dtype="fp16", outdtype="fp16"),
        _example(4, 128, 128, w_format="mxfp8", w_group="32", layout="humming", bias="True"),
        _example(5, 256, 128, w_format="nvfp4", w_group="16", layout="humming", x_dtype="fp16", outdtype="fp16"),
        _example(1, 128, 256, w_format="gptq_int4_order", w_group="64", layout="marlin"),
        _example(33, 130, 96, w_format="gptq_int4", w_group="32", outdtype="fp32"),
        _example(7, 257, 256, w_format="ct_int4_zp", w_group="128", bias="True"),  # odd N
        _example(6, 131, 256, w_format="gptq_int4_zp_order", w_group="64", x_dtype="fp16", bias="True"),
        _example(3, 257, 320, w_format="nvfp4", w_group="16", x_dtype="fp16", outdtype="fp32", bias="True"),
        _example(9, 131, 256, w_format="fp8_block", w_group="128", outdtype="fp32", bias="True"),
        _example(17, 48, 96, w_format="mxfp8", w_group="32", x_dtype="fp16", outdtype="fp32"),
        _example(0, 256, 512, w_format="awq_int4", w_group="128"),  # an empty batch
    )


op = quantised.product_op(
    _SCHEMA,
    "AITER_CONFIG_GEMM_A16WN",
    values=("libtype", *quantised.VALUES),
    operands=_OPERANDS,
    weights=(1, 2, 3, 4, 5, 6),
    shuffled_scales=(2, 3, 4, 5),
    shape_of=_shape_of,
    make_inputs=decoding.make_inputs,
    reference=decoding.reference,
    bytes_moved=decoding.bytes_moved,
    fake=_fake,
    factors=_factors,
    fields=lambda shape: {FORMAT: shape[FORMAT]},
    problem=Domain(_DTYPES, quantised.OUTDTYPES, quantised.BIAS_DTYPES, ("block",), "own", extra=(FORMAT, GROUP), further=_problem).problem,
    canonical=_canonical,
    unbiased=unbiased,
    weight_dtype=lambda shape: format_of(shape).dtypes[0],
    examples=_examples,
    large=lambda: (
        _example(16, 4096, 4096, w_format="gptq_int4", w_group="128"),
        _example(1024, 6144, 4096, w_format="awq_int4", w_group="128", x_dtype="fp16"),
        _example(64, 4096, 14336, w_format="nvfp4", w_group="16"),
        _example(4099, 2112, 1408, w_format="mxfp8", w_group="32"),
        _example(64, 6144, 4096, w_format="gptq_int4", w_group="128", layout="marlin"),
        _example(128, 4096, 4096, w_format="mxfp4", w_group="32", layout="humming"),
        _example(300, 4096, 14336, w_format="awq_int4", w_group="128", layout="machete", x_dtype="fp16", outdtype="fp16"),
    ),
    functions=("gemm_a16wn",),
    entry=public(gemm_a16wn, _OPERANDS, (FORMAT,)),
)
