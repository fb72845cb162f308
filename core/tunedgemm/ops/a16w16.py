"""a16w16: ``out[..., N] = x[..., K] @ weight[N, K].T (+ bias[N])`` in 16- or 32-bit floats.

Also fp8 with per-tensor scales. AITER's ``gemm_a16w16``, with the table ``bf16_tuned_gemm.csv``.
Accumulation is in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import short_dtype, table_text, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.hot import Serving, hot, hot_function, serving
from tunedgemm.ops.layout import check_not_transposed, layout_of
from tunedgemm.ops.op import Columns, Function, Op, unbiased
from tunedgemm.ops.product import exact_dtype, exact_product, fake, tolerance
from tunedgemm.ops.quantised import BIAS_DTYPES, bytes_moved, check_matrices, describe, flops, names_of
from tunedgemm.ops.schema import BIAS, MNK, Column, Dtype, Flag, Schema
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

_OPERANDS = ("x", "weight", "bias?", "scale_a?", "scale_b?", "scale_c?")
#: AITER's spellings of `gemm_a16w16` on `TunedGemm`, with their argument names.
SPELLINGS = {"mm": {"x": "inp", "weight": "weights"}, "gemm_AB": {"x": "A", "weight": "B"}}


#: Dtypes of x and weight: floats only, as no GPU kernel multiplies integers without scales.
_FLOATS = ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz")
_DOMAIN = Domain(_FLOATS, _FLOATS, (*BIAS_DTYPES, "fp64"), ("none", "tensor"), "any")


_SCHEMA = Schema(
    {"op": "a16w16"},
    key=(
        *MNK,
        BIAS,
        Dtype("dtype", "dtype", "bf16"),
        Dtype("outdtype", "outdtype"),
        Flag("scaleAB", "scale", values=("none", "tensor")),
        Flag("bpreshuffle", "layout", values=("row", "aiter16x16")),
    ),
    own=(
        Column("layout", "layout", lambda shape: "row" if shape.layout == "row" else "aiter16x16"),
        Column("scale", "scale", lambda shape: "none" if shape.scale == "none" else "tensor"),
    ),
)


def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    scale_c: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
) -> Shape:
    scales: dict[str, torch.Tensor] = {}
    if scale_a is not None or scale_b is not None or scale_c is not None:
        optional = {"scale_a": scale_a, "scale_b": scale_b, "scale_c": scale_c}
        scales = {name: scale for name, scale in optional.items() if scale is not None}
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype or x.device != weight.device:
        check_matrices("a16w16", x, weight)
        raise OperandError(f"a16w16: x and weight must have one dtype (got x {x.dtype}, weight {weight.dtype})")
    n, k = weight.shape
    if bias is not None and (tuple(bias.shape) not in ((n,), (1, n)) or bias.device != x.device):
        raise OperandError(f"a16w16: bias must be [{n}] on {x.device} (got {tuple(bias.shape)} on {bias.device})")
    for name, scale in scales.items():
        if scale.numel() != 1:
            raise OperandError(f"a16w16: {name} must hold one value (got {tuple(scale.shape)}); see the a8w8 ops for other scales")
        if str(scale.dtype) not in map(table_text, BIAS_DTYPES) or scale.device != x.device:
            raise OperandError(f"a16w16: {name} must be {names_of(BIAS_DTYPES)} on {x.device} (got {describe(scale)})")
    layout = layout_of("a16w16", weight)
    row_shape = _one_row(n, k, x.dtype, otype or x.dtype, None if bias is None else bias.dtype, bool(scales), layout)
    return row_shape.with_m(math.prod(x.shape[:-1]))


@functools.lru_cache(maxsize=4096)
def _one_row(n: int, k: int, dtype: torch.dtype, otype: torch.dtype, bias_dtype: torch.dtype | None, scaled: bool, layout: str) -> Shape:
    """Return the shape of a call with M = 1, cached.

    Calls of a layer differ only in M, and validating a new shape is the slowest step of a miss.
    """
    shape = Shape(
        op="a16w16",
        m=1,
        n=n,
        k=k,
        dtype=short_dtype(dtype),
        outdtype=short_dtype(otype),
        epilogue="none" if bias_dtype is None else "bias",
        bias_dtype="" if bias_dtype is None else short_dtype(bias_dtype),
        scale="tensor" if scaled else "none",
        layout=layout,
    )
    if fault := _DOMAIN.format_problem(shape):
        raise OperandError(f"a16w16: {fault}")
    return shape


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal x [m, k] and weight [n, k], and the shape's bias [n] and scales [1]."""
    import torch

    from tunedgemm.ops.formats.shuffle import shuffle_weight

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*sizes: int, dtype: str) -> torch.Tensor:
        target = torch_dtype(dtype)
        wide = target if target in (torch.bfloat16, torch.float16, torch.float64) else torch.float32
        return torch.randn(*sizes, generator=generator, device=device, dtype=wide).to(target)

    weight = draw(shape.n, shape.k, dtype=shape.dtype)
    weight = weight if shape.layout == "row" else shuffle_weight(weight, shape.layout)
    operands: list[torch.Tensor | None] = [draw(shape.m, shape.k, dtype=shape.dtype), weight]
    if shape.bias:
        operands.append(draw(shape.n, dtype=shape.bias_dtype))
    if shape.scale != "none":
        scales = torch.rand(2, generator=generator, device=device) + 0.5
        operands += [None] * (3 - len(operands)) + [scales[:1], scales[1:]]
    return tuple(operands)


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    from tunedgemm.ops.formats.shuffle import unshuffled

    x, weight, bias, scale_a, scale_b, scale_c = (*operands, None, None, None, None)[:6]
    exact = exact_dtype(shape.m, shape.n, shape.k) if shape.dtype != "fp64" else x.dtype
    out = exact_product(x.reshape(shape.m, shape.k), unshuffled(weight), exact)
    for scale in (scale_a, scale_b):
        out = out if scale is None else out * scale.to(exact)
    out = out if bias is None else out + bias.to(exact)
    return out if scale_c is None else out * scale_c.to(exact)


