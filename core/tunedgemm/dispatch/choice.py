"""Choose the solution of a call: table rows first, then heuristics in the untuned order, then torch.

Each rejected offer is kept with its reason, which `explain` prints.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, unmeasured
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN, absent
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.folders import DISTRIBUTION, SHIPPED_WORD
from tunedgemm.text.printable import printable

if TYPE_CHECKING:
    from tunedgemm.table.lookup import Match, Table
    from tunedgemm.table.row import Row

_log = logging.getLogger("tunedgemm")

#: The solution of the built-in backend, which supports every shape.
NATIVE = Solution(BUILTIN, "native")

#: Most names to list in a message about an ambiguous kernel name.
_NAMES = 5


@attrs.frozen
class Offer:
    """A solution that may serve a shape.

    Attributes:
        solution: the solution.
        origin: ``table`` (a row), ``unbiased`` (a row of the shape without its bias), ``heuristic``
            (chosen by a backend) or ``builtin``.
        why: its source for messages: the row's file and line, or the backend of the heuristic.
        us: the row's time in microseconds, without a bias that the row lacks; 0 without a row.
        libver, file: library version that the row was tuned with, and its table; "" without a row.
        table_layer: name of that table's layer; "" without a row.
        partial: whether the kernel name may be empty or a part of a name; see `resolve`.
        own: whether a backend chose the solution, not a row.
        match: the match of a row with exactly this shape; else None.
    """

    solution: Solution
    origin: str
    why: str
    us: float = 0.0
    libver: str = ""
    file: str = ""
    table_layer: str = ""
    partial: bool = False
    own: bool = False
    match: Match | None = None


@attrs.frozen
class Explanation:
    """The offer that serves a shape on a device, and the offers rejected before it."""

    shape: Shape
    device: Device
    offer: Offer
    passed_over: tuple[tuple[Offer, str], ...] = ()
    #: why no offer can run; "" if *offer* runs
    refused: str = ""
    #: whether *offer* was bound; False for a device that is only described
    bound: bool = True
    #: the row that would serve the shape on another device, and what differs; "" if none
    elsewhere: str = ""
    #: whether later calls may reuse the choice; False if memory ran out for an earlier offer
    lasting: bool = True

    @property
    def libtype(self) -> str:
        """Return the libtype of the chosen offer."""
        return self.offer.solution.libtype

    @property
    def tuned(self) -> bool:
        """Check whether a table row serves the shape."""
        return self.offer.origin == "table"

    @property
    def certain(self) -> bool:
        """Check that the choice was bound, or is torch's, so that it will run."""
        return self.bound or self.libtype == BUILTIN

    def __str__(self) -> str:
        runs = f"  nothing runs: {self.refused}" if self.refused else f"  runs {self.offer.solution}: {self.offer.why}"
        lines = [f"{self.shape} on {self.device}", runs]
        if self.elsewhere:
            lines.append(f"  untuned: {self.elsewhere}")
        if not (self.certain or self.refused):
            lines.append("  checked without the device: its libraries and compiled kernels may still refuse")
        lines += [f"  not {offer.solution}: {reason} ({offer.why})" for offer, reason in self.passed_over]
        return printable("\n".join(lines))


def with_elsewhere(explanation: Explanation, table: Table) -> Explanation:
    """Add the row that would serve an untuned shape on another device."""
    if explanation.tuned:
        return explanation
    return attrs.evolve(explanation, elsewhere=table.elsewhere(explanation.shape, explanation.device))


def offers(shape: Shape, device: Device, table: Table, registry: Registry, untuned: tuple[str, ...]) -> Iterator[Offer]:
    """Yield the solutions that may serve a shape, best first; the last is torch's call."""
    table.warn_of_foreign_files(device)
    tried: set[Solution] = set()
    for match in table.candidates(shape, device):
        tried.add(match.row.solution)
        yield _offer_of_row(match.row, _why(match, shape), match.layer, match)
    for offer in _without_bias(shape, device, table):
        if offer.solution not in tried:
            tried.add(offer.solution)
            yield offer
    for solution in choices(shape, device, registry, untuned):
        yield Offer(solution, "heuristic", f"untuned; heuristic of {solution.libtype}", own=True)
    yield Offer(NATIVE, "builtin", "; ".join(filter(None, ("untuned; no other backend answers", unmeasured(device)))))


def _why(match: Match, shape: Shape) -> str:
    """Describe a row and the fields in which its shape differs from the requested one."""
    others = [f"{name}={value}" for name, value in match.row.shape.extra if (name, value) not in shape.extra]
    return f"{match.why}, a row of {', '.join(others)}" if others else match.why


def _offer_of_row(row: Row, why: str, layer: str = "", exact_match: Match | None = None) -> Offer:
    """Make the offer of a row; *exact_match* is given for a row of exactly this shape."""
    partial = not (row.gfx or row.cu_num) or _is_nameless(row.solution)
    return Offer(row.solution, "table", why, row.us, row.libver, str(row.source), layer, partial=partial, match=exact_match)


