"""``tunedgemm triton check``: what of JSON files is wrong, dead, or without effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, Shape, UserError
from tunedgemm.tools import op_named, shape_of_texts

from tunedgemm_triton import buckets, jsonfile
from tunedgemm_triton.dialect import Dialect
from tunedgemm_triton.jsonfile import Name
from tunedgemm_triton.limits import ARCHITECTURES, SHUFFLED
from tunedgemm_triton.parameters import Entry

#: Compute units of a device that is only described: enough for any choice of a grid.
_UNITS = 120


@attrs.frozen
class Finding:
    """One thing about a file.

    Attributes:
        path: the file.
        text: what it is, with the bucket where it is of one.
        wrong: whether it has to be mended; else it is only worth knowing.
    """

    path: Path
    text: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {'' if self.wrong else 'note: '}{self.text}"


def check(path: Path, dialects: Sequence[Dialect]) -> list[Finding]:
    """All that is to be said of one file; nothing where all of it is used as it stands."""
    return list(_findings(path, dialects))


def _findings(path: Path, dialects: Sequence[Dialect]) -> Iterator[Finding]:
    name = jsonfile.name_of(path)
    if name is None:
        theirs = path.with_name(jsonfile.DEFAULT).is_file()
        told = "is never read: names are as gfx942-GEMM-A8W8-N=2112-K=7168.json, without -N=…-K=… for all other weights"
        yield Finding(path, "is never read here: this is one of AITER's own, for other kernels" if theirs else told, wrong=not theirs)
        return
    dialect = next((dialect for dialect in dialects if name.tag in dialect.tags), None)
    if dialect is None:
        yield Finding(path, f"is never read here: there is no kernel {name.tag}; this is one of AITER's own", wrong=False)
        return
    try:
        entries = jsonfile.read(path)
    except UserError as error:
        yield Finding(path, str(error).removeprefix(f"{path}: "))
        return
    yield from _keys(path, name, entries)
    letters = [letter for letter, _ in name.sizes]
    if letters not in ([], ["N", "K"], ["B", "N", "K"], ["E", "N", "K"]):
        yield Finding(path, f"is never read: sizes in a name are N and K, with B or E before them, not {', '.join(letters)}", wrong=False)
    if name.gfx not in ARCHITECTURES and not name.gfx.startswith("cpu-"):
        yield Finding(path, f"no kernel is compiled for {name.gfx}; known: {', '.join(ARCHITECTURES)}", wrong=False)
    notes: dict[str, list[str]] = {}
    for key, entry in entries.items():
        try:
            for note in _unused(name, (key, entry), dialect):
                notes.setdefault(note, []).append(key)
        except UserError as error:
            yield Finding(path, f"{key}: {error}")
    for note, keys in notes.items():
        yield Finding(path, f"{note} ({', '.join(keys)})", wrong=False)


def _keys(path: Path, name: Name, entries: Iterable[str]) -> Iterator[Finding]:
    keys = list(entries)
    bounds = buckets.bounds_of(name.tag)
    for key, reason in buckets.dead_keys(keys, bounds).items():
        yield Finding(path, f"{key!r} {reason}")
    unanswered = [m for m in (1, *bounds, 2 * bounds[-1]) if buckets.find(keys, m, bounds) is None]
    if unanswered:
        yield Finding(path, f"no bucket answers for M={', '.join(map(str, unanswered))}: 'any' is missing", wrong=False)


def _unused(name: Name, bucket: tuple[str, Entry], dialect: Dialect) -> tuple[str, ...]:
    """What of one entry has no effect: by itself, and on its weight and architecture where they are known.

    Raises:
        UserError: something is wrong with it, or no kernel can serve it there.
    """
    key, entry = bucket
    unused = dialect.unused_of(entry, dialect.tags[name.tag])
    shape, device = _shape(name, key, dialect), Device(name.gfx, _UNITS)
    if shape is None or not dialect.supports(shape, device):
        return unused
    solution, notes = dialect.solution_of(entry, shape, device)
    if solution is None:
        raise UserError(f"serves no M={shape.m} on {name.gfx}: {notes[-1] if notes else 'no kernel'}")
    hardly = () if dialect.fits(solution, shape, device) else (f"{solution} hardly fits: its shared memory, registers, or work for all",)
    return tuple(dict.fromkeys([*unused, *notes, *hardly]))


def _shape(name: Name, key: str, dialect: Dialect) -> Shape | None:
    """A shape that the entry may be asked about; None where the name does not tell enough of it."""
    op = op_named(dialect.tags[name.tag])
    sizes = dict(name.sizes) or {"N": 4096, "K": 4096}
    if not {"N", "K"} <= {*sizes} or not {"M", "N", "K"} <= {*op.columns.key}:
        return None
    said = {"M": str(buckets.rows_of(key)), "N": str(sizes["N"]), "K": str(sizes["K"])}
    said |= {"B": str(sizes.get("B", 16))} if "B" in op.columns.key else {}
    own, fp8 = op.columns.own, ARCHITECTURES[name.gfx].fp8 if name.gfx in ARCHITECTURES else ""
    said |= {"dtype": fp8} if fp8 and "dtype" in own and "blockscale" in op.name else {}
    said |= {"q_dtype_w": fp8} if fp8 and "q_dtype_w" in op.columns.key else {}
    said |= {"layout": SHUFFLED[0]} if name.tag.endswith("_PRESHUFFLED") and "layout" in own else {}
    try:
        return shape_of_texts(op, (), said)
    except UserError:
        return None
