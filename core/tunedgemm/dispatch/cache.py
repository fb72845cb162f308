"""Cache of bound launchers by call key, and vetoes against solutions that failed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.counters import MAX_COUNTED, Counter, Tally, count
from tunedgemm.ops.key import Key
from tunedgemm.ops.op import Function
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.deny import DenyList


@attrs.frozen(eq=False)
class Served:
    """A launcher and what it was bound for.

    Attributes:
        launcher: the function that the cache holds, with its wrappers.
        shape: the shape it is bound for.
        index: index of the device it is bound for.
        solution: the solution that it launches; None for a launcher that serves one call only.
        counter: counts its calls; None while calls are not counted.
    """

    launcher: Function
    shape: Shape
    index: int
    solution: Solution | None
    counter: Counter | None = None


class LauncherCache:
    """Cache of launchers by call key.

    Attributes:
        launchers: maps a cache key to its launcher; hot functions read it without a lock.
        outdated: (shape, device index) of bindings to replace; launchers of these are not kept.
        lock: what is held while launchers are replaced.
    """

    def __init__(self, lock: ForkSafeLock | None = None) -> None:
        self.lock = lock or ForkSafeLock()
        self.launchers: dict[Key, Function] = {}
        self.outdated: set[tuple[Shape, int]] = set()
        self._served: dict[Key, Served] = {}
        self._tallies: dict[Key, tuple[Served, Tally]] = {}
        self._opened = self._closed = time.perf_counter()
        self._share = 1.0

    def keep(self, key: Key, served: Served) -> None:
        """Cache a launcher under a key, unless it is outdated."""
        with self.lock:
            if self.outdated and (served.shape, served.index) in self.outdated:
                return
            self.launchers[key] = served.launcher if served.counter is None else self._counting(key, served, is_new=True)
            self._served[key] = served

    def pending(self) -> list[tuple[Counter, Tally]]:
        """Return the counts of new launchers that no window has ended yet."""
        return [(served.counter, tally) for served, tally in list(self._tallies.values()) if tally.is_new and served.counter]

    def _counting(self, key: Key, served: Served, *, is_new: bool) -> Function:
        """Wrap a launcher to count its calls up to the end of the window."""
        self._tallies[key] = served, (tally := Tally(served.launcher, is_new=is_new))
        return tally.call

    def open_window(self) -> None:
        """Begin to count the calls of some launchers."""
        with self.lock:
            size, start = len(self._served), random.randrange(len(self._served) or 1)
            ring = itertools.islice(itertools.chain(self._served.items(), self._served.items()), start, start + min(size, MAX_COUNTED))
            chosen = [(key, served) for key, served in list(ring) if served.counter is not None and key not in self._tallies]
            self._share = min(1.0, len(chosen) / max(1, size - len(self._tallies)))
            self._opened = time.perf_counter()
            for key, served in chosen:
                self.launchers[key] = self._counting(key, served, is_new=False)

    def close_window(self) -> None:
        """Put the launchers back, and extrapolate their counts to the time since the last window.

        Those that were bound since then were counted all the time.
        """
        with self.lock:
            now, tallies, self._tallies = time.perf_counter(), self._tallies, {}
            weight = (now - self._closed) / max(now - self._opened, 1e-6) / (self._share or 1.0)
            self._closed = now
            for key, (served, tally) in tallies.items():
                if self.launchers.get(key) is tally.call:  # not dropped meanwhile
                    self.launchers[key] = served.launcher
                if served.counter is not None:
                    served.counter.add(tally, 1.0 if tally.is_new else weight)

    def take(self, key: Key) -> Served | None:
        """Remove and return the entry of a key."""
        with self.lock:  # a window that begins would put the launcher back
            self.launchers.pop(key, None)
            return self._served.pop(key, None)

    def behind(self, key: Key | None, launcher: Function) -> Served | None:
        """Return the entry of a key; None if it no longer holds this launcher."""
        served = None if key is None else self._served.get(key)
        if key in self._tallies and self._tallies[key][1].call is launcher:
            return served
        return served if served is not None and served.launcher is launcher else None

    def drop(self, is_dropped: Callable[[Served], bool]) -> None:
        """Remove the launchers for which the condition holds, under any key."""
        for key, served in list(self._served.items()):
            if is_dropped(served):
                self.take(key)

    def outdate(self, places: set[tuple[Shape, int]]) -> None:
        """Remove the launchers of these shapes and devices, and keep no more of them."""
        self.outdated |= places
        self.drop(lambda served: (served.shape, served.index) in places)

    def unbind(self, bound: dict[tuple[Shape, int], Any], place: tuple[Shape, int]) -> None:
        """Remove an outdated binding, so that the next one is kept."""
        if place in self.outdated:
            bound.pop(place, None)
            self.outdated.discard(place)  # last: until then no thread keeps the earlier launcher

    def clear(self) -> None:
        """Remove all launchers."""
        self.launchers.clear()
        self._served.clear()
        self.outdated.clear()


class Vetoes(dict[tuple[Shape, int, Solution | None], str]):
    """Why solutions failed in this process, by (shape, device index, solution); deny lists deny others."""

    #: The deny lists, read at the first need; a cached property would hold a lock over a fork.
    _deny_list: DenyList | None = None

    def add(self, served: Served, error: BaseException) -> bool:
        """Veto the solution of a launcher that raised; return whether it was not vetoed before."""
        place = served.shape, served.index, served.solution
        reason = f"failed in this process: {described(error)}"
        is_new = self.setdefault(place, reason) is reason
        if is_new and served.solution is not None:
            count("demotions", served.shape.op, served.solution.libtype)
        return is_new

    def against(self, shape: Shape, device: Device, registry: Registry) -> Callable[[Solution], str] | None:
        """Return a function from a solution to why it must not serve or ""; None if all may."""
        deny_list = self._deny_list = self._deny_list or DenyList.load()
        denied = deny_list.against(shape, device, lambda libtype: registry.library_version(libtype, device))
        if not self:
            return denied
        return lambda solution: self.get((shape, device.index, solution), "") or (denied(solution) if denied else "")
