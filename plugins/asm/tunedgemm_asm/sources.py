"""Where packs come from. Code objects are code: only what the user named or installed is looked at, and no package is imported for it.

In order: the folders of ``TUNEDGEMM_ASM_PACKS``, packages that name one by the entry point group ``tunedgemm.asm_packs``, an installed
AITER's own tree, and what this plugin ships.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import attrs

#: Folders of packs, or of AITER's tree, joined by `os.pathsep`.
VARIABLE = "TUNEDGEMM_ASM_PACKS"
#: AITER's own variable for its tree of code objects; it sets it itself when it is imported.
OF_AITER = "AITER_ASM_DIR"
GROUP = "tunedgemm.asm_packs"
#: Packages of AITER that may have the tree: inside, or, in a checkout, beside.
_AITER_PACKAGES = ("aiter_meta", "aiter")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@attrs.frozen
class Source:
    """A folder that is said to hold packs.

    Attributes:
        label: who says so.
        folder: where; None where *problem* says why there is none.
    """

    label: str
    folder: Path | None
    problem: str = ""


def sources() -> Iterator[Source]:
    """Every place, in the order in which they count."""
    for text in os.environ.get(VARIABLE, "").split(os.pathsep):
        if text.strip():
            yield _existing(VARIABLE, Path(text.strip()).expanduser())
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        yield _of_package(entry)
    yield from _aiter()
    shipped = Path(__file__).with_name("packs")
    if shipped.is_dir():
        yield Source("tunedgemm-asm", shipped)


def _existing(label: str, folder: Path) -> Source:
    return Source(label, folder) if folder.is_dir() else Source(label, None, f"{label}: there is no folder {folder}")


def _of_package(entry: EntryPoint) -> Source:
    """The folder of the package that an entry point names."""
    label = entry.dist.name if entry.dist else entry.name
    if not _MODULE.fullmatch(entry.value):
        return Source(label, None, f"{label}: entry point {entry.name} = {entry.value!r} names no package")
    top, *below = entry.value.split(".")
    for location in _locations(top):
        folder = location.joinpath(*below)
        if folder.is_dir():
            return Source(label, folder)
    return Source(label, None, f"{label}: entry point {entry.name} names the package {entry.value}, which has no folder here")


def _aiter() -> Iterator[Source]:
    named = os.environ.get(OF_AITER, "").strip()
    if named:
        yield _existing(OF_AITER, Path(named).expanduser())
        return
    for package in _AITER_PACKAGES:
        for location in _locations(package):
            for tree in (location / "hsa", location.parent / "hsa"):
                if any(tree.glob("gfx*")):
                    yield Source(f"AITER ({package})", tree)
                    return


def _locations(package: str) -> list[Path]:
    """Folders of a top-level package, which is found and not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(location) for location in (spec.submodule_search_locations or ())] if spec is not None else []
