"""AITER's words for a fused mixture of experts, and the dtypes that each kind of quantisation takes.

Imports no torch.
"""

from __future__ import annotations

import enum
from typing import Any

from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.shape import Shape


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
#: Field of `Shape.extra` where experts are on several ranks, and the column.
EXPERT_PARALLEL = "expert_parallel"
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
    for name in ("expert", "topk"):
        if int(shape[name]) < 1:
            return f"{name} must be at least 1 (got {shape[name]})"
    if shape["act"] == "swiglu" and not shape["g1u1"]:
        return "swiglu needs gated weights: w1 [expert, 2 * inter_dim, model_dim], use_g1u1 1"
    if shape["q_type"] == "per_1x32" and (shape.n % 32 or shape.k % 32):
        return f"per_1x32 needs model_dim and inter_dim to be multiples of 32 (got {shape.n} and {shape.k})"
    return ""
