"""AITER's experts in plain torch, with its arguments: what serves smooth scales."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from tunedgemm.ops import moe, moe_words
from tunedgemm.ops.moe_words import ActivationType
from tunedgemm.ops.product import exact_product
from tunedgemm.shape import Shape


def get_inter_dim(w1_shape: Any, w2_shape: Any) -> tuple[int, int, int]:
    """Return (experts, model_dim, inter_dim) of the shapes of weights, whose elements may be packed."""
    experts, model_dim, inter_dim = w2_shape
    return experts, model_dim, inter_dim * (model_dim // w1_shape[-1])


def torch_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    fc1_scale: torch.Tensor | None = None,
    fc2_scale: torch.Tensor | None = None,
    fc1_smooth_scale: torch.Tensor | None = None,
    fc2_smooth_scale: torch.Tensor | None = None,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
) -> torch.Tensor:
    """Compute the experts in float32, quantising nothing.

    Args:
        w1, w2: plain, one value an element.
        fc1_scale, fc2_scale: one a row of the weights.
        fc1_smooth_scale, fc2_smooth_scale: [E, model_dim] and [E, inter_dim], of each stage's
            input.
    """
    return _unquantised(
        hidden_states, (w1, w2), topk_weight, _local(topk_ids, expert_mask), (fc1_scale, fc2_scale),
        (fc1_smooth_scale, fc2_smooth_scale), activation, early=False,
    )  # fmt: skip


def torch_moe_tkw1(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    fc1_scale: torch.Tensor | None = None,
    fc2_scale: torch.Tensor | None = None,
    fc1_smooth_scale: torch.Tensor | None = None,
    fc2_smooth_scale: torch.Tensor | None = None,
    expert_mask: torch.Tensor | None = None,
    activation: Any = ActivationType.Silu,
) -> torch.Tensor:
    """Compute `torch_moe` with the routing weights multiplied into stage 1's product."""
    return _unquantised(
        hidden_states, (w1, w2), topk_weight, _local(topk_ids, expert_mask), (fc1_scale, fc2_scale),
        (fc1_smooth_scale, fc2_smooth_scale), activation, early=True,
    )  # fmt: skip


def _shape(activation: Any, gated: bool) -> Shape:
    """Return a shape that has what `moe.activated` asks for."""
    return attrs.evolve(_ANY, extra={"act": moe_words.act_word(activation), "g1u1": gated})


_ANY = Shape("fmoe", 1, 1, 1)


def _local(topk_ids: torch.Tensor, expert_mask: torch.Tensor | None) -> torch.Tensor:
    """Return ids among the local experts, -1 for the others."""
    if expert_mask is None:
        return topk_ids
    mask = expert_mask.reshape(-1) != 0
    local = (mask.cumsum(0) - 1).masked_fill(~mask, -1)
    return local[topk_ids.long()]


def _unquantised(
    hidden: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    scales: tuple[Any, Any],
    smooth: tuple[Any, Any],
    activation: Any,
    *,
    early: bool,
) -> torch.Tensor:
    (w1, w2), topk, experts = weights, topk_ids.shape[1], len(weights[0])
    smooth = tuple(None if scale is None else scale.view(experts, -1) for scale in smooth)  # type: ignore[assignment]
    by_row = tuple(None if scale is None else scale.view(experts, -1, 1) for scale in scales)
    shape, factors = _shape(activation, w1.shape[1] == 2 * w2.shape[2]), topk_weight.reshape(-1, 1).float()
    x, out = hidden.float(), torch.zeros(topk_ids.numel(), w2.shape[1], device=hidden.device)

    def product(values: torch.Tensor, stage: int, expert: int) -> torch.Tensor:
        weight, scale = weights[stage][expert].float(), by_row[stage]
        values = values if smooth[stage] is None else values * smooth[stage][expert]
        return exact_product(values, weight if scale is None else weight * scale[expert], out.dtype)

    for expert, pairs in moe.routes(topk_ids, experts):
        first = product(x[pairs // topk], 0, expert)
        out[pairs] = product(moe.activated(first * factors[pairs] if early else first, shape), 1, expert)
    out = out if early else out * factors
    return out.view(*topk_ids.shape, -1).sum(1).to(hidden.dtype)
