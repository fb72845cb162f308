"""Say which Triton is installed, without importing it.

Torch's builds for GPUs require theirs, under one of three names, so this package requires none.
"""

from __future__ import annotations

import contextlib
import functools
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tunedgemm.tools.launching import ARCHITECTURES

#: Triton's distributions: its own, and those of torch for ROCm.
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm")
#: The oldest version that serves, and the newest whose code and launcher were checked.
_OLDEST, _NEWEST = (3, 6), (3, 9)
KNOWN = "Triton {}.{} to {}.{}".format(*_OLDEST, *_NEWEST)
#: Architectures, or uses, and the first Triton that compiles for them, of 3.6, 3.8 and 3.9: whose
#: ptxas knows sm_107 or sm_110, or which emits the matrix instructions of gfx1250 and gfx1251. For
#: gfx1154 and gfx117x 3.8 ends the process.
SINCE = {
    "sm_107": (3, 9), "sm_110": (3, 8), "gfx1250": (3, 8), "gfx1251": (3, 8),
    **dict.fromkeys(("gfx1154", "gfx1170", "gfx1171", "gfx1172"), (3, 9)),
    "tcgen05 by specialised warps": (3, 8), "tcgen05 by gated mxfp4": (3, 8),
}  # fmt: skip
#: The first Triton that raises an error for an unknown architecture of AMD, where others end the
#: process.
_RAISES = (3, 9)


@functools.cache
def version() -> str:
    """Return Triton's version, "" where no distribution says it."""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def target_fault(gfx: str, use: str = "") -> str:
    """Return why the installed Triton cannot compile for an architecture, or for a use of it, or an
    empty text.
    """
    is_unknown = gfx.startswith("gfx") and ARCHITECTURES.stand_ins(gfx) != (gfx,)
    needed = SINCE.get(use or gfx, _RAISES if is_unknown else (0, 0))
    if not version() or _numbers() >= needed:
        return ""
    return f"triton: must be {'.'.join(map(str, needed))} or later for {use or gfx} (got {version()}); a newer torch brings it"


@functools.cache
def fault() -> str:
    """Return why no kernel can be compiled, or an empty text."""
    if find_spec("triton") is None:
        return "triton: not installed; install a torch for GPUs, which brings it, or pip install triton"
    if version() and _numbers() < _OLDEST:
        return f"triton: must be {'.'.join(map(str, _OLDEST))} or later (got {version()}); torch 2.10 and later bring it"
    return ""


@functools.cache
def notice() -> str:
    """Return what is not known of a version that serves, or an empty text."""
    if version() and _numbers() > _NEWEST:
        return f"triton {version()}: its code was not checked, that of {KNOWN} was; `tunedgemm tune` checks the kernels that it times"
    return ""


def _numbers() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version())[:2]))


@functools.cache
def descriptor_fault() -> str:
    """Return why no kernel can be given tensor descriptors, or an empty text."""
    found = find_spec("triton")
    folders = found.submodule_search_locations if found else None
    if folders and not any(Path(folder, "tools", "tensor_descriptor.py").is_file() for folder in folders):
        return f"triton: has no tensor descriptors (got {version()}); {KNOWN} have"
    return ""
