"""AITER's other entries to experts, in its words: ``asm_moe``, ``ck_moe_2stages`` and shared experts.

They call `tunedgemm.fused_moe`, and refuse smooth scales and 4-bit weights of 32-bit words.
"""

from __future__ import annotations

from typing import Any

import torch
import tunedgemm
from tunedgemm import ActivationType, QuantType, ShuffledWeight
from tunedgemm.integrations import OperandError, quant_word

from tunedgemm_aiter_names.operands import SHUFFLED, shuffled

_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # not in the stubs


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
    quant_type: Any = QuantType.No,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Call `tunedgemm.fused_moe` with weights and scales in the order that AITER's kernels read.

    They read plain tensors of weights as shuffled by (16, 16). In mxfp4 and mxfp8 these are plain
    unless one of both has the type `ShuffledWeight` or AITER's mark ``is_shuffled``; their scales
    are shuffled either way.
    """
    e8m0 = quant_word(quant_type) == "per_1x32" and w1.dtype is not _INT4
    if not e8m0 or any(isinstance(weight, ShuffledWeight) or getattr(weight, "is_shuffled", False) is True for weight in (w1, w2)):
        w1, w2 = shuffled(w1), shuffled(w2)
    named |= {"scale_order": SHUFFLED} if e8m0 else {}
    arguments = (topk_weight, topk_ids, expert_mask, activation, quant_type, *rest)
    return tunedgemm.fused_moe(hidden_states, w1, w2, *arguments, **named)


def asm_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    fc1_scale: torch.Tensor | None = None,
    fc2_scale: torch.Tensor | None = None,
    fc1_smooth_scale: torch.Tensor | None = None,
    fc2_smooth_scale: torch.Tensor | None = None,
    a16: bool = False,
    per_tensor_quant_scale: torch.Tensor | None = None,
    block_shape: tuple[int, int] | None = None,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
    local_expert_hash: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute experts whose weights are shuffled by (16, 16), as plain tensors or `ShuffledWeight`.

    Args:
        fc1_scale, fc2_scale: one a row, or of 128x128 blocks with that *block_shape*; None for
            16-bit weights.
        fc1_smooth_scale, fc2_smooth_scale, a16: refused with fc1_scale, as 32-bit words are.
        per_tensor_quant_scale: one value, of the hidden states.
        local_expert_hash: not used: expert_mask has it.
    """
    del local_expert_hash
    routing = (topk_weight, topk_ids)
    if fc1_scale is not None:
        _refuse("asm_moe", w1, fc1_smooth_scale, fc2_smooth_scale, a16=a16)
    kind = QuantType.No if fc1_scale is None else QuantType.per_Token
    if block_shape is not None:
        if tuple(block_shape) != (128, 128):
            raise OperandError(f"asm_moe: block_shape must be (128, 128) (got {tuple(block_shape)})")
        kind = QuantType.per_1x128
    given = _given(hidden_states, w1, per_tensor_quant_scale) if kind == QuantType.per_Token else (hidden_states, None)
    named: dict[str, Any] = {"w1_scale": fc1_scale, "w2_scale": fc2_scale, "a1_scale": given[1], "dtype": hidden_states.dtype}
    return fused_moe(given[0], w1, w2, *routing, expert_mask, activation, kind, **named)


def asm_moe_tkw1(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    fc1_scale: torch.Tensor | None = None,
    fc2_scale: torch.Tensor | None = None,
    fc1_smooth_scale: torch.Tensor | None = None,
    fc2_smooth_scale: torch.Tensor | None = None,
    a16: bool = False,
    per_tensor_quant_scale: torch.Tensor | None = None,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
) -> torch.Tensor:
    """Compute `asm_moe` by token with the routing weights multiplied into stage 1's product."""
    del per_tensor_quant_scale
    routing = (topk_weight, topk_ids)
    _refuse("asm_moe_tkw1", w1, fc1_smooth_scale, fc2_smooth_scale, a16=a16)
    return fused_moe(hidden_states, w1, w2, *routing, expert_mask, activation, QuantType.per_Token, True, fc1_scale, fc2_scale)


def ck_moe_2stages(
    a1: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    quant_type: Any = QuantType.No,
    fc1_scale: torch.Tensor | None = None,
    fc2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size: int | None = None,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
    doweight_stage1: bool = False,
) -> torch.Tensor:
    """Compute experts whose weights are shuffled by (16, 16), by the solution that the tables choose."""
    return fused_moe(
        a1, shuffled(w1), shuffled(w2), topk_weight, topk_ids, expert_mask, activation, quant_type, doweight_stage1,
        fc1_scale, fc2_scale, a1_scale, a2_scale, block_size,
    )  # fmt: skip


def get_block_size(token: int, topk: int, expert: int) -> int:
    """Return AITER's rows of a block by the tokens of an expert."""
    return next((block for block in (32, 64) if token * topk / expert <= block * 4), 128)


def get_dp_shared_expert_token_range(token_num: int, dp_size: int, rank: int) -> tuple[int, int]:
    """Return the first token of a rank and the one behind its last."""
    each = -(-token_num // dp_size)
    return min(each * rank, token_num), min(each * (rank + 1), token_num)


def fused_moe_dp_share_expert(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
    quant_type: Any = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    dp_size: int = 1,
    dp_rank: int = 0,
    moe_buf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute shared experts, all with the weight 1, of a rank's part of the tokens.

    Args:
        a1_scale, a2_scale: those of `fused_moe`; for per_Token they are smooth scales, and refused.
        moe_buf: to which the result is added.

    Returns:
        moe_buf, or zeros of its sizes; the rows of other ranks are unchanged.
    """
    start, end = get_dp_shared_expert_token_range(len(hidden_states), dp_size, dp_rank)
    out = torch.zeros_like(hidden_states, dtype=dtype or hidden_states.dtype) if moe_buf is None else moe_buf
    if start == end:
        return out
    part, experts = hidden_states[start:end].contiguous(), len(w1)
    ids = torch.arange(experts, dtype=torch.int32, device=part.device).expand(len(part), -1).contiguous()
    weights = torch.ones(ids.shape, dtype=torch.float32, device=part.device)
    if quant_word(quant_type) == "per_Token":
        _refuse("fused_moe_dp_share_expert", w1, a1_scale, a2_scale)
    out[start:end] += fused_moe(
        part, shuffled(w1), shuffled(w2), weights, ids, expert_mask, activation, quant_type, doweight_stage1, w1_scale, w2_scale,
        a1_scale, a2_scale, block_size_M, num_local_tokens, moe_sorting_dispatch_policy, dtype,
    )  # fmt: skip
    return out


def _refuse(name: str, w1: torch.Tensor, *smooth: torch.Tensor | None, a16: bool = False) -> None:
    """Refuse what kernels of AITER's alone compute.

    Raises:
        OperandError: smooth scales, 16-bit activations with scales, or weights in 32-bit words.
    """
    is_smooth = any(scale is not None for scale in smooth)
    if a16 or is_smooth or w1.element_size() == 4:
        got = f"a16={a16}, {w1.dtype}, {'smooth' if is_smooth else 'no smooth'} scales"
        raise OperandError(f"{name}: smooth scales, a16 and 32-bit words have no kernel (got {got}); install AITER for them")


def _given(hidden: torch.Tensor, w1: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise hidden states with one given scale, as if each token had it."""
    if scale is None:
        return hidden, None
    quantised, one = tunedgemm.per_tensor_quant(hidden, scale, quant_dtype=w1.dtype)
    return quantised, one.view(1, 1).expand(len(hidden), 1).contiguous()
