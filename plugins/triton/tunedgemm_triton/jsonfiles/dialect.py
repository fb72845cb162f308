"""Describe how JSON files name a backend's solutions: ours, and those made with `author`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape, Solution, UserError

from tunedgemm_triton import families
from tunedgemm_triton.families import family_of
from tunedgemm_triton.jsonfiles import entries
from tunedgemm_triton.jsonfiles.entries import Entry
from tunedgemm_triton.jsonfiles.files import Sizes
from tunedgemm_triton.moe.names import OP as MOE_OP
from tunedgemm_triton.names import LIBTYPE
from tunedgemm_triton.packed.names import OPS as MX_OPS

#: Op -> tag, the kernel's name in the names of its files, as in AITER's.
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
#: Kind of quantisation of fmoe -> tag.
_MOE = {
    "No": "GEMM-FMOE_A16W16",
    "per_Tensor": "GEMM-FMOE_A8W8",
    "per_Token": "GEMM-FMOE_A8W8",
    "per_1x128": "GEMM-FMOE_A8W8_BLOCKSCALE",
    "per_1x32": "GEMM-FMOE_AFP4WFP4",
}
_SHUFFLED = "_PRESHUFFLED"
#: Ops of plain and of shuffled weights.
_ANY_LAYOUT = ("a16w16", *MX_OPS)


@attrs.frozen(eq=False)
class Dialect:
    """Functions of a backend that tuning into JSON files calls.

    Attributes:
        libtype: the backend's name.
        ops: the ops that it covers.
        tags: tag of a file, such as ``GEMM-A8W8`` -> op.
        tag_of: shape -> the tag of its files.
        entry_of: (solution, shape, gfx) -> the entry of the solution.
        unused_of: (entry, op) -> parameters without effect; raises UserError for a wrong entry.
        solution_of: (entry, shape, device) -> the solution and notes on unused parameters; or None
            and why.
        fits: (solution, shape, device) -> whether the solution is worth compiling.
        unsupported: (shape, device) -> why the static limits exclude the shape, or None.
        listed: (shape, device) -> the backend's own list of solutions, best guesses first.
    """

    libtype: str
    ops: tuple[str, ...]
    tags: Mapping[str, str]
    tag_of: Callable[[Shape], str]
    entry_of: Callable[[Solution, Shape, str], dict[str, Any]]
    unused_of: Callable[[Entry, str], tuple[str, ...]]
    solution_of: Callable[[Entry, Shape, Device], tuple[Solution | None, tuple[str, ...]]]
    fits: Callable[[Solution, Shape, Device], bool]
    unsupported: Callable[[Shape, Device], str | None]
    listed: Callable[[Shape, Device], Any]


def tag_of(shape: Shape) -> str:
    """Return the tag of a shape, as in AITER's files."""
    if shape.op == MOE_OP:
        return _MOE[str(shape["q_type"])]
    own = TAGS[shape.op]
    return own + _SHUFFLED if shape.layout != "row" and shape.op in _ANY_LAYOUT else own


def sizes_of(shape: Shape) -> Sizes:
    """Return the sizes in the name of a weight's file."""
    extra = dict(shape.extra)
    leading = [("B", int(extra["B"]))] if "B" in extra else [("E", int(extra["expert"]))] if "expert" in extra else []
    return (*leading, ("N", shape.n), ("K", shape.k))


def _fits(solution: Solution, shape: Shape, device: Device) -> bool:
    family = family_of(shape.op)
    return family.fits(family.parse_name(solution.kernel_name), max(solution.split_k, 1), shape, device)


#: Dialect of the backend ``triton``.
OURS = Dialect(
    libtype=LIBTYPE,
    ops=(*TAGS, MOE_OP),
    tags={
        **{tag: op for op, tag in TAGS.items()},
        **{TAGS[op] + _SHUFFLED: op for op in _ANY_LAYOUT},
        **dict.fromkeys(_MOE.values(), MOE_OP),
    },
    tag_of=tag_of,
    entry_of=entries.entry_of,
    unused_of=lambda entry, op: entries.parse_entry(entry, op).unused,
    solution_of=entries.solution_of,
    fits=_fits,
    unsupported=families.unsupported,
    listed=lambda shape, device: family_of(shape.op).enumerate_solutions(shape, device),
)


def dialect_of(libtype: str) -> Dialect:
    """Return the dialect of an installed backend, the attribute ``dialect`` of its hooks.

    Raises:
        UserError: the backend is not installed, cannot be imported, or has no dialect.
    """
    if libtype == OURS.libtype:
        return OURS
    installed = [entry for entry in entry_points(group="tunedgemm.backends") if entry.name == libtype]
    if not installed:
        raise UserError(f"backend {libtype!r} is not installed; install a package with that entry point in the group tunedgemm.backends")
    try:
        dialect = getattr(getattr(installed[0].load(), "hooks", None), "dialect", None)
    except Exception as error:  # a plugin's import may raise anything
        raise UserError(f"backend {libtype!r} ({installed[0].value}): import failed: {type(error).__name__}: {error}") from None
    if not isinstance(dialect, Dialect):
        raise UserError(
            f"backend {libtype!r} has no JSON files: its hooks need a `dialect`, as those of tunedgemm_triton.author.TunedKernel have"
        )
    return dialect
