"""Find the folders of installed packages without importing them."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import EntryPoint
from pathlib import Path

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def folder_of_entry(entry: EntryPoint) -> tuple[Path | None, str]:
    """Return the folder of the package that an entry point names, else None and the reason.

    The installed distribution comes before a folder of that name in the working directory.
    """
    if not _MODULE.fullmatch(entry.value):
        return None, f"entry point {entry.name} = {entry.value!r} names no package"
    top, *below = entry.value.split(".")
    owned = [Path(str(entry.dist.locate_file(top)))] if entry.dist else []
    for location in (*owned, *package_folders(top)):
        folder = location.joinpath(*below)
        if is_folder(folder):
            return folder, ""
    return None, f"entry point {entry.name} names the package {entry.value}, which has no folder here"


def package_folders(package: str) -> list[Path]:
    """Return the folders of a top-level package without importing it; exclude namespace packages."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(location) for location in (spec.submodule_search_locations or ())] if spec is not None and spec.origin else []


def is_folder(path: Path) -> bool:
    """Check whether the path is an accessible folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
