"""a8w8_blockscale: ``out[..., N] = x[..., K] @ weight[N, K].T`` in fp8 with block scales.

Each 1x128 of x and each 128x128 of the weight has a float32 scale. AITER's
``gemm_a8w8_blockscale``; its table is ``a8w8_blockscale_tuned_gemm.csv``. N and K need not be
multiples of 128: the last blocks are smaller. Accumulation is in float32. The scales of x may be
M-major instead of row-major, which is a field of the shape (`tunedgemm.ops.scale_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised, scaled_blocks
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.layout import plain_layout
from tunedgemm.ops.op import Call, Columns, Op, Serving
from tunedgemm.ops.product import tolerance
from tunedgemm.ops.scale_order import M_MAJOR, M_MAJOR_PADDED, ROW, blocks, canonical_order, equivalent_orders, order_of, with_order
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

NAME = "a8w8_blockscale"


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *, otype: torch.dtype | None = None
) -> Shape:
    """Return the shape of a call; raises OperandError for operands that do not fit each other."""
    quantised.check_tensors(NAME, x=x, weight=weight, x_scale=x_scale, w_scale=w_scale)
    layout = plain_layout(NAME, weight, "gemm_a8w8_blockscale_bpreshuffle")
    shape = scaled_blocks.shape_of(NAME, layout, (x, weight, x_scale, w_scale), otype)
    order = order_of(NAME, x_scale, shape.m)
    return shape if order == ROW else with_order(shape, order)


def _first_rows(shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    x, weight, x_scale, w_scale = operands
    scales = x_scale.reshape(shape.m, blocks(shape.k))[:m].contiguous()
    return x.reshape(shape.m, shape.k)[:m].contiguous(), weight, scaled_blocks.in_order(scales, shape.with_m(m)), w_scale


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    scaled, bf16 = hot_function(serving, scaled_blocks.OPERANDS), torch.bfloat16

    def gemm_a8w8_blockscale(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        dtype: torch.dtype | None = bf16,
        isBpreshuffled: bool = False,
    ) -> torch.Tensor:
        """Compute ``XQ[..., K] @ WQ[N, K].T`` with block scales by the solution the tables choose.

        Args:
            XQ, WQ: activations, any leading dimensions (M rows in all), and weight, both of one fp8
                e4m3.
            x_scale: float32 [M, ceil(K/128)], or with the leading dimensions of XQ. Row-major,
                M-major (strides (1, M)), or M-major with each column padded to 16 bytes (strides
                (1, 4 * ceil(M/4))); none is copied.
            w_scale: float32 [ceil(N/128), ceil(K/128)].
            dtype: of the output: bf16, fp16 or fp32; None for bf16.
            isBpreshuffled: only False; `gemm_a8w8_blockscale_bpreshuffle` takes shuffled weights.

        Returns:
            A new tensor [..., N].

        Raises:
            OperandError: shapes, dtypes, layouts or devices that do not fit each other.
        """
        if isBpreshuffled:
            raise OperandError(f"{NAME}: isBpreshuffled=True is not taken; call gemm_a8w8_blockscale_bpreshuffle for shuffled weights")
        return scaled(XQ, WQ, x_scale, w_scale, dtype)

    return {"gemm_a8w8_blockscale": gemm_a8w8_blockscale}


_SCHEMA = scaled_blocks.schema(NAME, "row")
_example = quantised.example_of(_SCHEMA)


def _equivalent_shapes(shape: Shape) -> tuple[Shape, ...]:
    """Return the shape and its form in AITER's key, both for each order of x's scales that may serve it."""
    if (orders := equivalent_orders(shape)) == (ROW,):
        return _SCHEMA.equivalent_shapes(shape)
    forms = (shape, _SCHEMA.plain(shape))
    return tuple(dict.fromkeys(with_order(form, order) for order in orders for form in forms))


op = Op(
    name=NAME,
    operands=scaled_blocks.OPERANDS,
    weights=scaled_blocks.WEIGHTS,
    columns=Columns(
        tuned_file="a8w8_blockscale_tuned_gemm.csv",
        untuned_file="a8w8_blockscale_untuned_gemm.csv",
        variable="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE",
        values=("libtype", *quantised.VALUES),
        **_SCHEMA.columns(),
    ),
    shape_of=_shape_of,
    make_inputs=scaled_blocks.make_inputs,
    reference=scaled_blocks.reference,
    tolerance=tolerance,
    flops=quantised.flops,
    bytes_moved=scaled_blocks.bytes_moved,
    fake=quantised.fake,
    problem=scaled_blocks.domain("row").problem,
    canonical=canonical_order,
    equivalent_shapes=_equivalent_shapes,
    first_rows=_first_rows,
    strided=(2,),
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512),  # a prime M
        _example(16, 256, 384),
        _example(33, 130, 72),  # ragged in all three: one short block of K, two blocks of N
        _example(5, 576, 200),  # tails in N (DeepSeek's kv_a projection) and K
        _example(17, 96, 99),  # an odd K: rows that are not 16-byte aligned
        _example(32, 16, 2048),  # the narrowest N
        _example(8, 256, 1024, outdtype="fp32"),
        _example(24, 320, 640, outdtype="fp16"),
        _example(7, 128, 256, dtype="torch.float8_e4m3fnuz"),
        _example(0, 256, 512),  # an empty batch
        _example(64, 256, 512, scale_order=M_MAJOR),
        _example(127, 136, 384, scale_order=M_MAJOR),  # a prime M
        _example(3, 576, 200, scale_order=M_MAJOR),  # tails in N and K
        _example(59, 256, 512, scale_order=M_MAJOR_PADDED),  # a prime M
        _example(1, 1280, 1024, scale_order=M_MAJOR_PADDED),  # a scale in each 16 bytes
        _example(3, 130, 328, scale_order=M_MAJOR_PADDED),  # ragged in all three
        _example(34, 320, 640, outdtype="fp32", scale_order=M_MAJOR_PADDED),
    ),
    large=lambda: (
        _example(1024, 4096, 4096),
        _example(4099, 2112, 1408),  # a prime M beyond one wave of tiles, N with a tail
        _example(64, 7168, 18432),
        _example(1024, 4096, 4096, scale_order=M_MAJOR),
        _example(4099, 2112, 1408, scale_order=M_MAJOR_PADDED),
    ),
    functions=("gemm_a8w8_blockscale",),
    entry=_entry,
)
