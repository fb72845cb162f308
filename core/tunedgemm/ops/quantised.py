"""Shared by the quantised ops ``x[..., K] @ weight[N, K].T``: columns, checks, traffic, inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import dtype_bits, short_dtype, table_text, torch_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops.layout import transposed_hint
from tunedgemm.ops.op import Columns, Op
from tunedgemm.ops.product import tolerance
from tunedgemm.ops.schema import Dtype, Schema
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
#: Dtypes of the output; the first is AITER's default.
OUTDTYPES = ("bf16", "fp16", "fp32")
BIAS_DTYPES = ("bf16", "fp16", "fp32")
#: Our column of the output dtype.
OUTDTYPE = Dtype("outdtype", "outdtype", OUTDTYPES[0], allowed=OUTDTYPES)

#: AITER's columns after the key (and ``libtype``, if present) in its 8- and 4-bit families.
VALUES = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")


def flops(shape: Shape) -> int:
    """Count the multiplications and additions of a call."""
    return 2 * shape.m * shape.n * shape.k


def bytes_moved(shape: Shape, scale_bits: int = 0, weight: str = "") -> int:
    """Count the bytes of each operand and the output once.

    Args:
        shape: the shape.
        scale_bits: total bits of all scales.
        weight: short dtype of the weight; by default the shape's dtype.
    """
    of_x, of_weight = (4 if dtype == "fp4x2" else dtype_bits(dtype) for dtype in (shape.dtype, weight or shape.dtype))
    bits = shape.k * (shape.m * of_x + shape.n * of_weight) + scale_bits
    bits += shape.n * dtype_bits(shape.bias_dtype) if shape.bias else 0
    return (bits + shape.m * shape.n * dtype_bits(shape.outdtype)) // 8


def fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    """Make an empty output [..., N], by default in bf16."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=otype or torch_dtype(OUTDTYPES[0]))


def product_op(schema: Schema, variable: str, *, files: str = "", values: tuple[str, ...] = VALUES, **fields: Any) -> Op:
    """Make an op from its schema.

    Args:
        schema: the columns; the fixed field ``op`` is the name.
        variable: the environment variable that overrides the tables.
        files: file name of the tables, with ``{}`` for ``tuned`` or ``untuned``.
        values: columns after the key.
        fields: further fields of `Op`, some with defaults here.
    """
    name = str(schema.fixed["op"])
    files = files or f"{name}_{{}}_gemm.csv"
    columns = Columns(files.format("tuned"), files.format("untuned"), variable, values=values, **schema.columns())
    usual = {"tolerance": tolerance, "flops": flops, "fake": fake, "equivalent_shapes": schema.equivalent_shapes}
    return Op(name=name, columns=columns, **{**usual, **fields})


def names_of(dtypes: tuple[str, ...]) -> str:
    """Join short dtypes for a message."""
    return ", ".join(map(table_text, dtypes))


def example_of(schema: Schema, sizes: Sequence[str] = "MNK") -> Callable[..., Shape]:
    """Make a function that builds the shape of a row from numbers for *sizes* and other cells."""

    def example(*numbers: int, **cells: str) -> Shape:
        return schema.parse({**dict(zip(sizes, map(str, numbers), strict=True)), **cells})

    return example


def describe(operand: torch.Tensor) -> str:
    """Describe an operand in a message: sizes, dtype and device."""
    return f"{tuple(operand.shape)} {operand.dtype} on {operand.device}"


def check_matrices(op: str, x: torch.Tensor, weight: torch.Tensor, packed: int = 1) -> None:
    """Check that x [..., K] and weight [N, K/packed] match and are on one device.

    Args:
        packed: values of K per element of the weight.

    Raises:
        OperandError: a size or device differs.
    """
    operands = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
    form, sides = ("[N, K]", "equal") if packed == 1 else (f"[N, K/{packed}]", f"be {packed} times")
    if weight.dim() != 2:
        raise OperandError(f"{op}: the weight must be 2-D {form} ({operands})")
    if x.dim() == 0 or x.shape[-1] != packed * weight.shape[1]:
        hint = _k_hint(x, weight, packed * weight.shape[1])
        raise OperandError(f"{op}: the last dimension of x must {sides} that of the {form} weight ({operands}){hint}")
    if weight.numel() == 0:
        raise ShapeError(f"{op}: N and K must be at least 1 ({operands})")
    if x.device != weight.device:
        raise OperandError(f"{op}: x is on {x.device} and weight on {weight.device}")


def _k_hint(x: torch.Tensor, weight: torch.Tensor, k: int) -> str:
    if x.dim() and x.shape[-1] == weight.shape[0]:
        return f"; {transposed_hint(weight)}"
    if x.dim() and x.shape[-1] < k:
        return f"; for a weight padded in K, pad x with zeros to K={k}, too"
    return ""


def check_dtypes(op: str, x: torch.Tensor, weight: torch.Tensor, dtypes: tuple[str, ...]) -> str:
    """Return the common short dtype of x and weight, one of *dtypes*.

    Raises:
        OperandError: the dtypes differ or are not supported.
    """
    if x.dtype != weight.dtype or str(x.dtype) not in map(table_text, dtypes):
        raise OperandError(f"{op}: x and weight must both be one of {names_of(dtypes)} (got x {x.dtype}, weight {weight.dtype})")
    return short_dtype(x.dtype)


