"""Dialects: how a backend's solutions are said in JSON files. Ours, and those of backends that others make with `author`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape, Solution, Unsupported, UserError

from tunedgemm_triton import limits, moe, mx, parameters, solutions
from tunedgemm_triton.jsonfile import Sizes
from tunedgemm_triton.parameters import Entry
from tunedgemm_triton.planned import PLANNED

#: Op -> tag, the kernel's name in its files, as AITER's are named.
TAGS = {
    "a16w16": "GEMM-A16W16",
    "a8w8": "GEMM-A8W8",
    "a8w8_bpreshuffle": "GEMM-A8W8_PRESHUFFLED",
    "a8w8_blockscale": "GEMM-A8W8_BLOCKSCALE",
    "a8w8_blockscale_bpreshuffle": "GEMM-A8W8_BLOCKSCALE_PRESHUFFLED",
    "a4w4_blockscale": "GEMM-AFP4WFP4",
    "a16w4_blockscale": "GEMM-A16WFP4",
    "batched_bf16": "BATCHED_GEMM-A16W16",
    "batched_a8w8": "BATCHED_GEMM-A8W8",
}
#: fmoe: kind of quantisation -> the same.
_MOE = {
    "No": "GEMM-FMOE_A16W16",
    "per_Tensor": "GEMM-FMOE_A8W8",
    "per_Token": "GEMM-FMOE_A8W8",
    "per_1x128": "GEMM-FMOE_A8W8_BLOCKSCALE",
    "per_1x32": "GEMM-FMOE_AFP4WFP4",
}
_SHUFFLED = "_PRESHUFFLED"
#: Ops of plain and of shuffled weights.
_ANY_LAYOUT = ("a16w16", *mx.OPS)


@attrs.frozen(eq=False)
class Dialect:
    """What tuning through JSON files asks of a backend.

    Attributes:
        libtype: the backend's name.
        ops: the ops that it covers.
        tags: the names of kernels that its files may have, such as ``GEMM-A8W8``, each with its op.
        tag_of: a shape -> the tag of its files.
        entry_of: (solution, shape, gfx) -> the parameters that mean it.
        unused_of: (parameters, op) -> what of them has no effect, or UserError for what is wrong.
        solution_of: (parameters, shape, device) -> the solution that they mean, or None, and what of them has no effect, or why it is None.
        fits: (solution, shape, device) -> whether it is worth compiling.
        supports: as the hook.
        listed: (shape, device) -> what the backend lists for itself, best guesses first.
    """

    libtype: str
    ops: tuple[str, ...]
    tags: Mapping[str, str]
    tag_of: Callable[[Shape], str]
    entry_of: Callable[[Solution, Shape, str], dict[str, Any]]
    unused_of: Callable[[Entry, str], tuple[str, ...]]
    solution_of: Callable[[Entry, Shape, Device], tuple[Solution | None, tuple[str, ...]]]
    fits: Callable[[Solution, Shape, Device], bool]
    supports: Callable[[Shape, Device], bool | Unsupported]
    listed: Callable[[Shape, Device], Any]


def tag_of(shape: Shape) -> str:
    """The tag of a shape, as AITER's files have it."""
    if shape.op == moe.OP:
        return _MOE[str(shape["q_type"])]
    own = TAGS[shape.op]
    return own + _SHUFFLED if shape.layout != "row" and shape.op in _ANY_LAYOUT else own


def sizes_of(shape: Shape) -> Sizes:
    """The sizes in the name of a weight's file."""
    extra = dict(shape.extra)
    leading = [("B", int(extra["B"]))] if "B" in extra else [("E", int(extra["expert"]))] if "expert" in extra else []
    return (*leading, ("N", shape.n), ("K", shape.k))


def _fits(solution: Solution, shape: Shape, device: Device) -> bool:
    kernel, split = parameters.kernel_of(solution.kernel_name, shape.op), max(solution.split_k, 1)
    fits: Callable[..., bool] = moe.fits if shape.op == moe.OP else mx.fits if shape.op in mx.OPS else solutions.fits
    return fits(kernel, split, shape, device)


def _listed(shape: Shape, device: Device) -> Any:
    return PLANNED.get(shape.op, solutions).enumerate_solutions(shape, device)


#: Of the backend ``triton``.
OURS = Dialect(
    libtype=solutions.LIBTYPE,
    ops=(*limits.OPS, *PLANNED),
    tags={
        **{tag: op for op, tag in TAGS.items()},
        **{TAGS[op] + _SHUFFLED: op for op in _ANY_LAYOUT},
        **dict.fromkeys(_MOE.values(), moe.OP),
    },
    tag_of=tag_of,
    entry_of=parameters.entry_of,
    unused_of=lambda entry, op: parameters.parsed(entry, op).unused,
    solution_of=parameters.solution_of,
    fits=_fits,
    supports=lambda shape, device: PLANNED.get(shape.op, limits).supports(shape, device),
    listed=_listed,
)


def dialect_of(libtype: str) -> Dialect:
    """The dialect of an installed backend, which its registered object has as ``dialect``.

    Raises:
        UserError: there is no such backend, it cannot be imported, or it has none.
    """
    if libtype == OURS.libtype:
        return OURS
    found = [entry for entry in entry_points(group="tunedgemm.backends") if entry.name == libtype]
    if not found:
        raise UserError(f"no backend {libtype!r} is installed; its package has an entry point of that name in the group tunedgemm.backends")
    try:
        dialect = getattr(found[0].load(), "dialect", None)
    except Exception as error:  # a plugin's import may raise anything
        raise UserError(f"backend {libtype!r} ({found[0].value}) cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(dialect, Dialect):
        raise UserError(f"backend {libtype!r} has no JSON files: its object has no `dialect` (tunedgemm_triton.author.TunedKernel has one)")
    return dialect
