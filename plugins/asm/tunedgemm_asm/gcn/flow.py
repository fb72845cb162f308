"""What holds before each item of a stream, along all ways through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tunedgemm_asm.gcn.stream import Label, Op, Stream

#: Rounds after which states only grow, so that an end is certain; loops of kernels need three or four.
_PATIENCE = 12


class State(Protocol):
    """What is known at a place."""

    def join(self: S, other: S) -> S:
        """What is known where two ways meet."""


S = TypeVar("S", bound=State)


def ways(stream: Stream) -> list[tuple[int, ...]]:
    """Of each item the items that may follow it."""
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
    """The state before each item, by rounds through the stream until nothing changes.

    A state is made anew from the ways into its place in each round and does not remember former rounds: what a first round through a loop
    does not know yet must not stay in it.
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
