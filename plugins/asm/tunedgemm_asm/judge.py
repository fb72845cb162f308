"""Judge: everything that is wrong with packs, before they are shipped. Where calls are served it costs a pack or a kernel alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from tunedgemm_asm import packs
from tunedgemm_asm.packs import Pack


@attrs.frozen
class Verdict:
    """What was found in one folder.

    Attributes:
        folder: which.
        packs: in it and below.
        faults: what must be mended.
        notes: what is no fault.
    """

    folder: Path
    packs: tuple[Pack, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def verdicts(folders: Iterable[Path]) -> Iterator[Verdict]:
    """The judgement of each folder; a kernel of one architecture that two of them give is a fault of the later."""
    owners: dict[tuple[str, str], Pack] = {}
    for folder in folders:
        found, problems = packs.in_folder(folder)
        faults, notes = list(problems), []
        for pack in found:
            where = f"pack {pack.name} ({pack.folder})"
            faults += [f"{where}: {name}: {reason}" for name, reason in pack.refused.items()]
            faults += [f"{where}: {remark}" for remark in pack.remarks]
            faults += [f"{where}: {reason}" for reason in _of_hashes(pack)]
            faults += _of_code(pack)
            faults += [f"{where}: {reason}" for reason in _given(pack, owners)]
            notes += [f"{where}: {note}" for note in _notes(pack)]
        yield Verdict(folder, found, tuple(faults), tuple(notes))


def _of_code(pack: Pack) -> Iterator[str]:
    yield from filter(None, (loaded.refused() for loaded in pack.loaded))


def _of_hashes(pack: Pack) -> Iterator[str]:
    files = {kernel.file for kernel in pack.kernels}
    for file in pack.descriptor.sha256:
        if file not in files:
            yield f"the descriptor has a sha256 of {file}, which no usable kernel is in"
    if pack.descriptor.sha256:
        yield from (f"the descriptor has no sha256 of {file}" for file in sorted(files - set(pack.descriptor.sha256)))


def _given(pack: Pack, owners: dict[tuple[str, str], Pack]) -> Iterator[str]:
    for kernel in pack.kernels:
        owner = owners.setdefault((pack.gfx, kernel.name), pack)
        if owner is not pack:
            yield f"{kernel.name} is given by {owner.name} ({owner.folder}) already"


def _notes(pack: Pack) -> Iterator[str]:
    listed = {kernel.file for kernel in pack.kernels}
    spare = [path.name for path in sorted(pack.folder.rglob("*.co")) if path.relative_to(pack.folder).as_posix() not in listed]
    if spare:
        yield f"no usable kernel is in {', '.join(spare[:5])}{f' and {len(spare) - 5} more' if len(spare) > 5 else ''}"
    if not pack.kernels:
        yield "it has no kernel"
    for loaded in pack.loaded:
        if not loaded.fault and loaded.checked().metadata.spills:
            yield f"{loaded.kernel.name} keeps {loaded.checked().metadata.spills} registers in memory"