def _is_nameless(solution: Solution) -> bool:
    """Check whether a row leaves the choice to its backend: no kernel name and no index."""
    return not split_bias.without_add(solution).kernel_name and solution.solidx <= 0


def _without_bias(shape: Shape, device: Device, table: Table) -> Iterator[Offer]:
    """Yield the unbiased shape's rows: first with the bias in the kernel, then added after it."""
    plain, product = split_bias.unbiased_shape(shape), split_bias.product_shape(shape)
    for unbiased_shape in dict.fromkeys((plain, product)):
        for match in table.candidates(unbiased_shape, device) if unbiased_shape is not None else ():
            offer = attrs.evolve(_offer_of_row(match.row, _why(match, shape), match.layer), origin="unbiased")
            if unbiased_shape == plain:
                yield attrs.evolve(offer, why=f"{offer.why}, a row without a bias")
            if unbiased_shape == product and offer.solution.libtype != BUILTIN:
                summed = split_bias.with_add(offer.solution)
                yield attrs.evolve(offer, solution=summed, why=f"{offer.why}, a row without a bias, and an add")


def examine(offer: Offer, shape: Shape, device: Device, registry: Registry) -> Backend | Unsupported:
    """Return the backend whose static limits allow an offer, or why none does.

    The backend of its libtype comes before those whose ``rows`` list that libtype.
    """
    libtype = offer.solution.libtype
    own = registry.get(libtype)
    if isinstance(own, Unsupported):
        reasons = [f"libtype {libtype!r}: {('' if libtype in registry else absent(libtype)) or own.reason}"]
    elif (refusal := own.refusal(shape, device, offer.solution)) is None:
        return own
    else:
        reasons = [refusal.reason]
    for backend in registry.runners(shape.op, libtype):
        if (refusal := backend.refusal(shape, device, offer.solution)) is None:
            return backend
        reasons.append(f"{backend.libtype}: {refusal}")
    return Unsupported("; ".join(reasons))


def resolve(offer: Offer, backend: Backend, shape: Shape, device: Device) -> Offer | Unsupported:
    """Return an offer with the full kernel name, which its row may abbreviate or omit.

    A row without a kernel name leaves the choice to the backend. A row without a device was
    written by hand: its name is a full name, or a part of exactly one name for this shape.
    """
    if not offer.partial:
        return offer
    solution_and_shape = split_bias.kernel_and_shape(offer.solution, shape)
    if isinstance(solution_and_shape, Unsupported):
        return solution_and_shape
    kernel, shape = solution_and_shape
    solution: Solution | Unsupported
    why = offer.why
    if kernel.kernel_name:
        solution = _named(kernel, backend, shape, device)
    else:
        solution = own_choice(backend, shape, device)
        why = f"{offer.why}; {backend.libtype}'s own choice"
    if isinstance(solution, Unsupported):
        return solution
    whole = split_bias.with_add(solution) if split_bias.is_split(offer.solution) else solution
    return attrs.evolve(offer, solution=whole, why=why, own=not kernel.kernel_name)


def own_choice(backend: Backend, shape: Shape, device: Device) -> Solution | Unsupported:
    """Return a backend's choice for a shape that a row assigns to it.

    That is its heuristic's solution, or else the first enumerated one, of those without a missing
    requirement (`lacks`). Backends enumerate the most promising solutions first.
    """
    first = backend.heuristic_fallback(shape, device)
    if first is not None and not backend.lacks(first, shape, device):
        return first
    try:
        for solution in backend.iterate(shape, device):
            first = first or solution
            if not backend.lacks(solution, shape, device):
                return solution
    except PluginError as error:
        return Unsupported(str(error))
    return first or Unsupported(backend.why_none(shape, device))


def _named(wanted: Solution, backend: Backend, shape: Shape, device: Device) -> Solution | Unsupported:
    """Return the first solution with this kernel name, else with the only name that contains it.

    Any other name may be an alias that the backend resolves.
    """
    parts: list[Solution] = []
    try:
        for solution in backend.iterate(shape, device):
            if wanted.split_k in (0, solution.split_k):
                if solution.kernel_name == wanted.kernel_name:
                    return solution
                if wanted.kernel_name in solution.kernel_name:
                    parts.append(solution)
    except PluginError as error:
        return Unsupported(str(error))
    names = list(dict.fromkeys(solution.kernel_name for solution in parts))
    if len(names) == 1:
        return parts[0]
    if names:
        listed = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
        return Unsupported(f"{len(names)} kernels of {backend.libtype} have {wanted.kernel_name!r} in their names: {listed}")
    if "lacks" in backend.functions and not backend.lacks(wanted, shape, device):
        return wanted
    return Unsupported(f"no kernel of {backend.libtype} for this shape has {wanted.kernel_name!r} in its name")


