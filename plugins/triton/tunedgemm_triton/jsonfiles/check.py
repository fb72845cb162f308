"""Implement ``tunedgemm triton check``: find wrong, unread and ineffective parts of JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
from tunedgemm.plugin import Device, Shape, UserError
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm.tools.tables import op_named, shape_of_texts

from tunedgemm_triton.jsonfiles import buckets, files
from tunedgemm_triton.jsonfiles.dialect import Dialect
from tunedgemm_triton.jsonfiles.entries import Entry
from tunedgemm_triton.jsonfiles.files import Name
from tunedgemm_triton.limits import MATRIX, SHUFFLED

#: Compute units of a device that is only described; no check depends on the number.
_UNITS = 120


#: Most characters of a finding: a key of a file may have any length.
_LONGEST = 1000


@attrs.frozen
class Finding:
    """Fault or note on a file.

    Attributes:
        path: the file.
        text: the finding, with its bucket.
        wrong: True for a fault, False for a note.
    """

    path: Path
    text: str = attrs.field(converter=lambda text: text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
    wrong: bool = True

    def __str__(self) -> str:
        line = f"{self.path}: {'' if self.wrong else 'note: '}{self.text}"
        return line.replace("\n", "\\n")  # of a key: it must not look like another finding


def check(path: Path, dialects: Sequence[Dialect]) -> list[Finding]:
    """Return the findings on one file, none where all of it is used."""
    return list(_findings(path, dialects))


def _findings(path: Path, dialects: Sequence[Dialect]) -> Iterator[Finding]:
    name = files.name_of(path)
    if name is None:
        is_aiter = path.with_name(files.DEFAULT).is_file()
        text = "is never read; name it as gfx942-GEMM-A8W8-N=2112-K=7168.json, or without -N=…-K=… for all other weights"
        yield Finding(path, "is never read here: a file of AITER for other kernels" if is_aiter else text, wrong=not is_aiter)
        return
    dialect = next((dialect for dialect in dialects if name.tag in dialect.tags), None)
    if dialect is None:
        yield Finding(path, f"is never read here: unknown kernel {name.tag}, one of AITER's", wrong=False)
        return
    try:
        entries = files.read(path)
    except UserError as error:
        yield Finding(path, str(error).removeprefix(f"{path}: "))
        return
    yield from _keys(path, name, entries)
    letters = [letter for letter, _ in name.sizes]
    if letters not in ([], ["N", "K"], ["B", "N", "K"], ["E", "N", "K"]):
        yield Finding(path, f"is never read: sizes in a name must be N and K, after B or E if any (got {', '.join(letters)})", wrong=False)
    if name.gfx not in ARCHITECTURES and not name.gfx.startswith("cpu-"):
        yield Finding(path, f"no kernel is compiled for {name.gfx}; known: {', '.join(ARCHITECTURES.having(matrix=MATRIX))}", wrong=False)
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
    """Return notes on parameters of one entry without effect, in general and on its weight and
    architecture.

    Raises:
        UserError: the entry is wrong, or no kernel can serve it there.
    """
    key, entry = bucket
    unused = dialect.unused_of(entry, dialect.tags[name.tag])
    shape, device = _shape(name, key, dialect), Device(name.gfx, _UNITS)
    if shape is None or dialect.unsupported(shape, device):
        return unused
    solution, notes = dialect.solution_of(entry, shape, device)
    if solution is None:
        raise UserError(f"serves no M={shape.m} on {name.gfx}: {notes[-1] if notes else 'no kernel'}")
    tight = () if dialect.fits(solution, shape, device) else (f"{solution} may not fit: shared memory, registers or idle programs",)
    return tuple(dict.fromkeys([*unused, *notes, *tight]))


def _shape(name: Name, key: str, dialect: Dialect) -> Shape | None:
    """Return a shape that reads the entry; None where the name does not determine one."""
    op = op_named(dialect.tags[name.tag])
    sizes = dict(name.sizes) or {"N": 4096, "K": 4096}
    if not {"N", "K"} <= {*sizes} or not {"M", "N", "K"} <= {*op.columns.key}:
        return None
    texts = {"M": str(buckets.rows_of(key)), "N": str(sizes["N"]), "K": str(sizes["K"])}
    texts |= {"B": str(sizes.get("B", 16))} if "B" in op.columns.key else {}
    has_fp8 = name.gfx in ARCHITECTURES and ARCHITECTURES[name.gfx].fp8
    texts |= {"q_dtype_w": "fp8"} if has_fp8 and "q_dtype_w" in op.columns.key else {}
    texts |= {"layout": SHUFFLED[0]} if name.tag.endswith("_PRESHUFFLED") and "layout" in op.columns.own else {}
    try:
        return shape_of_texts(op, (), texts, name.gfx)
    except UserError:
        return None
