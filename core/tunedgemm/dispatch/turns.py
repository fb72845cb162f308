"""Turns of threads that bind: one thread binds a shape while others bind and serve other shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import attrs

from tunedgemm.process.forksafe import ForkSafeLock

Answer = TypeVar("Answer")

_LOOK_SECONDS = 0.1


class _Held(threading.local):
    """The number of turns that a thread holds."""

    number = 0


_held = _Held()


@attrs.define(eq=False)
class _Turn:
    lock: ForkSafeLock
    threads: int = 0


class Turns:
    """Locks by place, while a thread holds or awaits them.

    A fork waits for their holders, because a plugin may be half imported. A holder must take no
    other lock that a fork waits for.
    """

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn] = {}
        self._free: list[_Turn] = []
        self._guard = ForkSafeLock()

    def run(self, place: Hashable, action: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return the answer of an action that only one thread at a time runs at a place.

        A thread that has another turn does not wait: two that wait for each other would for ever.
        So a plugin whose `bind` multiplies may bind a shape that another thread binds, too.
        """
        with self._guard:
            turn = self._turns.get(place)
            if turn is None:
                turn = self._turns[place] = self._free.pop() if self._free else _Turn(ForkSafeLock(awaited=True))
            turn.threads += 1
        taken, held = False, _held.number
        try:
            taken = turn.lock.acquire(blocking=False)
            while not (taken or held):  # a signal may end the wait; without a limit, one just before it would be missed
                taken = turn.lock.acquire(timeout=_LOOK_SECONDS)
            _held.number = held + 1
            return action(*arguments)
        finally:
            _held.number = held
            if taken:
                turn.lock.release()
            with self._guard:
                turn.threads -= 1
                if not turn.threads:
                    self._free.append(self._turns.pop(place))
