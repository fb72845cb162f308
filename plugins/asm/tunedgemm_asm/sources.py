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
            yield _existing(VARIABLE, text.strip())
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        yield _of_package(entry)
    yield from _aiter()
    shipped = Path(__file__).with_name("packs")
    if shipped.is_dir():
        yield Source("tunedgemm-asm", shipped)


def _existing(label: str, text: str) -> Source:
    try:
        folder = Path(text).expanduser()
        there = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, or the home of nobody
        return Source(label, None, f"{label}: {text[:200]}: {error}"[:400])
    return Source(label, folder) if there else Source(label, None, f"{label}: there is no folder {folder}")


def _of_package(entry: EntryPoint) -> Source:
    """The folder of the package that an entry point names."""
    label = entry.dist.name if entry.dist else entry.name
    if not _MODULE.fullmatch(entry.value):
        return Source(label, None, f"{label}: entry point {entry.name} = {entry.value!r} names no package")
    top, *below = entry.value.split(".")
    # Where its own distribution lies comes first: a folder of that name in the working directory is not what was installed.
    owned = [Path(str(entry.dist.locate_file(top)))] if entry.dist else []
    for location in (*owned, *_locations(top)):
        folder = location.joinpath(*below)
        if is_folder(folder):
            return Source(label, folder)
    return Source(label, None, f"{label}: entry point {entry.name} names the package {entry.value}, which has no folder here")


def _aiter() -> Iterator[Source]:
    named = os.environ.get(OF_AITER, "").strip()
    if named:
        yield _existing(OF_AITER, named)
        return
    for package in _AITER_PACKAGES:
        for location in _locations(package):
            for tree in (location / "hsa", location.parent / "hsa"):
                if is_folder(tree) and any(tree.glob("gfx*")):
                    yield Source(f"AITER ({package})", tree)
                    return


def is_folder(path: Path) -> bool:
    """Whether there is one that may be seen."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _locations(package: str) -> list[Path]:
    """Folders of a top-level package, which is found and not imported; a folder that only has its name is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(location) for location in (spec.submodule_search_locations or ())] if spec is not None and spec.origin else []
