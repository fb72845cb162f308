"""Propose shapes to tune next: layers with the most time without exact rows, and their M."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.coverage.result import TUNED, Entry, layer_of
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import Untuned, write_untuned
from tunedgemm.tuner.report import sizes
from tunedgemm.workload.lists import list_paths

#: Fraction of a layer's calls or lost time from which an M gets an exact row; others share padded
#: rows.
OWN_SHARE = 0.01


@attrs.frozen
class Next:
    """A layer to tune, which is all of a shape but M.

    Attributes:
        layer: the shape with M = 0.
        name: the layer's name, if the captured files have it.
        listed: the shapes to tune, by M, with the calls that their rows will serve.
        entries: the entries that they will serve.
        share: the share of all calls' time that tuning may save: down to the best known time if it
            is known, else all of it.
    """

    layer: Shape
    name: str
    listed: tuple[Untuned, ...] = attrs.field(validator=attrs.validators.min_len(1))
    entries: tuple[Entry, ...] = attrs.field(validator=attrs.validators.min_len(1))
    share: float = attrs.field(validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)])

    @property
    def title(self) -> str:
        """Return op, sizes and name of the layer."""
        return f"{self.layer.op} {sizes(self.layer).replace('M=0 ', '', 1)}" + (f" ({self.name})" if self.name else "")

    def rows(self, most: int | None) -> str:
        """Return the M to tune as text; of more than *most*, the number of the others."""
        values = [str(listed.shape.m) for listed in self.listed]
        more = f" and {len(values) - most} more" if most is not None and len(values) > most else ""
        return " ".join(values[:most]) + more


def propose(entries: Sequence[Entry], most: int) -> list[Next]:
    """Return the *most* layers with the most to gain, without those fully tuned or refused.

    Raises:
        UserError: *most* is negative.
    """
    if most < 0:
        raise UserError(f"--next: must be at least 0 (got {most})")
    total = sum(entry.time for entry in entries)
    layers: dict[Shape, list[Entry]] = {}
    for entry in entries:
        if entry.how not in (*TUNED, "refused") and entry.lost > 0:
            layers.setdefault(layer_of(entry.shape), []).append(entry)
    proposals = [_next(layer, members, total) for layer, members in layers.items()]
    worthwhile = [proposal for proposal in proposals if proposal is not None]
    return sorted(worthwhile, key=lambda proposal: (-proposal.share, str(proposal.layer)))[:most]


def _next(layer: Shape, members: Sequence[Entry], total: float) -> Next | None:
    """Return the shapes to tune of one layer; None if its padded rows exist and no M needs an exact one."""
    op, lost, calls = op_named(layer.op), sum(entry.lost for entry in members), sum(entry.calls for entry in members)
    at: dict[int, list[Entry]] = {}
    for entry in members:
        m = entry.shape.m
        own = entry.lost >= OWN_SHARE * lost or entry.calls >= OWN_SHARE * calls
        target = m if own else rung_of(op, m, layer.n)
        if target == m or target != entry.row_m or entry.how == "other device":
            at.setdefault(target, []).append(entry)
    if not at:
        return None
    chosen = [entry for entries in at.values() for entry in entries]
    names = dict.fromkeys(entry.layer for entry in chosen if entry.layer)
    listed = tuple(
        Untuned(attrs.evolve(layer, m=m), sum(entry.calls for entry in at[m]), layer=next((e.layer for e in at[m] if e.layer), ""))
        for m in sorted(at)
    )
    return Next(layer, ", ".join(names), listed, tuple(chosen), min(sum(entry.lost for entry in chosen) / total, 1.0))


def rung_of(op: Op, m: int, n: int) -> int:
    """Return the padded M that an op looks up first without a row of *m*.

    It is *m* itself if other M are padded to it, or if it has no padded M.
    """

    def first(exact_m: int) -> int:
        rungs = op.padded_m(exact_m, n)
        return next((rung for rung, word in rungs.items() if rung and word != "exact"), exact_m)

    if any(first(neighbour) == m for neighbour in (m - 1, m + 1) if neighbour > 0) or m == 1:
        return m
    return first(m)


def write_next(proposals: Sequence[Next], target: str | Path, inputs: Sequence[Path]) -> dict[str, Path]:
    """Write the proposals as untuned CSVs, one for each op, and return their paths by op.

    Args:
        target: the file, or a folder (existing, or ending in ``/``) for files with AITER's names.
        inputs: files that must not be overwritten.

    Raises:
        UserError: one file would get several ops, or a file with other contents would be replaced.
    """
    by_op: dict[str, list[Untuned]] = {}
    for proposal in proposals:
        by_op.setdefault(proposal.layer.op, []).extend(proposal.listed)
    paths = list_paths(by_op, str(target))
    for path in paths.values():
        if os.path.realpath(path) in map(os.path.realpath, inputs):
            raise UserError(f"{path}: is one of the files with the captured calls; name another file with -o")
    for op, path in paths.items():
        write_untuned(path, op_named(op), by_op[op])
    return paths
