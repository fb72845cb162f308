"""Choose the solution of an untuned call, and of ``auto``: the choice of a JSON file.

Files are read again for each new shape; ``tunedgemm.reload()`` makes every shape new.
"""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, UserError
from tunedgemm.tools.launching import may_guess, stand_ins, warn_once

from tunedgemm_triton.jsonfiles import buckets, files
from tunedgemm_triton.jsonfiles.dialect import OURS, Dialect, sizes_of

#: Names that stand for the choice: AITER's, of which the last two are its dialects, and none.
ALIASES = ("", "auto", "triton", "gluon")

_MI = 1 << 20
#: Op -> untuned calls of one row on Hopper that get the first listed kernel: elements of the
#: weight, least N and K. Over torch's best call, on an H100 (26 November 2026) and an H200. bf16:
#: 1.04 to 1.48 for 30 weights, H200 1.01 to 1.40 for 22. A K of 1024 lost 20 %. fp8 by row: 1.14 to
#: 2.2 for 12 weights from 16 Mi elements on, H200 1.46 to 7.7 for 10 of every size. fp8 by block,
#: every order of scales: 1.9 to 5.9 for 13 weights below 14 Mi. A kernel takes seconds to compile,
#: so asm serves larger ones, at 0.97 of the speed. Two rows in bf16: 1.01 to 1.23 on an H200 with
#: Triton 3.6 for 16 weights, 0.94 and 0.97 with 3.8 for two.
_FASTER = {
    "a16w16": (range(10 * _MI, 1 << 62), 2048, 2048),
    "a8w8": (range(_MI, 1 << 62), 64, 2048),
    "a8w8_blockscale": (range(_MI // 2, 14 * _MI), 64, 512),
}
#: Op -> dtype and kind of scales of such calls; the output has 16 bits.
_KINDS = {"a8w8": ("fp8_e4m3fn", "row"), "a8w8_blockscale": ("fp8_e4m3fn", "block")}

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
    """Check whether such products are expected to be faster than torch's without tuning."""
    if device.gfx != "sm_90" or not may_guess(device) or shape.layout != "row" or shape.outdtype not in ("bf16", "fp16"):
        return False
    if (shape.dtype, shape.scale) != _KINDS.get(shape.op, (shape.outdtype, "none")):
        return False
    weight, least_n, least_k = _FASTER.get(shape.op, (range(0), 0, 0))
    sizes = [shape.n, *(other.n for other, _ in stand_ins(shape, device))]
    return shape.m == 1 and shape.k >= least_k and all(n * shape.k in weight and n >= least_n for n in sizes)


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
