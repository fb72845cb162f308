"""a8w8_bpreshuffle: a8w8 with a shuffled weight.

``out[..., N] = (x[..., K] @ weight[N, K].T) * x_scale * w_scale (+ bias[N])``. AITER's
``gemm_a8w8_bpreshuffle`` (fp8) and ``gemm_a8w8_ASM`` (int8); its table is
``a8w8_bpreshuffle_tuned_gemm.csv``. Here the bias is optional with either dtype. Both read a weight
in layout (16, 16). AITER's tuner and tests do too, and so do its int8 kernels when an emulator runs
their instructions. The comments at ``gemm_a8w8_ASM`` say (32, 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunedgemm.dtype import FP8
from tunedgemm.ops import quantised, scaled_rows
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.layout import shuffled_layout
from tunedgemm.ops.op import Call, Columns, Op, Serving, unbiased
from tunedgemm.ops.product import tolerance
from tunedgemm.ops.schema import ShuffledLayout

if TYPE_CHECKING:
    import torch

NAME = "a8w8_bpreshuffle"


def _layout_of(weight: torch.Tensor) -> str:
    return shuffled_layout(NAME, weight, "(16, 16)", "gemm_a8w8")


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    scaled, bf16 = hot_function(serving, scaled_rows.OPERANDS), torch.bfloat16

    def gemm_a8w8_bpreshuffle(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = bf16,
        check: bool = False,
    ) -> torch.Tensor:
        """Compute ``(XQ[..., K] @ WQ[N, K].T) * x_scale * w_scale (+ bias)`` of a shuffled weight.

        Args:
            XQ: activations, int8 or fp8 e4m3, any leading dimensions (M rows in all).
            WQ: of the same dtype, as `shuffle_weight` or `as_shuffled` gives it; AITER's kernels
                want (16, 16).
            x_scale, w_scale: float32: M values as [M], [M, 1] or [..., 1] and N values as [N], [N,
                1] or [1, N]; or one value each.
            bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
            dtype: of the output: bf16, fp16 or fp32; None for bf16.
            check: accepted as AITER does and not used: operands are always checked.

        Returns:
            A new tensor [..., N].

        Raises:
            OperandError: shapes, dtypes, layouts or devices that do not fit each other.
        """
        del check
        return scaled(XQ, WQ, x_scale, w_scale, bias, dtype)

    return {"gemm_a8w8_bpreshuffle": gemm_a8w8_bpreshuffle, "gemm_a8w8_ASM": gemm_a8w8_bpreshuffle}


_SCHEMA = scaled_rows.schema(NAME, FP8, (ShuffledLayout(),))
_example = quantised.example_of(_SCHEMA)
_INT8, _FNUZ = {"q_dtype_w": "torch.int8"}, {"q_dtype_w": "torch.float8_e4m3fnuz"}

op = Op(
    name=NAME,
    operands=scaled_rows.OPERANDS,
    weights=scaled_rows.WEIGHTS,
    columns=Columns(
        tuned_file="a8w8_bpreshuffle_tuned_gemm.csv",
        untuned_file="a8w8_bpreshuffle_untuned_gemm.csv",
        variable="AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE",
        values=("libtype", *quantised.VALUES),
        **_SCHEMA.columns(),
    ),
    shape_of=scaled_rows.shaper(NAME, _layout_of),
    make_inputs=scaled_rows.make_inputs,
    reference=scaled_rows.reference,
    tolerance=tolerance,
    flops=quantised.flops,
    bytes_moved=scaled_rows.bytes_moved,
    fake=quantised.fake,
    problem=scaled_rows.domain("shuffled").problem,
    canonical=scaled_rows.canonical,
    equivalent_shapes=_SCHEMA.equivalent_shapes,
    unbiased=unbiased,
    first_rows=scaled_rows.first_rows,
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512, **_INT8),  # a prime M
        _example(33, 144, 96),  # N and K: multiples of what the layout needs and of no tile
        _example(5, 96, 32, **_INT8),  # the least K
        _example(64, 384, 256, bias="True", **_INT8),
        _example(16, 512, 1024, scale="tensor"),
        _example(3, 160, 256, bias="True", outdtype="fp32"),
        _example(24, 320, 640, bias="True", outdtype="fp16", scale="tensor", **_INT8),
        _example(32, 16, 2048, outdtype="fp16"),  # the narrowest N
        _example(17, 64, 128, layout="aiter32x16"),
        _example(8, 128, 256, **_FNUZ),
        _example(0, 256, 512),  # an empty batch
    ),
    large=lambda: (
        _example(1024, 4096, 4096, **_INT8),
        _example(4099, 2048, 1408),  # a prime M beyond one wave of tiles
        _example(16, 7168, 16384),
    ),
    functions=("gemm_a8w8_bpreshuffle", "gemm_a8w8_ASM"),
    entry=_entry,
)
