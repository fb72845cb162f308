"""Read AITER's ``hip_online_tuning_res.csv`` where HIP_ONLINE_TUNING is on.

Its 20 columns (``gradlib/csrc/hipbsolgemm.cu``) hold an algorithm's index, the name of its kernel
and no library version. Indices differ between versions, so the present library must have an
algorithm of that name. A 21st column ``libver`` that equals the library's version, as in our
tables, is enough alone. Rows with neither are counted and ignored.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
from tunedgemm.tools.files import SignatureError, check_signature, home_folder, read_regular
from tunedgemm.tools.launching import switched_on

from tunedgemm_hipblaslt.limits import Problem
from tunedgemm_hipblaslt.names import is_library_name

FILE = "hip_online_tuning_res.csv"
_SWITCH = "HIP_ONLINE_TUNING"
#: Key columns in AITER's order. The algorithm's index and the kernel's name follow.
_KEY_COLUMNS = 18
_COLUMNS = 20
_INDEX = re.compile(r"[0-9]{1,9}")

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


def is_switched_on() -> bool:
    """Return whether HIP_ONLINE_TUNING is on, with which AITER reads the file."""
    return switched_on(_SWITCH)


@attrs.frozen
class OnlineRow:
    """A row of the file.

    Attributes:
        index: the algorithm's index.
        kernel_name: hipBLASLt's name of its kernel; "" for a text that is none.
        libver: version of the library; "" in AITER's rows.
        source: file and line.
    """

    index: int
    kernel_name: str
    libver: str
    source: str


def find_row(problem: Problem, libver: str) -> OnlineRow | None:
    """Return the first row for a problem that has this library version, or none and a name.

    The file in the working folder comes first, the file in the user folder next.
    """
    key = make_key(problem)
    rows = [row for folder in (Path.cwd(), home_folder()) for row in read(folder / FILE).get(key, ())] if key else []
    return next((row for row in rows if row.libver == libver or (row.kernel_name and not row.libver)), None)


@functools.lru_cache(maxsize=8)
def read(path: Path) -> Mapping[tuple[str, ...], list[OnlineRow]]:
    """Read a file once: key -> rows in order; empty where the file does not exist.

    Malformed lines, and lines with neither a version nor a name, are skipped. The first of equal
    keys wins, as in AITER.
    """
    rows: dict[tuple[str, ...], list[OnlineRow]] = {}
    nameless = 0
    try:
        content = read_regular(path)
        check_signature(path, content)
    except SignatureError as error:
        _log.warning("%s", error)
        return rows
    except OSError:
        return rows
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]  # as in AITER, no cell is quoted
        if line.startswith("#") or len(cells) < _COLUMNS or not _INDEX.fullmatch(cells[_KEY_COLUMNS]):
            continue  # includes the header
        name = cells[_COLUMNS - 1] if is_library_name(cells[_COLUMNS - 1]) else ""
        libver = cells[_COLUMNS] if len(cells) > _COLUMNS else ""
        if name or libver:
            rows.setdefault(tuple(cells[:_KEY_COLUMNS]), []).append(OnlineRow(int(cells[_KEY_COLUMNS]), name, libver, f"{path}:{number}"))
        else:
            nameless += 1
    if nameless:
        _log.warning(
            "%s: rows with no hipBLASLt version and no kernel name are ignored (got %d); tune those shapes instead", path, nameless
        )
    return rows
