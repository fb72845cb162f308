"""Operands of fmoe: their shape, checks and random inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tunedgemm.device import current_device
from tunedgemm.dtype import short_dtype, table_text, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import moe, moe_formats, moe_words
from tunedgemm.ops.e8m0 import check_not_shuffled
from tunedgemm.ops.layout import layout_of
from tunedgemm.ops.moe_options import GATE_MODE, OPTIONS, call_options, gate_word, options_of, used_gate
from tunedgemm.ops.scale_order import ROW, SHUFFLED
from tunedgemm.ops.scale_order import scale_order as order_of_scales
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


#: The only layout in which AITER's kernels read int4 weights.
_INT4_LAYOUT = "aiter16x16"


def shape_of(  # noqa: PLR0913 - fields of the shape
    *operands: Any,
    otype: torch.dtype | None = None,
    activation: Any = moe_words.ActivationType.Silu,
    quant_type: Any = moe_words.QuantType.No,
    doweight_stage1: bool = False,
    expert_parallel: bool = False,
    q_dtype_a: str = "",
    gate_mode: Any = "",
    scale_order: str | None = None,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
) -> Shape:
    """Return the shape of a call; raise OperandError for mismatched operands.

    Args:
        q_dtype_a: short dtype to which activations are quantised; "" for AITER's choice.
        gate_mode: AITER's order of gate and up rows in w1.
        scale_order: order of e8m0 scales; None to infer it from their types or sizes.
    """
    import torch

    hidden, w1, w2, topk_weight, topk_ids = operands[:5]
    w1_scale, w2_scale, a1_scale, a2_scale, bias1, bias2 = (*operands[5:], *[None] * 6)[:6]
    act, kind = moe_words.act_word(activation), moe_words.quant_word(quant_type)
    experts, model_dim, inter, gated, q_dtype_w = _weights(hidden, w1, w2, kind)
    quantised = hidden.dtype not in (torch.bfloat16, torch.float16)
    outdtype = short_dtype(hidden.dtype if otype is None else otype)
    if outdtype not in moe_words.DTYPES:
        advice = "; the dtype of the output must be given with quantised hidden states" if quantised and otype is None else ""
        raise OperandError(f"fmoe: the output must be torch.bfloat16 or torch.float16 (got {otype}){advice}")
    dtype = outdtype if quantised else short_dtype(hidden.dtype)
    gfx = current_device().gfx
    mode = gate_word(gate_mode, gfx)
    mode = used_gate(mode, gated, kind)
    if quantised:
        q_dtype_a = short_dtype(hidden.dtype)
    q_dtype_a = q_dtype_a or moe_words.activation_dtype(kind, q_dtype_w, act, hidden.shape[0], bool(mode), gfx)
    options = call_options((bias1, bias2), act, quantised, swiglu_limit, beta=beta, linear_beta=linear_beta)
    shape = Shape(
        op=moe_words.NAME,
        m=hidden.shape[0],
        n=model_dim,
        k=inter,
        dtype=dtype,
        outdtype=outdtype,
        layout=_INT4_LAYOUT if q_dtype_w == "int4" else layout_of(moe_words.NAME, w1),
        extra={  # type: ignore[arg-type]
            "expert": experts,
            "topk": _topk(hidden, topk_weight, topk_ids),
            "act": act,
            "q_dtype_a": q_dtype_a,
            "q_dtype_w": q_dtype_w,
            "q_type": kind,
            "g1u1": gated,
            "doweight_stage1": bool(doweight_stage1),
            **({moe_words.EXPERT_PARALLEL: True} if expert_parallel else {}),
            **({GATE_MODE: mode} if mode else {}),
            **({OPTIONS: options} if options else {}),
        },
    )
    if wrong := moe_words.problem(shape):
        raise OperandError(f"fmoe: {wrong}")
    shape = moe_formats.with_scale_order(shape, scale_order, w1_scale, w2_scale)
    _check_scale("w1_scale", w1_scale, shape, (w1.shape[1], model_dim), hidden.device)
    _check_scale("w2_scale", w2_scale, shape, (model_dim, inter), hidden.device)
    if quantised:
        _check_given(a1_scale, shape, hidden.device)
    else:
        _check_static("a1_scale", a1_scale, kind, hidden.device)
    _check_static("a2_scale", a2_scale, kind, hidden.device)
    _check_bias("bias1", bias1, (experts, w1.shape[1]), hidden.device)
    _check_bias("bias2", bias2, (experts, model_dim), hidden.device)
    return shape


def default_q_dtype_a(shape: Shape) -> str:
    """Return the short dtype to which AITER quantises activations on the current device."""
    kind, q_dtype_w, act = (str(shape[name]) for name in ("q_type", "q_dtype_w", "act"))
    return moe_words.activation_dtype(kind, q_dtype_w, act, shape.m, GATE_MODE in dict(shape.extra), current_device().gfx)


def _weights(hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, kind: str) -> tuple[int, int, int, bool, str]:
    """Return (experts, model_dim, inter_dim, gated, dtype); raise OperandError for a mismatch."""
    import torch

    operands = f"hidden {tuple(hidden.shape)} {hidden.dtype}, w1 {tuple(w1.shape)} {w1.dtype}, w2 {tuple(w2.shape)} {w2.dtype}, {kind}"
    if hidden.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        raise OperandError(f"fmoe: hidden must be [T, model_dim], w1 [E, rows, model_dim] and w2 [E, model_dim, inter_dim] ({operands})")
    taken = moe_words.DTYPES if kind == "No" else moe_words.activation_dtypes(kind, "")
    if str(hidden.dtype) not in (hidden_texts := [*map(table_text, taken)]):
        raise OperandError(f"fmoe: hidden must be {' or '.join(hidden_texts)} with QuantType.{kind} ({operands})")
    allowed = (short_dtype(hidden.dtype),) if kind == "No" else moe_words.WEIGHT_DTYPES[kind]
    texts = [*map(table_text, allowed), *(["torch.uint8"] if kind == "per_1x32" else [])]  # bytes are mxfp4
    if w1.dtype != w2.dtype or str(w1.dtype) not in texts:
        raise OperandError(f"fmoe: with QuantType.{kind} w1 and w2 must both be {' or '.join(texts)} ({operands})")
    if w1.device != hidden.device or w2.device != hidden.device:
        raise OperandError(f"fmoe: hidden is on {hidden.device}, w1 on {w1.device} and w2 on {w2.device}")
    layouts = [layout_of(moe_words.NAME, weight) for weight in (w1, w2)]
    if layouts[0] != layouts[1]:
        raise OperandError(f"fmoe: w1 and w2 must lie alike (got layouts {layouts[0]} and {layouts[1]}); see shuffle_weight")
    q_dtype_w = allowed[0] if w1.dtype is torch.uint8 else short_dtype(w1.dtype)
    packed = 2 if q_dtype_w in moe_words.PACKED else 1
    wide = 2 if hidden.dtype is torch.float4_e2m1fn_x2 else 1
    experts, rows, model_dim, inter = w1.shape[0], w1.shape[1], hidden.shape[1] * wide, w2.shape[2] * packed
    if w2.shape[0] != experts or w2.shape[1] != model_dim or w1.shape[2] * packed != model_dim or rows not in (inter, 2 * inter):
        halves = " (two 4-bit values are one element of the last dimension)" if packed == 2 else ""
        raise OperandError(
            f"fmoe: w1 must be [E, 2 * inter_dim or inter_dim, model_dim] and w2 [E, model_dim, inter_dim] for hidden [T, model_dim]"
            f"{halves} ({operands})"
        )
    if not experts or not inter or not model_dim:
        raise OperandError(f"fmoe: the number of experts and their sizes must be at least 1 ({operands})")
    return experts, model_dim, inter, rows == 2 * inter, q_dtype_w


def _topk(hidden: torch.Tensor, topk_weight: torch.Tensor, topk_ids: torch.Tensor) -> int:
    """Return topk; raise OperandError if the routing does not match the tokens."""
    import torch

    sizes = (hidden.shape[0], topk_weight.shape[-1] if topk_weight.dim() else 0)
    right = tuple(topk_weight.shape) == tuple(topk_ids.shape) == sizes and topk_weight.dtype == torch.float32
    if not right or topk_ids.dtype is not torch.int32 or not hidden.device == topk_weight.device == topk_ids.device:
        raise OperandError(
            f"fmoe: topk_weight must be float32 and topk_ids int32, both [{hidden.shape[0]}, topk] on {hidden.device} (got "
            f"{tuple(topk_weight.shape)} {topk_weight.dtype} on {topk_weight.device} and "
            f"{tuple(topk_ids.shape)} {topk_ids.dtype} on {topk_ids.device})"
        )
    return sizes[1]


def _check_scale(name: str, scale: torch.Tensor | None, shape: Shape, sizes: tuple[int, int], device: torch.device) -> None:
    """Raise OperandError for a missing, superfluous or mismatched scale of weights [E, *sizes]."""
    kind = str(shape["q_type"])
    if kind == "No":
        if scale is not None:
            raise OperandError(f"fmoe: {name} is given, but QuantType.No has no scales; name the quant_type")
        return
    allowed, dtypes, order = _scale_forms(shape, *sizes)
    if scale is None or tuple(scale.shape) not in allowed or str(scale.dtype) not in dtypes or scale.device != device:
        got = "None" if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}"
        shapes = " or ".join(str(list(sizes)) for sizes in allowed)
        raise OperandError(f"fmoe: with QuantType.{kind} {name} must be {shapes}, {order}{' or '.join(dtypes)} on {device} (got {got})")


def _scale_forms(shape: Shape, rows: int, cols: int) -> tuple[list[tuple[int, ...]], list[str], str]:
    """Return the valid shapes and dtypes of scales of weights [E, rows, cols], and their order."""
    kind, experts = str(shape["q_type"]), int(shape["expert"])
    wanted = moe_formats.scale_shape(shape, rows, cols)
    if kind != "per_1x32":
        flat: dict[str, list[tuple[int, ...]]] = {"per_Tensor": [(experts, 1), (experts, 1, 1)], "per_Token": [(experts, rows)]}
        return [wanted, *flat.get(kind, [(experts, math.prod(wanted[1:]))])], ["torch.float32"], ""
    if shape["q_dtype_w"] == "int4":
        shuffled = [(math.prod(wanted),), (experts, wanted[1] // 2, rows, 2)]
        return [wanted, *shuffled], ["torch.bfloat16", "torch.float32"], "the latter in the order of shuffle_scale_for_int4, "
    order = order_of_scales(shape)
    words = "" if order == ROW else "in the order of shuffle_scale, "
    return [*moe_formats.e8m0_forms(shape, order, rows, cols)], ["torch.float8_e8m0fnu", "torch.uint8"], words


def _check_static(name: str, scale: torch.Tensor | None, kind: str, device: torch.device) -> None:
    """Raise OperandError for an activation scale other than one float32 value for per_Tensor."""
    if scale is None:
        return
    if kind != "per_Tensor":
        raise OperandError(f"fmoe: {name} applies only to QuantType.per_Tensor; with {kind} the op computes the scales")
    if scale.numel() != 1 or str(scale.dtype) != "torch.float32" or scale.device != device:
        raise OperandError(f"fmoe: {name} must be one float32 value on {device} (got {tuple(scale.shape)} {scale.dtype} on {scale.device})")


def _check_given(scale: torch.Tensor | None, shape: Shape, device: torch.device) -> None:
    """Raise OperandError if a1_scale does not match quantised hidden states."""
    kind, rows = str(shape["q_type"]), shape.m
    groups = shape.n // 32 if kind == "per_1x32" else -(-shape.n // 128)
    wanted = {"per_Tensor": [(1,), ()], "per_Token": [(rows, 1), (rows,)]}.get(kind, [(rows, groups)])
    dtypes = ["torch.float8_e8m0fnu", "torch.uint8"] if kind == "per_1x32" else ["torch.float32"]
    if scale is not None:
        check_not_shuffled("fmoe", "a1_scale", scale, "row-major", rows, groups)
    if scale is None or tuple(scale.shape) not in wanted or str(scale.dtype) not in dtypes or scale.device != device:
        got = "None" if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}"
        forms = " or ".join(str(list(sizes)) for sizes in wanted)
        raise OperandError(f"fmoe: a1_scale of quantised hidden states must be {forms}, {' or '.join(dtypes)} on {device} (got {got})")


def _check_bias(name: str, bias: torch.Tensor | None, wanted: tuple[int, int], device: torch.device) -> None:
    """Raise OperandError for a bias of another shape than *wanted*, not float or elsewhere."""
    if bias is not None and (tuple(bias.shape) != wanted or not bias.is_floating_point() or bias.device != device):
        got = f"{tuple(bias.shape)} {bias.dtype} on {bias.device}"
        raise OperandError(f"fmoe: {name} must be {list(wanted)} in a float dtype on {device} (got {got})")


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal hidden states and experts, quantised and shuffled by the shape.

    Each token's experts are random and distinct; ids beyond the shape's belong to other ranks.
    Magnitudes of scale groups differ by up to 4, so that a wrong group's scale is detected.
    Weights are scaled so that stage 1's products are about 2 and the output about 1. So
    activations are tested where they are non-linear, and element bounds hold for every shape.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    kind, word = str(shape["q_type"]), str(shape["q_dtype_a"])
    group = (0, 0) if word in moe_words.DTYPES else _ACTIVATION_GROUPS[kind]
    hidden = torch.randn(shape.m, shape.n, generator=generator, device=device)
    hidden = (hidden * _uneven((shape.m, shape.n), group, _SPREAD, generator)).to(torch_dtype(shape.dtype))
    experts, topk = int(shape["expert"]), int(shape["topk"])
    logits = torch.randn(shape.m, max(experts, topk), generator=generator, device=device)
    chosen, ids = logits.topk(topk, dim=-1)
    routing = moe.local_routing(torch.softmax(chosen, -1), ids, None, None, experts)
    rows = moe_formats.stage_rows(shape)
    # With one scale for all, intermediates of experts with small weights would round to 0.
    spread = 1.5 if kind == "per_Tensor" else _SPREAD
    w1, w1_scale = _experts(shape, (rows, shape.n), 4 * shape.n**-0.5, spread, generator)
    w2, w2_scale = _experts(shape, (shape.n, shape.k), 2 * shape.k**-0.5, _SPREAD, generator)
    options, a1_scale = options_of(shape), None
    if options.quantised:
        hidden, a1_scale = moe_formats.quantised(hidden, shape, word)
    biases = (
        torch.randn(experts, size, generator=generator, device=device) if wanted else None
        for size, wanted in ((rows, options.bias1), (shape.n, options.bias2))
    )
    operands = (hidden, w1, w2, *routing, w1_scale, w2_scale, a1_scale, None, *biases)
    return operands[: max(index for index, operand in enumerate(operands) if operand is not None) + 1]


#: Largest ratio between the magnitudes of two scale groups.
_SPREAD = 4.0

#: Rows and columns per scale of the activations, 0 for all.
_ACTIVATION_GROUPS = {
    "No": (0, 0), "per_Tensor": (0, 0), "per_Token": (1, 0), "per_1x32": (1, 32), **dict.fromkeys(moe_words.BLOCK_ROWS, (1, 128)),
}  # fmt: skip
_WEIGHT_GROUPS = _ACTIVATION_GROUPS | {kind: (rows, 128) for kind, rows in moe_words.BLOCK_ROWS.items()}


def _uneven(sizes: tuple[int, int], group: tuple[int, int], spread: float, generator: torch.Generator) -> torch.Tensor:
    """Draw factors from 1/spread to 1, one per scale group, expanded to [*sizes]."""
    import torch

    high, wide = (step or max(1, size) for size, step in zip(sizes, group, strict=True))
    counts = [-(-size // step) for size, step in zip(sizes, (high, wide), strict=True)]
    factors = spread ** -torch.rand(*counts, generator=generator, device=generator.device)
    columns = factors.repeat_interleave(wide, 1)[:, : sizes[1]] if counts[1] > 1 else factors
    return columns.repeat_interleave(high, 0)[: sizes[0]] if counts[0] > 1 and high > 1 else columns


def _experts(
    shape: Shape, sizes: tuple[int, int], size: float, spread: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw weights [E, *sizes] and scales, expert by expert to save float32 memory."""
    import torch

    kind, word, experts = str(shape["q_type"]), str(shape["q_dtype_w"]), int(shape["expert"])
    rows = moe_words.BLOCK_ROWS.get(kind, 1)
    weights: torch.Tensor | None = None
    scales: list[torch.Tensor] = []
    for expert in range(experts):
        values = torch.randn(*sizes, generator=generator, device=generator.device) * size
        values *= _uneven(sizes, _WEIGHT_GROUPS[kind], spread, generator)
        quantised, scale = moe_formats.quantised(values, shape, word, rows=rows) if kind != "No" else (values.to(torch_dtype(word)), None)
        scales += [] if scale is None else [scale]
        bits = quantised.view(torch.uint8)
        if weights is None:
            weights = torch.empty(experts, *bits.shape, dtype=torch.uint8, device=bits.device)
        weights[expert] = bits
    assert weights is not None
    scale = torch.stack([scale.view(torch.uint8) for scale in scales]).view(scales[0].dtype) if scales else None
    return _stored(weights, scale, shape, sizes)


def _stored(
    weights: torch.Tensor, scale: torch.Tensor | None, shape: Shape, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack and shuffle weights and their scales [E, ...] into the shape's layout."""
    import torch

    from tunedgemm.ops.formats import int4
    from tunedgemm.ops.formats.scales import shuffle_scale
    from tunedgemm.ops.formats.shuffle import as_shuffled, shuffle_weight

    shuffled, dtype = shape.layout != "row", torch_dtype(str(shape["q_dtype_w"]))
    if dtype is int4.INT4:
        values, half = weights.view(torch.int8), (*weights.shape[:2], weights.shape[2] // 2)
        packed = int4.pack_int8_to_packed_int4(shuffle_weight(values, shape.layout).plain).view(half).view(dtype)
        assert scale is not None
        return as_shuffled(packed, shape.layout), int4.shuffle_scale_for_int4(scale).view(-1)
    typed = shuffle_weight(weights.view(dtype), shape.layout) if shuffled else weights.view(dtype)
    if scale is None:
        return typed, None
    if order_of_scales(shape) == SHUFFLED:
        return typed, shuffle_scale(scale.reshape(-1, scale.shape[-1]))
    return typed, scale.reshape(moe_formats.scale_shape(shape, *sizes))
