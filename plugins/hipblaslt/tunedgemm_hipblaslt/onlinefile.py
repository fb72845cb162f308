"""AITER's ``hip_online_tuning_res.csv``: what its online tuning chose, read where HIP_ONLINE_TUNING is on.

Its 20 columns (``gradlib/csrc/hipbsolgemm.cu``) name an algorithm by its number and hold no version of the library, and numbers
differ between versions. So a row counts only with a 21st column ``libver`` that equals the present library's version, as the
column of that name in our own tables; the others are counted and left alone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tunedgemm.tools import home_folder

from tunedgemm_hipblaslt.problem import Problem

FILE = "hip_online_tuning_res.csv"
_SWITCH = "HIP_ONLINE_TUNING"
#: The columns that say what is multiplied, in AITER's order; the number of the algorithm and its name follow.
_KEY_COLUMNS = 18
_COLUMNS = 20

_log = logging.getLogger("tunedgemm")

#: AITER's words for dtypes.
_DTYPES = MappingProxyType({"fp32": "f32_r", "fp16": "f16_r", "bf16": "bf16_r", "fp8_e4m3fnuz": "f8_e4m3_fnuz_r"})


def key_of(problem: Problem) -> tuple[str, ...] | None:
    """A problem in AITER's columns; None for one that its online tuning does not know."""
    matrices = (problem.a, problem.b, problem.d)
    if problem.batch > 1 or problem.compute != "32f" or any(matrix.dtype not in _DTYPES for matrix in matrices):
        return None
    (m, n, k), shuffled, by_row = problem.sizes, problem.a.order != "col", problem.a_scale == "row"
    a, b, c = ((_DTYPES[matrix.dtype], str(matrix.ld), "0") for matrix in matrices)
    return (str(shuffled).lower(), str(by_row).lower(), "T", "N", str(m), str(n), str(k), *a, *b, *c, "f32_r", "1")


def switched_on() -> bool:
    """Whether AITER would read the file."""
    return os.environ.get(_SWITCH, "").lower() in ("1", "true")


def named_for(problem: Problem, libver: str) -> int | None:
    """The number of the algorithm that a file in the working or the user folder names for a problem and a version of the library."""
    key = key_of(problem)
    if key is None:
        return None
    found = (read(folder / FILE).get((libver, key)) for folder in (Path.cwd(), home_folder()))
    return next((number for number in found if number is not None), None)


@functools.lru_cache(maxsize=8)
def read(path: Path) -> Mapping[tuple[str, tuple[str, ...]], int]:
    """(version of the library, key) -> number of the algorithm, from a file that need not exist; read once.

    Lines that are cut off or hold something else are left out, as are those without a version; of several the first wins, as in AITER.
    """
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    unversioned = 0
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]  # as AITER does: no cell is quoted
        if line.startswith("#") or len(cells) < _COLUMNS or not cells[_KEY_COLUMNS].isdecimal():
            continue  # the header, too
        if len(cells) == _COLUMNS or not cells[_COLUMNS]:
            unversioned += 1
            continue
        found.setdefault((cells[_COLUMNS], tuple(cells[:_KEY_COLUMNS])), int(cells[_KEY_COLUMNS]))
    if unversioned:
        _log.warning(
            "%s: %d rows name an algorithm by its number without a version of hipBLASLt and are not used; tune those shapes instead",
            path, unversioned,
        )  # fmt: skip
    return found
