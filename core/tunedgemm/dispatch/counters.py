"""Counters of served calls (``TUNEDGEMM_METRICS``), of verified calls and of demotions. Torch-free.

Calls are counted in windows: a thread puts counting functions into the launcher caches for
`WINDOW` of each `PAUSE` seconds, and extrapolates. Between windows a hit costs nothing. A new
launcher is counted from its first call to the end of the next window.
Memory does not grow with the shapes: counts are kept for each (op, backend, tier), and for the
first untuned shapes.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from tunedgemm.libtypes import BUILTIN
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.table.folders import SHIPPED_WORD

if TYPE_CHECKING:
    from tunedgemm.dispatch.call import Call
    from tunedgemm.dispatch.offer import Offer
    from tunedgemm.ops.op import Function

#: Untuned shapes that are counted singly, and the name under which others are counted.
MAX_SHAPES, OTHERS = 256, "others"
#: Most launchers of a cache that are counted in a window, beyond new ones: 0.3 ms to begin with.
MAX_COUNTED = 256
#: Seconds of a window, and of the mean pause between two, which is random: calls come in periods.
WINDOW, PAUSE = 0.025, 1.0

#: Counter -> its labels, and its meaning.
COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "calls": (("op", "backend", "tier"), "Calls by how they are served: exact, padded, shipped, untuned or torch."),
        "misses": (("op", "shape"), "Calls of shapes without a row."),
        "verifications": (("op", "backend"), "Calls that were compared with torch's."),
        "demotions": (("op", "backend"), "Solutions that failed for a shape and serve it no more."),
        "timed_calls": (("op", "backend", "tier"), "Calls whose host time was taken."),
        "host_microseconds": (("op", "backend", "tier"), "Host time of the timed calls in their launchers."),
    }
)


class Windowed(Protocol):
    """Protocol of caches whose calls are counted; see `dispatch.cache.LauncherCache`."""

    def open_window(self) -> None:
        """Begin to count."""

    def close_window(self) -> None:
        """Stop counting."""

    def pending(self) -> list[tuple[Counter, Tally]]:
        """Return what is counted, but not added yet."""


class Tally:
    """The calls of a launcher in a window.

    Attributes:
        call: runs the launcher; a call that raises is not counted.
        is_new: whether it is counted since it was bound, not in a window alone.
        calls, nanoseconds: their number and host time.
    """

    def __init__(self, launcher: Function, *, is_new: bool) -> None:
        self.is_new, self.calls, self.nanoseconds = is_new, 0, 0

        def call(*operands: Any) -> Any:
            start = time.perf_counter_ns()
            out = launcher(*operands)
            self.nanoseconds += time.perf_counter_ns() - start
            self.calls += 1
            return out

        self.call = call


@attrs.define(eq=False)
class Counter:
    """The counts of launchers with equal labels.

    Attributes:
        labels: op, backend, tier and, for an untuned shape, its name or `OTHERS`; else "".
        calls: an estimate.
        timed, nanoseconds: timed calls, and their host time.
    """

    labels: tuple[str, str, str, str]
    calls: float = 0.0
    timed: int = 0
    nanoseconds: int = 0

    def add(self, tally: Tally, weight: float) -> None:
        """Add the calls of a window, each of which stands for *weight* calls."""
        self.calls += tally.calls * weight
        self.timed += tally.calls
        self.nanoseconds += tally.nanoseconds


_lock = ForkSafeLock()
_counters: dict[tuple[str, str, str, str], Counter] = {}
#: Untuned shapes that are counted singly.
_shapes: set[str] = set()
#: (counter, op, backend) -> number of rare events.
_events: dict[tuple[str, str, str], int] = {}
_caches: weakref.WeakSet[Windowed] = weakref.WeakSet()
#: The thread of this process, once a call was counted.
_threads: list[threading.Thread] = []


def counter_of(cache: Windowed, call: Call, offer: Offer | None) -> Counter:
    """Return the counter of the launcher of a new call, which it counts.

    Args:
        cache: the cache that will hold the launcher.
        call: the call.
        offer: the offer that was bound; None if torch serves whatever the tables say.
    """
    is_miss = offer is not None and offer.origin in ("heuristic", "builtin")
    backend, shape = BUILTIN if offer is None else offer.solution.libtype, str(call.shape) if is_miss else ""
    with _lock:
        if shape and shape not in _shapes:
            if len(_shapes) < MAX_SHAPES:
                _shapes.add(shape)
            else:
                shape = OTHERS
        labels = (call.op.name, backend, tier_of(offer), shape)
        counter = _counters.setdefault(labels, Counter(labels))
        counter.calls += 1
        _caches.add(cache)
        if not _threads:
            _start()
    return counter


def _start() -> None:
    _threads[:] = [threading.Thread(target=_keep_counting, name="tunedgemm counters", daemon=True)]
    with contextlib.suppress(RuntimeError):  # no thread can be started: all calls are counted
        _threads[0].start()


def tier_of(offer: Offer | None) -> str:
    """Return how an offer serves: ``exact``, ``padded`` (by another M's row, or one without the
    bias), ``shipped``, ``untuned`` or ``torch``.
    """
    if offer is None or offer.origin == "builtin":
        return "torch"
    if offer.origin == "heuristic":
        return "untuned"
    if offer.table_layer == SHIPPED_WORD:
        return "shipped"
    return "exact" if offer.match is not None and offer.match.granularity in ("exact", "pinned") else "padded"


def _keep_counting() -> None:
    while True:
        time.sleep(random.uniform(0.0, 2 * PAUSE))
        with _lock:  # a set that grows cannot be copied
            caches = list(_caches)
        for cache in caches:
            cache.open_window()
        time.sleep(WINDOW)
        for cache in caches:
            cache.close_window()


def count(event: str, op: str, backend: str) -> None:
    """Count a rare event: a name of `COUNTERS`."""
    with _lock:
        _events[event, op, backend] = _events.get((event, op, backend), 0) + 1


def metrics() -> dict[str, dict[tuple[str, ...], float]]:
    """Return the counters of this process: name -> values of its labels -> number.

    `COUNTERS` has the names and the labels. Calls are counted with ``TUNEDGEMM_METRICS=1`` alone;
    their number is an estimate. A replayed graph makes no calls.
    """
    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
    with _lock:
        for (event, *labels), events in _events.items():
            found[event][tuple(labels)] = events
        sums = [(counter.labels, counter.calls, counter.timed, counter.nanoseconds) for counter in _counters.values()]
        new = [pair for cache in list(_caches) for pair in cache.pending()]
    sums += [(counter.labels, tally.calls, tally.calls, tally.nanoseconds) for counter, tally in new]
    for (*labels, shape), calls, timed, nanoseconds in sums:
        place = tuple(labels)
        for name, number in (("calls", calls), ("timed_calls", timed), ("host_microseconds", nanoseconds / 1e3)):
            found[name][place] = found[name].get(place, 0.0) + number
        if shape:
            found["misses"][labels[0], shape] = found["misses"].get((labels[0], shape), 0.0) + calls
    return found


def _restart() -> None:
    """Set all counts of a forked child to 0, since its parent reports them."""
    for cache in list(_caches):
        cache.close_window()  # else the next one's weight would be that of all calls since the fork
    _events.clear()
    for counter in _counters.values():
        counter.calls, counter.timed, counter.nanoseconds = 0.0, 0, 0
    if _threads:
        _start()


os.register_at_fork(after_in_child=_restart)
