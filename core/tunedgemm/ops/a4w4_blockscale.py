"""a4w4_blockscale: ``out[..., N] = x[..., K] @ weight[N, K].T (+ bias[N])`` in mxfp4.

AITER's ``gemm_a4w4``, with the table ``a4w4_blockscale_tuned_gemm.csv``. A byte holds two e2m1
values, the even element in the low nibble: the operands are [..., K/2] and [N, K/2]. Each 32
elements of K have an e8m0 scale: row-major [M, K/32] and [N, K/32], or in AITER's shuffled order
(`tunedgemm.ops.formats.scales.shuffle_scale`) [ceil256(M), ceil8(K/32)] and
[ceil256(N), ceil8(K/32)]. The order is a field of the shape (`tunedgemm.ops.scale_order`).
Accumulation is in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.errors import OperandError
from tunedgemm.ops import decoding, quantised, scaled_fp4
from tunedgemm.ops.hot import BF16, hot, public
from tunedgemm.ops.layout import misfit
from tunedgemm.ops.op import unbiased
from tunedgemm.ops.scale_order import FIELD, ROW, SHUFFLED, stated_order
from tunedgemm.ops.schema import MNK, Column, Schema
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.formats.scales import ShuffledScale

NAME = "a4w4_blockscale"
_OPERANDS = decoding.OPERANDS[NAME]


def _usual_layout(shape: Shape) -> str:
    """Return the default layout of AITER's rows: shuffled, or plain if N or K do not divide."""
    return scaled_fp4.SHUFFLED if not misfit(scaled_fp4.SHUFFLED, (shape.n, shape.k), scaled_fp4.FP4[0]) else "row"


_SCHEMA = Schema(
    {"op": NAME, "dtype": "fp4x2", "scale": "block"},
    key=MNK,
    own=(Column("layout", "layout", _usual_layout), *scaled_fp4.OWN),
)
_example = quantised.example_of(_SCHEMA)


def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
    scale_order: str | None = None,
) -> Shape:
    for name, operand in (("x", x), ("weight", weight)):
        quantised.check_dtype(NAME, name, operand, scaled_fp4.FP4)
    quantised.check_matrices(NAME, x, weight)
    dtypes = scaled_fp4.FP4[0], quantised.outdtype_of(NAME, otype)
    return scaled_fp4.shape_of(NAME, x, weight, bias, 2 * x.shape[-1], dtypes, scale_order, x_scale=x_scale, w_scale=w_scale)


def gemm_a4w4(  # noqa: PLR0913, PLR0917 - AITER's arguments
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    global_A_scale: torch.Tensor | None = None,
    global_B_scale: torch.Tensor | None = None,
    *,
    scale_order: str | None = None,
) -> torch.Tensor:
    """Compute ``A[..., K] @ B[N, K].T (+ bias)`` in mxfp4 by the solution the tables choose.

    Args:
        A, B: activations [..., K/2] (M rows in all) and weight [N, K/2], float4_e2m1fn_x2 or
            uint8, the even element in the low nibble.
        A_scale, B_scale: float8_e8m0fnu or uint8, shuffled by `shuffle_scale`: [ceil256(M),
            ceil8(K/32)] and [ceil256(N), ceil8(K/32)]; or row-major: [M, K/32] and [N, K/32].
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        dtype: output dtype: bf16, fp16 or fp32; None for bf16.
        alpha, beta: must be 1 and 0.
        bpreshuffle: whether B is shuffled, by `shuffle_weight` or `as_shuffled`.
        apreshuffle: must be False.
        global_A_scale, global_B_scale: must be None; they are for nvfp4.
        scale_order: ``aiter32x8`` for shuffled scales, ``row`` for row-major ones; None to
            infer it from their type or sizes.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes, layouts or devices, or an unsupported argument.
    """
    if alpha not in (1.0, None) or beta not in (0.0, None):
        raise OperandError(f"{NAME}: alpha and beta are only taken as 1 and 0 (got alpha={alpha}, beta={beta}); scale the output")
    if apreshuffle or global_A_scale is not None or global_B_scale is not None:
        name = "apreshuffle" if apreshuffle else "global_A_scale" if global_A_scale is not None else "global_B_scale"
        raise OperandError(f"{NAME}: {name} is not taken: activations are plain, and mxfp4 has no scale of the whole tensor")
    if (getattr(B, "layout_name", "row") != "row") is not bpreshuffle:
        scaled_fp4.check_preshuffle(NAME, B, bpreshuffle, "B")
    if scale_order is None and A_scale.__class__ is ShuffledScale and B_scale.__class__ is ShuffledScale:
        A_scale, B_scale, scale_order = A_scale.kept_plain, B_scale.kept_plain, SHUFFLED
    return hot(A, B, A_scale, B_scale, bias, scale_order, dtype)


op = quantised.product_op(
    _SCHEMA,
    "AITER_CONFIG_GEMM_A4W4",
    operands=_OPERANDS,
    weights=(1, 3, 4),
    shuffled_scales=(2, 3),
    shape_of=_shape_of,
    make_inputs=decoding.make_inputs,
    reference=decoding.reference,
    bytes_moved=decoding.bytes_moved,
    fields=stated_order,
    problem=scaled_fp4.domain(scaled_fp4.FP4[:1]).problem,
    unbiased=unbiased,
    some_rows=decoding.some_rows,
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512),  # a prime M
        _example(257, 144, 320),  # more rows than one tile of shuffled scales; K/32 is not divisible by 8
        _example(33, 272, 64, bias="True"),  # the least K of the layout
        _example(16, 512, 1024, layout="row"),
        _example(33, 130, 96, layout="row"),  # ragged in all three
        _example(5, 96, 32, layout="row", bias="True", outdtype="fp32"),  # one scale a row
        _example(24, 320, 640, bias="True", outdtype="fp16"),
        _example(32, 16, 2048, outdtype="fp32"),  # the narrowest N
        _example(48, 256, 512, layout="row", scale_order=SHUFFLED),  # AITER's kernels for plain weights
        _example(20, 272, 320, scale_order=ROW),
        _example(0, 256, 512),  # an empty batch
        _example(0, 130, 96, layout="row"),
    ),
    large=lambda: (
        _example(1024, 4096, 4096),
        _example(4099, 2112, 1408),  # a prime M beyond one wave of tiles
        _example(64, 7168, 18432, layout="row"),
    ),
    functions=("gemm_a4w4",),
    entry=public(gemm_a4w4, _OPERANDS, (FIELD,)),
)
