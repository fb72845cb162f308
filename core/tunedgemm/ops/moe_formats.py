"""Formats of the weights, scales and activations of a fused mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.dtype import torch_dtype
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


def scale_shape(shape: Shape, rows: int, cols: int) -> tuple[int, ...]:
    """Return the shape of the scales of weights [expert, rows, cols], () for none.

    cols counts elements. mxfp4 in a shuffled layout has AITER's shuffled e8m0 scales of the rows of
    all experts, padded to multiples of (256, 8).
    """
    experts, kind = int(shape["expert"]), shape["q_type"]
    if kind == "per_1x32" and shape.layout != "row":
        return -(-experts * rows // 256) * 256, -(-cols // 32 // 8) * 8
    return {
        "No": (),
        "per_Tensor": (experts,),
        "per_Token": (experts, rows, 1),
        "per_1x128": (experts, -(-rows // 128), -(-cols // 128)),
        "per_1x32": (experts, rows, cols // 32),
    }[str(kind)]


def as_quantised(x: torch.Tensor, shape: Shape, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Quantise activations [R, C] and convert them back to *dtype*, as a stage multiplies them.

    Args:
        scale: one value for per_Tensor, None to take the largest magnitude of all of x.
    """
    from tunedgemm.ops.formats import mxfp4, quant

    kind = shape["q_type"]
    if kind == "No" or x.numel() == 0:
        return x.to(dtype)
    x = x.float()
    if kind == "per_1x32":
        return mxfp4.dequant_fp4(*mxfp4.per_1x32_f4_quant(x), dtype)
    q_dtype = torch_dtype(str(shape["q_dtype_a"]))
    if kind == "per_1x128":
        return quant.dequant_blocks(*quant.per_1x128_quant(x, q_dtype), dtype, (1, 128))
    if kind == "per_Token":
        return quant.dequant_rows(*quant.pertoken_quant(x, quant_dtype=q_dtype), dtype)
    return quant.dequant_rows(*quant.per_tensor_quant(x, scale, quant_dtype=q_dtype), dtype)


def plain_scale(scale: torch.Tensor | None, shape: Shape, rows: int, cols: int) -> torch.Tensor | None:
    """Return the scales of weights [expert, rows, cols] in order as [expert, ...]; None without any."""
    from tunedgemm.ops.formats.scales import unshuffle_scale

    if scale is None:
        return None
    wanted = scale_shape(shape, rows, cols)
    if shape["q_type"] == "per_1x32" and shape.layout != "row":
        experts = int(shape["expert"])
        return unshuffle_scale(scale.reshape(wanted), experts * rows, cols // 32).reshape(experts, rows, cols // 32)
    return scale.reshape(wanted)


def expert_weight(weight: torch.Tensor, scale: torch.Tensor | None, expert: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix [rows, cols] in *dtype*, dequantised.

    Args:
        weight: [expert, rows, cols], plain (cols / 2 for fp4x2).
        scale: as `plain_scale` gives it.
    """
    import torch

    from tunedgemm.ops.formats import mxfp4, quant

    kind = shape["q_type"]
    if kind == "per_1x32":  # torch indexes no 4-bit tensors
        return mxfp4.dequant_fp4(mxfp4.as_fp4(weight.view(torch.uint8)[expert]), scale[expert], dtype)  # type: ignore[index]
    matrix = weight[expert]
    if scale is None:
        return matrix.to(dtype)
    if kind == "per_1x128":
        return quant.dequant_blocks(matrix, scale[expert], dtype, (128, 128))
    return quant.dequant_rows(matrix, scale[expert], dtype)
