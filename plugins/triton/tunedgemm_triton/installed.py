"""Say which Triton is installed, without importing it.

Torch's builds for GPUs require theirs, under one of three names, so this package requires none.
"""

from __future__ import annotations

import contextlib
import functools
import re
from importlib import metadata
from importlib.util import find_spec

#: Triton's distributions: its own, and those of torch for ROCm.
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm")
OLDEST = (3, 6)
#: Architectures and the first Triton that compiles for them, of 3.6, 3.8 and 3.9: whose ptxas knows
#: sm_107 or sm_110, or which emits the matrix instructions of gfx1250.
_SINCE = {"sm_107": (3, 9), "sm_110": (3, 8), "gfx1250": (3, 8)}


@functools.cache
def version() -> str:
    """Return Triton's version, "" where no distribution says it."""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@functools.cache
def fault() -> str:
    """Return why no kernel can be compiled, or an empty text."""
    if find_spec("triton") is None:
        return "triton: not installed; install a torch for GPUs, which brings it, or pip install triton"
    if _is_before(OLDEST):
        return f"triton: must be {'.'.join(map(str, OLDEST))} or later (got {version()}); torch 2.10 and later bring it"
    return ""


def target_fault(gfx: str) -> str:
    """Return why the installed Triton cannot compile for an architecture, or an empty text."""
    if since(gfx) == OLDEST or not _is_before(since(gfx)):
        return ""
    return f"triton: must be {'.'.join(map(str, since(gfx)))} or later for {gfx} (got {version()}); a newer torch brings it"


def since(gfx: str) -> tuple[int, int]:
    """Return the first Triton that compiles for an architecture."""
    return _SINCE.get(gfx, OLDEST)


def _is_before(release: tuple[int, int]) -> bool:
    return version() != "" and tuple(map(int, re.findall(r"\d+", version())[:2])) < release


@functools.cache
def launcher_fault() -> str:
    """Return why no kernel with tensor descriptors can be launched, or an empty text.

    Its launcher is a C function whose arguments change with Triton's version.
    """
    if not version() or version().startswith("3.6."):
        return ""
    return f"triton: launches tensor descriptors in version 3.6 only (got {version()}); torch 2.10 and 2.11 bring it"
