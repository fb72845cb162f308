"""Read AITER's ``hip_online_tuning_res.csv`` where HIP_ONLINE_TUNING is on.

Its 20 columns (``gradlib/csrc/hipbsolgemm.cu``) hold an algorithm's index and no library version.
Indices differ between versions. A row counts only with a 21st column ``libver`` that equals the
present library's version, as in our tables. Other rows are counted and ignored.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tunedgemm.tools import home_folder

from tunedgemm_hipblaslt.limits import Problem

FILE = "hip_online_tuning_res.csv"
_SWITCH = "HIP_ONLINE_TUNING"
#: Key columns in AITER's order. The algorithm's index and the kernel's name follow.
_KEY_COLUMNS = 18
_COLUMNS = 20

_log = logging.getLogger("tunedgemm")

#: AITER's names of dtypes.
_DTYPES = MappingProxyType({"fp32": "f32_r", "fp16": "f16_r", "bf16": "bf16_r", "fp8_e4m3fnuz": "f8_e4m3_fnuz_r"})


def make_key(problem: Problem) -> tuple[str, ...] | None:
    """Return a problem's key in AITER's columns; None where AITER does not tune it online."""
    matrices = (problem.a, problem.b, problem.d)
    if problem.batch > 1 or problem.compute != "32f" or any(matrix.dtype not in _DTYPES for matrix in matrices):
        return None
    (m, n, k), shuffled, by_row = problem.sizes, problem.a.order != "col", problem.a_scale == "row"
    a, b, c = ((_DTYPES[matrix.dtype], str(matrix.ld), "0") for matrix in matrices)
    return (str(shuffled).lower(), str(by_row).lower(), "T", "N", str(m), str(n), str(k), *a, *b, *c, "f32_r", "1")


def switched_on() -> bool:
    """Return whether AITER would read the file."""
    return os.environ.get(_SWITCH, "").lower() in ("1", "true")


def find_index(problem: Problem, libver: str) -> int | None:
    """Return the algorithm's index for a problem and a library version.

    The file in the working folder comes first, the file in the user folder next.
    """
    key = make_key(problem)
    if key is None:
        return None
    indices = (read(folder / FILE).get((libver, key)) for folder in (Path.cwd(), home_folder()))
    return next((index for index in indices if index is not None), None)


@functools.lru_cache(maxsize=8)
def read(path: Path) -> Mapping[tuple[str, tuple[str, ...]], int]:
    """Read a file once: (library version, key) -> index; empty where the file does not exist.

    Malformed lines and lines without a version are skipped. The first of equal keys wins, as in
    AITER.
    """
    indices: dict[tuple[str, tuple[str, ...]], int] = {}
    unversioned = 0
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return indices
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]  # as in AITER, no cell is quoted
        if line.startswith("#") or len(cells) < _COLUMNS or not cells[_KEY_COLUMNS].isdecimal():
            continue  # includes the header
        if len(cells) == _COLUMNS or not cells[_COLUMNS]:
            unversioned += 1
            continue
        indices.setdefault((cells[_COLUMNS], tuple(cells[:_KEY_COLUMNS])), int(cells[_KEY_COLUMNS]))
    if unversioned:
        _log.warning("%s: rows without a hipBLASLt version are ignored (got %d); tune those shapes instead", path, unversioned)
    return indices
