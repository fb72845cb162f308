"""Check and draw the operands of fmoe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import short_dtype, table_text, torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import moe, moe_formats, moe_words
from tunedgemm.ops.layout import layout_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


_NAMES = ("hidden", "w1", "w2", "topk_weight", "topk_ids", "w1_scale", "w2_scale", "a1_scale", "a2_scale")


def shape_of(
    *operands: Any,
    otype: torch.dtype | None = None,
    activation: Any = moe_words.ActivationType.Silu,
    quant_type: Any = moe_words.QuantType.No,
    doweight_stage1: bool = False,
    expert_parallel: bool = False,
) -> Shape:
    """Return the shape of a call; raises OperandError for operands that do not fit each other."""
    import torch

    if not 5 <= len(operands) <= 9:
        raise OperandError(f"fmoe: expected 5 to 9 operands, {', '.join(_NAMES)} (got {len(operands)})")
    for index, (name, operand) in enumerate(zip(_NAMES, operands, strict=False)):
        if not isinstance(operand, torch.Tensor) and (index < 5 or operand is not None):
            raise OperandError(f"fmoe: {name} must be a tensor (got {type(operand).__name__})")
    hidden, w1, w2, topk_weight, topk_ids = operands[:5]
    w1_scale, w2_scale, a1_scale, a2_scale = (*operands[5:], *[None] * 4)[:4]
    act, kind = moe_words.act_word(activation), moe_words.quant_word(quant_type)
    experts, model_dim, inter, gated, q_dtype = _weights(hidden, w1, w2, kind)
    dtype = short_dtype(hidden.dtype)
    outdtype = dtype if otype is None else short_dtype(otype)
    if outdtype not in moe_words.DTYPES:
        raise OperandError(f"fmoe: the output must be torch.bfloat16 or torch.float16 (got {otype})")
    shape = Shape(
        op=moe_words.NAME,
        m=hidden.shape[0],
        n=model_dim,
        k=inter,
        dtype=dtype,
        outdtype=outdtype,
        layout=layout_of(moe_words.NAME, w1),
        extra={  # type: ignore[arg-type]
            "expert": experts,
            "topk": _topk(hidden, topk_weight, topk_ids),
            "act": act,
            "q_dtype_a": q_dtype,
            "q_dtype_w": q_dtype,
            "q_type": kind,
            "g1u1": gated,
            "doweight_stage1": bool(doweight_stage1),
            **({moe_words.EXPERT_PARALLEL: True} if expert_parallel else {}),
        },
    )
    if wrong := moe_words.problem(shape):
        raise OperandError(f"fmoe: {wrong}")
    _check_scale("w1_scale", w1_scale, shape, (w1.shape[1], model_dim), hidden.device)
    _check_scale("w2_scale", w2_scale, shape, (model_dim, inter), hidden.device)
    _check_static("a1_scale", a1_scale, kind, hidden.device)
    _check_static("a2_scale", a2_scale, kind, hidden.device)
    return shape


def _weights(hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, kind: str) -> tuple[int, int, int, bool, str]:
    """Return (experts, model_dim, inter_dim, whether gated, dtype) of the weights.

    Raises OperandError where they do not fit each other.
    """
    operands = f"hidden {tuple(hidden.shape)} {hidden.dtype}, w1 {tuple(w1.shape)} {w1.dtype}, w2 {tuple(w2.shape)} {w2.dtype}, {kind}"
    if hidden.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        raise OperandError(f"fmoe: hidden must be [T, model_dim], w1 [E, rows, model_dim] and w2 [E, model_dim, inter_dim] ({operands})")
    if str(hidden.dtype) not in map(table_text, moe_words.DTYPES):
        raise OperandError(f"fmoe: hidden must be torch.bfloat16 or torch.float16; the op quantises it itself ({operands})")
    allowed = (short_dtype(hidden.dtype),) if kind == "No" else moe_words.WEIGHT_DTYPES[kind]
    texts = [*map(table_text, allowed), *(["torch.uint8"] if kind == "per_1x32" else [])]
    if w1.dtype != w2.dtype or str(w1.dtype) not in texts:
        raise OperandError(f"fmoe: with QuantType.{kind} w1 and w2 must both be {' or '.join(texts)} ({operands})")
    if w1.device != hidden.device or w2.device != hidden.device:
        raise OperandError(f"fmoe: hidden is on {hidden.device}, w1 on {w1.device} and w2 on {w2.device}")
    layouts = [layout_of(moe_words.NAME, weight) for weight in (w1, w2)]
    if layouts[0] != layouts[1]:
        raise OperandError(f"fmoe: w1 and w2 must lie alike (got layouts {layouts[0]} and {layouts[1]}); see shuffle_weight")
    packed = 2 if kind == "per_1x32" else 1
    experts, rows, model_dim, inter = w1.shape[0], w1.shape[1], hidden.shape[1], w2.shape[2] * packed
    if w2.shape[0] != experts or w2.shape[1] != model_dim or w1.shape[2] * packed != model_dim or rows not in (inter, 2 * inter):
        halves = " (two 4-bit values are one element of the last dimension)" if packed == 2 else ""
        raise OperandError(
            f"fmoe: w1 must be [E, 2 * inter_dim or inter_dim, model_dim] and w2 [E, model_dim, inter_dim] for hidden [T, model_dim]"
            f"{halves} ({operands})"
        )
    if not experts or not inter or not model_dim:
        raise OperandError(f"fmoe: the number of experts and their sizes must be at least 1 ({operands})")
    return experts, model_dim, inter, rows == 2 * inter, allowed[0] if packed == 2 else short_dtype(w1.dtype)


def _topk(hidden: torch.Tensor, topk_weight: torch.Tensor, topk_ids: torch.Tensor) -> int:
    """Return topk of the routing; raise OperandError where it does not fit the tokens."""
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
    """Raise OperandError for a wrong scale of weights [E, *sizes].

    It may be missing, superfluous, or of another shape, dtype or device.
    """
    kind, experts, (rows, cols) = str(shape["q_type"]), int(shape["expert"]), sizes
    wanted = moe_formats.scale_shape(shape, rows, cols)
    allowed = {
        "No": [],
        "per_Tensor": [wanted, (experts, 1), (experts, 1, 1)],
        "per_Token": [wanted, (experts, rows)],
        "per_1x128": [wanted, (experts, wanted[-1] * wanted[-2] if len(wanted) == 3 else 0)],
        "per_1x32": [wanted, (experts * rows, cols // 32)] if shape.layout == "row" else [wanted],
    }[kind]
    if kind == "per_1x32" and wanted == (experts * rows, cols // 32):  # shuffled, and nothing was padded
        allowed.append((experts, rows, cols // 32))
    dtypes = ["torch.float8_e8m0fnu", "torch.uint8"] if kind == "per_1x32" else ["torch.float32"]
    if kind == "No":
        if scale is not None:
            raise OperandError(f"fmoe: {name} is given, but QuantType.No has no scales; name the quant_type")
        return
    if scale is None or tuple(scale.shape) not in allowed or str(scale.dtype) not in dtypes or scale.device != device:
        got = "None" if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}"
        order = "in the order of quant.shuffle_scale, as the weights are shuffled, " if kind == "per_1x32" and shape.layout != "row" else ""
        shapes = " or ".join(str(list(sizes)) for sizes in allowed)
        raise OperandError(f"fmoe: with QuantType.{kind} {name} must be {shapes}, {order}{' or '.join(dtypes)} on {device} (got {got})")


def _check_static(name: str, scale: torch.Tensor | None, kind: str, device: torch.device) -> None:
    """Raise OperandError for a scale of activations that is not one float32 value of per_Tensor."""
    if scale is None:
        return
    if kind != "per_Tensor":
        raise OperandError(f"fmoe: {name} applies only to QuantType.per_Tensor; with {kind} the op computes the scales")
    if scale.numel() != 1 or str(scale.dtype) != "torch.float32" or scale.device != device:
        raise OperandError(f"fmoe: {name} must be one float32 value on {device} (got {tuple(scale.shape)} {scale.dtype} on {scale.device})")


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal hidden states and experts, quantised and shuffled as the shape says.

    Each token's experts are random and distinct; those beyond the shape's are of other ranks.
    Groups with separate scales differ in size by up to 4, so that a scale of another group shows.
    The weights' spread makes stage 1's products about 2 and the output about 1 whatever the sizes.
    So activations are used where they bend, and a bound of one element means the same for every
    shape.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    kind = str(shape["q_type"])
    hidden = torch.randn(shape.m, shape.n, generator=generator, device=device)
    hidden = (hidden * _uneven((shape.m, shape.n), _ACTIVATION_GROUPS[kind], _SPREAD, generator)).to(torch_dtype(shape.dtype))
    experts, topk = int(shape["expert"]), int(shape["topk"])
    logits = torch.randn(shape.m, max(experts, topk), generator=generator, device=device)
    chosen, ids = logits.topk(topk, dim=-1)
    routing = moe.local_routing(torch.softmax(chosen, -1), ids, None, None, experts)
    rows = shape.k * (2 if shape["g1u1"] else 1)
    # One scale of all tokens' intermediates would make nothing of those of the smaller experts.
    spread = 1.5 if kind == "per_Tensor" else _SPREAD
    w1, w1_scale = _experts(shape, (rows, shape.n), 4 * shape.n**-0.5, spread, generator)
    w2, w2_scale = _experts(shape, (shape.n, shape.k), 2 * shape.k**-0.5, _SPREAD, generator)
    operands = (hidden, w1, w2, *routing)
    return operands if w1_scale is None else (*operands, w1_scale, w2_scale)


#: Largest ratio between the sizes of two groups of random values with separate scales.
_SPREAD = 4.0

#: Rows and columns that share a scale, 0 for all of them.
_ACTIVATION_GROUPS = {"No": (0, 0), "per_Tensor": (0, 0), "per_Token": (1, 0), "per_1x128": (1, 128), "per_1x32": (1, 32)}
_WEIGHT_GROUPS = {"No": (0, 0), "per_Tensor": (0, 0), "per_Token": (1, 0), "per_1x128": (128, 128), "per_1x32": (1, 32)}


def _uneven(sizes: tuple[int, int], group: tuple[int, int], spread: float, generator: torch.Generator) -> torch.Tensor:
    """Draw factors of 1/spread to 1, one for each group, that apply to [*sizes]."""
    import torch

    high, wide = (step or max(1, size) for size, step in zip(sizes, group, strict=True))
    counts = [-(-size // step) for size, step in zip(sizes, (high, wide), strict=True)]
    factors = spread ** -torch.rand(*counts, generator=generator, device=generator.device)
    columns = factors.repeat_interleave(wide, 1)[:, : sizes[1]] if counts[1] > 1 else factors
    return columns.repeat_interleave(high, 0)[: sizes[0]] if counts[0] > 1 and high > 1 else columns


def _experts(
    shape: Shape, sizes: tuple[int, int], size: float, spread: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw weights [E, *sizes] and their scales by expert: in float32 all would not fit a device."""
    import torch

    from tunedgemm.ops.formats.scales import shuffle_scale
    from tunedgemm.ops.formats.shuffle import shuffle_weight

    kind, experts = str(shape["q_type"]), int(shape["expert"])
    dtype = torch_dtype(str(shape["q_dtype_w"]))
    weights: torch.Tensor | None = None
    scales: list[torch.Tensor] = []
    for expert in range(experts):
        values = torch.randn(*sizes, generator=generator, device=generator.device) * size
        values *= _uneven(sizes, _WEIGHT_GROUPS[kind], spread, generator)
        quantised, scale = _quantised(values, kind, dtype)
        scales += [] if scale is None else [scale]
        bits = quantised.view(torch.uint8)
        if weights is None:
            weights = torch.empty(experts, *bits.shape, dtype=torch.uint8, device=bits.device)
        weights[expert] = bits
    assert weights is not None
    typed = weights.view(dtype)
    if shape.layout != "row":
        typed = shuffle_weight(typed, shape.layout)
    if not scales:
        return typed, None
    scale = torch.stack([scale.view(torch.uint8) for scale in scales]).view(scales[0].dtype)
    if kind == "per_1x32" and shape.layout != "row":
        return typed, shuffle_scale(scale.reshape(-1, scale.shape[-1]))
    return typed, scale.reshape(moe_formats.scale_shape(shape, *sizes))


def _quantised(values: torch.Tensor, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise one expert's weights [rows, cols] as stored; the scales are None for QuantType.No."""
    from tunedgemm.ops.formats import mxfp4, quant

    if kind == "per_Tensor":
        return quant.per_tensor_quant(values, quant_dtype=dtype)
    if kind == "per_Token":
        return quant.pertoken_quant(values, quant_dtype=dtype)
    if kind == "per_1x128":
        return quant.per_block_quant(values, dtype)
    return mxfp4.per_1x32_f4_quant(values) if kind == "per_1x32" else (values.to(dtype), None)
