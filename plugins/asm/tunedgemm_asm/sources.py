"""Find the folders that may hold packs.

Code objects are code: only folders that the user named or installed count, and no package is
imported. The order is: folders of ``TUNEDGEMM_ASM_PACKS``, packages of the entry point group
``tunedgemm.asm_packs``, an installed AITER's tree, and the packs shipped with this plugin.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import attrs
from tunedgemm.plugin import UserError
from tunedgemm.tools.files import expanded, folder_of_entry

#: Folders of packs or of AITER's tree, joined by `os.pathsep`.
VARIABLE = "TUNEDGEMM_ASM_PACKS"
#: AITER's variable for its tree of code objects; AITER sets it when imported.
OF_AITER = "AITER_ASM_DIR"
GROUP = "tunedgemm.asm_packs"
#: AITER's packages; the tree is inside, or next to the package in a checkout.
_AITER_PACKAGES = ("aiter_meta", "aiter")


@attrs.frozen
class Source:
    """Folder that may hold packs.

    Attributes:
        label: origin of the folder.
        folder: the folder; None where *problem* says why it is missing.
    """

    label: str
    folder: Path | None
    problem: str = ""


def sources() -> Iterator[Source]:
    """Yield every source in order of precedence."""
    for text in os.environ.get(VARIABLE, "").split(os.pathsep):
        if text.strip():
            yield _existing(VARIABLE, text.strip())
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        label = entry.dist.name if entry.dist else entry.name
        folder, fault = folder_of_entry(entry)
        yield Source(label, folder, f"{label}: {fault}" if fault else "")
    yield from _aiter()
    shipped = Path(__file__).with_name("packs")
    if shipped.is_dir():
        yield Source("tunedgemm-asm", shipped)


def _existing(label: str, text: str) -> Source:
    try:
        folder = expanded(text)
        there = folder.is_dir()
    except (OSError, UserError, ValueError) as error:  # permission denied, name too long, or unknown user
        return Source(label, None, f"{label}: {text[:200]}: {error}"[:400])
    return Source(label, folder) if there else Source(label, None, f"{label}: folder not found: {folder}")


def _aiter() -> Iterator[Source]:
    named = os.environ.get(OF_AITER, "").strip()
    if named:
        yield _existing(OF_AITER, named)
        return
    for package in _AITER_PACKAGES:
        for location in _folders_of(package):
            for tree in (location / "hsa", location.parent / "hsa"):
                if any(tree.glob("gfx*")):
                    yield Source(f"AITER ({package})", tree)
                    return


def _folders_of(package: str) -> list[Path]:
    """Return the folders of a package without importing it; none of a namespace package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(location) for location in spec.submodule_search_locations or ()] if spec and spec.origin else []
