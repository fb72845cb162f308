"""Experts for vLLM: at each number of tokens the faster of `tunedgemm.fused_moe` and vLLM's kernel.

After loading, `route_experts` finds the layers whose kernel (``quant_method.moe_kernel``, vLLM 0.20
and newer) keeps the checkpoint's order of weights and scales. It puts a route before the kernel's
``apply``. Both sides include quantisation of the activations. Routing of tokens, shared experts and
reductions among ranks stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from tunedgemm import ActivationType, QuantType, dispatcher, fused_moe
from tunedgemm.integrations import plain
from tunedgemm.plugin import Shape, device_of
from tunedgemm.tools.launching import short_dtype

from tunedgemm_engines.bit_classes import is_on
from tunedgemm_engines.routes import Route, add_layer
from tunedgemm_engines.rows import record_unrouted, routing, rows_of

#: vLLM's classes of experts that keep the loaded weights [E, 2 I, H] and [E, H, I]: the gate first,
#: rows contiguous.
_AS_LOADED = ("TritonExperts", "TritonOrDeepGemmExperts", "DeepGemmExperts", "TritonOrCutlassExperts", "CutlassExpertsFp8")
#: vLLM's activations, all gated, to those of the op; GELU is the exact one in both.
ACTIVATIONS = {"silu": ActivationType.Silu, "gelu": ActivationType.Gelu}
#: Fields of a parallel configuration that are 1 if every rank has a part of every expert and all
#: tokens.
_RANKS = ("ep_size", "dp_size", "pcp_size", "sp_size")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_BLOCK = 128
#: Largest relative difference of our outputs and vLLM's. Each rounds two activations to fp8. In
#: blocks that is 4.4 % of the exact product here, and 4.7 % in vLLM 0.25.1, whose scales are powers
#: of two. The two are 6.5 % apart (H200, 128 experts of 768).
_TOLERANCE = 0.1


def refused(config: Any) -> str:
    """Return why vLLM must compute a layer of experts, whatever the tables hold, or "".

    Args:
        config: vLLM's FusedMoEConfig.

    Raises:
        AttributeError: this version of vLLM describes layers in another form.
    """
    if config.moe_backend != "auto":
        return f"moe_backend is {config.moe_backend}"
    if not single_rank(config.moe_parallel_config):
        return "experts are split among ranks"
    if config.activation.value not in ACTIVATIONS:
        return f"their activation is {config.activation.value}"
    if config.is_lora_enabled or config.has_bias:
        return "they have LoRA or a bias"
    if any(getattr(config, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")):
        return "their activation has parameters"
    if getattr(config, "aiter_fmoe_shared_expert_enabled", False):
        return "shared experts are among the routed ones"
    if config.in_dtype not in (torch.bfloat16, torch.float16):
        return f"hidden states are {config.in_dtype}"
    return ""


def known_ids(ids: torch.Tensor) -> torch.Tensor:
    """Give padded tokens, whose experts vLLM may mark by -1 (the default of 0.33), a valid expert."""
    from vllm import envs

    return ids.clamp(min=0) if getattr(envs, "VLLM_MOE_SKIP_PADDING", False) else ids


def single_rank(parallel: Any) -> bool:
    """Return whether every rank has a part of every expert and all tokens."""
    alone = all(getattr(parallel, name, 1) == 1 for name in _RANKS)
    return alone and not getattr(parallel, "enable_eplb", False)


def shape_of(config: Any, quant_type: QuantType, q_dtype: torch.dtype) -> Shape:
    """Make a layer's shape on this rank, at one token."""
    dtype, q = short_dtype(config.in_dtype), short_dtype(q_dtype)
    return Shape(
        op="fmoe", m=1, n=config.hidden_dim, k=config.intermediate_size_per_partition, dtype=dtype, outdtype=dtype,
        extra={  # type: ignore[arg-type]
            "expert": config.num_local_experts, "topk": config.experts_per_token, "act": config.activation.value,
            "q_dtype_a": q, "q_dtype_w": q, "q_type": QuantType(quant_type).name, "g1u1": True, "doweight_stage1": False,
        },
    )  # fmt: skip


def route_experts(model: torch.nn.Module) -> None:
    """Put a route before the kernel of each layer of experts with rows; record why others keep vLLM's."""
    kernel_ids: set[int] = set()
    for name, layer in model.named_modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None or id(kernel) in kernel_ids or not hasattr(layer, "w13_weight"):
            continue
        kernel_ids.add(id(kernel))
        with routing(name):
            try:
                reason = _route(layer, kernel, name)
            except AttributeError as error:
                reason = f"this vLLM describes experts in another form ({error})"
            if reason:
                record_unrouted(f"experts: {reason}", name)


