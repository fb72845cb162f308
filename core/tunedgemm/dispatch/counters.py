"""Counters of served calls (``TUNEDGEMM_METRICS``), of verified calls and of demotions. Torch-free.

A counted launcher is wrapped in C by `functools.lru_cache` without a cache, which counts its
misses: 20 ns a call, where a Python function takes 35. Memory does not grow with the shapes: counts
are kept for each (op, backend, tier) and for the first untuned shapes.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.libtypes import BUILTIN
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.table.folders import SHIPPED_WORD

if TYPE_CHECKING:
    from tunedgemm.dispatch.call import Call
    from tunedgemm.dispatch.offer import Offer
    from tunedgemm.ops.key import Key
    from tunedgemm.ops.op import Function
    from tunedgemm.solution import Solution

#: Untuned shapes with a count of their own, and the name under which others are counted.
MAX_SHAPES, OTHERS = 256, "others"
#: Calls of each launcher that are timed, after the one that binds it.
TIMED = 8
#: Launchers of one counter between two sweeps for those that are gone.
_SWEPT = 1024

#: Counter -> its labels, and its meaning.
COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "calls": (("op", "backend", "tier"), "Calls by how they are served: exact, padded, shipped, untuned or torch."),
        "misses": (("op", "shape"), "Calls of shapes without a row."),
        "verifications": (("op", "backend"), "Calls that were compared with torch's."),
        "demotions": (("op", "backend"), "Solutions that failed for a shape and serve it no more."),
        "timed_calls": (("op", "backend", "tier"), "Calls whose host time was taken."),
        "host_microseconds": (("op", "backend", "tier"), "Host time of these calls in their launchers."),
    }
)


@attrs.define(eq=False)
class _Counter:
    """The counts of launchers with equal labels.

    Attributes:
        labels: op, backend, tier and, for an untuned shape, its name or `OTHERS`; else "".
        ended: calls of launchers that are gone.
        live: the counting launchers; the sweep drops those that only this list holds.
        swept_at: their number at which the next sweep comes.
        timed, nanoseconds: timed calls, and their host time.
    """

    labels: tuple[str, str, str, str]
    ended: int = 0
    live: list[Any] = attrs.field(factory=list)
    swept_at: int = _SWEPT
    timed: int = 0
    nanoseconds: int = 0

    @property
    def calls(self) -> int:
        """Return the calls so far."""
        live: int = sum(launcher.cache_info().misses for launcher in self.live)
        return self.ended + live

    def add(self, launcher: Any) -> None:
        """Count a launcher's calls, too."""
        if len(self.live) >= self.swept_at:
            self._sweep()
        self.live.append(launcher)

    def _sweep(self) -> None:
        """Keep only the counts of launchers that dispatch has dropped."""
        held = [(weakref.ref(launcher), launcher.cache_info().misses) for launcher in self.live]
        self.live.clear()
        for reference, calls in held:
            if (launcher := reference()) is None:
                self.ended += calls
            else:
                self.live.append(launcher)
        self.swept_at = max(_SWEPT, 2 * len(self.live))


_lock = ForkSafeLock()
_counters: dict[tuple[str, str, str, str], _Counter] = {}
#: Untuned shapes with a count of their own.
_shapes: set[str] = set()
#: (counter, op, backend) -> number of rare events.
_events: dict[tuple[str, str, str], int] = {}


def with_counts(dispatcher: Any, launcher: Function, call: Call, solution: Solution | None, offer: Offer | None) -> Function:
    """Wrap a launcher to count its calls, the first ones with their host time.

    Args:
        dispatcher: the dispatcher, whose cache will hold the launcher.
        launcher: the launcher.
        call: its first call.
        solution: its solution; None if it serves this call only.
        offer: the offer that was bound; None if torch serves whatever the tables say.
    """
    is_miss = offer is not None and offer.origin in ("heuristic", "builtin")
    backend = BUILTIN if offer is None else offer.solution.libtype
    with _lock:
        counter = _counter(call.op.name, backend, tier_of(offer), str(call.shape) if is_miss else "")
        if call.key is None or solution is None:
            counter.ended += 1
            return launcher
        counted = functools.lru_cache(maxsize=0)(launcher)
        counter.add(counted)
    return _timing(counted, counter, dispatcher, call.key)


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


def _counter(op: str, backend: str, tier: str, shape: str) -> _Counter:
    if shape and shape not in _shapes:
        if len(_shapes) < MAX_SHAPES:
            _shapes.add(shape)
        else:
            shape = OTHERS
    labels = (op, backend, tier, shape)
    return _counters.setdefault(labels, _Counter(labels))


def _timing(counted: Function, counter: _Counter, dispatcher: Any, key: Key) -> Function:
    """Wrap a new launcher to time its first calls, after which the cache holds it alone."""
    left = TIMED + 1

    def first_calls(*operands: Any) -> Any:
        nonlocal left
        left -= 1
        start = time.perf_counter_ns()
        out = counted(*operands)
        if 0 <= left < TIMED:  # the first call loads and compiles
            counter.nanoseconds += time.perf_counter_ns() - start
            counter.timed += 1
        if left <= 0:
            dispatcher.settle(key, first_calls, counted)
        return out

    return first_calls


def settle(self: Any, key: Key, launcher: Function, other: Function) -> None:
    """Cache another launcher instead of this one; a method of dispatchers."""
    with self._lock:
        self.cache.replace(key, launcher, other)


def count(event: str, op: str, backend: str) -> None:
    """Count a rare event: a name of `COUNTERS`."""
    with _lock:
        _events[event, op, backend] = _events.get((event, op, backend), 0) + 1


def metrics() -> dict[str, dict[tuple[str, ...], float]]:
    """Return the counters of this process: name -> values of its labels -> number.

    `COUNTERS` has the names and the labels. Calls and their times are counted with
    ``TUNEDGEMM_METRICS=1`` alone. A replayed graph makes no calls.
    """
    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
    with _lock:
        for (event, *labels), number in _events.items():
            found[event][tuple(labels)] = number
        for counter in _counters.values():
            *labels, shape = counter.labels
            calls, place = counter.calls, tuple(labels)
            for name, value in (("calls", calls), ("timed_calls", counter.timed), ("host_microseconds", counter.nanoseconds / 1e3)):
                found[name][place] = found[name].get(place, 0) + value
            if shape:
                found["misses"][labels[0], shape] = found["misses"].get((labels[0], shape), 0) + calls
    return found


def _forget() -> None:
    """Set all counts of a forked child to 0, since its parent reports them."""
    _events.clear()
    for counter in _counters.values():
        counter.ended = counter.timed = counter.nanoseconds = 0
        for launcher in counter.live:
            launcher.cache_clear()


os.register_at_fork(after_in_child=_forget)
