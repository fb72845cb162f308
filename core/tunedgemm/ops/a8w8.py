"""8-bit GEMM with row-wise or per-tensor scales: ``(x @ weight.T) * x_scale * w_scale (+ bias)``.

``a8w8`` has a plain weight [N, K] in int8 or fp8: AITER's ``gemm_a8w8``, with the table
``a8w8_tuned_gemm.csv``. ``a8w8_bpreshuffle`` has a shuffled weight: AITER's
``gemm_a8w8_bpreshuffle`` (fp8) and ``gemm_a8w8_ASM`` (int8), with the table
``a8w8_bpreshuffle_tuned_gemm.csv``. Here the bias is optional with either dtype. Both kernels read
layout (16, 16), as AITER's tuner, tests and emulated int8 kernels do; the comments at
``gemm_a8w8_ASM`` say (32, 16).

Scales are float32, one per row of x and of the weight, or one per tensor. Accumulation is in int32
or float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import FP8, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.hot import BF16, hot, public
from tunedgemm.ops.layout import plain_layout, shuffled_layout
from tunedgemm.ops.op import Op, taken, unbiased
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.schema import BIAS, MNK, Column, Dtype, Schema, ShuffledLayout, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

_DTYPES = ("int8", *quantised.FP8)
_OPERANDS = ("x", "weight", "x_scale", "w_scale", "bias?")

#: Scale granularities; the first is the default of AITER's rows.
_KINDS = ("row", "tensor")
_FLOAT32 = ("fp32",)
#: Columns of K whose magnitude `make_inputs` varies together.
_GROUP = 128


def _kind_of(m: int, n: int, kind: str) -> str:
    """Return the scale granularity; for M = N = 1 both are the same, named ``row``."""
    return _KINDS[0] if m == n == 1 else kind


def _canonical(shape: Shape) -> Shape:
    """Return a shape with the scale granularity that calls of its sizes have."""
    return shape if shape.scale == (kind := _kind_of(shape.m, shape.n, shape.scale)) else attrs.evolve(shape, scale=kind)


def _schema(op: str, default: str, layouts: tuple[Column, ...] = ()) -> Schema:
    """Return the schema of *op*, whose rows have dtype *default* if they name none.

    *layouts* is the column of shuffled layouts; without it, weights are plain.
    """
    return Schema(
        {"op": op},
        key=(*MNK, Dtype("q_dtype_w", "dtype", default, allowed=_DTYPES)),
        own=(*layouts, Word("scale", "scale", _KINDS[0], allowed=_KINDS), quantised.OUTDTYPE, BIAS),
    )


def _shaper(op: str, layout_of: Callable[[torch.Tensor], str]) -> Callable[..., Shape]:
    """Make `Op.shape_of`.

    *layout_of* returns the layout of a supported weight, and raises OperandError for another.
    """

    def shape_of(
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        otype: torch.dtype | None = None,
    ) -> Shape:
        """Return the shape of a call; raise OperandError for mismatched operands."""
        layout = layout_of(weight)
        quantised.check_matrices(op, x, weight)
        dtype = quantised.check_dtypes(op, x, weight, _DTYPES)
        m, n = quantised.rows_of(x), weight.shape[0]
        bias_dtype = quantised.bias_dtype_of(op, bias, n, x.device)
        return Shape(
            op=op,
            m=m,
            n=n,
            k=x.shape[-1],
            dtype=dtype,
            outdtype=quantised.outdtype_of(op, otype),
            epilogue="bias" if bias_dtype else "none",
            bias_dtype=bias_dtype,
            scale=_kind(op, x, n, x_scale, w_scale),
            layout=layout,
        )

    return shape_of


def _kind(op: str, x: torch.Tensor, n: int, x_scale: torch.Tensor, w_scale: torch.Tensor) -> str:
    """Return ``tensor`` for one scale each, ``row`` for one scale per row, also with one row.

    Raises OperandError for other scales.
    """
    m = quantised.rows_of(x)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.device != x.device:
            raise OperandError(f"{op}: {name} must be on {x.device}, as x (got {quantised.describe(scale)})")
    ones = [scale.numel() == 1 for scale in (x_scale, w_scale)]
    if all(ones):
        kind = _kind_of(m, n, "tensor")
    elif ones == [True, False] and m != 1:
        raise OperandError(
            f"{op}: x_scale is of the whole tensor and w_scale by row (got {quantised.describe(x_scale)}, {quantised.describe(w_scale)}); "
            f"pass x_scale.reshape(1, 1).expand({m}, 1).contiguous()"
        )
    elif ones == [False, True] and n != 1:
        raise OperandError(
            f"{op}: x_scale is by row and w_scale of the whole tensor (got {quantised.describe(x_scale)}, {quantised.describe(w_scale)}); "
            f"pass w_scale.reshape(1, 1).expand({n}, 1).contiguous()"
        )
    else:
        kind = "row"
        quantised.check_scale(op, "x_scale", x_scale, ((m,), (m, 1), (*x.shape[:-1], 1)), _FLOAT32, x.device)
        quantised.check_scale(op, "w_scale", w_scale, ((n,), (n, 1), (1, n)), _FLOAT32, x.device)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        quantised.check_dtype(op, name, scale, _FLOAT32)
    return kind


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw quantised x [m, k] and weight [n, k], their scales, and the shape's bias [n].

    Scales are [m, 1] and [n, 1], or [1] each.
    """
    import torch

    from tunedgemm.ops.formats.quant import per_tensor_quant, pertoken_quant
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    generator = torch.Generator(device).manual_seed(seed)
    quantise = per_tensor_quant if shape.scale == "tensor" else pertoken_quant
    target = torch_dtype(shape.dtype)
    x, x_scale = quantise(quantised.draw(shape.m, shape.k, _GROUP, generator), quant_dtype=target)
    weight, w_scale = quantise(quantised.draw(shape.n, shape.k, _GROUP, generator), quant_dtype=target)
    weight = weight if shape.layout == "row" else shuffle_weight(weight, shape.layout)
    return x, weight, x_scale, w_scale, *quantised.draw_bias(shape, generator)


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    from tunedgemm.ops.formats.shuffle import unshuffled

    x, weight, x_scale, w_scale, bias = (*operands, None)[:5]
    wide = exact_dtype(shape.m, shape.n, shape.k)
    out = exact_product(x.reshape(shape.m, shape.k), unshuffled(weight), wide)
    out = out.mul_(x_scale.to(wide).reshape(-1, 1)).mul_(w_scale.to(wide).reshape(1, -1))
    return out if bias is None else out.add_(bias.to(wide).reshape(1, -1))