def _route(layer: Any, kernel: Any, name: str) -> str:
    """Route one layer; return the reason why not, or ""."""
    experts, config = kernel.fused_experts, kernel.fused_experts.moe_config
    if type(experts).__name__ == "TunedGemmExperts" or "apply" in vars(kernel):  # ours already
        return ""
    if type(experts).__name__ not in _AS_LOADED:
        return f"vLLM computes them by {type(experts).__name__}, whose weights have another order"
    if is_on("fmoe"):
        return "tables have no bit classes of experts"
    if reason := refused(config):
        return reason
    if kernel.prepare_finalize.supports_async() or getattr(kernel, "owns_shared_experts", False):
        return "vLLM's kernel computes shared experts, too"
    if getattr(experts, "post_gemm2_hook", None) is not None:
        return "vLLM's model sums up their outputs itself"
    w1, w2 = plain(layer.w13_weight), plain(layer.w2_weight)
    quant_type = _quant_type(experts, w1, config)
    sizes = (config.num_local_experts, config.hidden_dim, config.intermediate_size_per_partition)
    as_loaded = tuple(w1.shape) == (sizes[0], 2 * sizes[2], sizes[1]) and tuple(w2.shape) == sizes
    if quant_type is None or not (as_loaded and w1.is_contiguous() and w2.is_contiguous()):
        return f"their weights are {w1.dtype} {tuple(w1.shape)} with scales that the op does not take"
    shape = shape_of(config, quant_type, w1.dtype)
    op_dispatcher = dispatcher("fmoe")
    if not (op_dispatcher.settings.needs_calls("fmoe") or rows_of(shape, device_of(w1.get_device()))):
        return f"no row of {shape}"
    layer.prefix = getattr(layer, "prefix", "") or name  # `add_layer` takes a layer's name from it
    _put_before(kernel, add_layer(_make_route(shape, config, quant_type, w1.device, type(experts).__name__), layer))
    return ""


def _quant_type(experts: Any, w1: torch.Tensor, config: Any) -> QuantType | None:
    """Return the kind of a layer's scales, by their number; None for kinds that the op lacks."""
    quant, scale = experts.quant_config, plain(experts.w1_scale)
    if quant.quant_dtype is None:
        return QuantType.No if w1.dtype is config.in_dtype and scale is None else None
    if w1.dtype not in FP8 or quant.quant_dtype is not w1.dtype or scale is None or scale.dtype is not torch.float32:
        return None
    count, rows, columns = w1.shape
    by_block = count * -(-rows // _BLOCK) * -(-columns // _BLOCK)
    if quant.block_shape is not None:
        supported = list(quant.block_shape) == [_BLOCK] * 2 and scale.numel() == by_block and scale.is_contiguous()
        return QuantType.per_1x128 if supported else None
    kind, scales = (QuantType.per_Token, count * rows) if quant.per_act_token_quant else (QuantType.per_Tensor, count)
    return kind if scale.numel() == scales else None


def _make_route(shape: Shape, config: Any, quant_type: QuantType, device: torch.device, experts: str) -> Route:
    act, topk, count = config.activation, config.experts_per_token, config.num_local_experts

    def ours(*operands: Any) -> torch.Tensor:
        hidden, w1, w2, weights, ids, kernel, how = operands
        if how["apply_router_weight_on_input"]:
            hidden, weights = hidden * weights.to(hidden.dtype), torch.ones_like(weights)
        have = kernel.fused_experts
        out: torch.Tensor = fused_moe(
            hidden, w1, w2, weights.float(), known_ids(ids), activation=ACTIVATIONS[act.value], quant_type=quant_type,
            w1_scale=plain(have.w1_scale), w2_scale=plain(have.w2_scale), a1_scale=plain(have.a1_scale), a2_scale=plain(have.a2_scale),
            dtype=hidden.dtype,
        )  # fmt: skip
        return out

    def theirs(*operands: Any) -> torch.Tensor:
        hidden, w1, w2, weights, ids, kernel, how = operands
        out: torch.Tensor = type(kernel).apply(kernel, hidden, w1, w2, topk_weights=weights, topk_ids=ids, **how)
        return out

    def inputs(m: int) -> tuple[Any, ...]:
        scores, ids = torch.rand(m, count, device=device).topk(topk)
        return torch.randn(m, shape.n, dtype=config.in_dtype, device=device), scores / scores.sum(1, keepdim=True), ids.int()

    def operands(inputs: tuple[Any, ...], layer: Any) -> tuple[Any, ...]:
        how = {"activation": act, "global_num_experts": count, "expert_map": None, "apply_router_weight_on_input": False}
        return inputs[0], plain(layer.w13_weight), plain(layer.w2_weight), *inputs[1:], layer.quant_method.moe_kernel, how

    return Route(f"{shape} {experts}", shape, device, ours, theirs, inputs, operands, tolerance=_TOLERANCE)


def _put_before(kernel: Any, route: Route) -> None:
    """Replace a kernel's ``apply`` by the route's choice."""

    def apply(
        hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        operands = (hidden_states, plain(w1), plain(w2), topk_weights, topk_ids, kernel, how)
        return route.call_of(operands, hidden_states.shape[0])(*operands)

    kernel.apply = apply