def complete(offer: Offer, shape: Shape, device: Device, registry: Registry) -> tuple[Offer, Backend | Unsupported]:
    """Return an offer with its full kernel name, and its backend or why none can serve it."""
    backend = examine(offer, shape, device, registry)
    if isinstance(backend, Unsupported):
        return offer, backend
    whole = resolve(offer, backend, shape, device)
    return (offer, whole) if isinstance(whole, Unsupported) else (whole, backend)


def row_refusal(row: Row, device: Device, registry: Registry) -> str:
    """Return why a row cannot run, without binding it; "" if no fault is known before `bind`."""
    shape = attrs.evolve(row.shape, m=row.shape.m or 1)  # a pin serves every M
    offer, backend = complete(_offer_of_row(row, ""), shape, device, registry)
    return backend.reason if isinstance(backend, Unsupported) else backend.lacks(offer.solution, shape, device)


def choose(
    untried: Iterator[Offer], shape: Shape, device: Device, registry: Registry, veto: Callable[[Solution], str] | None
) -> tuple[Explanation, Launcher | None]:
    """Take the first offer that works, and bind it if the device is present.

    Args:
        untried: the offers, best first; at least one.
        shape, device: shape and device of the call.
        registry: the installed backends.
        veto: returns why a solution failed before for this shape, or ""; None if none has.
    """
    passed: list[tuple[Offer, str]] = []
    last: Offer | None = None
    lasting = True
    for offer in untried:
        if veto is not None and not offer.partial and (reason := veto(offer.solution)):  # saves asking the backend
            last = offer
            passed.append((last, reason))
            continue
        last, backend = complete(offer, shape, device, registry)
        if isinstance(backend, Unsupported):
            reason = backend.reason
        elif not (reason := veto(last.solution) if veto is not None else ""):
            solution = last.solution
            launcher = backend.bind(solution, shape, device, asked=True) if device.is_present else backend.lacks(solution, shape, device)
            if isinstance(launcher, Launcher):
                if last.libver:
                    last = _with_version(last, backend, device, bound=True)
                return Explanation(shape, device, last, tuple(passed), lasting=lasting), launcher
            if not launcher and not device.is_present:
                last = _with_version(last, backend, device, bound=False)
                return Explanation(shape, device, last, tuple(passed), bound=False), None
            reason = f"{backend.libtype} refuses: {launcher}"
            lasting = lasting and not (isinstance(launcher, Unsupported) and launcher.passing)
        passed.append((last, reason))
    if last is None:
        raise AssertionError("offers() yields at least the built-in backend")
    return Explanation(shape, device, last, tuple(passed[:-1]), passed[-1][1]), None


def with_source(explanation: Explanation, registry: Registry) -> Explanation:
    """Add the file and entry that the backend names as the source of its solution."""
    offer, backend = explanation.offer, registry.get(explanation.libtype)
    solution = attrs.evolve(offer.solution, kernel_name="") if offer.own else offer.solution
    source = backend.source_of(solution, explanation.shape, explanation.device) if isinstance(backend, Backend) else ""
    return attrs.evolve(explanation, offer=attrs.evolve(offer, why=f"{offer.why}; {source}")) if source else explanation


def digest(table: Table, registry: Registry, untuned: tuple[str, ...], device: Device) -> str:
    """Return a digest of all that determines choices: rows, backends, library versions, order."""
    parts = [table.fingerprint()]
    for libtype in registry.libtypes:
        backend = registry.get(libtype)
        versions = (backend.version, backend.library_version(device)) if isinstance(backend, Backend) else str(backend)
        parts.append(f"{libtype} {versions}")
    return hashlib.sha256("\n".join([*parts, *untuned]).encode()).hexdigest()[:16]


_reported: dict[tuple[str, str], object] = {}


def _with_version(offer: Offer, backend: Backend, device: Device, *, bound: bool) -> Offer:
    """Note in an offer that its row was tuned with another library version, and log it.

    Logged once per table and libtype, and not for shipped tables, which users cannot retune.

    Args:
        bound: whether `bind` has just accepted the row.
    """
    now = backend.library_version(device) if offer.libver else ""
    if now == offer.libver or not (now or bound):
        return offer
    first = object()
    if bound and _reported.setdefault((offer.file, backend.libtype), first) is first:
        shipped = offer.table_layer == SHIPPED_WORD
        of_user = not shipped and not offer.table_layer.startswith(DISTRIBUTION)
        _log.log(
            logging.INFO if shipped else logging.WARNING,
            "%s: rows of %s were tuned with its library's version %s, and now serve with %s; `tunedgemm tune %s` tunes them again",
            offer.file, backend.libtype, offer.libver, now or "an unknown one", "--stale" if of_user else f"-i {offer.file}",
        )  # fmt: skip
    return attrs.evolve(offer, why=f"{offer.why}; tuned with {offer.libver}, now {now or 'an unknown version'}")
