"""The functions that calls go through, known by name: they read their operands' memory, which no tracing compiler can follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tunedgemm.device import device_of
from tunedgemm.dispatch.calls import Call, needs_gradient, with_gradient

if TYPE_CHECKING:
    from tunedgemm.dispatch.serving import Serving

#: (a hot function's arguments) to the operands in the op's order, the output's dtype or None, and the op's fields; traceable Python.
Place = Callable[..., tuple[tuple[torch.Tensor | None, ...], torch.dtype | None, dict[str, Any]]]

#: The hot functions in use, each with its dispatcher and what places its arguments.
hot_functions: weakref.WeakKeyDictionary[Call, tuple[Serving, Place]] = weakref.WeakKeyDictionary()

#: Called with each hot function made from here on; those made before stand in `hot_functions`.
on_hot: list[Callable[[Call, Serving, Place], None]] = []


#: From a dispatcher and a call, whose operands are traced without a compiler, to the function that a graph has for it, or None.
in_graph: list[Callable[[Serving, torch.dtype | None, dict[str, Any]], Call | None]] = []


def note(inner: Call, dispatcher: Serving, place: Place) -> Call:
    """Note a function that an entry made.

    Args:
        inner: the function, a closure over the dispatcher's launchers.
        dispatcher: whose tables answer.
        place: from inner's arguments to those of `Dispatcher.call`.

    Returns:
        inner.
    """
    hot_functions[inner] = dispatcher, place
    for tell in on_hot:
        tell(inner, dispatcher, place)
    return inner


def without_memory(dispatcher: Serving, operands: tuple[Any, ...], otype: torch.dtype | None, fields: dict[str, Any]) -> torch.Tensor:
    """Serve a call whose operands are `memoryless`: by what a graph has for it, else by torch's own call.

    Raises:
        OperandError: the operands do not form this op, or one needs a gradient that the op does not give.
    """
    while operands[-1] is None:
        operands = operands[:-1]
    found = (serving(dispatcher, otype, fields) for serving in in_graph)
    call = next(filter(None, found), None)
    if call is None:
        shape = dispatcher.op.shape_of(*operands, otype=otype, **fields)
        call = dispatcher.torchs(shape, device_of(operands[0].get_device()))
    return with_gradient(dispatcher.op.name, call)(*operands) if needs_gradient(operands) else call(*operands)
