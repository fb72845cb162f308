"""Registry of hot functions and of the custom ops that replace them in traced graphs.

A hot function reads addresses, which Dynamo cannot trace. `tunedgemm.integrations.graph_ops`
registers the `GraphOps` whose custom ops replace it.
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
    from tunedgemm.dispatch.settings import Settings


class Binding(Serving, Protocol):
    """Protocol of dispatchers that bind shapes; see `dispatcher.Dispatcher`."""

    above: tuple[Path, ...]
    settings: Settings
    preferences: dict[tuple[Any, ...], bool]

    def torch_fallback(self, shape: Shape, device: Device) -> Function:
        """Return torch's implementation of a shape."""

    def is_bound(self, shape: Shape, device: Device) -> bool:
        """Tell whether a shape is bound on a device."""

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape, and return the choice."""

    def bit_class(self, shape: Shape, device: Device | None = None) -> str:
        """Return the class that serves a shape's weight in batch-invariant mode, else ""."""


#: Maps each live hot function to its dispatcher and to the function that rearranges its arguments
#: for `Dispatcher.call`.
hot_functions: weakref.WeakKeyDictionary[Function, tuple[Binding, ArgumentOrder]] = weakref.WeakKeyDictionary()


class GraphOps(Protocol):
    """Protocol of the custom ops that replace calls in traced graphs."""

    def add(self, function: Function, dispatcher: Binding, arrange: ArgumentOrder) -> None:
        """Make compilers trace a custom op instead of a hot function."""

    def stand_in(self, dispatcher: Binding, call: Call) -> Function | None:
        """Return the replacement for this call under make_fx tracing; None for torch's call."""


_graph_ops: list[GraphOps] = []


def register_graph_ops(graph_ops: GraphOps) -> None:
    """Set the custom ops for traced graphs, and register the existing hot functions with them."""
    for function, (dispatcher, arrange) in list(hot_functions.items()):
        graph_ops.add(function, dispatcher, arrange)
    _graph_ops[:] = [graph_ops]


def register_hot_function(function: Function, dispatcher: Binding, arrange: ArgumentOrder) -> Function:
    """Register a hot function for tracing.

    Args:
        function: a closure over the dispatcher's launchers.
        dispatcher: the dispatcher that serves its calls.
        arrange: maps the function's arguments to those of `Dispatcher.call`.

    Returns:
        The function.
    """
    hot_functions[function] = dispatcher, arrange
    for graph_ops in _graph_ops:
        graph_ops.add(function, dispatcher, arrange)
    return function


def stand_in(dispatcher: Binding, call: Call) -> Function | None:
    """Return the replacement for a call under tracing; see `GraphOps.stand_in`."""
    return _graph_ops[0].stand_in(dispatcher, call) if _graph_ops else None
