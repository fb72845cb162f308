"""Fork-safe lock: released in a forked child, whichever thread of the parent held it."""

from __future__ import annotations

import _thread
import os
import threading
import time
import weakref
from typing import Any

#: Most seconds that a fork waits for awaited locks of other threads. An unfinished import of a
#: plugin, for example, would stay unfinished in the child.
PATIENCE = 2.0

_locks: set[weakref.ref[ForkSafeLock]] = set()


class _Forking(threading.local):
    """The locks that a thread has acquired for its fork."""

    def __init__(self) -> None:
        self.acquired: list[ForkSafeLock] = []


_forking = _Forking()


class ForkSafeLock(_thread.RLock):  # type: ignore[misc]
    """A re-entrant lock, as fast as `threading.RLock`, that is released in a forked child.

    Args:
        awaited: whether a fork waits up to `PATIENCE` for its holder. For outermost locks only: a
            holder that needs another awaited lock would wait for the fork.
    """

    def __init__(self, *, awaited: bool = False) -> None:
        self.awaited = awaited
        _locks.add(weakref.ref(self, _locks.discard))

    def __new__(cls, *_: Any, **__: Any) -> ForkSafeLock:
        """Make the lock; the interpreter's type takes no arguments."""
        lock: ForkSafeLock = super().__new__(cls)
        return lock


def _present() -> list[ForkSafeLock]:
    """Return all locks; the set of references is copied at once, while no other thread can add to it."""
    return [lock for lock in (reference() for reference in list(_locks)) if lock is not None]


def _await() -> None:
    end = time.monotonic() + PATIENCE
    for lock in sorted(_present(), key=id):  # in one order, so that two forks never wait for each other
        if lock.awaited and lock.acquire(timeout=max(0.0, end - time.monotonic())):
            _forking.acquired.append(lock)


def _release() -> None:
    while _forking.acquired:
        _forking.acquired.pop().release()


def _free() -> None:
    _release()
    for lock in _present():
        if lock.acquire(blocking=False):  # free, or held by the thread that forked
            lock.release()
        else:
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does


os.register_at_fork(before=_await, after_in_parent=_release, after_in_child=_free)
