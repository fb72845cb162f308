"""What to tune next: the layers whose calls stand for the longest time without a row of their own, and which M of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.coverage.result import TUNED, Entry, layer_of
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import write_untuned
from tunedgemm.table.row import Untuned
from tunedgemm.workload.lists import list_paths

#: An M with at least this share of its layer's calls, or of what they lose, is tuned as it is; the ragged rest shares rows of rungs.
OWN_SHARE = 0.01


@attrs.frozen
class Next:
    """A layer to tune: all that is equal but M.

    Attributes:
        layer: the shape with M = 0.
        name: what multiplies so, where the captured files say it.
        listed: the shapes to tune with the calls that their rows will answer, by M.
        entries: what they answer.
        share: of the time of all calls, what these stand for: what the best known saves of it,
            where one is known, else all.
    """

    layer: Shape
    name: str
    listed: tuple[Untuned, ...] = attrs.field(validator=attrs.validators.min_len(1))
    entries: tuple[Entry, ...] = attrs.field(validator=attrs.validators.min_len(1))
    share: float = attrs.field(validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)])


def propose(entries: Sequence[Entry], most: int) -> list[Next]:
    """The layers that are worth the most, at most so many; those with a row for each M, or that nothing can run, are none.

    Raises:
        UserError: *most* is negative.
    """
    if most < 0:
        raise UserError(f"--next must be at least 0 (got {most})")
    total = sum(entry.time for entry in entries)
    layers: dict[Shape, list[Entry]] = {}
    for entry in entries:
        if entry.how not in (*TUNED, "refused") and entry.lost > 0:
            layers.setdefault(layer_of(entry.shape), []).append(entry)
    found = [_next(layer, members, total) for layer, members in layers.items()]
    return sorted((one for one in found if one is not None), key=lambda one: (-one.share, str(one.layer)))[:most]


def _next(layer: Shape, members: Sequence[Entry], total: float) -> Next | None:
    """What to tune of one layer; None where its rungs have their rows, and no M has a share of its own."""
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
    chosen = [entry for found in at.values() for entry in found]
    names = dict.fromkeys(entry.layer for entry in chosen if entry.layer)
    listed = tuple(
        Untuned(attrs.evolve(layer, m=m), sum(entry.calls for entry in at[m]), layer=next((e.layer for e in at[m] if e.layer), ""))
        for m in sorted(at)
    )
    return Next(layer, ", ".join(names), listed, tuple(chosen), min(sum(entry.lost for entry in chosen) / total, 1.0))


def rung_of(op: Op, m: int, n: int) -> int:
    """The M whose row an op asks for first where there is none of exactly *m*; *m* itself where others ask for its row, or none can."""

    def first(asked: int) -> int:
        rungs = op.ladder(asked, n)
        return next((rung for rung, word in rungs.items() if rung and word != "exact"), asked)

    if any(first(neighbour) == m for neighbour in (m - 1, m + 1) if neighbour > 0) or m == 1:
        return m
    return first(m)


def write_next(found: Sequence[Next], target: str | Path, inputs: Sequence[Path]) -> dict[str, Path]:
    """Write what is to be tuned as untuned CSVs, one for each op, and return their paths by op.

    Args:
        target: the file, or a folder, in which each op's file has AITER's name: one that is there,
            or that ends in ``/``.
        inputs: files that are not to be written over.

    Raises:
        UserError: there are shapes of several ops for one file, or a file that is something else
            would be replaced.
    """
    by_op: dict[str, list[Untuned]] = {}
    for one in found:
        by_op.setdefault(one.layer.op, []).extend(one.listed)
    paths = list_paths(by_op, str(target))
    for path in paths.values():
        if any(path.resolve() == other.resolve() for other in inputs):
            raise UserError(f"{path}: is one of the files with the captured calls; name another one with -o")
    for op, path in paths.items():
        write_untuned(path, op_named(op), by_op[op])
    return paths
