"""fp8 GEMM with block scales: ``out[..., N] = x[..., K] @ weight[N, K].T``.

Each 1x128 block of x and each 128x128 block of the weight has a float32 scale. N and K need not be
multiples of 128: the last blocks are smaller. Accumulation is in float32.

``a8w8_blockscale`` has a plain weight: AITER's ``gemm_a8w8_blockscale``, with the table
``a8w8_blockscale_tuned_gemm.csv``. The scales of x are row-major or M-major, a field of the shape
(`tunedgemm.ops.scale_order`).

``a8w8_blockscale_bpreshuffle`` has a shuffled weight and transposed scales of x: AITER's
``gemm_a8w8_blockscale_bpreshuffle``, with the table
``a8w8_blockscale_bpreshuffle_tuned_gemm.csv``. ``x_scale`` is a contiguous [M, ceil(K/128)] tensor
whose memory holds the transpose, row-major [ceil(K/128), M]. `transposed_scale` makes it, as does
AITER's quantisation with ``transpose_scale=True``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import FP8, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.hot import BF16, hot, public
from tunedgemm.ops.layout import plain_layout, shuffled_layout
from tunedgemm.ops.op import Op, taken
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.scale_order import (
    BLOCK,
    FIELD,
    M_MAJOR,
    M_MAJOR_PADDED,
    ORDERS,
    ROW,
    blocks,
    canonical_order,
    equivalent_orders,
    field_of,
    order_of,
    scale_order,
    scale_strides,
    with_order,
)  # fmt: skip
from tunedgemm.ops.schema import MNK, Dtype, Schema, ShuffledLayout, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

_OPERANDS = ("x", "weight", "x_scale", "w_scale")
_DTYPE = Dtype("dtype", "dtype", FP8, allowed=quantised.FP8)
_PLAIN = Schema(
    {"op": "a8w8_blockscale", "scale": "block"}, MNK, (_DTYPE, quantised.OUTDTYPE, Word(FIELD, FIELD, ROW, spare=True, allowed=ORDERS))
)
_SHUFFLED = Schema({"op": "a8w8_blockscale_bpreshuffle", "scale": "block"}, MNK, (ShuffledLayout(), _DTYPE, quantised.OUTDTYPE))
_plain, _shuffled = quantised.example_of(_PLAIN), quantised.example_of(_SHUFFLED)


def _blocks_shape(op: str, layout: str, operands: tuple[torch.Tensor, ...], otype: torch.dtype | None) -> Shape:
    """Return the shape of a call with this layout; raise OperandError for mismatched operands."""
    x, weight, x_scale, w_scale = operands
    quantised.check_matrices(op, x, weight)
    dtype = quantised.check_dtypes(op, x, weight, quantised.FP8)
    m, (n, k) = quantised.rows_of(x), weight.shape
    quantised.check_not_packed(op, x_scale=x_scale, w_scale=w_scale)
    quantised.check_scale(op, "x_scale", x_scale, ((m, blocks(k)), (*x.shape[:-1], blocks(k))), ("fp32",), x.device)
    quantised.check_scale(op, "w_scale", w_scale, ((blocks(n), blocks(k)),), ("fp32",), x.device)
    return Shape(op=op, m=m, n=n, k=k, dtype=dtype, outdtype=quantised.outdtype_of(op, otype), scale="block", layout=layout)


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw quantised x [m, k] and weight [n, k], with x_scale and w_scale.

    x_scale [m, ceil(k/128)] is in the shape's order, with NaN in any padding; for a shuffled weight
    its memory is transposed. w_scale is [ceil(n/128), ceil(k/128)].
    """
    import torch

    from tunedgemm.ops.formats.quant import per_1x128_quant, per_block_quant
    from tunedgemm.ops.formats.scales import transposed_scale
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    generator, target = torch.Generator(device).manual_seed(seed), torch_dtype(shape.dtype)
    x, x_scale = per_1x128_quant(quantised.draw(shape.m, shape.k, BLOCK, generator), target)
    weight, w_scale = per_block_quant(quantised.draw(shape.n, shape.k, BLOCK, generator), target, (BLOCK, BLOCK))
    if shape.layout != "row":
        return x, shuffle_weight(weight, shape.layout), transposed_scale(x_scale), w_scale
    return x, weight, in_order(x_scale, shape), w_scale


