"""AITER's enums for fmoe, and the dtypes that each quantisation supports.

Imports no torch.
"""

from __future__ import annotations

import enum
from typing import Any

from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops.moe_options import GATE_MODE, OPTIONS
from tunedgemm.process.variables import read, switched_on
from tunedgemm.shape import Shape


class _AiterEnum(enum.IntEnum):
    """An enum with AITER's values, written as in AITER's tables."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class ActivationType(_AiterEnum):
    """AITER's activations (csrc/include/aiter_enum.h)."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(_AiterEnum):
    """AITER's quantisation types (csrc/include/aiter_enum.h).

    ``per_128x128`` is an alias of ``per_1x128``: 128x128 blocks of weights, 1x128 of activations.
    """

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
    per_256x128 = 6
    per_1024x128 = 7


NAME = "fmoe"
#: Field of `Shape.extra` for expert parallelism, and its column.
EXPERT_PARALLEL = "expert_parallel"
#: Dtypes of the hidden states and of the output.
DTYPES = ("bf16", "fp16")
_FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
#: Quantisation type -> rows per weight scale of 128 columns; activations have 1x128 scales.
BLOCK_ROWS = {"per_1x128": 128, "per_256x128": 256, "per_1024x128": 1024}
#: Quantisation type, as in `Shape.extra` -> short dtypes that its weights may have.
WEIGHT_DTYPES = {
    "No": DTYPES,
    "per_Tensor": (*_FP8, "int8"),
    "per_Token": (*_FP8, "int8"),
    "per_1x32": ("fp4x2", *_FP8, "int4"),
    **dict.fromkeys(BLOCK_ROWS, _FP8),
}
#: Value of topk in AITER's rows of tuned_grouped_fmoe.csv that hold for any topk.
ANY_TOPK = -1
#: Dtypes with two elements in a byte.
PACKED = ("fp4x2", "int4")
#: Activation, as in `Shape.extra` -> its member.
ACTIVATIONS = {member.name.lower(): member for member in (ActivationType(value) for value in (0, 1, 2, 3, -1))}
_PLAIN_KINDS, _PLAIN_ACTIVATIONS = ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128"), ("silu", "gelu", "swiglu")
#: Activations of a gate and an up half.
GATED = ("swiglu", "situv2")
#: AITER's variables for the token count from which activations are quantised, by gate mode.
_BOUNDS = {"separated": "GPTOSS_SWIGLU_MXFP4_BF16_BOUND", "interleaved": "AITER_BF16_FP8_MOE_BOUND"}


def activation_dtypes(kind: str, dtype: str) -> tuple[str, ...]:
    """Return the short dtypes of activations in a stage: quantised, or 16 bits."""
    if kind == "No":
        return (dtype,)
    return *(word for word in WEIGHT_DTYPES[kind] if word != "int4"), *DTYPES


def activation_dtype(kind: str, q_dtype_w: str, act: str, m: int, interleaved: bool, gfx: str) -> str:
    """Return the short dtype to which AITER quantises a call's activations (fused_moe.py).

    It is that of the weights, except for per_1x32: bf16 for int4 weights, and bf16, fp8 or mxfp4
    for mxfp4 weights by activation, token count and architecture. On NVIDIA, which AITER does not
    support, Swiglu with few tokens uses mxfp4, too.
    """
    if q_dtype_w == "int4":
        return "bf16"
    if kind != "per_1x32" or q_dtype_w != "fp4x2":
        return q_dtype_w
    if gfx == "gfx1250":
        return _FP8[0] if switched_on("AITER_FORCE_A8W4") else q_dtype_w
    if act == "situv2":
        return _FP8[0] if switched_on("AITER_SITUV2_A8W4") else q_dtype_w if switched_on("AITER_SITUV2_A4W4") else "bf16"
    if not interleaved:
        return "bf16" if act == "swiglu" and m < _bound("separated") and not gfx.startswith("sm_") else q_dtype_w
    return "bf16" if gfx != "gfx950" or m < _bound("interleaved") else _FP8[0]


def _bound(gate: str) -> int:
    return int(read(_BOUNDS[gate]))


def act_word(value: Any) -> str:
    """Return the name, such as ``silu``, of a number or member of `ActivationType` or AITER's enum.

    Raises:
        OperandError: an unknown activation.
    """
    return _member(ActivationType, value).name.lower()


def quant_word(value: Any) -> str:
    """Return the name of a number or member of `QuantType` or AITER's enum, aliases resolved.

    Raises:
        OperandError: an unknown quantisation type.
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
    """Translate the text of a table cell.

    Args:
        words: maps AITER's texts to our words; a text may omit the part before the dot.

    Raises:
        ShapeError: an unknown text.
    """
    meaning = words.get(text) or {name.partition(".")[2]: word for name, word in words.items()}.get(text)
    if meaning is None:
        fault = f"has the unknown word {text[:60]!r}" if text else "is empty"
        raise ShapeError(f"column {column!r} {fault}; known: {', '.join(words)}")
    return meaning


def problem(shape: Shape) -> str:
    """Return why a shape is impossible, or ""."""
    for name in ("expert", "topk"):
        if int(shape[name]) < 1:
            any_number = "; AITER's rows of grouped experts name any number so" if shape[name] == ANY_TOPK else ""
            return f"{name} must be at least 1 (got {shape[name]}){any_number}"
    if shape["act"] in GATED and not shape["g1u1"]:
        return f"{shape['act']} needs gated weights: w1 [expert, 2 * inter_dim, model_dim], use_g1u1 1"
    kind, q_dtype_a, q_dtype_w = (str(shape[name]) for name in ("q_type", "q_dtype_a", "q_dtype_w"))
    if kind == "No" and q_dtype_w != shape.dtype:
        return f"QuantType.No needs weights of the hidden states' dtype (got {shape.dtype} and {q_dtype_w})"
    if q_dtype_a not in (allowed := activation_dtypes(kind, shape.dtype)):
        return f"activations of QuantType.{kind} must be {', '.join(allowed)} (got {q_dtype_a})"
    if q_dtype_w == "int4" and (shape.layout == "row" or shape.n % 64 or shape.k % 64):
        return f"int4 weights need a shuffled layout, and sizes in multiples of 64 (got {shape.layout}, {shape.n} and {shape.k})"
    if kind == "per_1x32" and (shape.n % 32 or shape.k % 32):
        return f"per_1x32 needs model_dim and inter_dim to be multiples of 32 (got {shape.n} and {shape.k})"
    return ""


def unusual_experts(shape: Shape) -> str:
    """Return which rare feature a shape has, or "".

    Without any, activations and weights have one dtype, and backends commonly support the
    quantisation and the activation.
    """
    kind, q_dtype_a, q_dtype_w = (str(shape[name]) for name in ("q_type", "q_dtype_a", "q_dtype_w"))
    if q_dtype_a != q_dtype_w:
        return f"activations of {q_dtype_a} and weights of {q_dtype_w}"
    if kind not in _PLAIN_KINDS or (kind == "per_1x32" and q_dtype_w != "fp4x2"):
        return f"QuantType.{kind} of {q_dtype_w}"
    declared = dict(shape.extra)
    if special := " ".join(str(declared[name]) for name in (GATE_MODE, OPTIONS) if name in declared):
        return special
    return "" if shape["act"] in _PLAIN_ACTIVATIONS else f"activation {shape['act']}"
