"""Seconds that the plugin spends in an engine's start-up, by phase."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

#: Seconds by phase, without those of phases within.
_seconds: dict[str, float] = {}


class _Open(threading.local):
    """The open phases of a thread.

    Attributes:
        within: seconds of the phases within each, the outermost first.
    """

    def __init__(self) -> None:
        self.within: list[float] = []


_open = _Open()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time of a block to a phase; a block within counts for its own phase only."""
    begin, within = time.perf_counter(), _open.within
    within.append(0.0)
    try:
        yield
    finally:
        spent, inner = time.perf_counter() - begin, within.pop()
        if within:
            within[-1] += spent
        add(name, spent - inner)


def add(name: str, seconds: float) -> None:
    """Add seconds to a phase."""
    _seconds[name] = _seconds.get(name, 0.0) + seconds


def report() -> str:
    """Return one line for the engine's log: all seconds, then those of each phase."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in _seconds.items())
    return f"tunedgemm: {sum(_seconds.values()):.2f} s of start-up: {parts}"
