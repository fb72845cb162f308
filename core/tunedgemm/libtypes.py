"""Libtypes: names, ranks and aliases of backends as data; no code branches on a libtype."""

from __future__ import annotations

import importlib.metadata
import re

#: The built-in backend, which supports every shape and ranks last.
BUILTIN = "torch"

#: Value of ``--libtype`` for all libtypes.
ALL = "all"

#: Ranks for ties, best first; unlisted libtypes come between these and the built-in one.
RANK = ("hipblaslt", "cublaslt", "asm", "skinny", "triton", "ck", "cktile", "cutlass")

#: Libtypes that may serve untuned calls, in order; TUNEDGEMM_FALLBACK overrides it.
UNTUNED = ("hipblaslt", "triton", "asm", "skinny", "ck")

#: The same in batch-invariant mode. There a backend answers for every weight that it takes, so the
#: faster one comes first.
INVARIANT = ("asm", "triton")

#: Libtypes that serve untuned calls on one kind of device -> the kind. Elsewhere they are not
#: loaded for these.
UNTUNED_KINDS = {"ck": "amd"}

#: Other spellings in AITER's and gradlib's files.
ALIASES = {"hipblast": "hipblaslt"}

#: AITER's names in ``--libtype`` for several libtypes.
GROUPS = {"both": ("ck", "cktile")}

#: Libtypes of old files without a backend -> the equivalent solution, for any solution index.
#: gradlib's rocblas is torch's default route.
STAND_INS = {"rocblas": (BUILTIN, "native")}

#: Op -> libtypes that AITER's dispatch accepts in its tables; empty if AITER has no table.
OF_AITERS_OPS = {
    "a16w16": ("asm", "flydsl", "hipblaslt", "opus", "skinny", BUILTIN, "triton"),
    "a8w8": ("ck",),
    "a8w8_bpreshuffle": ("asm", "ck", "cktile", "flydsl"),
    "a8w8_blockscale": ("ck", "cktile"),
    "a8w8_blockscale_bpreshuffle": ("asm", "ck", "cktile", "flydsl", "opus", "triton"),
    "a4w4_blockscale": ("asm", "ck"),
    "a16w4_blockscale": (),
    "a16wn": (),
    "a8w8_mxfp8": (),
    "a4w4_nvfp4": (),
    "batched_bf16": ("ck",),
    "batched_a8w8": ("ck",),
    "fmoe": ("asm", "ck", "flydsl"),
}

#: All libtypes of AITER's tables.
AITER = tuple(sorted({libtype for libtypes in OF_AITERS_OPS.values() for libtype in libtypes}))

#: Libtype of AITER's functions, which run rows whose stages belong to several backends.
AITERS_OWN = "aiter"

#: Separator of the libtypes in a row whose stages belong to several backends.
JOINT = "+"

#: Prefix of a kernel's name -> its libtype, for AITER's tables without a libtype column; "" matches
#: the rest.
KERNELS = {"_ZN5aiter": "asm", "flydsl_": "flydsl", "": "ck"}


def listed(libtypes: str) -> list[str]:
    """Return the distinct libtypes in a ``--libtype`` text; [] for all."""
    words = [word.strip() for word in libtypes.split(",") if word.strip()]
    if ALL in words:
        return []
    return list(dict.fromkeys(name for word in words for name in GROUPS.get(word, (canonical(word),))))


def canonical(libtype: str) -> str:
    """Resolve an alias of a libtype in a file."""
    return ALIASES.get(libtype.strip(), libtype.strip())


def stand_in(libtype: str) -> tuple[str, str] | None:
    """Return the libtype and kernel name that replace an old libtype; None for any other."""
    return STAND_INS.get(libtype.strip())


def is_known(libtype: str) -> bool:
    """Check whether AITER or our extras have a libtype, and each part of a joint one."""
    return all(part in AITER or part in RANK or part in owners() for part in canonical(libtype).split(JOINT))


def absent(libtype: str) -> str:
    """Return why no backend runs a joint libtype; "" for a single one."""
    parts = libtype.split(JOINT)
    if len(parts) > 1:
        hint = pip_hint(AITERS_OWN)
        return f"its stages belong to {' and '.join(parts)}: no installed backend runs both{f'; {hint}' if hint else ''}"
    return ""


def libtype_of_kernel(kernel_name: str) -> str:
    """Return the libtype of a kernel in a file without a libtype column."""
    return next(libtype for start, libtype in KERNELS.items() if kernel_name.startswith(start))


def rank(libtype: str) -> tuple[int, str]:
    """Return a sort key: the position in `RANK`, others by name after them, the built-in one last."""
    position = RANK.index(libtype) if libtype in RANK else len(RANK) + (libtype == BUILTIN)
    return position, libtype


#: Extras without a backend.
WITHOUT_BACKEND = ("ray", "report")


def owners() -> dict[str, str]:
    """Map each libtype of our extras to its distribution, by the installed metadata."""
    try:
        required = importlib.metadata.requires("tunedgemm") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pattern = re.compile(r"^(tunedgemm-[\w-]+).*;\s*extra\s*==\s*['\"](\w+)['\"]")
    return {match[2]: match[1] for text in required if (match := pattern.match(text)) and match[2] not in WITHOUT_BACKEND}


def pip_hint(libtype: str) -> str:
    """Return the command that installs a libtype of our extras; "" for others."""
    return f"pip install tunedgemm[{libtype}]" if libtype in owners() else ""
