"""a8w8: ``out[..., N] = (x[..., K] @ weight[N, K].T) * x_scale * w_scale (+ bias[N])`` in int8 or fp8.

AITER's ``gemm_a8w8``; its table is ``a8w8_tuned_gemm.csv``. Scales are float32, one a row of x and
of the weight, or one each. Accumulation is in int32 or float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunedgemm.ops import quantised, scaled_rows
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.layout import plain_layout
from tunedgemm.ops.op import Call, Columns, Op, Serving, unbiased
from tunedgemm.ops.product import tolerance

if TYPE_CHECKING:
    import torch

NAME = "a8w8"


def _layout_of(weight: torch.Tensor) -> str:
    return plain_layout(NAME, weight, "gemm_a8w8_bpreshuffle")


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    scaled, bf16 = hot_function(serving, scaled_rows.OPERANDS), torch.bfloat16

    def gemm_a8w8(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = bf16,
        splitK: int | None = None,
    ) -> torch.Tensor:
        """Compute ``(XQ[..., K] @ WQ[N, K].T) * x_scale * w_scale (+ bias)`` by the tables' solution.

        Args:
            XQ, WQ: activations, any leading dimensions (M rows in all), and weight: both int8 or
                both of one fp8 e4m3.
            x_scale, w_scale: float32: M values as [M], [M, 1] or [..., 1] and N values as [N],
                [N, 1] or [1, N]; or one value each.
            bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
            dtype: of the output: bf16, fp16 or fp32; None for bf16.
            splitK: accepted as AITER does and not used: the table decides.

        Returns:
            A new tensor [..., N].

        Raises:
            OperandError: shapes, dtypes, layouts or devices that do not fit each other.
        """
        del splitK
        return scaled(XQ, WQ, x_scale, w_scale, bias, dtype)

    return {"gemm_a8w8": gemm_a8w8, "gemm_a8w8_CK": gemm_a8w8}


_SCHEMA = scaled_rows.schema(NAME, "int8")
_example = quantised.example_of(_SCHEMA)
_FN, _FNUZ = {"q_dtype_w": "torch.float8_e4m3fn"}, {"q_dtype_w": "torch.float8_e4m3fnuz"}

op = Op(
    name=NAME,
    operands=scaled_rows.OPERANDS,
    weights=scaled_rows.WEIGHTS,
    columns=Columns(
        tuned_file="a8w8_tuned_gemm.csv",
        untuned_file="a8w8_untuned_gemm.csv",
        variable="AITER_CONFIG_GEMM_A8W8",
        values=quantised.VALUES,
        **_SCHEMA.columns(),
    ),
    shape_of=scaled_rows.shaper(NAME, _layout_of),
    make_inputs=scaled_rows.make_inputs,
    reference=scaled_rows.reference,
    tolerance=tolerance,
    flops=quantised.flops,
    bytes_moved=scaled_rows.bytes_moved,
    fake=quantised.fake,
    problem=scaled_rows.domain("row").problem,
    canonical=scaled_rows.canonical,
    equivalent_shapes=_SCHEMA.equivalent_shapes,
    unbiased=unbiased,
    first_rows=scaled_rows.first_rows,
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512, **_FN),  # a prime M
        _example(33, 130, 99),  # ragged in all three: rows that are not 16-byte aligned
        _example(5, 96, 72, **_FN),
        _example(64, 384, 256, bias="True"),
        _example(16, 512, 1024, scale="tensor", **_FN),
        _example(3, 160, 256, bias="True", outdtype="fp32", scale="tensor"),
        _example(24, 320, 640, bias="True", outdtype="fp16", **_FN),
        _example(32, 16, 2048, outdtype="fp32", **_FN),  # the narrowest N
        _example(8, 128, 256, **_FNUZ),
        _example(1, 1, 64, outdtype="fp32"),  # one row each: scales that could be the whole tensor's
        _example(0, 256, 512, **_FN),  # an empty batch
    ),
    large=lambda: (
        _example(1024, 4096, 4096),
        _example(4099, 2048, 1408, **_FN),  # a prime M beyond one wave of tiles
        _example(16, 7168, 16384, scale="tensor", **_FN),
    ),
    functions=("gemm_a8w8", "gemm_a8w8_CK"),
    entry=_entry,
)
