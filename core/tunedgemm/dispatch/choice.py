"""Choose the solution of a call: table rows first, then heuristics in the untuned order, then torch.

Each rejected offer is kept with its reason, which `explain` prints.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher, WeightRefused
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, unmeasured
from tunedgemm.device import Device
from tunedgemm.dispatch.invariant import class_offers
from tunedgemm.dispatch.offer import NATIVE, Offer, complete, offer_of_row, why_of
from tunedgemm.libtypes import BUILTIN
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.deny import DenyList
from tunedgemm.table.folders import DISTRIBUTION, SHIPPED_WORD
from tunedgemm.text.printable import printable

if TYPE_CHECKING:
    from tunedgemm.table.lookup import Table

_log = logging.getLogger("tunedgemm")


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
    if table.invariant:
        yield from class_offers(shape, device, table, registry, untuned)
        return
    tried: set[Solution] = set()
    for match in table.candidates(shape, device):
        tried.add(match.row.solution)
        yield offer_of_row(match.row, why_of(match, shape), match.layer, match)
    for offer in _without_bias(shape, device, table):
        if offer.solution not in tried:
            tried.add(offer.solution)
            yield offer
    for solution in choices(shape, device, registry, untuned):
        yield Offer(solution, "heuristic", f"untuned; heuristic of {solution.libtype}", own=True)
    yield Offer(NATIVE, "builtin", "; ".join(filter(None, ("untuned; no other backend answers", unmeasured(device)))))


def _without_bias(shape: Shape, device: Device, table: Table) -> Iterator[Offer]:
    """Yield the unbiased shape's rows: first with the bias in the kernel, then added after it."""
    plain, product = split_bias.unbiased_shape(shape), split_bias.product_shape(shape)
    for unbiased_shape in dict.fromkeys((plain, product)):
        for match in table.candidates(unbiased_shape, device) if unbiased_shape is not None else ():
            offer = attrs.evolve(offer_of_row(match.row, why_of(match, shape), match.layer), origin="unbiased")
            if unbiased_shape == plain:
                yield attrs.evolve(offer, why=f"{offer.why}, a row without a bias")
            if unbiased_shape == product and offer.solution.libtype != BUILTIN:
                summed = split_bias.with_add(offer.solution)
                yield attrs.evolve(offer, solution=summed, why=f"{offer.why}, a row without a bias, and an add")


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
                if launcher.keeps_weights:
                    launcher = stepping_down(launcher, choose(untried, shape, device, registry, _and_not(solution, veto))[1])
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


def _and_not(solution: Solution, veto: Callable[[Solution], str] | None) -> Callable[[Solution], str]:
    """Extend a veto to a solution, which rows of several M may name."""
    return lambda other: "it refuses the weight" if other == solution else veto(other) if veto is not None else ""


def stepping_down(launcher: Launcher, following: Launcher | None) -> Launcher:
    """Wrap a launcher that keeps copies of weights: the next kernel serves those that it refuses.

    Both are bound together, since a refusal may come in a graph capture.
    """
    if following is None:
        return launcher
    first, second = launcher.call, following.call

    def call(*operands: Any) -> Any:
        try:
            return first(*operands)
        except WeightRefused:
            return second(*operands)

    return attrs.evolve(launcher, call=call, graph_safe=launcher.graph_safe and following.graph_safe)


def with_source(explanation: Explanation, registry: Registry) -> Explanation:
    """Add the file and entry that the backend names as the source of its solution."""
    offer, backend = explanation.offer, registry.get(explanation.libtype)
    solution = attrs.evolve(offer.solution, kernel_name="") if offer.own else offer.solution
    source = backend.source_of(solution, explanation.shape, explanation.device) if isinstance(backend, Backend) else ""
    return attrs.evolve(explanation, offer=attrs.evolve(offer, why=f"{offer.why}; {source}")) if source else explanation


def digest(table: Table, registry: Registry, untuned: tuple[str, ...], device: Device) -> str:
    """Return a digest of all that determines choices: rows, mode, backends, library versions, order."""
    parts = [table.fingerprint(), *(["batch-invariant"] if table.invariant else [])]
    parts += map(repr, DenyList.load().entries)
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
