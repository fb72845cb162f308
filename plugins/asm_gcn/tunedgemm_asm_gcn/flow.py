"""Compute the facts that hold before each instruction of a stream on all paths to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tunedgemm_asm_gcn.stream import Label, Op, Stream

#: Rounds after which states may only grow, which ensures termination; loops need three or four.
_PATIENCE = 12


class State(Protocol):
    """State at a point of the stream."""

    def join(self: S, other: S) -> S:
        """Merge the states of two paths."""


S = TypeVar("S", bound=State)


def ways(stream: Stream) -> list[tuple[int, ...]]:
    """Return the successors of each item."""
    places = {f".L{item.name}": at for at, item in enumerate(stream) if isinstance(item, Label)}
    following: list[tuple[int, ...]] = []
    for at, item in enumerate(stream):
        on = (at + 1,) if at + 1 < len(stream) else ()
        if isinstance(item, Op) and item.unit == "branch":
            target = places[str(item.of[0])]
            on = (target,) if item.name == "s_branch" else (*on, target)
        elif isinstance(item, Op) and item.unit == "end":
            on = ()
        following.append(on)
    return following


def entered(stream: Stream, first: S, after: Callable[[S, Op], S]) -> list[S]:
    """Return the state before each item, iterated to a fixed point.

    Each round recomputes a state from its predecessors and forgets earlier rounds: what the first
    round through a loop does not know yet must not persist.
    """
    before: list[list[int]] = [[] for _ in stream]
    for at, following in enumerate(ways(stream)):
        for on in following:
            before[on].append(at)
    states: list[S | None] = [None] * len(stream)
    left: list[S | None] = [None] * len(stream)
    changed, rounds = True, 0
    while changed:
        changed, rounds = False, rounds + 1
        for at, item in enumerate(stream):
            known = [first] if at == 0 else []
            known += [state for way in before[at] if (state := left[way]) is not None]
            if not known:
                continue
            state = known[0]
            for other in known[1:]:
                state = state.join(other)
            old = states[at]
            if old is not None and rounds > _PATIENCE:
                state = state.join(old)
            if state != old:
                changed, states[at] = True, state
                left[at] = after(state, item) if isinstance(item, Op) else state
    return [first if state is None else state for state in states]
