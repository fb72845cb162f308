"""Define a fused mixture of experts: AITER's words for it, and the reference.

Semantics as AITER's ``torch_moe_stage1`` and ``torch_moe_stage2`` (aiter/fused_moe.py), with the
quantisation of the hidden states and of the intermediate that its two stages do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops.product import exact_dtype, exact_product
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch


class ActivationType(enum.IntEnum):
    """AITER's activations (csrc/include/aiter_enum.h) that are computed here."""

    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(enum.IntEnum):
    """AITER's kinds of quantisation (csrc/include/aiter_enum.h) that are computed here.

    ``per_128x128`` is AITER's other name of ``per_1x128``: blocks of the weights, and 128 elements
    of the activations.
    """

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


NAME = "fmoe"
#: Dtypes of the hidden states and of the output.
DTYPES = ("bf16", "fp16")
_BYTES = ("fp8_e4m3fn", "fp8_e4m3fnuz", "int8")
#: the word of a kind in `Shape.extra` -> the dtypes that weights of this kind may have
WEIGHT_DTYPES = {
    "No": ("bf16", "fp16"),
    "per_Tensor": _BYTES,
    "per_Token": _BYTES,
    "per_1x128": _BYTES[:2],
    "per_1x32": ("fp4x2",),
}
#: the word of an activation in `Shape.extra` -> its member
ACTIVATIONS = {member.name.lower(): member for member in ActivationType}

#: Swiglu as AITER and gpt-oss define it: slope of the sigmoid, and bounds of both halves.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def act_word(value: Any) -> str:
    """Return ``silu``, ``gelu`` or ``swiglu`` for a member of either enum, or its number.

    The enums are `ActivationType` and AITER's.

    Raises:
        OperandError: another activation; the message lists those there are.
    """
    return _member(ActivationType, value).name.lower()


def quant_word(value: Any) -> str:
    """Return the name of a kind of quantisation: a member of `QuantType`, of AITER's enum, or a number.

    It is ``No``, ``per_Tensor``, ``per_Token``, ``per_1x128`` or ``per_1x32``.

    Raises:
        OperandError: another kind; the message lists those there are.
    """
    member: enum.IntEnum = _member(QuantType, value)
    return "per_1x128" if member is QuantType.per_128x128 else member.name


def _member(kind: type[enum.IntEnum], value: Any) -> enum.IntEnum:
    number = getattr(value, "value", value)
    try:
        return kind(int(number))
    except (TypeError, ValueError):
        members = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise OperandError(f"fmoe: no {kind.__name__} {value!r} is computed here; known: {members}") from None


def cell_word(column: str, text: str, words: dict[str, str]) -> str:
    """Return the meaning of a table's text, looked up in a closed list.

    Args:
        words: the texts known, as AITER writes them, each with its meaning; the part before the dot
            may be left out.

    Raises:
        ShapeError: another text; the message lists those known.
    """
    meaning = words.get(text) or {name.partition(".")[2]: word for name, word in words.items()}.get(text)
    if meaning is None:
        fault = f"has the unknown word {text[:60]!r}" if text else "is empty"
        raise ShapeError(f"column {column!r} {fault}; known: {', '.join(words)}")
    return meaning


def problem(shape: Shape) -> str:
    """Return why no operands could have a shape, or ""."""
    experts, topk = int(shape["expert"]), int(shape["topk"])
    if not 1 <= topk <= experts:
        return f"topk must be in 1..expert (got topk={topk}, expert={experts})"
    if shape["act"] == "swiglu" and not shape["g1u1"]:
        return "swiglu needs gated weights: w1 [expert, 2 * inter_dim, model_dim], use_g1u1 1"
    if shape["q_type"] == "per_1x32" and (shape.n % 32 or shape.k % 32):
        return f"per_1x32 needs model_dim and inter_dim to be multiples of 32 (got {shape.n} and {shape.k})"
    return ""


