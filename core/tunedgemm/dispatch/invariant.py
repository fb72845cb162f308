"""Batch-invariant mode: one bit class serves a weight at every M, else torch's call serves it.

What serves a group, which is a shape at every M, is decided once, from facts that do not depend on
the call's M. So a call never gets another class than the others of its weight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.cache import LauncherCache
from tunedgemm.dispatch.offer import NATIVE, Offer, complete, offer_of_row, why_of
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.scale_order import of_any_m
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution
from tunedgemm.table.bit_classes import REMEDY
from tunedgemm.text.printable import warn_once

if TYPE_CHECKING:
    from tunedgemm.dispatch.settings import Settings
    from tunedgemm.ops.op import Op
    from tunedgemm.table.lookup import Table
    from tunedgemm.table.row import Row

_log = logging.getLogger("tunedgemm")

#: How `torch.library` names replaced products; engines replace them by invariant ones in the mode.
_REPLACED = frozenset(f"aten/{name}/CUDA" for name in ("mm", "addmm", "matmul"))


@attrs.frozen
class Decision:
    """What serves a group in batch-invariant mode.

    Attributes:
        bit_class: the class of its rows, or the sum order of a backend's choice; "" for torch's
            call.
        add: ``+add`` if a bias is added after the kernel, else "".
        libtype: the backend that chooses a solution for each M; "" for rows.
        why: why torch's call serves; "" if a class does.
    """

    bit_class: str = ""
    add: str = ""
    libtype: str = ""
    why: str = ""

    def __str__(self) -> str:
        return self.bit_class + self.add


def decision_of(shape: Shape, device: Device, table: Table, registry: Registry, untuned: tuple[str, ...]) -> Decision:
    """Return what serves a shape's group on a device; the table keeps it.

    Args:
        shape: a shape of any M.
        device: the device; an absent one is asked for nothing that needs its libraries.
        table: a table in batch-invariant mode.
        registry: the installed backends.
        untuned: the libtypes that may serve a group without rows.
    """
    key = _key(shape, device)
    found: Decision | None = table.decisions.get(key)
    if found is None:
        found = table.decisions.setdefault(key, _decide(shape.with_m(1), device, table, registry, untuned))
    return found


def _key(shape: Shape, device: Device) -> tuple[Shape, Device, bool]:
    return of_any_m(shape), device, device.is_present


def _decide(shape: Shape, device: Device, table: Table, registry: Registry, untuned: tuple[str, ...]) -> Decision:
    """Decide by rows of the shape, then by rows of its product and an add, then by backends alike."""
    product = split_bias.product_shape(shape)
    ways = [(shape, "")] + ([] if product is None else [(product, ADD)])
    for way, add in ways:
        if (pin := table.pin(way, device)) is not None:
            fault = _fault(pin.row, device, registry)
            if not fault and add and pin.row.solution.libtype == BUILTIN:
                fault = f"{BUILTIN} adds a bias in its routes"
            why = f"class {pin.row.bit_class} cannot run: {fault} ({pin.why})"
            return Decision(why=why) if fault else Decision(pin.row.bit_class, add)
    for way, add in ways:
        for solution in choices(way, device, registry, untuned, invariant=True):
            _, backend = complete(_chosen(solution), way, device, registry)
            if isinstance(backend, Backend) and not backend.lacks(solution, way, device):
                return Decision(solution.sum_order, add, solution.libtype)
    return Decision(why=f"no row with a bit class serves this weight; {REMEDY}")


def _fault(row: Row, device: Device, registry: Registry) -> str:
    """Return why a class row cannot serve with its class's bits; "" if no fault is known before `bind`."""
    offer = offer_of_row(row, "")
    if offer.partial:
        return "a class row must name its device and its kernel"
    shape = row.shape.with_m(row.shape.m or 1)
    offer, backend = complete(offer, shape, device, registry)
    if not isinstance(backend, Backend):
        return backend.reason
    if lack := backend.lacks(offer.solution, shape, device):
        return lack
    now = backend.library_version(device) if row.libver else ""
    if now == row.libver or not (now or device.is_present):
        return ""
    return f"measured with {row.libver}, now {now or 'an unknown version'}; `tunedgemm table check --bits` compares its bits"


def _chosen(solution: Solution) -> Offer:
    """Return the offer of a backend's choice."""
    return Offer(solution, "heuristic", f"untuned; batch-invariant choice of {solution.libtype}", own=True)


