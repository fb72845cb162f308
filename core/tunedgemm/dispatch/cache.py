"""Launchers by cache key, with the solution behind each, and the solutions that have failed."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tunedgemm.device import Device
from tunedgemm.ops.key import Key
from tunedgemm.ops.op import Function
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution


@attrs.frozen(eq=False)
class Served:
    """A launcher and what it was bound for.

    Attributes:
        launcher: the launcher, with all that is wrapped around it.
        shape, index: of the call, and of its device.
        solution: the solution behind it; None where the launcher serves one call only.
    """

    launcher: Function
    shape: Shape
    index: int
    solution: Solution | None


class LauncherCache:
    """The launchers that the next calls of their keys get.

    Attributes:
        launchers: cache key to launcher, which hot functions read without a lock.
    """

    def __init__(self) -> None:
        self.launchers: dict[Key, Function] = {}
        self._served: dict[Key, Served] = {}

    def keep(self, key: Key, served: Served) -> None:
        """Keep a launcher for the next call of a key."""
        self._served[key] = served
        self.launchers[key] = served.launcher

    def take(self, key: Key) -> Served | None:
        """Remove the launcher of a key, and return it."""
        self.launchers.pop(key, None)
        return self._served.pop(key, None)

    def behind(self, key: Key | None, launcher: Function) -> Served | None:
        """Return what is behind a key's launcher; None where another thread has replaced or removed it."""
        served = None if key is None else self._served.get(key)
        return served if served is not None and served.launcher is launcher else None

    def drop(self, vetoed: Served) -> None:
        """Remove the launchers of a solution for a shape, through whichever keys they are called."""
        for key, served in list(self._served.items()):
            if (served.solution, served.shape, served.index) == (vetoed.solution, vetoed.shape, vetoed.index):
                self.take(key)

    def clear(self) -> None:
        """Remove all launchers."""
        self.launchers.clear()
        self._served.clear()


class Vetoes(dict[tuple[Shape, int, Solution | None], str]):
    """Reasons against solutions that failed in this process, by shape, device index and solution."""

    def add(self, served: Served, error: BaseException) -> bool:
        """Add the solution behind a launcher that raised; return whether it is new."""
        place = served.shape, served.index, served.solution
        reason = f"failed in this process: {described(error)}"
        return self.setdefault(place, reason) is reason

    def against(self, shape: Shape, device: Device) -> Callable[[Solution], str] | None:
        """Return a function of the reason against a solution of a shape; None where no solution has failed."""
        return (lambda solution: self.get((shape, device.index, solution), "")) if self else None
