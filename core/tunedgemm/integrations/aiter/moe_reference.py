"""AITER's experts in plain torch: the references of its tests, with its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.ops import moe, moe_words
from tunedgemm.ops.moe_words import ActivationType, QuantType
from tunedgemm.ops.product import exact_product
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


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


def torch_moe_stage1(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    dtype: torch.dtype | None = None,
    activation: Any = ActivationType.Silu,
    quant_type: Any = QuantType.No,
    a1_scale: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    doweight: bool = False,
    swiglu_limit: float | None = None,
    situ_beta: float = 4.0,
    situ_linear_beta: float = 25.0,
) -> torch.Tensor:
    """Compute stage 1 of quantised hidden states: [T, topk, inter_dim] of *dtype*, fp16 if None."""
    import torch

    kind, topk = moe_words.quant_word(quant_type), topk_ids.shape[1]
    experts, model_dim, inter_dim = get_inter_dim(w1.shape, w2.shape)
    rows = w1.shape[1]
    x = _values(hidden_states, a1_scale, kind, len(hidden_states), model_dim)
    out = torch.zeros(topk_ids.numel(), rows, device=x.device)
    for expert, pairs in moe.routes(topk_ids, experts):
        product = exact_product(x[pairs // topk], _weight(w1, w1_scale, expert, kind, (rows, model_dim)), out.dtype)
        product = product * topk_weight.reshape(-1, 1)[pairs] if doweight else product
        out[pairs] = product if w1_bias is None else product + w1_bias.view(experts, -1)[expert]
    bounds = {"swiglu_limit": swiglu_limit, "beta": situ_beta, "linear_beta": situ_linear_beta}
    middle = moe.activated(out, _shape(activation, rows == 2 * inter_dim, bounds))
    return middle.view(*topk_ids.shape, inter_dim).to(dtype or torch.float16)


def torch_moe_stage2(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    dtype: torch.dtype | None = None,
    quant_type: Any = QuantType.No,
    w2_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    doweight: bool = True,
) -> torch.Tensor:
    """Compute stage 2 of an intermediate [T, topk, inter_dim]: [T, model_dim] of *dtype* or fp16."""
    import torch

    kind = moe_words.quant_word(quant_type)
    experts, model_dim, inter_dim = get_inter_dim(w1.shape, w2.shape)
    x = _values(hidden_states.reshape(topk_ids.numel(), -1), a2_scale, kind, topk_ids.numel(), inter_dim)
    out = torch.zeros(topk_ids.numel(), model_dim, device=x.device)
    for expert, pairs in moe.routes(topk_ids, experts):
        product = exact_product(x[pairs], _weight(w2, w2_scale, expert, kind, (model_dim, inter_dim)), out.dtype)
        out[pairs] = product if w2_bias is None else product + w2_bias.view(experts, -1)[expert]
    out = out * topk_weights.reshape(-1, 1) if doweight else out
    return out.view(*topk_ids.shape, model_dim).sum(1).to(dtype or torch.float16)


def torch_moe_act(act_input: torch.Tensor, torch_act: Any, inter_dim: int) -> torch.Tensor:
    """Apply a function to a product, or to its first half, multiplied by the second."""
    if act_input.shape[-1] == inter_dim:
        return torch_act(act_input)  # type: ignore[no-any-return]
    gate, up = act_input.split([inter_dim, inter_dim], dim=-1)
    return torch_act(gate) * up  # type: ignore[no-any-return]


def swiglu(x_glu: torch.Tensor, x_linear: torch.Tensor, alpha: float = moe.SWIGLU_ALPHA, limit: float | None = 7.0) -> torch.Tensor:
    """Compute Swiglu of both halves of a product."""
    import torch

    limit = 7.0 if limit is None else limit
    gate = x_glu.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (x_linear.clamp(-limit, limit) + 1)


def situv2(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> torch.Tensor:
    """Compute Situv2 of both halves of a product."""
    import torch

    bounds = {"swiglu_limit": None, "beta": beta, "linear_beta": linear_beta}
    return moe.activated(torch.cat([gate, up], -1), _shape(ActivationType.Situv2, True, bounds))


def get_torch_act(aType: Any) -> Any:
    """Return the function of an activation of one argument.

    Raises:
        OperandError: the activation has two halves, or is unknown.
    """
    shape = _shape(aType, False, {})
    return lambda x: moe.activated(x, shape)


def _shape(activation: Any, gated: bool, bounds: dict[str, Any]) -> Shape:
    """Return a shape that has what `moe.activated` asks for."""
    from tunedgemm.ops.moe_options import OPTIONS, call_options

    act = moe_words.act_word(activation)
    options = call_options((None, None), act, False, **bounds) if bounds else ""
    extra = {"act": act, "g1u1": gated, **({OPTIONS: options} if options else {})}
    return attrs.evolve(_ANY, extra=extra)  # type: ignore[arg-type]


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
    import torch

    (w1, w2), topk, experts = weights, topk_ids.shape[1], len(weights[0])
    smooth = tuple(None if scale is None else scale.view(experts, -1) for scale in smooth)  # type: ignore[assignment]
    by_row = tuple(None if scale is None else scale.view(experts, -1, 1) for scale in scales)
    shape, factors = _shape(activation, w1.shape[1] == 2 * w2.shape[2], {}), topk_weight.reshape(-1, 1).float()
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


def _values(x: torch.Tensor, scale: torch.Tensor | None, kind: str, rows: int, cols: int) -> torch.Tensor:
    """Return quantised values [rows, cols] in float32; AITER pads the rows of scales of 32 elements."""
    import torch

    from tunedgemm.ops.formats import mxfp4, mxfp8, quant

    if kind == "No" or scale is None:
        return x.float()
    if kind == "per_1x32":
        powers = scale.reshape(-1, cols // 32)[:rows]
        return mxfp4.dequant_fp4(x, powers) if x.shape[-1] * 2 == cols else mxfp8.dequant_1x32(x, powers)
    if kind in moe_words.BLOCK_ROWS:
        return quant.dequant_blocks(x, scale.reshape(rows, -1), torch.float32, (1, 128))
    return x.float() * (scale if scale.numel() == 1 else scale.reshape(rows, 1)).float()


def _weight(w: torch.Tensor, scale: torch.Tensor | None, expert: int, kind: str, sizes: tuple[int, int]) -> torch.Tensor:
    """Return one expert's plain matrix in float32; int4 comes with a value a byte."""
    import torch

    from tunedgemm.ops.formats import int4, mxfp4, quant

    rows, cols = sizes
    if scale is None:
        return w[expert].float()
    if w.dtype is int4.INT4:
        groups = scale.reshape(len(w), cols // 32, rows)[expert].t().float()
        return (w.view(torch.int8)[expert].float().view(rows, -1, 32) * groups[:, :, None]).view(rows, cols)
    if w.element_size() == 1 and w.shape[-1] * 2 == cols:
        return mxfp4.dequant_fp4(w.view(torch.uint8)[expert], scale.reshape(len(w), rows, cols // 32)[expert])
    if kind in moe_words.BLOCK_ROWS:
        high = moe_words.BLOCK_ROWS[kind]
        return quant.dequant_blocks(w[expert], scale.reshape(len(w), -(-rows // high), -1)[expert], torch.float32, (high, 128))
    if kind == "per_1x32":
        return _values(w[expert], scale.reshape(len(w), rows, cols // 32)[expert], kind, rows, cols)
    return w[expert].float() * scale.reshape(len(w), -1)[expert].view(-1, 1)
