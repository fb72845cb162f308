"""Seconds that the plugin spends in an engine's start-up, by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Seconds by phase, without those of phases within.
_seconds: dict[str, float] = {}
#: Seconds of the phases within each open one, the outermost first.
_within: list[float] = []


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time of a block to a phase; a block within counts for its own phase only."""
    begin = time.perf_counter()
    _within.append(0.0)
    try:
        yield
    finally:
        spent, inner = time.perf_counter() - begin, _within.pop()
        if _within:
            _within[-1] += spent
        add(name, spent - inner)


def add(name: str, seconds: float) -> None:
    """Add seconds to a phase."""
    _seconds[name] = _seconds.get(name, 0.0) + seconds


def report() -> str:
    """Return one line for the engine's log: all seconds, then those of each phase."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in _seconds.items())
    return f"tunedgemm: {sum(_seconds.values()):.2f} s of start-up: {parts}"