def _some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    x, weight, x_scale, *rest = operands
    x_scale = taken(x_scale.reshape(-1, 1), indices) if shape.scale == "row" else x_scale
    return (taken(x.reshape(shape.m, shape.k), indices), weight, x_scale, *rest)


def gemm_a8w8(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    splitK: int | None = None,
) -> torch.Tensor:
    """Compute ``(XQ[..., K] @ WQ[N, K].T) * x_scale * w_scale (+ bias)`` by the tables' solution.

    Args:
        XQ, WQ: activations [..., K] (M rows in all) and weight [N, K], both int8 or both of one
            fp8 e4m3 dtype.
        x_scale, w_scale: float32: M values as [M], [M, 1] or [..., 1] and N values as [N],
            [N, 1] or [1, N]; or one value each.
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        dtype: of the output: bf16, fp16 or fp32; None for bf16.
        splitK: ignored; the table decides.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: shapes, dtypes, layouts or devices that do not fit each other.
    """
    del splitK
    return hot(XQ, WQ, x_scale, w_scale, bias, dtype)


def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    check: bool = False,
) -> torch.Tensor:
    """Compute ``(XQ[..., K] @ WQ[N, K].T) * x_scale * w_scale (+ bias)`` of a shuffled weight.

    Args:
        XQ: activations [..., K] (M rows in all) in int8 or fp8 e4m3.
        WQ: [N, K] of the same dtype, from `shuffle_weight` or `as_shuffled`; AITER's kernels
            need layout (16, 16).
        x_scale, w_scale: float32: M values as [M], [M, 1] or [..., 1] and N values as [N], [N,
            1] or [1, N]; or one value each.
        bias: [N] or [1, N] in bf16, fp16 or fp32, or absent.
        dtype: of the output: bf16, fp16 or fp32; None for bf16.
        check: ignored; operands are always checked.

    Returns:
        A new tensor [..., N].

    Raises:
        OperandError: shapes, dtypes, layouts or devices that do not fit each other.
    """
    del check
    return hot(XQ, WQ, x_scale, w_scale, bias, dtype)


