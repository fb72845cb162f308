"""Semantics of a fused mixture of experts: activations, routing and the reference.

They are those of AITER's ``torch_moe_stage1`` and ``torch_moe_stage2`` (aiter/fused_moe.py), with
its quantisation of the hidden states and of the intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import OperandError
from tunedgemm.ops import moe_formats
from tunedgemm.ops.moe_options import SWIGLU_LIMIT, gate_rows, options_of
from tunedgemm.ops.moe_words import GATED
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Slope of the sigmoid in Swiglu, as in AITER and gpt-oss.
SWIGLU_ALPHA = 1.702


def gate_first(product: torch.Tensor, shape: Shape) -> torch.Tensor:
    """De-interleave stage 1's product [..., 2 * inter], so that all gate columns come first."""
    rows = gate_rows(shape) if shape["g1u1"] else 0
    return product.unflatten(-1, (-1, 2, rows)).transpose(-3, -2).flatten(-3) if rows else product


def activated(product: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Apply the activation to stage 1's product [..., 2 * inter or inter] -> [..., inter].

    The dtype is kept. A gated product has the gate in its first half, the up part in its second.
    """
    import torch

    act, options = str(shape["act"]), options_of(shape)
    gate, up = product.chunk(2, dim=-1) if shape["g1u1"] else (product, None)
    if up is None:
        return _bent(gate, act)
    if act == "situv2":
        bent = options.beta * torch.tanh(gate / options.beta) * torch.sigmoid(gate)
        return bent * (options.linear_beta * torch.tanh(up / options.linear_beta))
    limit = options.swiglu_limit or (SWIGLU_LIMIT if act == "swiglu" else None)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if act == "swiglu":
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return _bent(gate, act) * up


def _bent(x: torch.Tensor, act: str) -> torch.Tensor:
    import torch

    if act in GATED:
        raise OperandError(f"fmoe: {act} needs gated weights [E, 2 * inter_dim, model_dim]")
    if act == "no":
        return x
    return torch.nn.functional.silu(x) if act == "silu" else torch.nn.functional.gelu(x)


def routes(topk_ids: torch.Tensor, experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each routed expert with its slots in the flattened [T * topk]; skip unknown ids."""
    import torch

    ids = topk_ids.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = torch.argsort(ids, stable=True)
    start = 0
    for expert, count in enumerate(torch.bincount(ids, minlength=experts + 1).tolist()[:experts]):
        if count:
            yield expert, order[start : start + count]
        start += count


def check_local(hidden: Any, topk_weight: Any, topk_ids: Any, expert_mask: Any, num_local_tokens: Any) -> None:
    """Check the operands of `local_tokens` and `local_routing`, before they hide faults.

    Raises:
        OperandError: an operand has a wrong shape, dtype or device.
    """
    import torch

    needed = {"hidden": hidden, "topk_weight": topk_weight, "topk_ids": topk_ids}
    optional = {"expert_mask": expert_mask, "num_local_tokens": num_local_tokens}
    tensors = needed | {name: value for name, value in optional.items() if value is not None}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise OperandError(f"fmoe: {name} must be a tensor (got {type(value).__name__})")
        if value.device != hidden.device:
            raise OperandError(f"fmoe: {name} must be on {hidden.device}, as hidden (got it on {value.device})")
    if hidden.dim() != 2 or topk_ids.dim() != 2 or topk_weight.shape != topk_ids.shape or len(topk_ids) != len(hidden):
        sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in needed.items())
        raise OperandError(f"fmoe: hidden must be [T, model_dim], topk_weight and topk_ids [T, topk] (got {sizes})")
    if expert_mask is not None and not expert_mask.numel():
        raise OperandError("fmoe: expert_mask must have one value for each of all experts (got none)")
    if num_local_tokens is not None and num_local_tokens.numel() != 1:
        raise OperandError(f"fmoe: num_local_tokens must be one value (got shape {tuple(num_local_tokens.shape)})")