def scale_shape(shape: Shape, rows: int, cols: int) -> tuple[int, ...]:
    """Return the shape of the scales of weights [expert, rows, cols], () for none.

    cols counts elements. mxfp4 in a shuffled layout has AITER's shuffled e8m0 scales of the rows of
    all experts, padded to multiples of (256, 8).
    """
    experts, kind = int(shape["expert"]), shape["q_type"]
    if kind == "per_1x32" and shape.layout != "row":
        return -(-experts * rows // 256) * 256, -(-cols // 32 // 8) * 8
    return {
        "No": (),
        "per_Tensor": (experts,),
        "per_Token": (experts, rows, 1),
        "per_1x128": (experts, -(-rows // 128), -(-cols // 128)),
        "per_1x32": (experts, rows, cols // 32),
    }[str(kind)]


def activated(product: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Apply the activation to stage 1's product [..., 2 * inter or inter] -> [..., inter], in its dtype.

    The first half of a gated product is the gate, the second its factor.
    """
    import torch

    act = shape["act"]
    gate, up = product.chunk(2, dim=-1) if shape["g1u1"] else (product, None)
    if act == "swiglu":
        if up is None:
            raise OperandError("fmoe: swiglu needs gated weights [E, 2 * inter_dim, model_dim]")
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    gate = torch.nn.functional.silu(gate) if act == "silu" else torch.nn.functional.gelu(gate)
    return gate if up is None else gate * up


def as_quantised(x: torch.Tensor, shape: Shape, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Quantise activations [R, C] and convert them back to *dtype*, as a stage multiplies them.

    Args:
        scale: one value for per_Tensor, None to take the largest magnitude of all of x.
    """
    from tunedgemm.ops.formats import mxfp4, quant

    kind = shape["q_type"]
    if kind == "No" or x.numel() == 0:
        return x.to(dtype)
    x = x.float()
    if kind == "per_1x32":
        return mxfp4.dequant_fp4(*mxfp4.per_1x32_f4_quant(x), dtype)
    q_dtype = torch_dtype(str(shape["q_dtype_a"]))
    if kind == "per_1x128":
        return quant.dequant_blocks(*quant.per_1x128_quant(x, q_dtype), dtype, (1, 128))
    if kind == "per_Token":
        return quant.dequant_rows(*quant.pertoken_quant(x, quant_dtype=q_dtype), dtype)
    return quant.dequant_rows(*quant.per_tensor_quant(x, scale, quant_dtype=q_dtype), dtype)


def plain_scale(scale: torch.Tensor | None, shape: Shape, rows: int, cols: int) -> torch.Tensor | None:
    """Return the scales of weights [expert, rows, cols] in order as [expert, ...]; None without any."""
    from tunedgemm.ops.formats.scales import unshuffle_scale

    if scale is None:
        return None
    wanted = scale_shape(shape, rows, cols)
    if shape["q_type"] == "per_1x32" and shape.layout != "row":
        experts = int(shape["expert"])
        return unshuffle_scale(scale.reshape(wanted), experts * rows, cols // 32).reshape(experts, rows, cols // 32)
    return scale.reshape(wanted)


def expert_weight(weight: torch.Tensor, scale: torch.Tensor | None, expert: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix [rows, cols] in *dtype*, dequantised.

    Args:
        weight: [expert, rows, cols], plain (cols / 2 for fp4x2).
        scale: as `plain_scale` gives it.
    """
    import torch

    from tunedgemm.ops.formats import mxfp4, quant

    kind = shape["q_type"]
    if kind == "per_1x32":  # torch indexes no 4-bit tensors
        return mxfp4.dequant_fp4(mxfp4.as_fp4(weight.view(torch.uint8)[expert]), scale[expert], dtype)  # type: ignore[index]
    matrix = weight[expert]
    if scale is None:
        return matrix.to(dtype)
    if kind == "per_1x128":
        return quant.dequant_blocks(matrix, scale[expert], dtype, (128, 128))
    return quant.dequant_rows(matrix, scale[expert], dtype)


def routes(topk_ids: torch.Tensor, experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each expert that is hit with its places in the flattened [T * topk]; skip unknown ids."""
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
    """Check that the operands of `local_tokens` and `local_routing` fit.

    This covers faults that `Op.shape_of` cannot see afterwards.

    Raises:
        OperandError: names what does not.
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
    """Zero the padding of hidden states [T, model_dim]: its values must reach neither sums nor scales."""
    import torch

    padding = torch.arange(len(hidden), device=hidden.device)[:, None] >= num_local_tokens.reshape(1, 1)
    return hidden.masked_fill(padding, 0.0)


def local_routing(
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None,
    num_local_tokens: torch.Tensor | None,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing among the experts that are here: (weights, ids), without a synchronisation.

    Both are new tensors. A slot of an absent expert, or of a token beyond the local ones, gets the
    weight 0. Its id is that of an expert that is here, spread evenly, so that it costs only work.

    Args:
        topk_weight, topk_ids: [T, topk]; ids count all experts.
        expert_mask: [all experts], 1 where one is here; those are numbered in order. None: all are
            here.
        num_local_tokens: one value: the tokens from here on are padding. None: none is.
        experts: how many are here.
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
    """Compute [T, model_dim] on the operands' device, in float64 where quick, else float32 without TF32.

    Hidden states and the intermediate are quantised as q_type says; everything else is exact.
    """
    import torch

    from tunedgemm.ops.formats.shuffle import unshuffled

    hidden, w1, w2, topk_weight, topk_ids, w1_scale, w2_scale, a1_scale, a2_scale = (*operands, *[None] * 4)[:9]
    experts, topk, inter = int(shape["expert"]), int(shape["topk"]), shape.k
    rows = inter * (2 if shape["g1u1"] else 1)
    wide = exact_dtype(shape.m * topk, rows + inter, shape.n)
    out = torch.zeros(shape.m, shape.n, dtype=wide, device=hidden.device)
    if shape.m == 0:
        return out
    factors, hits = topk_weight.reshape(-1, 1).to(wide), list(routes(topk_ids, experts))

    x = as_quantised(hidden, shape, a1_scale, wide)
    middle = torch.zeros(shape.m * topk, inter, dtype=wide, device=hidden.device)
    weight, scale = unshuffled(w1), plain_scale(w1_scale, shape, rows, shape.n)
    for expert, pairs in hits:
        product = exact_product(x[pairs // topk], expert_weight(weight, scale, expert, shape, wide), wide)
        product = product * factors[pairs] if shape["doweight_stage1"] else product
        middle[pairs] = activated(product, shape)

    middle = as_quantised(middle, shape, a2_scale, wide)
    weight, scale = unshuffled(w2), plain_scale(w2_scale, shape, shape.n, inter)
    for expert, pairs in hits:
        product = exact_product(middle[pairs], expert_weight(weight, scale, expert, shape, wide), wide)
        product = product if shape["doweight_stage1"] else product * factors[pairs]
        out.index_add_(0, pairs // topk, product)
    return out
