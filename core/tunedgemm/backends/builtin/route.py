"""Route: one of torch's ways to an op's result; Family: the routes of one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from tunedgemm.device import Device
from tunedgemm.shape import Shape


def _always(shape: Shape, device: Device) -> str:
    del shape, device
    return ""


def _unsplit(shape: Shape, device: Device) -> tuple[int, ...]:
    del shape, device
    return (0,)


@attrs.frozen
class Route:
    """One way to the result, by calls that depend on their arguments alone.

    Attributes:
        make: function of (shape, device), and of splitK for a route that splits, that returns a
            function of the op's operands with the weight in order; raises PluginError.
        unfit: why it cannot compute the shape on the device, as the rest of a sentence that begins
            with its name; "" where it can. Pure, and valid for absent devices.
        listed: the values of splitK worth a try; none where the route is not.
        splits: whether it takes splitK.
        graph_safe: whether it never waits for the device.
        keeps_weights, is_nested: see `Launcher`.
    """

    make: Callable[..., Callable[..., Any]]
    unfit: Callable[[Shape, Device], str] = _always
    listed: Callable[[Shape, Device], tuple[int, ...]] = _unsplit
    splits: bool = False
    graph_safe: bool = True
    keeps_weights: bool = False
    is_nested: bool = False


def weight_in_order(shape: Shape, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to take the weight, the second operand, in the shape's layout."""
    from tunedgemm.ops.formats.shuffle import unshuffle_weight

    layout = shape.layout
    if layout == "row":
        return call

    def ordered(x: Any, weight: Any, *rest: Any) -> Any:
        return call(x, unshuffle_weight(weight, layout), *rest)

    return ordered


@attrs.frozen
class Family:
    """The routes of an op.

    Attributes:
        routes: by name, best guesses first.
        native: the name of the best default route for a shape on a device; it fits.
        in_order: wraps (shape, function) for operands in the shape's layout and order of scales.
    """

    routes: Mapping[str, Route]
    native: Callable[[Shape, Device], str]
    in_order: Callable[[Shape, Callable[..., Any]], Callable[..., Any]] = weight_in_order

    def first(self, shape: Shape, device: Device, *names: str) -> str:
        """Return the first of these routes that fits; the last of them always does."""
        return next((name for name in names[:-1] if not self.routes[name].unfit(shape, device)), names[-1])
