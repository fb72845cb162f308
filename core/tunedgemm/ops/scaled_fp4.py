"""Share code of a4w4_blockscale and a16w4_blockscale, whose weight is in mxfp4.

Two e2m1 values share a byte, and each 32 elements of K have an e8m0 scale. K counts elements, so a
packed operand is [..., K/2], the even element in the low nibble. With a shuffled weight, as AITER's
kernels want it, the scales are AITER's shuffled ones
(`tunedgemm.ops.formats.scales.shuffle_scale`), with a plain weight plain [rows, K/32].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import quantised
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

FP4 = ("fp4x2", "uint8")
_E8M0 = ("e8m0", "uint8")
#: The layout of weights that AITER's kernels read.
SHUFFLED = "aiter16x16"
#: Elements of K that share a scale.
GROUP = 32


def check_k(op: str, k: int, error: type[ShapeError | OperandError]) -> None:
    """Check that scales divide K.

    Raises:
        ShapeError, OperandError: as *error* says, where they do not.
    """
    if k % GROUP:
        raise error(f"{op}: K must be a multiple of {GROUP}, which share a scale (got K={k}); pad x and the weight with zeros")


def scale_sizes(layout: str, rows: int, groups: int) -> tuple[int, int]:
    """Return the sizes of scales [rows, groups]; AITER pads shuffled ones to multiples of 256 and 8."""
    return (rows, groups) if layout == "row" else (-(-rows // 256) * 256, -(-groups // 8) * 8)


def check_scale(op: str, name: str, scale: torch.Tensor, sizes: tuple[tuple[int, ...], ...], layout: str, device: torch.device) -> None:
    """Check an e8m0 scale: one of the *sizes*, on *device*, in the order that *layout* wants.

    *layout* is the weight's.

    Raises:
        OperandError: another scale.
    """
    try:
        quantised.check_scale(op, name, scale, sizes, _E8M0, device)
    except OperandError as error:
        order = "a plain weight goes with plain scales (unshuffle_scale(s, rows, K/32))"
        shuffled = f"a weight of layout {layout} goes with shuffled scales (shuffle_scale(s))"
        raise OperandError(f"{error}; {order if layout == 'row' else shuffled}") from None
    if layout != "row" and not scale.is_contiguous():
        raise OperandError(f"{op}: shuffled scales must be contiguous (got {name} with strides {scale.stride()})")


def check_preshuffle(op: str, weight: torch.Tensor, bpreshuffle: bool | None, name: str) -> None:
    """Check that the type of a weight, the argument *name*, agrees with ``bpreshuffle``.

    Raises:
        OperandError: it does not.
    """
    layout = getattr(weight, "layout_name", "row")
    if (layout != "row") is not bool(bpreshuffle):
        raise OperandError(
            f"{op}: bpreshuffle={bpreshuffle}, but the weight has layout {layout}; pass "
            f"shuffle_weight({name}), as_shuffled({name}) if its bytes are shuffled already, or bpreshuffle=False with plain scales"
        )


def draw_weight(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a normal weight [n, k/2], quantised, in the shape's layout, and its scales."""
    from tunedgemm.ops.formats.mxfp4 import per_1x32_f4_quant
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    shuffled = shape.layout != "row"
    weight, scale = per_1x32_f4_quant(quantised.draw(shape.n, shape.k, GROUP, generator), shuffle=shuffled)
    return shuffle_weight(weight, shape.layout) if shuffled else weight, scale


def in_order(shape: Shape, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return plain scales [rows, k/32] as bytes."""
    import torch

    from tunedgemm.ops.formats.scales import unshuffle_scale

    groups, plain = shape.k // GROUP, scale.view(torch.uint8)
    return plain.reshape(rows, groups) if shape.layout == "row" else unshuffle_scale(plain, rows, groups)


def weight_values(shape: Shape, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [n, k] dequantised, in *dtype*."""
    from tunedgemm.ops.formats.mxfp4 import dequant_fp4
    from tunedgemm.ops.formats.shuffle import unshuffled

    return dequant_fp4(unshuffled(weight), in_order(shape, scale, shape.n), dtype)
