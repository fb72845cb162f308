"""Hot functions, their dispatchers, and the functions that replace their calls in traced graphs.

A hot function reads addresses, which a tracing compiler cannot follow.
`tunedgemm.integrations.graph_ops` registers a `GraphOps` that stands in for it.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from tunedgemm.device import device_of
from tunedgemm.dispatch.calls import Binding
from tunedgemm.dispatch.gradients import differentiable, needs_gradient, with_gradient
from tunedgemm.dispatch.operands import (
    check_not_nested,
    check_strided,
    copied_to_memory,
    has_no_storage,
    in_memory,
    outside_trace,
    product_of_none,
)
from tunedgemm.errors import ShapeError
from tunedgemm.ops.op import ArgumentOrder, Call

#: The hot functions in use. Each maps to its dispatcher and to the function that turns its
#: arguments into those of `Dispatcher.call`.
hot_functions: weakref.WeakKeyDictionary[Call, tuple[Binding, ArgumentOrder]] = weakref.WeakKeyDictionary()


class GraphOps(Protocol):
    """Ops that replace calls in traced graphs."""

    def add(self, function: Call, dispatcher: Binding, arrange: ArgumentOrder) -> None:
        """Register a hot function, so that compilers trace an op instead of it."""

    def stand_in(self, dispatcher: Binding, otype: torch.dtype | None, fields: dict[str, Any]) -> Call | None:
        """Return the function that replaces a call in a graph traced by running it.

        Returns None if the graph gets torch's call.
        """


_graph_ops: list[GraphOps] = []


def register_graph_ops(graph_ops: GraphOps) -> None:
    """Set the ops that replace calls in traced graphs, and add the existing hot functions."""
    for function, (dispatcher, arrange) in list(hot_functions.items()):
        graph_ops.add(function, dispatcher, arrange)
    _graph_ops[:] = [graph_ops]


def register_hot_function(function: Call, dispatcher: Binding, arrange: ArgumentOrder) -> Call:
    """Register a hot function.

    Args:
        function: a closure over the dispatcher's launchers.
        dispatcher: the dispatcher that serves its calls.
        arrange: from the function's arguments to those of `Dispatcher.call`.

    Returns:
        The function.
    """
    hot_functions[function] = dispatcher, arrange
    for graph_ops in _graph_ops:
        graph_ops.add(function, dispatcher, arrange)
    return function


def serve_without_memory(dispatcher: Binding, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any]) -> torch.Tensor:
    """Serve a call with an operand whose memory does not hold its values.

    A traced call becomes its op in the graph. Negated and zero tensors are copied to memory.
    Torch's call serves others.

    Raises:
        OperandError: the operands do not form this op, one needs a gradient that the op does not
            give, or torch's call does not take one.
    """
    call = _graph_ops[0].stand_in(dispatcher, otype, fields) if _graph_ops and has_no_storage(operands) else None
    if call is not None:
        return with_gradient(dispatcher.op.name, call)(*operands) if needs_gradient(operands) else call(*operands)
    copies = tuple(map(copied_to_memory, operands))
    if in_memory(copies):
        return dispatcher.call(*copies, otype=otype, **fields)
    check_not_nested(dispatcher.op, operands)
    try:
        with outside_trace():
            shape = dispatcher.op.shape_of(*operands, otype=otype, **fields)
    except ShapeError as error:
        return product_of_none(dispatcher.op, operands, otype, error)
    needed = needs_gradient(operands)
    if operands[0].is_meta and not needed:
        return dispatcher.op.fake(*operands, otype=otype)
    call = dispatcher.torch_fallback(shape, device_of(operands[0].get_device()))
    try:
        return differentiable(shape, call)(*operands) if needed else call(*operands)
    except (NotImplementedError, RuntimeError) as error:
        check_strided(dispatcher.op, operands, error)
        raise