def check_not_packed(op: str, **scales: torch.Tensor) -> None:
    """Check that block scales are not packed into integers.

    Raises:
        OperandError: one is, like DeepGEMM's ue8m0 scales for Blackwell.
    """
    import torch

    for name, scale in scales.items():
        if scale.dtype in (torch.int32, torch.uint8):
            raise OperandError(
                f"{op}: {name}: ue8m0 scales, packed or not, are not covered (got {describe(scale)}); "
                "pass float32 scales, one for each block"
            )


def check_scale(
    op: str, name: str, scale: torch.Tensor, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], device: torch.device
) -> None:
    """Check that a scale has one of the *shapes* and *dtypes* on *device*.

    Raises:
        OperandError: its shape, dtype or device differs.
    """
    if tuple(scale.shape) not in shapes or scale.device != device:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        single = scale.numel() == 1 < min(map(math.prod, shapes)) and scale.device == device and str(scale.dtype) in map(table_text, dtypes)
        hint = "; one value for all must be expanded and made contiguous" if single else ""
        raise OperandError(f"{op}: {name} must be {wanted}, {names_of(dtypes)} on {device} (got {describe(scale)}){hint}")
    check_dtype(op, name, scale, dtypes)


def check_global_scale(op: str, name: str, scale: torch.Tensor, most: float) -> None:
    """Check the value of a global scale that multiplies, amax / 2688, which is at most *most*.

    Raises:
        OperandError: it is not finite, not above 0, or a scale that divides.
    """
    value = float(scale.detach())
    if not 0 < value < math.inf:
        raise OperandError(f"{op}: {name} must be finite and above 0 (got {value:g}); pass amax / 2688, or 1 for zeros")
    if value > most:
        raise OperandError(
            f"{op}: {name}: it multiplies, amax / 2688, and must be at most {most:.4g} (got {value:g}); pass the reciprocal of a "
            "scale that divides, as compressed-tensors stores and quantisers of vLLM and FlashInfer take"
        )


def check_dtype(op: str, name: str, operand: torch.Tensor, dtypes: tuple[str, ...]) -> None:
    """Check that an operand has one of the *dtypes*.

    Raises:
        OperandError: its dtype is not supported.
    """
    if str(operand.dtype) not in map(table_text, dtypes):
        e8m0 = str(operand.dtype) == table_text("e8m0") and "fp32" in dtypes
        hint = f"; e8m0 scales are not taken here: pass {name}.float()" if e8m0 else ""
        raise OperandError(f"{op}: {name} must be {names_of(dtypes)} (got {operand.dtype}){hint}")


def bias_dtype_of(op: str, bias: torch.Tensor | None, n: int, device: torch.device, batches: tuple[int, ...] = ()) -> str:
    """Return the short dtype of a bias [*batches, N] or [*batches, 1, N] on *device*; "" for None.

    Raises:
        OperandError: its shape, dtype or device is wrong.
    """
    if bias is None:
        return ""
    forms = (*batches, n), (*batches, 1, n)
    if tuple(bias.shape) not in forms or bias.device != device or str(bias.dtype) not in map(table_text, BIAS_DTYPES):
        wanted = " or ".join(str(list(form)) for form in forms)
        raise OperandError(f"{op}: bias must be {wanted}, {names_of(BIAS_DTYPES)} on {device} (got {describe(bias)})")
    return short_dtype(bias.dtype)


def outdtype_of(op: str, otype: torch.dtype | None, default: str = OUTDTYPES[0]) -> str:
    """Return the short output dtype, by default *default*.

    Raises:
        OperandError: the op does not support the dtype.
    """
    if otype is not None and str(otype) not in map(table_text, OUTDTYPES):
        raise OperandError(f"{op}: the output must be one of {names_of(OUTDTYPES)} (got {otype})")
    return default if otype is None else short_dtype(otype)


def rows_of(x: torch.Tensor) -> int:
    """Return M: the product of all dimensions of x but the last."""
    return math.prod(x.shape[:-1])


def draw(rows: int, cols: int, group: int, generator: torch.Generator) -> torch.Tensor:
    """Draw normal [rows, cols] in bf16, whose magnitude varies by row and by *group* columns.

    So a scale applied to the wrong row or group is detected.
    """
    import torch

    device = generator.device
    by_row = torch.rand(rows, 1, generator=generator, device=device) + 0.5
    by_group = (torch.rand(-(-cols // group), generator=generator, device=device) + 0.5).repeat_interleave(group)[:cols]
    out = torch.randn(rows, cols, generator=generator, device=device, dtype=torch.bfloat16)
    return out.mul_(by_row.bfloat16()).mul_(by_group.bfloat16())


def draw_bias(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Draw a normal bias [n] as a 1-tuple; () for a shape without bias."""
    import torch

    if not shape.bias:
        return ()
    return (torch.randn(shape.n, generator=generator, device=generator.device).to(torch_dtype(shape.bias_dtype)),)
