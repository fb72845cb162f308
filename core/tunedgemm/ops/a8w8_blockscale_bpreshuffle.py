"""a8w8_blockscale_bpreshuffle: a8w8_blockscale with a shuffled weight and transposed scales of x.

AITER's ``gemm_a8w8_blockscale_bpreshuffle``; its table is
``a8w8_blockscale_bpreshuffle_tuned_gemm.csv``. ``x_scale`` has the shape [M, ceil(K/128)] and is
contiguous, but its memory holds the transpose, [ceil(K/128), M] row by row. `transposed_scale`
makes it (AITER's quantisation with ``transpose_scale=True``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised, scaled_blocks
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.layout import shuffled_layout
from tunedgemm.ops.op import Call, Columns, Op, Serving
from tunedgemm.ops.product import tolerance
from tunedgemm.ops.scale_order import blocks
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

NAME = "a8w8_blockscale_bpreshuffle"
_LAYOUT = "aiter16x16"


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *, otype: torch.dtype | None = None
) -> Shape:
    """Return the shape of a call; raises OperandError for operands that do not fit each other."""
    quantised.check_tensors(NAME, x=x, weight=weight, x_scale=x_scale, w_scale=w_scale)
    layout = shuffled_layout(NAME, weight, "(16, 16)", "gemm_a8w8_blockscale")
    shape = scaled_blocks.shape_of(NAME, layout, (x, weight, x_scale, w_scale), otype)
    if not x_scale.is_contiguous():
        raise OperandError(
            f"{NAME}: x_scale must be contiguous, its memory holding the transpose (got {tuple(x_scale.shape)} with strides "
            f"{x_scale.stride()}); pass transposed_scale(x_scale) of scales that lie row by row"
        )
    return shape


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw inputs as for a8w8_blockscale, then shuffle the weight and transpose the scales of x."""
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    x, weight, x_scale, w_scale = scaled_blocks.make_inputs(shape, device, seed)
    return x, shuffle_weight(weight, shape.layout), scaled_blocks.transposed_scale(x_scale), w_scale


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute [m, n] on the operands' device, rounded to float64 where quick, else to float32."""
    from tunedgemm.ops.formats.shuffle import unshuffled

    x, weight, x_scale, w_scale = operands
    return scaled_blocks.reference(shape, (x, unshuffled(weight), scaled_blocks.untransposed_scale(x_scale), w_scale))


def _first_rows(shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    x, weight, x_scale, w_scale = operands
    scales = scaled_blocks.untransposed_scale(x_scale).reshape(shape.m, blocks(shape.k))[:m]
    return x.reshape(shape.m, shape.k)[:m].contiguous(), weight, scaled_blocks.transposed_scale(scales), w_scale


def _entry(serving: Serving) -> Mapping[str, Call]:
    import torch

    scaled, bf16 = hot_function(serving, scaled_blocks.OPERANDS), torch.bfloat16

    def gemm_a8w8_blockscale_bpreshuffle(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        dtype: torch.dtype | None = bf16,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``XQ[..., K] @ WQ[N, K].T`` of fp8 operands with block scales and a shuffled weight.

        Args:
            XQ: activations in fp8 e4m3, any leading dimensions (M rows in all).
            WQ: of the same dtype, as `shuffle_weight` or `as_shuffled` gives it; AITER's kernels
                want (16, 16).
            x_scale: float32 [M, ceil(K/128)], its memory holding the transpose: contiguous, as
                `transposed_scale` gives it, or with the strides (1, M).
            w_scale: float32 [ceil(N/128), ceil(K/128)].
            dtype: of the output: bf16, fp16 or fp32; None for bf16.
            out: only None: the output is always new.

        Returns:
            A new tensor [..., N].

        Raises:
            OperandError: shapes, dtypes, layouts or devices that do not fit each other, or an
                *out*.
        """
        if out is not None:
            raise OperandError(f"{NAME}: out is not taken, the output is a new tensor; call out.copy_(…) with it")
        if isinstance(x_scale, torch.Tensor) and not x_scale.is_contiguous() and x_scale.dim() == 2 and x_scale.t().is_contiguous():
            x_scale = x_scale.t().view(x_scale.shape)  # the strides (1, M) say what the memory is
        return scaled(XQ, WQ, x_scale, w_scale, dtype)

    return {"gemm_a8w8_blockscale_bpreshuffle": gemm_a8w8_blockscale_bpreshuffle}


_SCHEMA = scaled_blocks.schema(NAME, _LAYOUT)
_example = quantised.example_of(_SCHEMA)

op = Op(
    name=NAME,
    operands=scaled_blocks.OPERANDS,
    weights=scaled_blocks.WEIGHTS,
    columns=Columns(
        tuned_file="a8w8_blockscale_bpreshuffle_tuned_gemm.csv",
        untuned_file="a8w8_blockscale_bpreshuffle_untuned_gemm.csv",
        variable="AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE",
        values=("libtype", *quantised.VALUES),
        **_SCHEMA.columns(),
    ),
    shape_of=_shape_of,
    make_inputs=_make_inputs,
    reference=_reference,
    tolerance=tolerance,
    flops=quantised.flops,
    bytes_moved=scaled_blocks.bytes_moved,
    fake=quantised.fake,
    problem=scaled_blocks.domain(_LAYOUT).problem,
    equivalent_shapes=_SCHEMA.equivalent_shapes,
    first_rows=_first_rows,
    examples=lambda: (
        _example(1, 1280, 4096),  # decoding one token
        _example(127, 256, 512),  # a prime M
        _example(16, 256, 384),
        _example(33, 144, 96),  # one short block of K, two blocks of N
        _example(5, 576, 224),  # tails in N (DeepSeek's kv_a projection) and K
        _example(32, 16, 2048),  # the narrowest N
        _example(8, 256, 1024, outdtype="fp32"),
        _example(24, 320, 640, outdtype="fp16"),
        _example(17, 64, 160, layout="aiter32x16"),
        _example(7, 128, 256, dtype="torch.float8_e4m3fnuz"),
        _example(0, 256, 512),  # an empty batch
    ),
    large=lambda: (
        _example(1024, 4096, 4096),
        _example(4099, 2112, 1408),  # a prime M beyond one wave of tiles, N with a tail
        _example(64, 7168, 18432),
    ),
    functions=("gemm_a8w8_blockscale_bpreshuffle",),
    entry=_entry,
)
