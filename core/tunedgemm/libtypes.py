"""What the core knows of backends' names: orders and aliases, as data. No code branches on a libtype."""

from __future__ import annotations

import importlib.metadata
import re

#: Built into the core, fits every shape, ranks last.
BUILTIN = "torch"

#: Ties go to the earlier; a libtype that is not listed ranks between these and the built-in one.
RANK = ("hipblaslt", "cublaslt", "asm", "skinny", "triton", "ck", "cktile", "cutlass")

#: Who may answer an untuned call, in order; TUNEDGEMM_FALLBACK replaces the list.
UNTUNED = ("hipblaslt", "asm", "skinny", "triton")

#: Other spellings in AITER's and gradlib's files.
ALIASES = {"hipblast": "hipblaslt"}

#: Libtypes of old files that no backend has: the solution that does what they did, whatever number they give it.
#: gradlib's rocblas is what torch runs where nothing is tuned.
STAND_INS = {"rocblas": (BUILTIN, "native")}

#: What AITER's own tables may name, by op; its dispatch stops at others. Nothing for an op of which AITER has no table.
OF_AITERS_OPS = {
    "a16w16": ("asm", "flydsl", "hipblaslt", "opus", "skinny", BUILTIN, "triton"),
    "a8w8": ("ck",),
    "a8w8_bpreshuffle": ("asm", "ck", "cktile", "flydsl"),
    "a8w8_blockscale": ("ck", "cktile"),
    "a8w8_blockscale_bpreshuffle": ("asm", "ck", "cktile", "flydsl", "opus", "triton"),
    "a4w4_blockscale": ("asm", "ck"),
    "a16w4_blockscale": (),
    "batched_bf16": ("ck",),
    "batched_a8w8": ("ck",),
    "fmoe": ("asm", "ck", "flydsl"),
}

#: All of them.
AITER = tuple(sorted({libtype for libtypes in OF_AITERS_OPS.values() for libtype in libtypes}))

#: Those of them whose kernels only AITER has.
AITERS_OWN = ("flydsl", "opus")

#: Between the libtypes of a row whose stages belong to several backends.
JOINT = "+"

#: AITER's tables of ops with one C++ backend have no libtype: how the kernel's name starts tells, and "" is the rest.
KERNELS = {"_ZN5aiter": "asm", "flydsl_": "flydsl", "": "ck"}


def canonical(libtype: str) -> str:
    """The name that a libtype of a file goes by here."""
    return ALIASES.get(libtype.strip(), libtype.strip())


def stand_in(libtype: str) -> tuple[str, str] | None:
    """The libtype and the kernel's name that a libtype of an old file stands for; None for any other libtype."""
    return STAND_INS.get(libtype.strip())


def known(libtype: str) -> bool:
    """Whether AITER's tables or our own extras know a libtype, each of a joint one."""
    return all(part in AITER or part in RANK or part in owners() for part in canonical(libtype).split(JOINT))


def absent(libtype: str) -> str:
    """Why there can be no backend for a libtype, or "" for one that may be installed."""
    parts = libtype.split(JOINT)
    if len(parts) > 1:
        return f"its stages belong to {' and '.join(parts)}: no installed backend runs both"
    return "AITER's own, no plugin" if libtype in AITERS_OWN else ""


def libtype_of_kernel(kernel_name: str) -> str:
    """The libtype of a kernel in a file that does not tell."""
    return next(libtype for start, libtype in KERNELS.items() if kernel_name.startswith(start))


def rank(libtype: str) -> tuple[int, str]:
    """Sort key: the place in `RANK`, others by name after them, the built-in one last."""
    place = RANK.index(libtype) if libtype in RANK else len(RANK) + (libtype == BUILTIN)
    return place, libtype


def owners() -> dict[str, str]:
    """Libtype -> the distribution that our own extras name for it, from the installed metadata."""
    try:
        required = importlib.metadata.requires("tunedgemm") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pattern = re.compile(r"^(tunedgemm-[\w-]+).*;\s*extra\s*==\s*['\"](\w+)['\"]")
    return {found[2]: found[1] for text in required if (found := pattern.match(text))}


def pip_hint(libtype: str) -> str:
    """How to install a libtype of ours, or "" for a name that our extras do not know."""
    return f"pip install tunedgemm[{libtype}]" if libtype in owners() else ""
