"""Hot functions with their dispatchers, and the functions that replace their calls in traced graphs.

A hot function reads addresses, which a tracing compiler cannot follow.
`tunedgemm.integrations.graph_ops` registers a `GraphOps` that stands in for it.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunedgemm.dispatch.call import Call
from tunedgemm.ops.hot import Serving
from tunedgemm.ops.op import ArgumentOrder, Function
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from tunedgemm.device import Device
    from tunedgemm.dispatch.choice import Explanation


class Binding(Serving, Protocol):
    """The part of a dispatcher that binds shapes; `dispatcher.Dispatcher` implements it."""

    above: tuple[Path, ...]
    preferences: dict[tuple[Any, ...], bool]

    def torch_fallback(self, shape: Shape, device: Device) -> Function:
        """Return torch's own call for a shape."""

    def is_bound(self, shape: Shape, device: Device) -> bool:
        """Tell whether a shape is bound on a device."""

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape and return the launcher that serves it."""


#: The hot functions in use. Each maps to its dispatcher and to the function that turns its
#: arguments into those of `Dispatcher.call`.
hot_functions: weakref.WeakKeyDictionary[Function, tuple[Binding, ArgumentOrder]] = weakref.WeakKeyDictionary()


class GraphOps(Protocol):
    """Ops that replace calls in traced graphs."""

    def add(self, function: Function, dispatcher: Binding, arrange: ArgumentOrder) -> None:
        """Register a hot function, so that compilers trace an op instead of it."""

    def stand_in(self, dispatcher: Binding, call: Call) -> Function | None:
        """Return the function that replaces a call in a graph traced by running it.

        Returns None if the graph gets torch's call.
        """


_graph_ops: list[GraphOps] = []


def register_graph_ops(graph_ops: GraphOps) -> None:
    """Set the ops that replace calls in traced graphs, and add the existing hot functions."""
    for function, (dispatcher, arrange) in list(hot_functions.items()):
        graph_ops.add(function, dispatcher, arrange)
    _graph_ops[:] = [graph_ops]


def register_hot_function(function: Function, dispatcher: Binding, arrange: ArgumentOrder) -> Function:
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


def stand_in(dispatcher: Binding, call: Call) -> Function | None:
    """Return what replaces a call in a graph; see `GraphOps.stand_in`."""
    return _graph_ops[0].stand_in(dispatcher, call) if _graph_ops else None