def gemm_a16w16(  # noqa: PLR0913, PLR0917 - AITER's arguments, and the weight in its other order
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    scale_c: torch.Tensor | None = None,
    shuffled_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x[..., K] @ weight[N, K].T (+ bias[N])`` by the solution the tables choose.

    Args:
        x: activations [..., K] in bf16, fp16, fp32 or fp8.
        weight: [N, K], of x's dtype; a [K, N] weight must be passed as
            ``weight.t().contiguous()``.
        bias: [N] or absent.
        otype: dtype of the output; that of x if absent.
        scale_a, scale_b, scale_c: one-element scales of x, weight and the output, usually
            float32; 1 if absent.
        shuffled_weight: a copy of the weight by `shuffle_weight`, used where it is faster: by
            the table rows of both, or without rows for M of at least
            `preshuffle.PRESHUFFLE_M_THRESHOLD`. Compiled graphs use the plain weight.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes or devices, or a square weight that is a
            transposed view.
    """
    if shuffled_weight is not None:
        weight = serving.preferred(x, weight, shuffled_weight, bias, scale_a, scale_b, scale_c, otype=otype)
    if scale_a is not None or scale_b is not None or scale_c is not None:
        check_not_transposed("a16w16", weight)
        return serving.call(x, weight, bias, scale_a, scale_b, scale_c, otype=otype)
    return hot(x, weight, bias, otype)


def _entry(dispatcher: Serving) -> Mapping[str, Function]:
    make = functools.partial(hot_function, dispatcher, _OPERANDS[:3], general=gemm_a16w16)
    return {"gemm_a16w16": make(), **{name: make(spelling=spelling) for name, spelling in SPELLINGS.items()}}


op = Op(
    name="a16w16",
    operands=_OPERANDS,
    weights=(1,),
    columns=Columns(
        tuned_file="bf16_tuned_gemm.csv",
        untuned_file="bf16_untuned_gemm.csv",
        variable="AITER_CONFIG_GEMM_BF16",
        values=("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"),
        **_SCHEMA.columns(),
    ),
    shape_of=_shape_of,
    make_inputs=_make_inputs,
    reference=_reference,
    tolerance=tolerance,
    flops=flops,
    bytes_moved=bytes_moved,
    fake=fake,
    problem=_DOMAIN.problem,
    unbiased=lambda shape: unbiased(shape) if shape.scale == "none" else None,
    # torch is close to the best: on an H200, 9 of 60 rows tuned on an H100 lost, by up to 17 %.
    serves_alike=False,
    functions=("gemm_a16w16",),
    entry=_entry,
)