def _op(schema: Schema, variable: str, layout_of: Callable[[torch.Tensor], str], **fields: Any) -> Op:
    layouts = "shuffled" if isinstance(schema.own[0], ShuffledLayout) else "row"
    return quantised.product_op(
        schema,
        variable,
        operands=_OPERANDS,
        weights=(1, 3, 4),
        shape_of=_shaper(str(schema.fixed["op"]), layout_of),
        make_inputs=_make_inputs,
        reference=_reference,
        bytes_moved=lambda shape: quantised.bytes_moved(shape, 32 * (2 if shape.scale == "tensor" else shape.m + shape.n)),
        problem=Domain(_DTYPES, quantised.OUTDTYPES, quantised.BIAS_DTYPES, _KINDS, layouts).problem,
        canonical=_canonical,
        unbiased=unbiased,
        some_rows=_some_rows,
        **fields,
    )


_PLAIN, _SHUFFLED = _schema("a8w8", "int8"), _schema("a8w8_bpreshuffle", FP8, (ShuffledLayout(),))
_plain, _shuffled = quantised.example_of(_PLAIN), quantised.example_of(_SHUFFLED)
_INT8, _FN, _FNUZ = ({"q_dtype_w": f"torch.{dtype}"} for dtype in ("int8", "float8_e4m3fn", "float8_e4m3fnuz"))

a8w8 = _op(
    _PLAIN,
    "AITER_CONFIG_GEMM_A8W8",
    lambda weight: plain_layout("a8w8", weight, "gemm_a8w8_bpreshuffle"),
    examples=lambda: (
        _plain(1, 1280, 4096),  # decoding one token
        _plain(127, 256, 512, **_FN),  # a prime M
        _plain(33, 130, 99),  # ragged in all three: rows not 16-byte aligned
        _plain(5, 96, 72, **_FN),
        _plain(64, 384, 256, bias="True"),
        _plain(16, 512, 1024, scale="tensor", **_FN),
        _plain(3, 160, 256, bias="True", outdtype="fp32", scale="tensor"),
        _plain(24, 320, 640, bias="True", outdtype="fp16", **_FN),
        _plain(32, 16, 2048, outdtype="fp32", **_FN),  # the narrowest N
        _plain(8, 128, 256, **_FNUZ),
        _plain(1, 1, 64, outdtype="fp32"),  # one row each: row-wise and per-tensor scales agree
        _plain(0, 256, 512, **_FN),  # an empty batch
    ),
    large=lambda: (
        _plain(1024, 4096, 4096),
        _plain(4099, 2048, 1408, **_FN),  # a prime M beyond one wave of tiles
        _plain(16, 7168, 16384, scale="tensor", **_FN),
    ),
    functions=("gemm_a8w8", "gemm_a8w8_CK"),
    entry=public(gemm_a8w8, _OPERANDS),
)

a8w8_bpreshuffle = _op(
    _SHUFFLED,
    "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE",
    lambda weight: shuffled_layout("a8w8_bpreshuffle", weight, "(16, 16)", "gemm_a8w8"),
    values=("libtype", *quantised.VALUES),
    examples=lambda: (
        _shuffled(1, 1280, 4096),  # decoding one token
        _shuffled(127, 256, 512, **_INT8),  # a prime M
        _shuffled(33, 144, 96),  # N and K divide by the layout's blocks and by no tile
        _shuffled(5, 96, 32, **_INT8),  # the least K
        _shuffled(64, 384, 256, bias="True", **_INT8),
        _shuffled(16, 512, 1024, scale="tensor"),
        _shuffled(3, 160, 256, bias="True", outdtype="fp32"),
        _shuffled(24, 320, 640, bias="True", outdtype="fp16", scale="tensor", **_INT8),
        _shuffled(32, 16, 2048, outdtype="fp16"),  # the narrowest N
        _shuffled(17, 64, 128, layout="aiter32x16"),
        _shuffled(8, 128, 256, **_FNUZ),
        _shuffled(0, 256, 512),  # an empty batch
    ),
    large=lambda: (
        _shuffled(1024, 4096, 4096, **_INT8),
        _shuffled(4099, 2048, 1408),  # a prime M beyond one wave of tiles
        _shuffled(16, 7168, 16384),
    ),
    functions=("gemm_a8w8_bpreshuffle", "gemm_a8w8_ASM"),
    entry=public(gemm_a8w8_bpreshuffle, _OPERANDS),
)
