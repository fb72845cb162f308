"""Open device: a device with its worker, and the solutions of shapes on it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import attrs

from tunedgemm.errors import PluginError
from tunedgemm.ops.op import Op
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.deny import DenyList
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.search import FULL, QUICK, Search
from tunedgemm.tuner.trial import Options, Place, Task
from tunedgemm.tuner.worker import AnyWorker, WorkerDied
from tunedgemm.tuner.worker_client import DeviceLost, WorkerClient

_log = logging.getLogger("tunedgemm")

#: Time limit in seconds of a hook that lists solutions, unless ``--timeout`` is shorter.
HOOK_S = 120.0
#: Worker crashes in a backend's listing after which the backend is left out of the run.
MOST_LOSSES = 3


@attrs.frozen
class Listing:
    """Candidates of a shape.

    Attributes:
        solutions: the solutions of all backends to try first, in order of backends.
        rest: the further ones of a quick search.
        quick: libtypes of a quick search.
        baseline: torch's solution.
        reasons: why backends offer nothing.
        refusals: (libtype, reason) of those backends whose platforms include the device.
    """

    solutions: tuple[Solution, ...]
    baseline: Solution | None
    reasons: str
    refusals: tuple[tuple[str, str], ...] = ()
    rest: tuple[Solution, ...] = ()
    quick: frozenset[str] = frozenset()


class OpenDevice:
    """A device with its worker, and the cached candidates of shapes.

    Attributes:
        op: the op to tune.
        options: how to tune.
        client: sends requests to the device's worker.
        compilers: compile ahead; shared by the device tuners of a machine.
        ranks: maps each libtype that may be stored to its rank for ties.
        versions: maps a libtype to its library version.
        finished: number of tuned shapes.
    """

    def __init__(self, op: Op, options: Options, worker: AnyWorker, compilers: Compilers, ranks: Mapping[str, int]) -> None:
        self.op, self.options, self.compilers, self.ranks = op, options, compilers, ranks
        self.client = WorkerClient(op, options, worker)
        self.versions: Mapping[str, str] = {}
        self.finished = 0
        self._listed: dict[Shape, Listing] = {}
        self._losses = Counter[str]()
        self._deny_list = DenyList.load()
        self._stated: dict[str, bool] = {}
        self._quick: dict[str, bool] = {}

    @property
    def place(self) -> Place:
        """Return the device and its node; known after `begin`."""
        return self.client.place

    def begin(self) -> None:
        """Start the worker, and query its device and library versions.

        Raises:
            DeviceLost: the device does not exist, or its worker dies.
        """
        self.client.begin()
        libtypes = self.client.ask("libtypes") if self.options.stale else self.ranks  # with --stale, also those of rows
        self.versions = {libtype: self._version(libtype) for libtype in libtypes}

    def _version(self, libtype: str) -> str:
        """Return a library version; leave out the backend if its hook fails.

        Dispatch to its rows would call the hook, too.
        """
        try:
            version: str = self._ask_backend(libtype, "library_version", "version", libtype)
        except PluginError as error:
            self._losses[libtype] = MOST_LOSSES
            _log.warning("left out: %s", error)
            return ""
        return version

    def stop(self) -> None:
        """End the worker at once; a running `tune` raises `DeviceLost`."""
        self.client.stop()

    def ahead(self, task: Task) -> None:
        """List the solutions of a shape, and compile them in the background, the first ones first."""
        if not task.only:
            with contextlib.suppress(WorkerDied):  # `tune` reports it
                listing = self.listed(task.shape)
                self.compilers.begin(task.shape, listing.solutions, self.place.device)
                self.compilers.begin(task.shape, listing.rest, self.place.device, spare=True)

    def listed(self, shape: Shape) -> Listing:
        """Return the candidates of a shape; a backend whose hooks fail offers none."""
        if shape not in self._listed:
            solutions, rest, reasons = list[Solution](), list[Solution](), dict[str, str]()
            for libtype in self.ranks:
                offered, reason = self._offered(libtype, shape)
                first, more = self._search(libtype).split(offered) if offered else ((), ())
                solutions += first
                rest += more
                reasons |= {} if offered else {libtype: reason}
            refusals = tuple((libtype, reason) for libtype, reason in reasons.items() if self._states_platform(libtype))
            text = "; ".join(": ".join(pair) for pair in reasons.items())
            quick = frozenset(libtype for libtype, is_quick in self._quick.items() if is_quick)
            self._listed[shape] = Listing(tuple(solutions), self.client.ask("baseline", shape), text, refusals, tuple(rest), quick)
        return self._listed[shape]

    def forget(self, shape: Shape) -> None:
        """Drop the candidates of a finished shape, and compilations that it did not need."""
        self._listed.pop(shape, None)
        self.compilers.drop(shape, self.place.device)

    def _search(self, libtype: str) -> Search:
        """Return how far to search a backend's lists; ask it once."""
        if libtype not in self._quick:
            self._quick[libtype] = self.client.ask("is_quick", libtype, self.op.name)
        return QUICK if self._quick[libtype] else FULL

    def _states_platform(self, libtype: str) -> bool:
        """Check once whether a backend's platforms include the device."""
        if libtype not in self._stated:
            self._stated[libtype] = self.client.ask("states_platform", libtype, self.op.name)
        return self._stated[libtype]

    def _offered(self, libtype: str, shape: Shape) -> tuple[tuple[Solution, ...], str]:
        """Return the solutions of a backend, or why it offers none."""
        if self._losses[libtype] >= MOST_LOSSES:
            return (), "left out of this run, because its hooks failed"
        try:
            if reason := self._ask_backend(libtype, "supports", "refusal", libtype, shape):
                _log.info("%s: %s does not support it: %s", shape, libtype, reason)
                return (), reason
            listed = self._ask_backend(libtype, "enumerate_solutions", "solutions", libtype, shape)
            if not listed:
                return (), self._ask_backend(libtype, "lacks", "why_none", libtype, shape)
            allowed = self._allowed(shape, listed)
            return allowed, "" if allowed else "deny lists deny all of its kernels"
        except PluginError as error:
            _log.warning("%s: left out: %s", shape, error)
            return (), str(error)

    def _allowed(self, shape: Shape, solutions: Iterable[Solution]) -> tuple[Solution, ...]:
        """Return the solutions that no deny list denies."""
        denied = self._deny_list.against(shape, self.place.device, lambda libtype: self.versions.get(libtype, ""))
        return tuple(solution for solution in solutions if denied is None or not denied(solution))

    def neighbours(self, shape: Shape, leaders: Sequence[Solution], known: Container[Solution] = ()) -> list[Solution]:
        """Return the neighbours of the leaders that are not known; a backend whose `refine` fails offers none."""
        near: list[Solution] = []
        for libtype in dict.fromkeys(leader.libtype for leader in leaders if self._losses[leader.libtype] < MOST_LOSSES):
            own = tuple(leader for leader in leaders if leader.libtype == libtype)
            try:
                asked: Sequence[Solution] = self._ask_backend(libtype, "refine", "neighbours", shape, own)
                near += [solution for solution in self._allowed(shape, asked) if solution not in known][
                    : self._search(libtype).near or None
                ]
            except PluginError as error:
                _log.warning("%s: neighbours left out: %s", shape, error)
        return near

    def _ask_backend(self, libtype: str, hook: str, method: str, *arguments: Any) -> Any:
        """Call a session method that runs one hook of one backend, within a time limit.

        Raises:
            PluginError: the hook failed, or crashed the worker.
        """
        limit = min(self.options.timeout, HOOK_S)
        try:
            return self.client.ask(method, *arguments, timeout=limit)
        except WorkerDied as error:
            self._losses[libtype] += 1
            raise PluginError(f"libtype {libtype!r}: {hook}() ended the worker: {error}") from error
        except (DeviceLost, PluginError):
            raise
        except Exception as error:  # a plugin may raise anything
            raise PluginError(f"libtype {libtype!r}: {hook}() raised {described(error)}") from error
