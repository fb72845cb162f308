"""Batched GEMM: ``out[B, M, N] = x[B, M, K] @ weight[B, N, K].mT (+ bias[B, N])``.

``batched_bf16`` takes bf16 or fp16: AITER's ``batched_gemm_bf16``, with the table
``bf16_tuned_batched_gemm.csv``. ``batched_a8w8`` takes int8 or fp8 with row-wise float32 scales:
AITER's ``batched_gemm_a8w8``, with the table ``a8w8_tuned_batched_gemm.csv``. Accumulation is in
int32 or float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.hot import BF16, Serving, hot, hot_function, public
from tunedgemm.ops.layout import plain_layout
from tunedgemm.ops.op import Function, Op, taken
from tunedgemm.ops.padded_m import exact
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.ops.schema import BIAS, MNK, Dtype, Schema, Size
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

_PLAIN = ("x", "weight", "bias?")
_SCALED = ("x", "weight", "x_scale", "w_scale", "bias?")
#: Dtypes of x and weight by op; the first is the default of AITER's rows.
_DTYPES = {"batched_a8w8": ("int8", *quantised.FP8), "batched_bf16": ("bf16", "fp16")}


def _shape_of_bf16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, otype: torch.dtype | None = None) -> Shape:
    return _shape("batched_bf16", x, weight, None, bias, otype)


def _shape_of_a8w8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
) -> Shape:
    return _shape("batched_a8w8", x, weight, (x_scale, w_scale), bias, otype)


def _shape(
    op: str, x: torch.Tensor, weight: torch.Tensor, scales: tuple[Any, Any] | None, bias: torch.Tensor | None, otype: torch.dtype | None
) -> Shape:
    batches, m, n, k, dtype = _check_operands(op, _DTYPES[op], x, weight)
    if scales:
        quantised.check_scale(op, "x_scale", scales[0], ((batches, m, 1), (batches, m)), ("fp32",), x.device)
        quantised.check_scale(op, "w_scale", scales[1], ((batches, 1, n), (batches, n, 1), (batches, n)), ("fp32",), x.device)
    bias_dtype = quantised.bias_dtype_of(op, bias, n, x.device, (batches,))
    return Shape(
        op=op,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        outdtype=quantised.outdtype_of(op, otype, "bf16" if scales else dtype),
        epilogue="bias" if bias_dtype else "none",
        bias_dtype=bias_dtype,
        scale="row" if scales else "none",
        extra={"B": batches},  # type: ignore[arg-type]
    )


def _check_operands(op: str, dtypes: tuple[str, ...], x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int, str]:
    """Return (B, M, N, K, dtype) of x [B, M, K] and weight [B, N, K]; raise OperandError else."""
    operands = f"x {quantised.describe(x)}, weight {quantised.describe(weight)}"
    plain_layout(op, weight)
    if x.dim() != 3 or weight.dim() != 3:
        raise OperandError(f"{op}: x must be 3-D [B, M, K] and the weight 3-D [B, N, K] ({operands})")
    if x.shape[0] != weight.shape[0]:
        raise OperandError(f"{op}: x [B, M, K] and weight [B, N, K] must have the same B ({operands})")
    if x.shape[2] != weight.shape[2]:
        hint = "; a [B, K, N] weight must be passed as weight.transpose(1, 2)" if x.shape[2] == weight.shape[1] else ""
        raise OperandError(f"{op}: the last dimension of x must equal that of the [B, N, K] weight ({operands}){hint}")
    dtype = quantised.check_dtypes(op, x, weight, dtypes)
    if x.device != weight.device:
        raise OperandError(f"{op}: x and weight must be on one device ({operands})")
    batches, m, k = x.shape
    if not batches:
        raise ShapeError(f"{op}: B must be at least 1 ({operands})")
    return batches, m, weight.shape[1], k, dtype


def _make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal x [B, m, k], weight [B, n, k] and the shape's bias [B, n].

    For batched_a8w8, x and weight are quantised row-wise, with scales [B, m, 1] and [B, n, 1].
    """
    import torch

    from tunedgemm.ops.formats.quant import pertoken_quant

    generator, batches, target = torch.Generator(device).manual_seed(seed), int(shape["B"]), torch_dtype(shape.dtype)

    def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(batches, *sizes, generator=generator, device=device, dtype=dtype)

    def uneven(rows: int) -> torch.Tensor:  # so that a wrong row's scale is detected
        return 2 ** -torch.rand(batches, rows, 1, generator=generator, device=device)

    bias_dtype = torch_dtype(shape.bias_dtype) if shape.bias else None
    if shape.scale == "none":
        operands = draw(shape.m, shape.k, dtype=target), draw(shape.n, shape.k, dtype=target)
        return (*operands, draw(shape.n, dtype=bias_dtype)) if bias_dtype else operands
    x, x_scale = pertoken_quant(draw(shape.m, shape.k) * uneven(shape.m), quant_dtype=target)
    weight, w_scale = pertoken_quant(draw(shape.n, shape.k) * uneven(shape.n), quant_dtype=target)
    return (x, weight, x_scale, w_scale, *([draw(shape.n).to(bias_dtype)] if bias_dtype else []))


