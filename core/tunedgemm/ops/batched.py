"""Share code of the batched ops: ``out[b] = x[b, M, K] @ weight[b, N, K].T``, AITER's key B, M, N, K."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import dtype_bits, short_dtype, table_text
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import quantised
from tunedgemm.ops.cells import dtype, flag, size
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.layout import plain_layout
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

KEY = ("B", "M", "N", "K")
#: Our columns: AITER's key knows only the default dtype, bf16 out and no bias.
OWN = ("dtype", "outdtype", "bias")


def domain(dtypes: tuple[str, ...], scale: str = "none") -> Domain:
    """Return the domain of a batched op."""
    return Domain(dtypes, quantised.OUTDTYPES, quantised.BIAS_DTYPES, (scale,), extra=("B",), further=_batches_problem)


def _batches_problem(shape: Shape) -> str:
    return "" if int(shape["B"]) >= 1 else f"B must be at least 1 (got {shape['B']})"


def parser(op: str, dtypes: tuple[str, ...], scale: str = "none") -> Callable[[Mapping[str, str]], Shape]:
    """Make `Columns.parse` of a batched op; the first of *dtypes* is the one of AITER's rows."""

    def parse(row: Mapping[str, str]) -> Shape:
        return Shape(
            op=op,
            m=size(row, "M"),
            n=size(row, "N"),
            k=size(row, "K"),
            dtype=dtype(row, "dtype", dtypes[0], dtypes),
            outdtype=dtype(row, "outdtype", quantised.OUTDTYPES[0], quantised.OUTDTYPES),
            epilogue="bias" if flag(row, "bias") else "none",
            scale=scale,
            extra={"B": size(row, "B")},  # type: ignore[arg-type]
        )

    return parse


def formatter(default: str) -> Callable[[Shape], dict[str, str]]:
    """Make `Columns.format` of a batched op whose rows have the dtype *default* where they do not tell."""

    def format_(shape: Shape) -> dict[str, str]:
        return {
            "B": str(shape["B"]),
            "M": str(shape.m),
            "N": str(shape.n),
            "K": str(shape.k),
            "dtype": "" if shape.dtype == default else table_text(shape.dtype),
            "outdtype": quantised.outdtype_cell(shape),
            "bias": "True" if shape.bias else "",
        }

    return format_


def equivalent_shapes_of(default: str) -> Callable[[Shape], tuple[Shape, ...]]:
    """Make `Op.equivalent_shapes`: the shape, then its form in AITER's key, without dtypes and bias."""

    def equivalent_shapes(shape: Shape) -> tuple[Shape, ...]:
        return quantised.equivalent_as(shape, dtype=default, outdtype=quantised.OUTDTYPES[0], epilogue="none", bias_dtype="")

    return equivalent_shapes


def check_operands(op: str, dtypes: tuple[str, ...], x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int, str]:
    """Return (B, M, N, K, dtype) of x [B, M, K] and weight [B, N, K].

    Raises OperandError where they do not fit each other.
    """
    import torch

    operands = f"x {quantised.describe(x)}, weight {quantised.describe(weight)}"
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor):
        raise OperandError(f"{op}: x and weight must be tensors ({operands})")
    plain_layout(op, weight)
    if x.dim() != 3 or weight.dim() != 3:
        raise OperandError(f"{op}: x must be 3-D [B, M, K] and the weight 3-D [B, N, K] ({operands})")
    if x.shape[0] != weight.shape[0]:
        raise OperandError(f"{op}: x [B, M, K] and weight [B, N, K] must have the same B ({operands})")
    if x.shape[2] != weight.shape[2]:
        hint = "; a [B, K, N] weight must be passed as weight.transpose(1, 2)" if x.shape[2] == weight.shape[1] else ""
        raise OperandError(f"{op}: the last dimension of x must equal that of the [B, N, K] weight ({operands}){hint}")
    allowed = [table_text(short) for short in dtypes]
    if x.dtype != weight.dtype or str(x.dtype) not in allowed:
        raise OperandError(f"{op}: x and weight must both be one of {', '.join(allowed)} ({operands})")
    if x.device != weight.device:
        raise OperandError(f"{op}: x and weight must be on one device ({operands})")
    batches, m, k = x.shape
    if not batches:
        raise ShapeError(f"{op}: B must be at least 1 ({operands})")
    return batches, m, weight.shape[1], k, short_dtype(x.dtype)


def bias_dtype_of(op: str, bias: torch.Tensor | None, batches: int, n: int, device: torch.device) -> str:
    """Return the short dtype of a bias [B, N] or [B, 1, N] on *device*, "" for none.

    Raises OperandError for another bias.
    """
    if bias is None:
        return ""
    import torch

    allowed = [table_text(short) for short in quantised.BIAS_DTYPES]
    fits = isinstance(bias, torch.Tensor) and tuple(bias.shape) in ((batches, n), (batches, 1, n)) and bias.device == device
    if not fits or str(bias.dtype) not in allowed:
        wanted = f"[{batches}, {n}] or [{batches}, 1, {n}] on {device}, {', '.join(allowed)}"
        raise OperandError(f"{op}: bias must be {wanted} (got {quantised.describe(bias)})")
    return short_dtype(bias.dtype)


def first_rows(shape: Shape, operands: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    """Cut the activations [B, M, K] and any scales of theirs [B, M, ...] to *m* rows of each batch."""
    count = 1 if shape.scale == "none" else 3
    return tuple(operand[:, :m].contiguous() if index < count and index != 1 else operand for index, operand in enumerate(operands))


def flops(shape: Shape) -> int:
    """Count the operations of all batches."""
    return 2 * int(shape["B"]) * shape.m * shape.n * shape.k


def bytes_moved(shape: Shape) -> int:
    """Count each operand and the output once; scales are float32."""
    read = (shape.m + shape.n) * shape.k * dtype_bits(shape.dtype)
    scales = 0 if shape.scale == "none" else (shape.m + shape.n) * 32
    bias = shape.n * dtype_bits(shape.bias_dtype) if shape.bias else 0
    return int(shape["B"]) * (read + scales + bias + shape.m * shape.n * dtype_bits(shape.outdtype)) // 8
