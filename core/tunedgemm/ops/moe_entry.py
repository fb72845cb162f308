"""fmoe's public function, with AITER's name and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import moe, moe_words
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.op import Call, Serving

if TYPE_CHECKING:
    import torch

#: Names of the operands; see `tunedgemm.ops.fmoe`.
OPERANDS = ("hidden", "w1", "w2", "topk_weight", "topk_ids", "w1_scale?", "w2_scale?", "a1_scale?", "a2_scale?")

#: AITER's arguments that change the result and are not computed here, with their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_pad": (0, None), "intermediate_pad": (0, None), "bias1": (None,), "bias2": (None,), "swiglu_limit": (None,),
    "beta": (None,), "linear_beta": (None,), "gate_mode": (None, "separated"), "shared_w1": (None,), "shared_w2": (None,),
    "shared_w1_scale": (None,), "shared_w2_scale": (None,), "shared_expert_id": (-1, None), "stage2_scatter": (None,),
}  # fmt: skip


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse an argument that would change the result.

    Raises TypeError for one that AITER does not have either, else OperandError.
    """
    for name, value in arguments.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"fused_moe() got an unexpected keyword argument {name!r}")
        if not any(value is nothing or (isinstance(value, int | str) and value == nothing) for nothing in _UNSUPPORTED[name]):
            value_text = repr(value) if isinstance(value, int | float | str) else type(value).__name__
            raise OperandError(f"fmoe: {name} is not computed here (got {value_text}); leave it out")


def entry(serving: Serving) -> Mapping[str, Call]:
    """Make `fused_moe` over a dispatcher's launchers: `Op.entry`."""
    import torch

    routed = hot_function(serving, OPERANDS, fields=("activation", "quant_type", "doweight_stage1", "expert_parallel"))

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
        **others: Any,
    ) -> torch.Tensor:
        """Compute a fused mixture of experts by the solution that the tables choose.

        Args:
            hidden_states: [T, model_dim] in bf16 or fp16.
            w1: [E, 2 * inter_dim, model_dim], of each expert the gate's rows and then those it
                multiplies, or ungated [E, inter_dim, model_dim]; plain, or shuffled by
                `shuffle_weight`.
            w2: [E, model_dim, inter_dim], of w1's dtype and layout; the last dimension of both is
                halved for fp4x2.
            topk_weight, topk_ids: [T, topk], float32 and int32; int64 is converted in each call.
            expert_mask: [all experts], 1 for those whose weights are here; topk_ids then count all
                experts, and their last slot is AITER's spare one: rows are found without it.
            activation: of `ActivationType`, or AITER's.
            quant_type: of `QuantType`, or AITER's, for both weights and both activations.
            doweight_stage1: multiply the routing weight into stage 1's product instead of stage
                2's.
            w1_scale, w2_scale: float32 [E] for per_Tensor, [E, rows, 1] for per_Token, [E,
                ceil(rows/128), ceil(cols/128)] for per_1x128; for per_1x32 e8m0 [E, rows, cols/32],
                of int4 bf16 [E, cols/32, rows], shuffled where the weights are.
            a1_scale, a2_scale: one float32 value for per_Tensor; taken from the values where
                absent.
            num_local_tokens: one value: rows of the output from there on are zero.
            dtype: of the output, bf16 or fp16; None for that of hidden_states.
            block_size_M, moe_sorting_dispatch_policy, splitk: accepted as AITER does and not used:
                the table decides.
            hidden_pad, intermediate_pad, bias1, bias2, others: AITER's, not computed here.

        Returns:
            A new tensor [T, model_dim].

        Raises:
            OperandError: shapes, dtypes or devices that do not fit each other, or an argument that
                is not computed here.
        """
        del block_size_M, moe_sorting_dispatch_policy, splitk
        if others or hidden_pad or intermediate_pad or bias1 is not None or bias2 is not None:
            pads = {"hidden_pad": hidden_pad, "intermediate_pad": intermediate_pad, "bias1": bias1, "bias2": bias2}
            _refuse({**pads, **others})
        if (expert_mask is not None or num_local_tokens is not None) and isinstance(w1, torch.Tensor) and w1.dim():
            moe.check_local(hidden_states, topk_weight, topk_ids, expert_mask, num_local_tokens)
            hidden_states = hidden_states if num_local_tokens is None else moe.local_tokens(hidden_states, num_local_tokens)
            topk_weight, topk_ids = moe.local_routing(topk_weight, topk_ids, expert_mask, num_local_tokens, w1.shape[0])
        elif isinstance(topk_ids, torch.Tensor) and topk_ids.dtype is torch.int64:
            topk_ids = topk_ids.to(torch.int32)
        operands = (hidden_states, w1, w2, topk_weight, topk_ids, w1_scale, w2_scale, a1_scale, a2_scale)
        return routed(*operands, activation, quant_type, doweight_stage1, expert_mask is not None, dtype)

    return {"fused_moe": fused_moe}