def _reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    x, weight, *rest = operands
    batches, scales = int(shape["B"]), [] if shape.scale == "none" else [rest.pop(0), rest.pop(0)]
    wide = exact_dtype(batches * shape.m, shape.n, shape.k)
    out = exact_product(x, weight, wide)
    for scale, sizes in zip(scales, ((shape.m, 1), (1, shape.n)), strict=False):
        out *= scale.to(wide).reshape(batches, *sizes)
    return out + rest[0].to(wide).reshape(batches, 1, shape.n) if rest and rest[0] is not None else out


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    otype = otype or (torch_dtype("bf16") if x.element_size() == 1 else x.dtype)
    return x.new_empty((*x.shape[:2], weight.shape[1]), dtype=otype)


def _some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    count = 1 if shape.scale == "none" else 3
    return tuple(taken(operand, indices, 1) if index < count and index != 1 else operand for index, operand in enumerate(operands))


def batched_gemm_a8w8(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    splitK: int | None = None,
) -> torch.Tensor:
    """Compute ``(XQ[B, M, K] @ WQ[B, N, K].mT) * x_scale * w_scale (+ bias)`` by the tables.

    Args:
        XQ, WQ: activations and weight, both int8 or both fp8.
        x_scale: float32 [B, M, 1] or [B, M].
        w_scale: float32 [B, 1, N], [B, N, 1] or [B, N].
        bias: [B, N] or [B, 1, N] in bf16, fp16 or fp32, or absent.
        dtype: of the output: bf16, fp16 or fp32; None for bf16.
        splitK: accepted as AITER does and not used: the table decides.

    Returns:
        A new tensor [B, M, N].

    Raises:
        OperandError: shapes, dtypes or devices that do not fit each other.
    """
    del splitK
    return hot(XQ, WQ, x_scale, w_scale, bias, dtype)


def batched_gemm_bf16(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = BF16,
    splitK: int | None = None,
) -> torch.Tensor:
    """Compute ``XQ[B, M, K] @ WQ[B, N, K].mT (+ bias[B, N])`` by the solution of the tables.

    Args:
        XQ, WQ: activations and weight, both bf16 or both fp16.
        bias: [B, N] or [B, 1, N] in bf16, fp16 or fp32, or absent.
        dtype: of the output: bf16, fp16 or fp32; None for that of XQ.
        splitK: accepted as AITER does and not used: the table decides.

    Returns:
        A new tensor [B, M, N].

    Raises:
        OperandError: shapes, dtypes or devices that do not fit each other.
    """
    del splitK
    return hot(XQ, WQ, bias, dtype)


def _entry_bf16(serving: Serving) -> Mapping[str, Function]:
    hot = hot_function(serving, ("XQ", "WQ", "bias?"), otype="dtype", general=batched_gemm_bf16)
    return dict.fromkeys(serving.op.functions, hot)


def _schema(op: str) -> Schema:
    dtypes = _DTYPES[op]
    return Schema(
        {"op": op, "scale": "row" if op == "batched_a8w8" else "none"},
        key=(Size("B", "B"), *MNK),
        own=(Dtype("dtype", "dtype", dtypes[0], allowed=dtypes), quantised.OUTDTYPE, BIAS),
    )