def class_offers(shape: Shape, device: Device, table: Table, registry: Registry, untuned: tuple[str, ...]) -> Iterator[Offer]:
    """Yield the solutions of a shape's class, best first, then torch's call."""
    decided = decision_of(shape, device, table, registry, untuned)
    if decided.bit_class:
        way = (split_bias.product_shape(shape) if decided.add else None) or shape
        added = ", and an add" if decided.add else ""
        for offer in _members(decided, way, shape, device, table, registry):
            solution = split_bias.with_add(offer.solution) if decided.add else offer.solution
            yield attrs.evolve(offer, solution=solution, bit_class=str(decided), why=f"{offer.why}{added}, class {decided}")
    why = decided.why or f"class {decided} cannot run here"
    switches = " and on torch's TF32 switches" if shape.dtype == "fp32" and device.kind != "cpu" else ""
    yield Offer(NATIVE, "builtin", f"torch's call, whose bits may depend on M{switches}: {why}")


def _members(decided: Decision, way: Shape, shape: Shape, device: Device, table: Table, registry: Registry) -> Iterator[Offer]:
    """Yield the offers of a class for a shape; *way* is the shape of the kernels."""
    if decided.libtype:
        for solution in choices(way, device, registry, (decided.libtype,), invariant=True):
            if solution.sum_order == decided.bit_class:
                yield _chosen(solution)
        return
    for match in table.candidates(way, device):
        own = match.row.shape.m in (0, shape.m)
        if match.row.shape.m and ((match.row.solution.libtype == BUILTIN and not own) or _fault(match.row, device, registry)):
            continue  # torch's library chooses kernels by M; the row with M = 0 has the bits of the class
        offer = offer_of_row(match.row, why_of(match, shape), match.layer, match if way == shape else None)
        yield offer if way == shape else attrs.evolve(offer, origin="unbiased")


def report_no_class(explanation: Outcome, table: Table, cache: LauncherCache, bound: dict[tuple[Shape, int], Any]) -> None:
    """Report a shape that torch's call serves; if its class failed, let it serve all other M, too.

    Args:
        explanation: the choice for the shape.
        table: the dispatcher's table.
        cache, bound: its launchers and its bound shapes, without those of the group afterwards.
    """
    shape, key = explanation.shape, _key(explanation.shape, explanation.device)
    before: Decision = table.decisions.get(key, Decision())
    if before.bit_class and explanation.lasting:
        reason = explanation.passed_over[-1][1] if explanation.passed_over else f"no kernel of it serves M = {shape.m}"
        table.decisions[key] = Decision(why=f"class {before} failed: {reason}")
        for place in [place for place in list(bound) if of_any_m(place[0]) == key[0]]:
            bound.pop(place, None)
        cache.drop(lambda served: of_any_m(served.shape) == key[0])
        _log.warning("%s: class %s failed, so torch's call serves every M, with other bits: %s", shape, before, reason)
    elif _is_torchs():
        warn_once(f"{shape.op} N={shape.n} K={shape.k} {shape.dtype}->{shape.outdtype}: {explanation.offer.why}")


def warn_of_other_bits(shape: Shape, bit_class: str | None, why: str) -> None:
    """Warn once of each weight that torch's call serves in this case; do nothing for None as class."""
    if bit_class is None or not shape.m or not (bit_class or _is_torchs()):
        return
    bits = f"differ from those of class {bit_class}" if bit_class else "depend on M"
    warn_once(f"{shape.op} N={shape.n} K={shape.k}: {why}, so torch's call serves: its bits may {bits}")


def _is_torchs() -> bool:
    """Check that no engine has replaced torch's products by invariant ones."""
    return _REPLACED.isdisjoint(getattr(torch.library, "_impls", ()))


class Outcome(Protocol):
    """The part of an `Explanation` that `report_no_class` uses."""

    @property
    def shape(self) -> Shape:
        """Return the shape."""

    @property
    def device(self) -> Device:
        """Return the device."""

    @property
    def offer(self) -> Offer:
        """Return what serves it."""

    @property
    def passed_over(self) -> tuple[tuple[Offer, str], ...]:
        """Return the rejected offers, with the reasons."""

    @property
    def lasting(self) -> bool:
        """Check whether later calls may reuse the choice."""


class Mode(Protocol):
    """The part of a dispatcher that `bit_class` uses."""

    op: Op
    registry: Registry
    settings: Settings

    @property
    def table(self) -> Table:
        """Return the merged table."""


def bit_class(dispatcher: Mode, shape: Shape, device: Device | None = None) -> str:
    """Return the class that serves a shape's weight at every M in batch-invariant mode.

    It is the ``bit_class`` of rows, or the sum order of a backend's choice, with ``+add`` if a bias
    is added after. "" if torch's call serves the weight, and outside the mode.

    Args:
        dispatcher: the dispatcher of the op.
        shape: a shape of any M.
        device: the device; by default the current one.
    """
    table = dispatcher.table
    if not table.invariant:
        return ""
    asked = dispatcher.op.canonical(shape)
    return str(decision_of(asked, device or current_device(), table, dispatcher.registry, dispatcher.settings.untuned))