def in_order(x_scale: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Copy row-major scales [m, ceil(k/128)] to the shape's order, with NaN in its padding."""
    if scale_order(shape) == ROW:
        return x_scale
    memory = x_scale.new_full((blocks(shape.k), scale_strides(shape)[1]), math.nan)
    return memory[:, : shape.m].t().copy_(x_scale)


def _reference(shape: Shape, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    from tunedgemm.ops.formats.quant import dequant_blocks
    from tunedgemm.ops.formats.scales import untransposed_scale
    from tunedgemm.ops.formats.shuffle import unshuffled

    x, weight, x_scale, w_scale = operands
    x_scale = x_scale if shape.layout == "row" else untransposed_scale(x_scale)
    wide = exact_dtype(shape.m, shape.n, shape.k)
    values = dequant_blocks(x.reshape(shape.m, shape.k), x_scale.reshape(shape.m, blocks(shape.k)), wide)
    return exact_product(values, dequant_blocks(unshuffled(weight), w_scale, wide, (BLOCK, BLOCK)), wide)


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *, otype: torch.dtype | None = None
) -> Shape:
    layout = plain_layout("a8w8_blockscale", weight, "gemm_a8w8_blockscale_bpreshuffle")
    shape = _blocks_shape("a8w8_blockscale", layout, (x, weight, x_scale, w_scale), otype)
    order = order_of("a8w8_blockscale", x_scale, shape.m)
    return shape if order == ROW else with_order(shape, order)


def _some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    from tunedgemm.ops.formats.scales import transposed_scale, untransposed_scale

    x, weight, x_scale, w_scale = operands
    plain = x_scale if shape.layout == "row" else untransposed_scale(x_scale)
    scales = taken(plain.reshape(shape.m, blocks(shape.k)), indices)
    scales = in_order(scales, shape.with_m(len(indices))) if shape.layout == "row" else transposed_scale(scales)
    return taken(x.reshape(shape.m, shape.k), indices), weight, scales, w_scale


def _equivalent_shapes(shape: Shape) -> tuple[Shape, ...]:
    """Return the shape and its form in AITER's key, for each scale order whose rows may serve it."""
    if (orders := equivalent_orders(shape)) == (ROW,):
        return _PLAIN.equivalent_shapes(shape)
    by_order, plain = [with_order(shape, order) for order in orders], _PLAIN.plain(shape)
    if plain in by_order:
        return tuple(by_order)
    return tuple(form for shape, order in zip(by_order, orders, strict=True) for form in (shape, with_order(plain, order)))


def gemm_a8w8_blockscale(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = BF16,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    """Compute ``XQ[..., K] @ WQ[N, K].T`` with block scales by the solution the tables choose.

    Args:
        XQ, WQ: activations [..., K] (M rows in all) and weight [N, K], both of one fp8 e4m3
            dtype.
        x_scale: float32 [M, ceil(K/128)] or [..., ceil(K/128)]: row-major, M-major (strides
            (1, M)), or M-major with columns padded to 16 bytes (strides (1, 4 * ceil(M/4))).
        w_scale: float32 [ceil(N/128), ceil(K/128)].
        dtype: of the output: bf16, fp16 or fp32; None for bf16.
        isBpreshuffled: must be False; for shuffled weights call
            `gemm_a8w8_blockscale_bpreshuffle`.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: shapes, dtypes, layouts or devices that do not fit each other.
    """
    if isBpreshuffled:
        raise OperandError("a8w8_blockscale: isBpreshuffled=True is not taken; call gemm_a8w8_blockscale_bpreshuffle for shuffled weights")
    return hot(XQ, WQ, x_scale, w_scale, dtype)


def _shape_of_bpreshuffle(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *, otype: torch.dtype | None = None
) -> Shape:
    layout = shuffled_layout("a8w8_blockscale_bpreshuffle", weight, "(16, 16)", "gemm_a8w8_blockscale")
    shape = _blocks_shape("a8w8_blockscale_bpreshuffle", layout, (x, weight, x_scale, w_scale), otype)
    if not x_scale.is_contiguous():
        raise OperandError(
            "a8w8_blockscale_bpreshuffle: x_scale must be contiguous, its memory holding the transpose "
            f"(got {tuple(x_scale.shape)} with strides {x_scale.stride()}); pass transposed_scale(x_scale) of scales that lie row by row"
        )
    return shape


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype | None = BF16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``XQ[..., K] @ WQ[N, K].T`` of fp8 operands with block scales and a shuffled weight.

    Args:
        XQ: activations [..., K] (M rows in all) in fp8 e4m3.
        WQ: [N, K] of the same dtype, from `shuffle_weight` or `as_shuffled`; AITER's kernels
            need layout (16, 16).
        x_scale: float32 [M, ceil(K/128)] with transposed memory: contiguous, from
            `transposed_scale`, or with strides (1, M).
        w_scale: float32 [ceil(N/128), ceil(K/128)].
        dtype: of the output: bf16, fp16 or fp32; None for bf16.
        out: must be None; the output is always a new tensor.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: mismatched shapes, dtypes, layouts or devices, or *out* is given.
    """
    if out is not None:
        raise OperandError("a8w8_blockscale_bpreshuffle: out is not taken, the output is a new tensor; call out.copy_(…) with it")
    if isinstance(x_scale, torch.Tensor) and not x_scale.is_contiguous() and x_scale.dim() == 2 and x_scale.t().is_contiguous():
        x_scale = x_scale.t().view(x_scale.shape)  # its memory is that of a transposed scale
    return hot(XQ, WQ, x_scale, w_scale, dtype)


def _order_problem(shape: Shape) -> str:
    order = field_of(shape)
    return "" if order in ORDERS else f"{FIELD} must be {' or '.join(ORDERS)} (got {order})"


def _op(schema: Schema, variable: str, **fields: Any) -> Op:
    is_plain = schema is _PLAIN
    domain = Domain(
        quantised.FP8,
        quantised.OUTDTYPES,
        scales=("block",),
        layouts="row" if is_plain else "shuffled",
        optional=(FIELD,) if is_plain else (),
        further=_order_problem,
    )
    return quantised.product_op(
        schema,
        variable,
        values=("libtype", *quantised.VALUES),
        operands=_OPERANDS,
        weights=(1, 3),
        make_inputs=_make_inputs,
        reference=_reference,
        bytes_moved=lambda shape: quantised.bytes_moved(shape, 32 * (shape.m + blocks(shape.n)) * blocks(shape.k)),
        some_rows=_some_rows,
        problem=domain.problem,
        **fields,
    )


a8w8_blockscale = _op(
    _PLAIN,
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE",
    shape_of=_shape_of,
    canonical=canonical_order,
    equivalent_shapes=_equivalent_shapes,
    strided=(2,),
    examples=lambda: (
        _plain(1, 1280, 4096),  # decoding one token
        _plain(127, 256, 512),  # a prime M
        _plain(16, 256, 384),
        _plain(33, 130, 72),  # ragged in all three: one short block of K, two blocks of N
        _plain(5, 576, 200),  # tails in N (DeepSeek's kv_a projection) and K
        _plain(17, 96, 99),  # an odd K: rows not 16-byte aligned
        _plain(32, 16, 2048),  # the narrowest N
        _plain(8, 256, 1024, outdtype="fp32"),
        _plain(24, 320, 640, outdtype="fp16"),
        _plain(7, 128, 256, dtype="torch.float8_e4m3fnuz"),
        _plain(0, 256, 512),  # an empty batch
        _plain(64, 256, 512, scale_order=M_MAJOR),
        _plain(127, 136, 384, scale_order=M_MAJOR),  # a prime M
        _plain(3, 576, 200, scale_order=M_MAJOR),  # tails in N and K
        _plain(59, 256, 512, scale_order=M_MAJOR_PADDED),  # a prime M
        _plain(1, 1280, 1024, scale_order=M_MAJOR_PADDED),  # one scale per 16 bytes
        _plain(3, 130, 328, scale_order=M_MAJOR_PADDED),  # ragged in all three
        _plain(34, 320, 640, outdtype="fp32", scale_order=M_MAJOR_PADDED),
    ),
    large=lambda: (
        _plain(1024, 4096, 4096),
        _plain(4099, 2112, 1408),  # a prime M beyond one wave of tiles, N with a tail
        _plain(64, 7168, 18432),
        _plain(1024, 4096, 4096, scale_order=M_MAJOR),
        _plain(4099, 2112, 1408, scale_order=M_MAJOR_PADDED),
    ),
    functions=("gemm_a8w8_blockscale",),
    entry=public(gemm_a8w8_blockscale, _OPERANDS),
)

a8w8_blockscale_bpreshuffle = _op(
    _SHUFFLED,
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
    shape_of=_shape_of_bpreshuffle,
    examples=lambda: (
        _shuffled(1, 1280, 4096),  # decoding one token
        _shuffled(127, 256, 512),  # a prime M
        _shuffled(16, 256, 384),
        _shuffled(33, 144, 96),  # one short block of K, two blocks of N
        _shuffled(5, 576, 224),  # tails in N (DeepSeek's kv_a projection) and K
        _shuffled(32, 16, 2048),  # the narrowest N
        _shuffled(8, 256, 1024, outdtype="fp32"),
        _shuffled(24, 320, 640, outdtype="fp16"),
        _shuffled(17, 64, 160, layout="aiter32x16"),
        _shuffled(7, 128, 256, dtype="torch.float8_e4m3fnuz"),
        _shuffled(0, 256, 512),  # an empty batch
    ),
    large=lambda: (
        _shuffled(1024, 4096, 4096),
        _shuffled(4099, 2112, 1408),  # a prime M beyond one wave of tiles, N with a tail
        _shuffled(64, 7168, 18432),
    ),
    functions=("gemm_a8w8_blockscale_bpreshuffle",),
    entry=public(gemm_a8w8_blockscale_bpreshuffle, _OPERANDS),
)
