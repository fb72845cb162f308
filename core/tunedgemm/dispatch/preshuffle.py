"""A weight that a model keeps twice, plain and shuffled: which of them a call gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.calls import needs_gradient, plain, recording
from tunedgemm.dispatch.choice import Explanation
from tunedgemm.dispatch.duals import levels
from tunedgemm.errors import OperandError, UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.shape import Shape
from tunedgemm.table.folders import table_layers

if TYPE_CHECKING:
    from tunedgemm.dispatch.serving import Serving

#: Without a row for either, the shuffled weight is taken from so many rows on: kernels for shuffled weights are made for
#: products that compute more than they read, and slow down decoding at batch 1. AITER has the same number.
PRESHUFFLE_M_THRESHOLD = 128

#: Remembered choices; more of them start over.
_REMEMBERED = 65_536


def preferred_weight(
    dispatcher: Serving,
    x: torch.Tensor,
    weight: torch.Tensor,
    shuffled_weight: torch.Tensor,
    rest: tuple[torch.Tensor | None, ...],
    otype: torch.dtype | None,
) -> torch.Tensor:
    """The weight that serves a call best; the plain one where a gradient or a tangent is to be kept, and for an empty batch.

    Args:
        dispatcher: whose tables and backends answer.
        x: activations [..., K].
        weight: [N, K], plain.
        shuffled_weight: the same values by `shuffle_weight`.
        rest: the operands behind the weight, absent ones as None.
        otype: dtype of the output, that of x if absent.

    Raises:
        OperandError: the two weights are not of one shape, dtype and device, *weight* is not plain or *shuffled_weight* is.
    """
    try:
        if levels or (is_grad_enabled() and needs_gradient((x, weight, *rest))):
            return weight
        key = (
            x.shape, weight.shape, shuffled_weight.shape, x.dtype, weight.dtype, shuffled_weight.dtype,
            x.get_device(), weight.get_device(), shuffled_weight.get_device(), type(x), type(weight), type(shuffled_weight), otype,
            *[None if operand is None else operand.dtype for operand in rest],
        )  # fmt: skip
    except AttributeError:  # an operand that is no tensor
        _check(dispatcher.op.name, weight, shuffled_weight)
        return weight  # whose call says what is wrong
    found = dispatcher.preferences.get(key)
    if found is None:
        found = _decide(dispatcher, x, weight, shuffled_weight, rest, otype)
        if found is None:
            return weight
        if len(dispatcher.preferences) >= _REMEMBERED:
            dispatcher.preferences.clear()
        dispatcher.preferences[key] = found
    return shuffled_weight if found else weight


def _decide(
    dispatcher: Serving,
    x: torch.Tensor,
    weight: torch.Tensor,
    shuffled_weight: torch.Tensor,
    rest: tuple[torch.Tensor | None, ...],
    otype: torch.dtype | None,
) -> bool | None:
    """Whether such calls get the shuffled weight; None where that cannot be told while a graph is captured."""
    _check(dispatcher.op.name, weight, shuffled_weight)
    shapes = [dispatcher.op.shape_of(x, one, *rest, otype=otype) for one in (weight, shuffled_weight)]
    if shapes[0].m == 0 or x.is_meta or not plain((x, weight)):
        return False
    device, ask = device_of(x.get_device()), recording(x)
    if ask is not None and ask() and not all(dispatcher.knows(shape, device) for shape in shapes):
        return None
    return prefers_shuffled(dispatcher, shapes[0], shapes[1], device)


def prefers_shuffled(dispatcher: Serving, row: Shape, shuffled: Shape, device: Device) -> bool:
    """Whether a call is better served by its shuffled weight; binds both shapes.

    Rows decide: where both shapes have one, the lower time of one layer of tables, else the higher layer; where one has, that
    one. Without rows it is the shuffled weight from `PRESHUFFLE_M_THRESHOLD` on, if a kernel for its layout serves it: torch
    would put the weight back in order at each call.

    Args:
        dispatcher: whose tables and backends answer.
        row: the shape with the plain weight.
        shuffled: the shape with the shuffled one.
        device: where it runs.
    """
    try:
        of_shuffled = dispatcher.bound(shuffled, device)
    except UserError:
        return False
    try:
        of_plain = dispatcher.bound(row, device)
    except UserError:
        return True
    if of_plain.tuned and of_shuffled.tuned:
        layers = table_layers(dispatcher.op, dispatcher.above)
        places = {path: place for place, layer in enumerate(layers) for path in layer.paths}
        return _standing(of_shuffled, places) < _standing(of_plain, places)
    if of_plain.tuned or of_shuffled.tuned:
        return of_shuffled.tuned
    return row.m >= PRESHUFFLE_M_THRESHOLD and of_shuffled.libtype != BUILTIN


def _standing(explanation: Explanation, places: dict[Path, int]) -> tuple[bool, int, float]:
    """What ranks a row against that of the other weight, lower first: of another device, its layer, its time."""
    match: Any = explanation.offer.match
    return not match.same_device, places.get(match.row.source, 0), explanation.offer.us


def _check(op: str, weight: Any, shuffled_weight: Any) -> None:
    """Raises OperandError unless the two are one weight, plain and shuffled."""
    if not isinstance(shuffled_weight, ShuffledWeight):
        raise OperandError(f"{op}: shuffled_weight must come from shuffle_weight or as_shuffled (got {type(shuffled_weight).__name__})")
    if isinstance(weight, ShuffledWeight) or not isinstance(weight, torch.Tensor):
        raise OperandError(f"{op}: beside a shuffled_weight the weight must be the plain one (got {type(weight).__name__})")
    ours, theirs = (f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in (weight, shuffled_weight))
    if ours != theirs:
        raise OperandError(f"{op}: weight and shuffled_weight must be the same values in two orders (got {ours} and {theirs})")
