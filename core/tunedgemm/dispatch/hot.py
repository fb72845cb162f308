"""Hot functions, their dispatchers, and the functions that replace their calls in traced graphs.

A hot function reads addresses, which a tracing compiler cannot follow.
`tunedgemm.integrations.graph_ops` registers a `GraphOps` that stands in for it.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from tunedgemm.device import device_of
from tunedgemm.dispatch.calls import Binding, needs_gradient, with_gradient
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


def serve_without_storage(
    dispatcher: Binding, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any]
) -> torch.Tensor:
    """Serve a call whose operands have no storage: by its op in a graph, else by torch's call.

    Raises:
        OperandError: the operands do not form this op, or one needs a gradient that the op does not
            give.
    """
    while operands[-1] is None:
        operands = operands[:-1]
    call = _graph_ops[0].stand_in(dispatcher, otype, fields) if _graph_ops else None
    if call is None:
        shape = dispatcher.op.shape_of(*operands, otype=otype, **fields)
        call = dispatcher.torch_fallback(shape, device_of(operands[0].get_device()))
    return with_gradient(dispatcher.op.name, call)(*operands) if needs_gradient(operands) else call(*operands)
