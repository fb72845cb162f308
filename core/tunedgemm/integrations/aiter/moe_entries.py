"""AITER's other entries to experts, in its words: ``asm_moe``, ``ck_moe_2stages`` and shared experts.

They call `tunedgemm.fused_moe`. Smooth scales and 4-bit weights of 32-bit words have no kernel
here: torch computes them without quantising the activations.
"""

from __future__ import annotations

from typing import Any

import torch

import tunedgemm
from tunedgemm.errors import OperandError
from tunedgemm.integrations.aiter.moe_reference import torch_moe, torch_moe_tkw1
from tunedgemm.integrations.aiter.operands import shuffled
from tunedgemm.ops.formats.int4 import INT4
from tunedgemm.ops.formats.shuffle import ShuffledWeight, plain_weight, unshuffle_weight
from tunedgemm.ops.moe_words import ActivationType, QuantType, quant_word
from tunedgemm.ops.scale_order import SHUFFLED

#: The eight 4-bit values of a 32-bit word in the order of AITER's kernels, lowest bits first.
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


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
    e8m0 = quant_word(quant_type) == "per_1x32" and w1.dtype is not INT4
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
        fc1_smooth_scale, fc2_smooth_scale: [E, model_dim] and [E, inter_dim], of each stage's
            input.
        a16: keep activations in 16 bits.
        per_tensor_quant_scale: one value, of the hidden states.
        local_expert_hash: not used: expert_mask has it.
    """
    del local_expert_hash
    routing = (topk_weight, topk_ids)
    if fc1_scale is not None and (a16 or fc1_smooth_scale is not None or w1.element_size() == 4):
        weights = (_plain(w1), _plain(w2))
        scales = (fc1_scale, fc2_scale, fc1_smooth_scale, fc2_smooth_scale)
        return torch_moe(hidden_states, *weights, *routing, *scales, expert_mask, activation)
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
    if a16 or fc1_smooth_scale is not None:
        scales = (fc1_scale, fc2_scale, fc1_smooth_scale, fc2_smooth_scale)
        return torch_moe_tkw1(hidden_states, _plain(w1), _plain(w2), *routing, *scales, expert_mask, activation)
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
        a1_scale, a2_scale: smooth scales [E, 1, model_dim] and [E, 1, inter_dim] for per_Token,
            else those of `fused_moe`.
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
    if a1_scale is not None and quant_word(quant_type) == "per_Token":
        function = torch_moe_tkw1 if doweight_stage1 else torch_moe
        result = function(part, _plain(w1), _plain(w2), weights, ids, w1_scale, w2_scale, a1_scale, a2_scale, expert_mask, activation)
    else:
        result = fused_moe(
            part, shuffled(w1), shuffled(w2), weights, ids, expert_mask, activation, quant_type, doweight_stage1, w1_scale, w2_scale,
            a1_scale, a2_scale, block_size_M, num_local_tokens, moe_sorting_dispatch_policy, dtype,
        )  # fmt: skip
    out[start:end] += result
    return out


def convert_int8_to_uint32_int4(tensor: torch.Tensor) -> torch.Tensor:
    """Pack int8 values [..., K] of -8 to 7 into 32-bit words [..., K/8], the first in the lowest bits.

    A shuffled weight gives its bytes in their order.

    Raises:
        OperandError: the values are not int8, or 8 does not divide K.
    """
    tensor = plain_weight(tensor)
    if tensor.dtype is not torch.int8 or tensor.shape[-1] % 8:
        raise OperandError(f"eight int8 values make a word: K must be a multiple of 8 (got {tuple(tensor.shape)} {tensor.dtype})")
    return _words((tensor & 15).to(torch.int32).unflatten(-1, (-1, 8)))


def rearrange_4bit_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Put the values of each 32-bit word in the order that AITER's kernels unpack."""
    values = torch.stack([(tensor.view(torch.int32) >> 4 * place) & 15 for place in range(8)], -1)
    return _words(values[..., list(_NIBBLES)])


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return [...] words of eight 4-bit values [..., 8], the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=values.device)
    return (values.long() << shifts).sum(-1).to(torch.int32).view(torch.uint32)


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """Return weights in order, a value an element, of shuffled ones; words hold 4-bit values."""
    weight = unshuffle_weight(shuffled(weight))
    if weight.element_size() < 4:
        return weight
    order = torch.tensor(_NIBBLES, device=weight.device).argsort()
    values = torch.stack([(weight.view(torch.int32) >> 4 * int(place)) & 15 for place in order.tolist()], -1)
    return (values - 16 * (values > 7).to(torch.int32)).to(torch.int8).flatten(-2)


def _given(hidden: torch.Tensor, w1: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise hidden states with one given scale, as if each token had it."""
    if scale is None:
        return hidden, None
    quantised, one = tunedgemm.per_tensor_quant(hidden, scale, quant_dtype=w1.dtype)
    return quantised, one.view(1, 1).expand(len(hidden), 1).contiguous()
