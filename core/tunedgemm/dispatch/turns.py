"""Locks by key for binding: threads bind different shapes concurrently, and each shape once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import attrs

from tunedgemm.process.forksafe import ForkSafeLock

Answer = TypeVar("Answer")

_LOOK_SECONDS = 0.1


class _Held(threading.local):
    """Number of turns that this thread holds."""

    number = 0


_held = _Held()


@attrs.define(eq=False)
class _Turn:
    lock: ForkSafeLock
    threads: int = 0


class Turns:
    """Locks by key; each exists while a thread holds or awaits it.

    A fork waits for the holders, since a plugin may be half imported. So a holder must not take
    another lock that a fork waits for.
    """

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn] = {}
        self._free: list[_Turn] = []
        self._guard = ForkSafeLock()

    def run(self, place: Hashable, action: Callable[..., Answer], *arguments: Any) -> Answer:
        """Run an action under the lock of *place*, and return its result.

        A thread that holds another turn does not wait for this one, which could deadlock. So if a
        plugin's `bind` calls an op, two threads may bind the same shape.
        """
        with self._guard:
            turn = self._turns.get(place)
            if turn is None:
                turn = self._turns[place] = self._free.pop() if self._free else _Turn(ForkSafeLock(awaited=True))
            turn.threads += 1
        taken, held = False, _held.number
        try:
            taken = turn.lock.acquire(blocking=False)
            while not (taken or held):  # a timeout, as a signal just before the wait would be missed
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
