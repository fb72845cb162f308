"""a16w4_blockscale: ``out[..., N] = x[..., K] @ weight[N, K].T (+ bias[N])``, weight in mxfp4.

Activations have 16 bits. AITER's ``gemm_a16wfp4`` quantises x to mxfp4 first; here x stays in 16
bits. The table ``a16w4_blockscale_tuned_gemm.csv`` is ours, as AITER has none. The weight is
[N, K/2], the even element in the low nibble. Its e8m0 scales, one per 32 elements of K, are
row-major [N, K/32] or in AITER's shuffled order [ceil256(N), ceil8(K/32)]. Accumulation is in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import short_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import decoding, quantised, scaled_fp4
from tunedgemm.ops.hot import BF16, hot, public
from tunedgemm.ops.op import unbiased
from tunedgemm.ops.product import fake
from tunedgemm.ops.scale_order import FIELD, SHUFFLED, stated_order
from tunedgemm.ops.schema import MNK, Column, Dtype, Schema
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.formats.scales import ShuffledScale

NAME = "a16w4_blockscale"
_OPERANDS = decoding.OPERANDS[NAME]
#: Dtypes of the activations; the first is the default of rows without one.
_DTYPES = ("bf16", "fp16")


_SCHEMA = Schema(
    {"op": NAME, "scale": "block"},
    key=(*MNK, Dtype("x_dtype", "dtype", _DTYPES[0], allowed=_DTYPES)),  # not "dtype", which marks files of a16w16
    own=(Column("layout", "layout", "row"), *scaled_fp4.OWN),
)
_example = quantised.example_of(_SCHEMA)


def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
    scale_order: str | None = None,
) -> Shape:
    quantised.check_dtype(NAME, "x", x, _DTYPES)
    quantised.check_dtype(NAME, "weight", weight, scaled_fp4.FP4)
    quantised.check_matrices(NAME, x, weight, packed=2)
    dtype = short_dtype(x.dtype)
    dtypes = dtype, quantised.outdtype_of(NAME, otype, dtype)
    return scaled_fp4.shape_of(NAME, x, weight, bias, x.shape[-1], dtypes, scale_order, w_scale=w_scale)


def gemm_a16wfp4(  # noqa: PLR0913, PLR0917 - AITER's arguments
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    atomic_add: bool | None = False,
    dtype: torch.dtype | None = BF16,
    y: torch.Tensor | None = None,
    config: Mapping[str, Any] | None = None,
    bias: torch.Tensor | None = None,
    bpreshuffle: bool | None = False,
    *,
    scale_order: str | None = None,
) -> torch.Tensor:
    """Compute ``x[..., K] @ w[N, K].T (+ bias)`` by the solution that the tables choose.

    Args:
        x: activations [..., K] in bf16 or fp16; unlike in AITER, not quantised to mxfp4.
        w: [N, K/2], mxfp4: float4_e2m1fn_x2 or uint8, the even element in the low nibble.
        w_scales: float8_e8m0fnu or uint8, row-major [N, K/32], or shuffled by `shuffle_scale`:
            [ceil256(N), ceil8(K/32)].
        atomic_add, config: ignored; the table decides the kernel and the split of K.
        dtype: output dtype: bf16, fp16 or fp32; None for that of x.
        y: must be None; the output is always a new tensor.
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        bpreshuffle: whether w is shuffled, by `shuffle_weight` or `as_shuffled`.
        scale_order: ``aiter32x8`` for shuffled scales, ``row`` for row-major ones; None to
            infer it from their type or sizes.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes, layouts or devices, or *y* is given.
    """
    del atomic_add, config
    if y is not None:
        raise OperandError(f"{NAME}: y is not taken, the output is a new tensor; call y.copy_(…) with it")
    if (getattr(w, "layout_name", "row") != "row") is not bpreshuffle:
        scaled_fp4.check_preshuffle(NAME, w, bpreshuffle, "w")
    if scale_order is None and w_scales.__class__ is ShuffledScale:
        w_scales, scale_order = w_scales.kept_plain, SHUFFLED
    return hot(x, w, w_scales, bias, scale_order, dtype)


op = quantised.product_op(
    _SCHEMA,
    "AITER_CONFIG_GEMM_A16W4",
    values=("libtype", *quantised.VALUES),
    operands=_OPERANDS,
    weights=(1, 2, 3),
    shuffled_scales=(2,),
    shape_of=_shape_of,
    make_inputs=decoding.make_inputs,
    reference=decoding.reference,
    bytes_moved=decoding.bytes_moved,
    fake=fake,
    fields=stated_order,
    problem=scaled_fp4.domain(_DTYPES).problem,
    unbiased=unbiased,
    weight_dtype=lambda _: "fp4x2",
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512),  # a prime M
        _example(16, 512, 1024, x_dtype="fp16", outdtype="fp16"),
        _example(33, 130, 96),  # ragged in all three
        _example(5, 96, 32, bias="True", outdtype="fp32"),  # one scale a row
        _example(3, 257, 320, layout="row", bias="True"),  # odd N, more rows than one tile of shuffled scales
        _example(7, 272, 320, layout="aiter16x16"),  # K/32 is not divisible by 8
        _example(33, 272, 64, layout="aiter16x16", bias="True"),  # the least K of the layout
        _example(24, 320, 640, x_dtype="fp16", bias="True"),
        _example(9, 48, 96, x_dtype="fp16", outdtype="fp32"),
        _example(32, 16, 2048, outdtype="fp32"),  # the narrowest N
        _example(12, 256, 512, scale_order=SHUFFLED),
        _example(0, 256, 512),  # an empty batch
        _example(0, 256, 512, layout="aiter16x16"),
    ),
    large=lambda: (
        _example(1024, 4096, 4096),
        _example(4099, 2112, 1408),  # a prime M beyond one wave of tiles
        _example(64, 7168, 18432, layout="aiter16x16"),
    ),
    functions=("gemm_a16wfp4",),
    entry=public(gemm_a16wfp4, _OPERANDS, (FIELD,)),
)
