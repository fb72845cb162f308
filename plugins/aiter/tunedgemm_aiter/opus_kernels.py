"""Read the numbers of opus's kernels from AITER's list, a file of plain Python."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tunedgemm_aiter.installed import find

_FILE = "csrc/opus_gemm/opus_gemm_common.py"
_MODULE = "tunedgemm_aiter._opus_gemm_common"


def number(name: str) -> int | None:
    """Return AITER's number of a kernel, ``solidx`` of its tables; None where it has no such kernel."""
    return next((number for number, kernel in kernels().items() if kernel.name == name), None)


def kernels() -> Mapping[int, Any]:
    """Return the kernels of the installed AITER by number; none where it has no such list."""
    return getattr(_module(), "kernels_list", {})


def compiled(gfx: str) -> frozenset[int]:
    """Return the numbers of the kernels that each build of AITER has on an architecture."""
    return frozenset(getattr(_module(), "HEURISTIC_DEFAULT_KIDS_BY_ARCH", {}).get(gfx, ()))


def _module() -> ModuleType | None:
    found = find()
    path = found.path(_FILE) if found is not None else None
    return _load(path, path.stat().st_mtime_ns) if path is not None and path.is_file() else None


@functools.lru_cache(maxsize=2)
def _load(path: Path, changed: int) -> ModuleType | None:
    """Execute AITER's list; None where that fails. *changed* makes an upgraded file another entry."""
    del changed
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        return None
    module = sys.modules[_MODULE] = importlib.util.module_from_spec(spec)  # its dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except Exception:  # another version's file may need anything
        return None
    return module
