"""Offer: a solution that may serve a shape, completed and checked by its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN, absent
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

if TYPE_CHECKING:
    from tunedgemm.table.match import Match
    from tunedgemm.table.row import Row

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
        bit_class: class of the output's bits in batch-invariant mode; "" if they may depend on M.
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
    bit_class: str = ""


def why_of(match: Match, shape: Shape) -> str:
    """Describe a row and the fields in which its shape differs from the requested one."""
    others = [f"{name}={value}" for name, value in match.row.shape.extra if (name, value) not in shape.extra]
    return f"{match.why}, a row of {', '.join(others)}" if others else match.why


def offer_of_row(row: Row, why: str, layer: str = "", exact_match: Match | None = None) -> Offer:
    """Make the offer of a row; *exact_match* is given for a row of exactly this shape."""
    partial = not (row.gfx or row.cu_num) or _is_nameless(row.solution)
    return Offer(row.solution, "table", why, row.us, row.libver, str(row.source), layer, partial=partial, match=exact_match)


def _is_nameless(solution: Solution) -> bool:
    """Check whether a row leaves the choice to its backend: no kernel name and no index."""
    return not split_bias.without_add(solution).kernel_name and solution.solidx <= 0


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
    offer, backend = complete(offer_of_row(row, ""), shape, device, registry)
    return backend.reason if isinstance(backend, Unsupported) else backend.lacks(offer.solution, shape, device)
