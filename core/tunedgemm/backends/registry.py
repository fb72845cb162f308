"""Registry: find backends by entry point, and load each on first use.

A broken plugin is skipped with its reason; requested by name, it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError
from tunedgemm.libtypes import BUILTIN, listed, owners, pip_hint, rank
from tunedgemm.process.plugin_guard import entry_points, load, name_of
from tunedgemm.solution import Unsupported
from tunedgemm.text.printable import warn_once
from tunedgemm.version import __version__

GROUP = "tunedgemm.backends"
_BUILTIN_ENTRY = EntryPoint(BUILTIN, "tunedgemm.backends.builtin:backend", GROUP)


class Registry:
    """The installed backends by libtype, each loaded on first use."""

    def __init__(self, entries: Iterable[EntryPoint] | None = None) -> None:
        points = entry_points(group=GROUP) if entries is None else entries
        self._entries, self._rivals = _by_name(points)
        self._loaded: dict[str, Backend | Unsupported] = {}
        self._runners: dict[tuple[str, str], tuple[Backend, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entry points; another process loads the plugins again."""
        return type(self), (list(self._entries.values()),)

    @property
    def libtypes(self) -> tuple[str, ...]:
        """Return the installed libtypes in order of rank, even those that do not load."""
        return tuple(sorted(self._entries, key=rank))

    def __contains__(self, libtype: object) -> bool:
        """Check whether a libtype is installed, even if it does not load."""
        return libtype in self._entries

    def get(self, libtype: str) -> Backend | Unsupported:
        """Return the backend of a libtype, or why it is unavailable; import it on first use."""
        if libtype not in self._loaded:
            entry = self._entries.get(libtype)
            self._loaded[libtype] = self._missing(libtype) if entry is None else _load(entry)
        return self._loaded[libtype]

    def library_version(self, libtype: str, device: Device) -> str:
        """Return the version of a backend's library on a device; "" without the backend."""
        backend = self.get(libtype)
        return backend.library_version(device) if isinstance(backend, Backend) else ""

    def runners(self, op: str, libtype: str) -> tuple[Backend, ...]:
        """Return the backends whose ``rows`` include ``op:libtype``.

        The first call imports all plugins.
        """
        if (op, libtype) not in self._runners:
            self._runners[op, libtype] = tuple(backend for backend in self._all() if f"{op}:{libtype}" in backend.rows)
        return self._runners[op, libtype]

    def problems(self, libtype: str) -> tuple[str, ...]:
        """Return other distributions that register the same libtype, as messages."""
        return tuple(self._rivals.get(libtype, ()))

    def select(self, libtypes: str = "all") -> list[Backend]:
        """Return the backends of a ``--libtype`` text: ``all``, or comma-separated libtypes.

        ``all`` gives those that load, by rank, with a warning about others. A list keeps its order,
        and ``both`` means ck and cktile.

        Raises:
            LibtypeError: a named libtype is unknown or does not load.
        """
        wanted = listed(libtypes)
        if not wanted:
            return self._all()
        selected = []
        for libtype in wanted:
            answer = self.get(libtype)
            if isinstance(answer, Unsupported):
                raise LibtypeError(f"libtype {libtype!r}: {answer.reason}")
            selected.append(answer)
        return selected

    def _all(self) -> list[Backend]:
        """Return the backends that load; warn once about each other one."""
        answers = {libtype: self.get(libtype) for libtype in self.libtypes}
        for libtype, answer in answers.items():
            if isinstance(answer, Unsupported):
                warn_once(f"libtype {libtype!r}: left out: {answer.reason}")
        return [answer for answer in answers.values() if isinstance(answer, Backend)]

    def add(self, backend: Backend) -> None:
        """Add a backend to this registry only, for tests and experiments."""
        self._entries[backend.libtype] = EntryPoint(backend.libtype, "", GROUP)
        self._loaded[backend.libtype] = backend
        self._runners.clear()

    def _missing(self, libtype: str) -> Unsupported:
        hint = pip_hint(libtype)
        how = f"not installed; {hint}" if hint else f"no backend of that name; installed: {', '.join(self.libtypes)}"
        return Unsupported(how)


def _load(entry: EntryPoint) -> Backend | Unsupported:
    distribution = _owner(entry)
    version = entry.dist.version if entry.dist else __version__
    backend, fault = load(entry)
    if fault:
        return Unsupported(f"{distribution} cannot be imported: {fault}")
    kind = type(backend)  # its `__class__` may raise
    if not issubclass(kind, Backend):
        fault = f"the entry point must name a tunedgemm.plugin.Backend (got {entry.value}, a {kind.__name__})"
    elif backend.libtype != entry.name:
        fault = f"the entry point and its backend must have one name (got {backend.libtype!r})"
    if fault:
        return Unsupported(f"{distribution} breaks the contract: libtype {entry.name!r}: {fault}")
    loaded: Backend = attrs.evolve(backend, distribution=distribution, version=version)
    return loaded


def _by_name(points: Iterable[EntryPoint]) -> tuple[dict[str, EntryPoint], dict[str, list[str]]]:
    """Return one entry point per libtype: ours if several exist, else the first by name."""
    official = owners()
    claims: dict[str, list[EntryPoint]] = {BUILTIN: [_BUILTIN_ENTRY]}
    for entry in points:
        if (entry.name, entry.value) != (_BUILTIN_ENTRY.name, _BUILTIN_ENTRY.value):
            claims.setdefault(entry.name, []).append(entry)
    entries, rivals = {}, {}
    for name, claimants in claims.items():
        ordered = sorted(claimants, key=lambda entry: _claim_rank(entry, official.get(name)))
        entries[name] = ordered[0]
        if len({entry.value for entry in ordered}) > 1:
            rivals[name] = [f"{_owner(entry)} also claims libtype {name!r}; {_owner(ordered[0])} keeps it" for entry in ordered[1:]]
    return entries, rivals


def _owner(entry: EntryPoint) -> str:
    return name_of(entry.dist) if entry.dist else "tunedgemm"


def _claim_rank(entry: EntryPoint, official: str | None) -> tuple[Any, ...]:
    return entry is not _BUILTIN_ENTRY, _owner(entry) != official, _owner(entry), entry.value


def tie_order(backends: Sequence[Backend], libtypes: str) -> dict[str, int]:
    """Map each libtype to its rank for ties: the order in ``--libtype``, else the usual rank."""
    ranked = sorted((backend.libtype for backend in backends), key=rank)
    return {libtype: position for position, libtype in enumerate(dict.fromkeys([*listed(libtypes), *ranked]))}
