"""`fused_moe`: fmoe's public function, with AITER's signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import moe, moe_words
from tunedgemm.ops.hot import Serving, bound, hot, hot_function
from tunedgemm.ops.op import Function
from tunedgemm.ops.scale_order import SHUFFLED

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.formats.scales import ShuffledScale

#: Names of the operands; see `tunedgemm.ops.fmoe`.
OPERANDS = (
    "hidden", "w1", "w2", "topk_weight", "topk_ids", "w1_scale?", "w2_scale?", "a1_scale?", "a2_scale?", "bias1?", "bias2?",
)  # fmt: skip
#: The operands without biases: the usual signature.
_USUAL = OPERANDS[:9]
_FIELDS = ("activation", "quant_type", "doweight_stage1", "expert_parallel", "scale_order")
#: Rare arguments that change the result, with their neutral values.
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "swiglu_limit": (None, 0), "beta": (None,), "linear_beta": (None,), "gate_mode": (None, "separated"),
}  # fmt: skip

#: AITER's unsupported arguments, with the neutral values that are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "shared_w1": (None,), "shared_w2": (None,), "shared_w1_scale": (None,), "shared_w2_scale": (None,),
    "shared_expert_id": (-1, None), "stage2_scatter": (None,),
}  # fmt: skip


#: The hot function that also takes biases and rare arguments.
hot_special = hot


def _special(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rare arguments that are given and not neutral.

    Raises TypeError for an argument unknown to AITER, OperandError for an unsupported one.
    """
    special = {}
    for name, value in arguments.items():
        if name not in _SPECIAL and name not in _UNSUPPORTED:
            raise TypeError(f"fused_moe() got an unexpected keyword argument {name!r}")
        neutral = _SPECIAL.get(name) or _UNSUPPORTED[name]
        if any(value is nothing or (isinstance(value, int | float | str) and value == nothing) for nothing in neutral):
            continue
        if name in _UNSUPPORTED:
            value_text = repr(value) if isinstance(value, int | float | str) else type(value).__name__
            raise OperandError(f"fmoe: {name} is not computed here (got {value_text}); leave it out")
        special[name] = value
    return special


def _local(
    hidden: torch.Tensor, scale: Any, weights: torch.Tensor, ids: torch.Tensor, mask: Any, tokens: Any, experts: int
) -> tuple[Any, ...]:
    """Restrict hidden states, scales, routing weights and ids to this rank's experts and tokens."""
    moe.check_local(hidden, weights, ids, mask, tokens)
    if tokens is not None:
        hidden = moe.local_tokens(hidden, tokens)
        scale = moe.local_tokens(scale, tokens) if scale is not None and scale.dim() == 2 else scale
    return hidden, scale, *moe.local_routing(weights, ids, mask, tokens, experts)


def fused_moe(  # noqa: PLR0913, PLR0917 - AITER's signature
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: Any = moe_words.ActivationType.Silu,
    quant_type: Any = moe_words.QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
    *,
    scale_order: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Compute a fused mixture of experts, [T, model_dim], by the solution the tables choose.

    Args:
        hidden_states: [T, model_dim] in bf16 or fp16; or quantised, with a1_scale and dtype.
        w1: [E, 2 * inter_dim, model_dim], each expert's gate rows before its up rows, or ungated
            [E, inter_dim, model_dim]; plain or shuffled.
        w2: [E, model_dim, inter_dim], like w1; fp4x2 halves the last dimension of both.
        topk_weight, topk_ids: [T, topk], float32 and int32; int64 is converted in each call.
        expert_mask: [all experts], 1 for local ones; topk_ids number all experts, and the last
            entry is AITER's extra slot.
        activation, quant_type: of `ActivationType` and `QuantType`, or AITER's.
        doweight_stage1: apply the routing weights in stage 1 instead of stage 2.
        w1_scale, w2_scale: float32 [E] for per_Tensor, [E, rows, 1] for per_Token, [E,
            ceil(rows/128), ceil(cols/128)] for per_1x128; for per_1x32 e8m0 [E, rows, cols/32],
            also shuffled by `shuffle_scale`, of int4 bf16 [E, cols/32, rows].
        a1_scale, a2_scale: one float32 value for per_Tensor, or None. a1_scale of quantised
            hidden states: one value, [T, 1], [T, model_dim/128] or e8m0 [T, model_dim/32].
        num_local_tokens: one value; output rows from this index on are zero.
        dtype: output dtype, bf16 or fp16; None for that of hidden_states.
        block_size_M, moe_sorting_dispatch_policy, splitk, hidden_pad, intermediate_pad:
            ignored: the table decides, and padding of weights must be zero.
        bias1, bias2: [E, rows of w1, the gate's first] and [E, model_dim], float.
        scale_order: order of e8m0 scales, ``aiter32x8`` or ``row``; None to infer it.
        others: AITER's swiglu_limit, beta, linear_beta and gate_mode.

    Raises:
        OperandError: mismatched operands, or an unsupported argument.
    """
    del block_size_M, moe_sorting_dispatch_policy, splitk, hidden_pad, intermediate_pad
    special = _special(others) if others else None
    if (expert_mask is not None or num_local_tokens is not None) and isinstance(w1, torch.Tensor) and w1.dim():
        local = (expert_mask, num_local_tokens, w1.shape[0])
        hidden_states, a1_scale, topk_weight, topk_ids = _local(hidden_states, a1_scale, topk_weight, topk_ids, *local)
    elif isinstance(topk_ids, torch.Tensor) and topk_ids.dtype is torch.int64:
        topk_ids = topk_ids.to(torch.int32)
    if scale_order is None and w1_scale.__class__ is ShuffledScale and w2_scale.__class__ is ShuffledScale:
        w1_scale, w2_scale, scale_order = w1_scale.kept_plain, w2_scale.kept_plain, SHUFFLED
    if special or bias1 is not None or bias2 is not None:
        operands = (hidden_states, w1, w2, topk_weight, topk_ids, w1_scale, w2_scale, a1_scale, a2_scale, bias1, bias2)
        fields = (activation, quant_type, doweight_stage1, expert_mask is not None, scale_order)
        return hot_special(*operands, *fields, *((special or {}).get(name) for name in _SPECIAL), dtype)
    return hot(
        hidden_states, w1, w2, topk_weight, topk_ids, w1_scale, w2_scale, a1_scale, a2_scale,
        activation, quant_type, doweight_stage1, expert_mask is not None, scale_order, dtype,
    )  # fmt: skip


def entry(serving: Serving) -> Mapping[str, Function]:
    """Make `fused_moe` over a dispatcher's launchers: `Op.entry`."""
    special = hot_function(serving, OPERANDS, fields=(*_FIELDS, *_SPECIAL))
    return {"fused_moe": bound(fused_moe, hot=hot_function(serving, _USUAL, fields=_FIELDS), hot_special=special)}
