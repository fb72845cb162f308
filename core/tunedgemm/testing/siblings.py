"""Modules next to tests, which have no name to import by: pytest imports tests by their paths."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


def module_at(path: Path) -> ModuleType:
    """Import the file, or the package's folder, at a path without its suffix; once in a process."""
    package = path / "__init__.py"
    file = package if package.exists() else path.with_name(f"{path.name}.py")
    name = f"tunedgemm_tests_{zlib.crc32(str(file.resolve()).encode()):08x}_{path.name}"
    if name not in sys.modules:
        folders = [str(path)] if file is package else None
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
