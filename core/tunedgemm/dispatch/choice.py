"""Which solution serves a call, and why: table rows first, then heuristics in the untuned order, then torch.

Every offer on the way is kept with the reason it was passed over, which is what `explain` prints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends import split
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN, absent
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

if TYPE_CHECKING:
    from tunedgemm.table.lookup import Match, Table

_log = logging.getLogger("tunedgemm")

#: What fits every shape: the built-in backend's own call.
NATIVE = Solution(BUILTIN, "native")

#: Kernels that a message about a part of their names lists.
_NAMES = 5


@attrs.frozen
class Offer:
    """One solution that may serve a shape.

    Attributes:
        solution: what would run.
        origin: ``table`` (a row), ``unbiased`` (a row of the shape without its bias), ``heuristic`` (a backend's own choice) or
            ``builtin``.
        why: where it comes from, in words: the row's file and line, or whose heuristic.
        us: the row's time in microseconds, without the bias where the row has none, else 0.
        libver: the library version that the row was tuned with, else "".
        partial: whether the kernel's name may be a part of one, as in a row that names no device; see `resolve`.
        match: the row, how its M relates to the one asked for, and whether its device is of this name; None where it is no row.
    """

    solution: Solution
    origin: str
    why: str
    us: float = 0.0
    libver: str = ""
    partial: bool = False
    match: Match | None = None


@attrs.frozen
class Explanation:
    """What serves a shape on a device, and every offer that was passed over before it."""

    shape: Shape
    device: Device
    offer: Offer
    passed_over: tuple[tuple[Offer, str], ...] = ()
    #: why not even the last offer can run, and so nothing does; "" where *offer* runs
    refused: str = ""

    @property
    def libtype(self) -> str:
        """The libtype that runs."""
        return self.offer.solution.libtype

    @property
    def tuned(self) -> bool:
        """Whether a table row answers."""
        return self.offer.origin == "table"

    def __str__(self) -> str:
        runs = f"  nothing runs: {self.refused}" if self.refused else f"  runs {self.offer.solution}: {self.offer.why}"
        lines = [f"{self.shape} on {self.device}", runs]
        lines += [f"  not {offer.solution}: {reason} ({offer.why})" for offer, reason in self.passed_over]
        return "\n".join(lines)


def offers(shape: Shape, device: Device, table: Table, registry: Registry, untuned: tuple[str, ...]) -> Iterator[Offer]:
    """All that may serve the shape, best first; the last one always can."""
    tried: set[Solution] = set()
    for match in table.candidates(shape, device):
        tried.add(match.row.solution)
        yield _of_row(match, match)
    for offer in _without_bias(shape, device, table):
        if offer.solution not in tried:
            tried.add(offer.solution)
            yield offer
    for libtype in untuned:
        backend = registry.get(libtype) if libtype in registry else None
        solution = backend.heuristic_fallback(shape, device) if isinstance(backend, Backend) else None
        if solution is not None:
            yield Offer(solution, "heuristic", f"untuned; heuristic of {libtype}")
    yield Offer(NATIVE, "builtin", "untuned; no other backend answers")


def _of_row(match: Match, known: Match | None = None) -> Offer:
    """The offer of a row; *known* where the row is of the very shape."""
    row = match.row
    return Offer(row.solution, "table", match.why, row.us, row.libver, partial=not (row.gfx or row.cu_num), match=known)


def _without_bias(shape: Shape, device: Device, table: Table) -> Iterator[Offer]:
    """Rows of a shape without its bias: each with the bias given to its kernel, then with an add after it."""
    plain, product = split.unbiased(shape), split.product(shape)
    for asked in dict.fromkeys((plain, product)):
        for match in table.candidates(asked, device) if asked is not None else ():
            offer = attrs.evolve(_of_row(match), origin="unbiased")
            if asked == plain:
                yield attrs.evolve(offer, why=f"{offer.why}, a row without a bias")
            if asked == product and offer.solution.libtype != BUILTIN:
                yield attrs.evolve(offer, solution=split.added(offer.solution), why=f"{offer.why}, a row without a bias, and an add")


def examine(offer: Offer, shape: Shape, device: Device, registry: Registry) -> Backend | Unsupported:
    """The backend that can serve an offer by its static limits, or why none can."""
    libtype = offer.solution.libtype
    why = absent(libtype) if libtype not in registry else ""
    backend = Unsupported(why) if why else registry.get(libtype)
    if isinstance(backend, Unsupported):
        return Unsupported(f"libtype {libtype!r}: {backend.reason}")
    answer = backend.supports(shape, device, offer.solution)
    return backend if answer else Unsupported(str(answer))


def resolve(offer: Offer, backend: Backend, shape: Shape, device: Device) -> Offer | Unsupported:
    """An offer with the whole name of a solution, where its row may give a part of it, or none.

    A row that names no device was written by hand: without a kernel's name it means the backend's heuristic, else any
    part of a name that one kernel alone among those for the shape has; of its solutions then the backend's first.
    """
    if not offer.partial:
        return offer
    whole = split.of(offer.solution, shape)
    if isinstance(whole, Unsupported):
        return whole
    wanted, shape = whole
    named = split.added if split.is_split(offer.solution) else _as_it_is
    if not wanted.kernel_name:
        choice = backend.heuristic_fallback(shape, device)
        why = f"{offer.why}; heuristic of {backend.libtype}"
        return (
            attrs.evolve(offer, solution=named(choice), why=why) if choice else Unsupported(f"heuristic of {backend.libtype} has no choice")
        )
    try:
        solutions = [found for found in backend.solutions(shape, device) if wanted.split_k in (0, found.split_k)]
    except PluginError as error:
        return Unsupported(str(error))
    fitting = [found for found in solutions if found.kernel_name == wanted.kernel_name]
    fitting = fitting or [found for found in solutions if wanted.kernel_name in found.kernel_name]
    names = list(dict.fromkeys(found.kernel_name for found in fitting))
    if len(names) == 1:
        return attrs.evolve(offer, solution=named(fitting[0]))
    if names:
        told = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
        return Unsupported(f"{len(names)} kernels of {backend.libtype} have {wanted.kernel_name!r} in their names: {told}")
    return Unsupported(f"no kernel of {backend.libtype} for this shape has {wanted.kernel_name!r} in its name")


def _as_it_is(solution: Solution) -> Solution:
    return solution


def choose(
    found: Iterator[Offer], shape: Shape, device: Device, registry: Registry, veto: Callable[[Solution], str]
) -> tuple[Explanation, Launcher | None]:
    """Walk the offers to the first that works; binds it where the device is present.

    Args:
        veto: the reason why a solution is not to be used for this shape any more, or "".
    """
    present = device.kind == "cpu" or device.index >= 0
    passed: list[tuple[Offer, str]] = []
    last: Offer | None = None
    for offer in found:
        backend = examine(offer, shape, device, registry)
        whole = backend if isinstance(backend, Unsupported) else resolve(offer, backend, shape, device)
        last = whole if isinstance(whole, Offer) else offer
        reason = whole.reason if isinstance(whole, Unsupported) else veto(whole.solution)
        if not reason and isinstance(backend, Backend) and not present:
            reason = backend.lacks(last.solution, device)
            if not reason:
                return Explanation(shape, device, last, tuple(passed)), None
        elif not reason and isinstance(backend, Backend):
            launcher = backend.bind(last.solution, shape, device)
            if isinstance(launcher, Launcher):
                _revalidated(last, backend, device)
                return Explanation(shape, device, last, tuple(passed)), launcher
            reason = f"{backend.libtype} refuses: {launcher.reason}"
        passed.append((last, reason))
    if last is None:
        raise AssertionError("offers() yields at least the built-in backend")
    return Explanation(shape, device, last, tuple(passed[:-1]), passed[-1][1]), None


_told: set[tuple[str, str]] = set()


def _revalidated(offer: Offer, backend: Backend, device: Device) -> None:
    """Tell once that rows of another library version are in use; `bind` has just accepted this one."""
    if not offer.libver:
        return
    now = backend.library_version(device)
    if now != offer.libver and (backend.libtype, offer.libver) not in _told:
        _told.add((backend.libtype, offer.libver))
        _log.info(
            "rows of %s were tuned with version %s, this is %s: still accepted by it, retuning may pay", backend.libtype, offer.libver, now
        )
