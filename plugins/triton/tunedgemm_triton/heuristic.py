"""Choose the solution of an untuned call, and of ``auto``: the choice of a JSON file.

Files are read again for each new shape; ``tunedgemm.reload()`` makes every shape new.
"""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, UserError
from tunedgemm.tools.launching import may_guess, warn_once

from tunedgemm_triton.jsonfiles import buckets, files
from tunedgemm_triton.jsonfiles.dialect import OURS, Dialect, sizes_of

#: Names that stand for the choice: AITER's, of which the last two are its dialects, and none.
ALIASES = ("", "auto", "triton", "gluon")

#: Untuned calls on Hopper that get the first listed kernel, by op: most rows, fewest elements of
#: the weight; and least N and K. Over F.linear in bf16 (26 November 2026), one row: 1.04 to 1.48
#: for 30 weights on an H100, 1.01 to 1.40 for 22 on an H200. Two rows: 1.02 to 1.35 for 18, 1.01
#: to 1.23 for 16. A K of 1024 lost 20 %. fp8 by row on that H100: 1.14 to 2.16 for 12 weights of
#: 17 to 262 million elements.
_FEW_ROWS, _LEAST = {"a16w16": (2, 10 << 20), "a8w8": (1, 16 << 20)}, 2048

_log = logging.getLogger("tunedgemm")


@attrs.frozen
class Choice:
    """Choice of a JSON file for a shape: the solution, None where the entry cannot serve, and its
    source.
    """

    solution: Solution | None
    path: Path
    key: str
    notes: tuple[str, ...] = ()


def heuristic_fallback(shape: Shape, device: Device) -> Solution | None:
    """Return the choice of a JSON file, else the first listed kernel where such were measured to be
    faster than torch, else None.
    """
    chosen = solution_from_file(OURS, shape, device)
    if chosen is not None or not _faster_untuned(shape, device):
        return chosen
    return next(iter(OURS.listed(shape, device)), None)


def _faster_untuned(shape: Shape, device: Device) -> bool:
    """Check whether such products were measured to be faster than torch's without tuning."""
    rows, weight = _FEW_ROWS.get(shape.op, (0, 0))
    if device.gfx != "sm_90" or not may_guess(device) or not 0 < shape.m <= rows or shape.layout != "row":
        return False
    if min(shape.n, shape.k) < _LEAST or shape.n * shape.k < weight:
        return False
    if shape.op == "a8w8":
        return (shape.dtype, shape.scale) == ("fp8_e4m3fn", "row") and shape.outdtype in ("bf16", "fp16")
    return shape.scale == "none" and shape.dtype == shape.outdtype in ("bf16", "fp16")


def resolve(solution: Solution, shape: Shape, device: Device) -> Solution:
    """Return the solution itself; for AITER's alias ``auto``, or no name, the choice of a JSON file
    or the first listed solution.

    Raises:
        PluginError: no kernel is listed for the shape.
    """
    if solution.kernel_name not in ALIASES:
        return solution
    first = solution_from_file(OURS, shape, device) or next(iter(OURS.listed(shape, device)), None)
    if first is None:
        raise PluginError(f"triton: no kernel for {shape} on {device}")
    return first


def source_of(solution: Solution, shape: Shape, device: Device) -> str:
    """Return the file and the bucket that choose the kernel of an alias; "" for other names.

    Without a file it is the first listed solution.
    """
    if solution.kernel_name not in ALIASES:
        return ""
    if first := solution_from_file(OURS, shape, device):
        choice = choice_of(OURS, shape, device)
        return f"{choice.path}: {choice.key}: {first}" if choice else ""
    try:
        return f"no JSON file has a bucket for it; the first listed: {resolve(solution, shape, device)}"
    except PluginError:
        return ""


def solution_from_file(dialect: Dialect, shape: Shape, device: Device) -> Solution | None:
    """Return the solution of a backend's file, or None; warn once of a file that cannot be used."""
    try:
        choice = choice_of(dialect, shape, device)
    except UserError as error:
        warn_once(f"{error}; the file is not used; run `tunedgemm triton check`")
        return None
    for note in choice.notes if choice else ():
        _log.info("%s: %s: %s", choice.path, choice.key, note)
    return choice.solution if choice else None


def choice_of(dialect: Dialect, shape: Shape, device: Device) -> Choice | None:
    """Return the choice of the file for a shape's weight; None without a file for the architecture
    or a bucket for M.

    Raises:
        UserError: the file or its entry cannot be used.
    """
    if shape.op not in dialect.ops or not shape.m:
        return None
    tag = dialect.tag_of(shape)
    path = files.find(device.gfx, tag, sizes_of(shape))
    if path is None:
        return None
    entries = files.read(path, serving=True)
    key = buckets.find(entries, shape.m, buckets.bounds_of(tag))
    if key is None:
        return None
    try:
        solution, notes = dialect.solution_of(entries[key], shape, device)
    except UserError as error:
        raise UserError(f"{path}: {key}: {error}") from None
    return Choice(solution, path, key, notes)
