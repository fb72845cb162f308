"""AITER's functions that shuffle weights of experts and scales, with AITER's names and arguments."""

from __future__ import annotations

import torch
import tunedgemm
from tunedgemm.integrations import OperandError, Order, alternated, gate_block, name_of

#: Rows of a tile of shuffled scales.
_TILE = 32


def moe_shuffle_weight(
    src: torch.Tensor,
    experts_cnt: int | None = None,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    layout: tuple[int, int] = (16, 16),
) -> torch.Tensor:
    """Call `tunedgemm.shuffle_weight`; on gfx1250 the rows of gate and up take turns one by one."""
    del experts_cnt
    if gate_block() == 1:
        return tunedgemm.shuffle_weight(alternated(src, len(src), 1) if is_guinterleave and gate_up else src, layout)
    return tunedgemm.shuffle_weight(src, layout, is_guinterleave=is_guinterleave, gate_up=gate_up)


def shuffle_weight_a16w4(src: torch.Tensor, NLane: int, gate_up: bool) -> torch.Tensor:
    """Shuffle the mxfp4 weights of experts for 16-bit activations, in packs of 16 bytes."""
    return tunedgemm.shuffle_weight(src, (NLane, 16), is_guinterleave=True, gate_up=gate_up)


def shuffle_weight_NK(x: torch.Tensor, inst_N: int, inst_K: int, use_int4: bool = False) -> torch.Tensor:
    """Shuffle for a matrix instruction of inst_N rows and inst_K elements: a lane's elements are a pack.

    Raises:
        OperandError: 64 lanes do not divide the instruction, or use_int4, whose sizes do not fit
            AITER's own order.
    """
    if use_int4 or inst_N <= 0 or 64 % inst_N or inst_K <= 0 or inst_K % (64 // inst_N) or inst_K % 2:
        raise OperandError(
            f"shuffle_weight_NK: needs 64 lanes that divide the instruction, and no int4 (got {inst_N}, {inst_K}, use_int4={use_int4})"
        )
    if x.shape[-1] % inst_K:
        raise OperandError(f"shuffle_weight_NK: K must be divisible by {inst_K} (got {x.shape[-1]})")
    return tunedgemm.shuffle_weight(x, name_of(Order(inst_N, inst_K // (64 // inst_N) * x.element_size(), inst_K)))


def shuffle_scale(
    src: torch.Tensor | None, experts_cnt: int | None = None, is_guinterleave: bool = False, gate_up: bool = False
) -> torch.Tensor | None:
    """Order e8m0 scales as AITER's kernels read them; None and float32 scales are returned unchanged.

    Args:
        src: [rows, K/32].
        experts_cnt: experts of the rows; needed with is_guinterleave.
        is_guinterleave: pad no rows; with gate_up, blocks of 16 rows of gate and up take turns.
        gate_up: whether the rows of an expert are those of gate and up. On gfx1250 they take turns
            one by one.

    Raises:
        OperandError: the sizes or the dtype do not fit.
    """
    if src is None or src.dtype is torch.float32:
        return src
    if not is_guinterleave:
        return tunedgemm.shuffle_scale(src)
    src = src.flatten(0, -2)
    if experts_cnt is None or src.shape[0] % (experts_cnt * _TILE):
        raise OperandError(
            f"shuffle_scale: is_guinterleave=True takes [rows, K/32], each expert's rows a multiple of {_TILE} "
            f"(got {tuple(src.shape)} and experts_cnt={experts_cnt})"
        )
    order = alternated(src, experts_cnt, gate_block()) if gate_up else src
    return tunedgemm.shuffle_scale(order)[: len(src)]


def e8m0_shuffle(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Call `shuffle_scale` by its name in ``aiter.utility.fp4_utils``."""
    return shuffle_scale(scale)


def shuffle_scale_a16w4(src: torch.Tensor, experts_cnt: int, gate_up: bool) -> torch.Tensor | None:
    """Order the scales of `shuffle_weight_a16w4`'s weights."""
    return shuffle_scale(src, experts_cnt, is_guinterleave=True, gate_up=gate_up)


#: AITER's name for the scales of experts.
moe_shuffle_scale = shuffle_scale
