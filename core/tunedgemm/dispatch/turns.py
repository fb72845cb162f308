"""Turns of threads that bind: one thread binds a shape while others bind and serve other shapes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from tunedgemm.process.forksafe import ForkSafeLock

Answer = TypeVar("Answer")

_LOOK_SECONDS = 0.1


class _Held(threading.local):
    """The number of turns that a thread holds."""

    number = 0


_held = _Held()


class Turns:
    """Locks by place, while a thread holds or awaits them.

    A fork waits for their holders, because a plugin may be half imported. A holder must take no
    other lock that a fork waits for.
    """

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[Hashable, ForkSafeLock] = weakref.WeakValueDictionary()
        self._guard = ForkSafeLock()

    def run(self, place: Hashable, action: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return the answer of an action that only one thread at a time runs at a place.

        A thread that has another turn does not wait: two that wait for each other would for ever.
        So a plugin whose `bind` multiplies may bind a shape that another thread binds, too.
        """
        with self._guard:
            lock = self._locks.get(place)
            if lock is None:
                lock = self._locks[place] = ForkSafeLock(awaited=True)
        taken, held = False, _held.number
        try:
            taken = lock.acquire(blocking=False)
            while not (taken or held):  # a signal may end the wait; without a limit, one just before it would be missed
                taken = lock.acquire(timeout=_LOOK_SECONDS)
            _held.number = held + 1
            return action(*arguments)
        finally:
            _held.number = held
            if taken:
                lock.release()