def local_tokens(hidden: torch.Tensor, num_local_tokens: torch.Tensor) -> torch.Tensor:
    """Zero the padding rows of hidden states [T, model_dim], which must not affect sums or scales."""
    import torch

    padding = torch.arange(len(hidden), device=hidden.device)[:, None] >= num_local_tokens.reshape(1, 1)
    if hidden.element_size() == 1:  # fp8 supports few operations
        return hidden.view(torch.uint8).masked_fill(padding, 0).view(hidden.dtype)
    return hidden.masked_fill(padding, 0.0)


def local_routing(
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new routing (weights, ids) restricted to local experts, without synchronisation.

    Slots of remote experts and of padding tokens get weight 0. Their ids are spread evenly over
    local experts, so that they cost work but change no result.

    Args:
        topk_weight, topk_ids: [T, topk]; ids number all experts.
        expert_mask: [all experts], 1 for local ones, which are renumbered in order; None if all
            are local.
        num_local_tokens: one value, the number of tokens before the padding; None for no padding.
        experts: number of local experts.
    """
    import torch

    if expert_mask is None:
        expert_mask = torch.ones(experts, dtype=torch.bool, device=topk_ids.device)
    mask = expert_mask.reshape(-1) != 0
    ids = topk_ids.long()
    clamped = ids.clamp(0, mask.numel() - 1)
    local = (mask.cumsum(0) - 1)[clamped]
    here = mask[clamped] & (clamped == ids) & (local < experts)
    if num_local_tokens is not None:
        here &= torch.arange(ids.shape[0], device=ids.device)[:, None] < num_local_tokens.reshape(1, 1)
    return torch.where(here, topk_weight, 0.0), torch.where(here, local, clamped % experts).to(torch.int32)


def reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute [T, model_dim] on the operands' device, in float64 for small shapes, else float32.

    Hidden states and the intermediate are quantised by q_type; everything else is exact.
    """
    import torch

    hidden, w1, w2, topk_weight, topk_ids, *rest = operands
    w1_scale, w2_scale, a1_scale, a2_scale, bias1, bias2 = (*rest, *[None] * 6)[:6]
    experts, topk, inter = int(shape["expert"]), int(shape["topk"]), shape.k
    rows = moe_formats.stage_rows(shape)
    wide = exact_dtype(shape.m * topk, rows + inter, shape.n)
    out = torch.zeros(shape.m, shape.n, dtype=wide, device=hidden.device)
    if shape.m == 0:
        return out
    factors, hits = topk_weight.reshape(-1, 1).to(wide), list(routes(topk_ids, experts))

    x = moe_formats.stage1_input(hidden, shape, a1_scale, wide)
    middle = torch.zeros(shape.m * topk, inter, dtype=wide, device=hidden.device)
    weight, scale = moe_formats.ordered_weight(w1, shape), moe_formats.plain_scale(w1_scale, shape, rows, shape.n)
    for expert, pairs in hits:
        product = exact_product(x[pairs // topk], moe_formats.expert_weight(weight, scale, expert, shape, wide), wide)
        product = gate_first(product * factors[pairs] if shape["doweight_stage1"] else product, shape)
        middle[pairs] = activated(product if bias1 is None else product + bias1[expert].to(wide), shape)

    middle = moe_formats.as_quantised(middle, shape, a2_scale, wide)
    weight, scale = moe_formats.ordered_weight(w2, shape), moe_formats.plain_scale(w2_scale, shape, shape.n, inter)
    for expert, pairs in hits:
        product = exact_product(middle[pairs], moe_formats.expert_weight(weight, scale, expert, shape, wide), wide)
        product = product if bias2 is None else product + bias2[expert].to(wide)
        product = product if shape["doweight_stage1"] else product * factors[pairs]
        out.index_add_(0, pairs // topk, product)
    return out
