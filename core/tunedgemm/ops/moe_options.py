"""Options of fmoe that AITER's key lacks: biases, bounds, quantised hidden states.

A shape without options has no field for them. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.device import current_device
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Fields of `Shape.extra` and columns: the order of w1's rows, and all other options as one text.
GATE_MODE, OPTIONS = "gate_mode", "options"
#: Gate modes with interleaved gate and up rows. The first interleaves blocks of 16 rows in shuffled
#: weights and single rows in plain ones; the second always single rows, as gfx1250 does.
INTERLEAVE, INTERLEAVE_ROWS = "interleave", "interleave_rows"
#: Default bound of both halves in Swiglu.
SWIGLU_LIMIT = 7.0
#: AITER's gate modes with all gate rows first.
_SEPARATED = ("", "separated", "mock_gate_only", "gate_only")
_ROWS = 16


@attrs.frozen
class Options:
    """The options of one call.

    Attributes:
        bias1, bias2: whether stage 1 and stage 2 add a bias.
        quantised: whether the caller passes quantised hidden states.
        swiglu_limit: bound of both halves of a gated product; None for the default.
        beta, linear_beta: bounds of Situv2's halves.
    """

    bias1: bool = False
    bias2: bool = False
    quantised: bool = False
    swiglu_limit: float | None = None
    beta: float = 1.0
    linear_beta: float = 1.0

    def __str__(self) -> str:
        values = attrs.asdict(self)
        changed = {name: value for name, value in values.items() if value != getattr(_NONE, name)}
        return " ".join(name if value is True else f"{name}={value!r}" for name, value in changed.items())


_NONE = Options()
_FLAGS = tuple(name for name, value in attrs.asdict(_NONE).items() if value is False)
_NUMBERS = tuple(name for name in attrs.asdict(_NONE) if name not in _FLAGS)


def parse_options(text: str) -> Options:
    """Parse the text of `Options`.

    Raises:
        ShapeError: an unknown option.
    """
    return Options(**dict(map(_parse_word, text.split())))


def _parse_word(word: str) -> tuple[str, Any]:
    name, _, number = word.partition("=")
    if name in _FLAGS and word == name:
        return name, True
    try:
        value = float(number) if name in _NUMBERS else math.nan
    except ValueError:
        value = math.nan
    if not value > 0:
        known = ", ".join((*_FLAGS, *(f"{name}=1.5" for name in _NUMBERS)))
        raise ShapeError(f"column {OPTIONS!r} has the unknown word {word[:40]!r}; known: {known}")
    return name, value


def options_of(shape: Shape) -> Options:
    """Return the options of a shape."""
    for name, value in shape.extra:
        if name == OPTIONS:
            return parse_options(str(value))
    return _NONE


def gate_rows(shape: Shape) -> int:
    """Return the interleaving block of gate and up rows in w1; 0 if all gate rows come first."""
    mode = dict(shape.extra).get(GATE_MODE, "")
    if not mode:
        return 0
    return _ROWS if mode == INTERLEAVE and shape.layout != "row" else 1


def gate_block() -> int:
    """Return the interleaving block of shuffled weights on the current device."""
    return 1 if current_device().gfx == "gfx1250" else _ROWS


def gate_word(value: Any, gfx: str = "") -> str:
    """Return the canonical gate mode of AITER's word, enum member or its text.

    Raises:
        OperandError: an unknown mode.
    """
    text = str(getattr(value, "value", value) or "").rpartition(".")[2].lower()
    if text in _SEPARATED:
        return ""
    if text in (INTERLEAVE, INTERLEAVE_ROWS):
        return INTERLEAVE_ROWS if gfx == "gfx1250" else text
    raise OperandError(f"fmoe: gate_mode must be separated or interleave (got {value!r})")


def call_options(
    biases: tuple[torch.Tensor | None, torch.Tensor | None], act: str, quantised: bool, swiglu_limit: float | None, **betas: float | None
) -> str:
    """Return the options of a call as text.

    Args:
        biases: bias1 and bias2.
        act: name of the activation, which decides the bounds that are kept.
        quantised: whether the hidden states are quantised.
        swiglu_limit: AITER's argument; None if not given.
        betas: beta and linear_beta; None if not given.
    """
    given = {name: float(value) for name, value in betas.items() if value is not None}
    given |= {"swiglu_limit": float(swiglu_limit)} if swiglu_limit else {}
    return str(_used(Options(biases[0] is not None, biases[1] is not None, quantised, **given), act))


def _used(options: Options, act: str) -> Options:
    """Drop the bounds that an activation does not use."""
    if act != "situv2":
        options = attrs.evolve(options, beta=_NONE.beta, linear_beta=_NONE.linear_beta)
    elif options.swiglu_limit is not None:
        options = attrs.evolve(options, swiglu_limit=None)
    return attrs.evolve(options, swiglu_limit=None) if act == "swiglu" and options.swiglu_limit == SWIGLU_LIMIT else options


def used_gate(mode: str, gated: bool, kind: str) -> str:
    """Return a gate mode, or "" where AITER's kernels ignore it and expect gate rows first."""
    return mode if gated and kind == "per_1x32" else ""


def canonical(shape: Shape) -> Shape:
    """Return the shape that a call has: without unused gate mode and bounds.

    Quantised hidden states count as the output dtype.
    """
    fields = dict(shape.extra)
    if GATE_MODE not in fields and OPTIONS not in fields:
        return shape
    options = _used(options_of(shape), str(fields["act"]))
    mode = used_gate(str(fields.get(GATE_MODE, "")), bool(fields["g1u1"]), str(fields["q_type"]))
    kept = {name: value for name, value in fields.items() if name not in (GATE_MODE, OPTIONS)}
    kept |= {name: word for name, word in ((GATE_MODE, mode), (OPTIONS, str(options))) if word}
    dtype = shape.outdtype if options.quantised else shape.dtype
    return shape if kept == fields and dtype == shape.dtype else attrs.evolve(shape, dtype=dtype, extra=kept)  # type: ignore[arg-type]
