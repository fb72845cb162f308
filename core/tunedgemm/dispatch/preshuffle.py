"""Choose between a plain weight and its shuffled copy, for a model that keeps both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from tunedgemm.device import Device
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.choice import Explanation
from tunedgemm.dispatch.traced import Binding
from tunedgemm.errors import OperandError, ShapeError, UserError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.shape import Shape
from tunedgemm.table.folders import table_layers

#: M from which the shuffled weight is used if neither weight has a row. Its kernels suit
#: compute-bound GEMMs and slow down decoding at batch 1. AITER uses the same threshold.
PRESHUFFLE_M_THRESHOLD = 128

#: Most cached choices; when full, the cache is cleared.
_REMEMBERED = 65_536


def preferred_weight(
    dispatcher: Binding,
    x: torch.Tensor,
    weight: torch.Tensor,
    shuffled_weight: Any,
    *rest: torch.Tensor | None,
    otype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the weight, plain or shuffled, that serves a call faster.

    An empty batch and a call that needs a gradient or tangent get the plain one.

    Args:
        dispatcher: the dispatcher that serves the call.
        x: activations [..., K].
        weight: [N, K], plain.
        shuffled_weight: the same values by `shuffle_weight`.
        rest: the operands after the weight, absent ones as None.
        otype: output dtype; by default that of x.

    Raises:
        OperandError: the weights differ in shape, dtype or device, *weight* is shuffled,
            *shuffled_weight* is plain, or *weight* has changed since it was shuffled.
    """
    try:
        memory = shuffled_weight._plain  # a plain tensor's attributes are three times as fast
        key = dispatcher.op.sizes_of(otype, (memory.shape, memory.dtype, memory.get_device(), type(shuffled_weight)), x, weight, *rest)
    except (AttributeError, TypeError):  # an operand is not a tensor
        _check(dispatcher.op.name, weight, shuffled_weight)
        return weight  # its call reports the fault
    shuffled = dispatcher.preferences.get(key)
    if shuffled is None:
        shuffled = _decide(dispatcher, Call.of(dispatcher.op, (x, weight, *rest), otype), shuffled_weight)
        if shuffled is None:
            return weight
        if len(dispatcher.preferences) >= _REMEMBERED:
            dispatcher.preferences.clear()
        dispatcher.preferences[key] = shuffled
    if not shuffled:
        return weight
    made_of = shuffled_weight.made_of
    if made_of is not None and made_of.address == weight.data_ptr() and not weight.is_inference() and made_of.version != weight._version:
        if (renewed := made_of.as_of(weight)) is None:
            raise OperandError(
                f"{dispatcher.op.name}: the weight has changed since shuffle_weight read it (version {made_of.version}, now "
                f"{weight._version}); pass shuffle_weight(weight) of its present values"
            )
        shuffled_weight.made_of = renewed
    chosen: torch.Tensor = shuffled_weight
    return chosen


def _decide(dispatcher: Binding, call: Call, shuffled_weight: torch.Tensor) -> bool | None:
    """Decide whether such calls use the shuffled weight; None if this call cannot decide it."""
    x, weight, *rest = call.operands
    if forward_ad._current_level >= 0:
        return None
    if call.needs_gradient:
        return False
    _check(call.op.name, weight, shuffled_weight)
    try:
        row, shuffled = call.shape, Call.of(call.op, (x, shuffled_weight, *rest), call.otype).shape
    except ShapeError:  # empty sizes: the call itself reports or serves them
        return None
    if call.torch_reason or x.is_meta:
        return False
    if call.is_captured and not all(dispatcher.is_bound(shape, call.device) for shape in (row, shuffled)):
        return None
    return prefers_shuffled(dispatcher, row, shuffled, call.device)


def prefers_shuffled(dispatcher: Binding, row: Shape, shuffled: Shape, device: Device) -> bool:
    """Decide whether the shuffled weight serves a shape faster; binds both shapes.

    If both have a row, the higher layer wins, within a layer the lower time. If one has, it wins.
    Without rows the shuffled weight wins from `PRESHUFFLE_M_THRESHOLD` on, if a kernel reads its
    layout; torch would unshuffle it in each call. In batch-invariant mode M must not decide: the
    shuffled weight serves if only it has a bit class.

    Args:
        dispatcher: the dispatcher that serves the call.
        row: the shape with the plain weight.
        shuffled: the shape with the shuffled one.
        device: the device that runs the call.
    """
    if dispatcher.settings.batch_invariant:
        return not dispatcher.bit_class(row, device) and bool(dispatcher.bit_class(shuffled, device))
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
        depths = {path: depth for depth, layer in enumerate(layers) for path in layer.paths}
        return _rank(of_shuffled, depths) < _rank(of_plain, depths)
    if of_plain.tuned or of_shuffled.tuned:
        return of_shuffled.tuned
    return row.m >= PRESHUFFLE_M_THRESHOLD and of_shuffled.libtype != BUILTIN


def _rank(explanation: Explanation, depths: dict[Path, int]) -> tuple[bool, int, float]:
    """Return the sort key of a weight's row: other device, layer, time; the lowest wins."""
    match: Any = explanation.offer.match
    return not match.same_device, depths.get(match.row.source, 0), explanation.offer.us


def _check(op: str, weight: Any, shuffled_weight: Any) -> None:
    """Raise OperandError unless the weights are plain and shuffled, of one shape and dtype."""
    if not isinstance(shuffled_weight, ShuffledWeight):
        raise OperandError(f"{op}: shuffled_weight must come from shuffle_weight or as_shuffled (got {type(shuffled_weight).__name__})")
    if isinstance(weight, ShuffledWeight) or not isinstance(weight, torch.Tensor):
        raise OperandError(f"{op}: with a shuffled_weight the weight must be the plain one (got {type(weight).__name__})")
    plain_text, shuffled_text = (f"{tuple(either.shape)} {either.dtype} on {either.device}" for either in (weight, shuffled_weight))
    if plain_text != shuffled_text:
        raise OperandError(f"{op}: weight and shuffled_weight must be the same values in two orders (got {plain_text} and {shuffled_text})")