_SCHEMAS = {op: _schema(op) for op in _DTYPES}
_a8w8, _bf16 = (quantised.example_of(_SCHEMAS[op], "BMNK") for op in _DTYPES)


def _batches_problem(shape: Shape) -> str:
    return "" if int(shape["B"]) >= 1 else f"B must be at least 1 (got {shape['B']})"


def _op(name: str, variable: str, **fields: Any) -> Op:
    kind, schema = name.removeprefix("batched_"), _SCHEMAS[name]
    domain = Domain(
        _DTYPES[name], quantised.OUTDTYPES, quantised.BIAS_DTYPES, (schema.fixed["scale"],), extra=("B",), further=_batches_problem
    )
    return quantised.product_op(
        schema,
        variable,
        files=f"{kind}_{{}}_batched_gemm.csv",
        make_inputs=_make_inputs,
        reference=_reference,
        flops=lambda shape: 2 * int(shape["B"]) * shape.m * shape.n * shape.k,
        bytes_moved=lambda shape: int(shape["B"]) * quantised.bytes_moved(shape, 32 * (shape.m + shape.n) if shape.scale == "row" else 0),
        fake=_fake,
        problem=domain.problem,
        padded_m=exact,
        some_rows=_some_rows,
        **fields,
    )


a8w8 = _op(
    "batched_a8w8",
    "AITER_CONFIG_A8W8_BATCHED_GEMM",
    operands=_SCALED,
    weights=(1, 3, 4),
    shape_of=_shape_of_a8w8,
    examples=lambda: (
        _a8w8(16, 1, 128, 256),
        _a8w8(1, 33, 130, 72),
        _a8w8(3, 17, 64, 99),  # an odd K: rows that are not 16-byte aligned
        _a8w8(2, 64, 192, 128, bias="True"),
        _a8w8(4, 5, 96, 64, bias="True", outdtype="fp32"),
        _a8w8(8, 24, 80, 160, outdtype="fp16"),
        _a8w8(5, 7, 48, 64, dtype="fp8_e4m3fn"),
        _a8w8(2, 31, 64, 128, dtype="fp8_e4m3fn", bias="True", outdtype="fp16"),
        _a8w8(3, 8, 32, 96, dtype="fp8_e4m3fnuz"),
        _a8w8(4, 0, 64, 128),
    ),
    large=lambda: (
        _a8w8(16, 512, 1280, 8192),
        _a8w8(16, 4099, 2048, 576),  # a prime M beyond one wave of tiles
        _a8w8(8, 1024, 4096, 4096, dtype="fp8_e4m3fn"),
    ),
    functions=("batched_gemm_a8w8", "batched_gemm_a8w8_CK"),
    entry=public(batched_gemm_a8w8, _SCALED),
)

bf16 = _op(
    "batched_bf16",
    "AITER_CONFIG_BF16_BATCHED_GEMM",
    operands=_PLAIN,
    weights=(1, 2),
    shape_of=_shape_of_bf16,
    examples=lambda: (
        _bf16(16, 1, 128, 256),
        _bf16(1, 33, 130, 72),
        _bf16(3, 17, 64, 99),  # an odd K: rows that are not 16-byte aligned
        _bf16(2, 64, 192, 128, bias="True"),
        _bf16(4, 5, 96, 64, bias="True", outdtype="fp32"),
        _bf16(8, 24, 80, 160, dtype="fp16", outdtype="fp16"),
        _bf16(5, 7, 48, 64, dtype="fp16"),
        _bf16(4, 0, 64, 128),
    ),
    large=lambda: (
        _bf16(16, 512, 1280, 8192),
        _bf16(128, 1024, 512, 128),  # DeepSeek V3: the absorbed projection of each head
        _bf16(16, 4099, 2048, 576),  # a prime M beyond one wave of tiles
    ),
    functions=("batched_gemm_bf16", "batched_gemm_bf16_CK"),
    entry=_entry_bf16,
)
