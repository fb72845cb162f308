"""Renew the table of a serving dispatcher: shapes that got a row are bound again between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.table.lookup import Table

if TYPE_CHECKING:
    from tunedgemm.dispatch.dispatcher import Dispatcher


def renew_table(dispatcher: Dispatcher) -> None:
    """Read the tables again; shapes that got a row are bound again by their next calls.

    A call while a graph is captured keeps the earlier binding. Launchers of other shapes stay.
    """
    with dispatcher._renewing:
        above, before, table = dispatcher.above, dispatcher.table, Table.load(dispatcher.op, above=dispatcher.above)
        with dispatcher._lock:
            if dispatcher.above is not above:  # `load` has read them meanwhile
                return
            dispatcher._table = table  # before the look at the bindings: those in progress notice it
            dispatcher.preferences.clear()
        untuned = [(place, bound.device) for place, (bound, _) in list(dispatcher._bound.items()) if not bound.tuned]
        fresh = {place for place, on in untuned if table.has_row(place[0], on) and not before.has_row(place[0], on)}
        with dispatcher._lock:
            dispatcher.cache.outdate(fresh)


def unbind(dispatcher: Dispatcher, shape: Shape, device: Device) -> None:
    """Drop the binding of a shape that has got a row since."""
    with dispatcher._lock:
        if (place := (shape, device.index)) in dispatcher.cache.outdated:
            dispatcher.cache.outdated.discard(place)
            dispatcher._bound.pop(place, None)
