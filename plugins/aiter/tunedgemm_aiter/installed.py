"""Find the installed AITER without importing it, say what it lacks, and import it at bind.

Importing AITER takes seconds, prints, asks ROCm for the device, and may compile.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.launching import ForkSafeLock, load_fault

PACKAGE = "aiter"
_DISTRIBUTIONS = ("amd-aiter", PACKAGE)
#: Timeout of AITER's first import in seconds; it may compile an extension missing in its wheel.
_IMPORT_SECONDS = 900
#: What AITER imports of flydsl from the place where it was before 0.4.
_MOVED = "SMEM_CAPACITY_MAP"
_importing = ForkSafeLock()


@attrs.frozen
class Need:
    """A text in a source file of AITER that a kernel needs, and since which version it is there.

    Attributes:
        file: path below AITER's package, or below ``csrc``.
        text: part of the file.
        since: the first version of ``amd-aiter`` that has it, in words.
    """

    file: str
    text: str
    since: str


@attrs.frozen
class Installation:
    """The installed AITER.

    Attributes:
        folder: of its package.
        version: of its distribution; "" where it has none.
    """

    folder: Path
    version: str

    @property
    def name(self) -> str:
        """Return the version and the folder in words."""
        return f"AITER {self.version or 'of unknown version'} ({self.folder})"

    def path(self, file: str) -> Path:
        """Return a source file; a wheel has ``csrc`` in the package ``aiter_meta``."""
        if not file.startswith("csrc/"):
            return self.folder / file
        beside = self.folder.parent / "aiter_meta" / file
        return beside if beside.exists() else self.folder.parent / file


def find() -> Installation | None:
    """Return the installed AITER, or None.

    Modules that `tunedgemm.integrations.aiter.install` serves under its name do not count.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(PACKAGE, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.origin and Path(spec.origin).name == "__init__.py":
            return Installation(Path(spec.origin).resolve().parent, _version())
    return None


@functools.cache
def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def lacking(need: Need, flydsl: bool = False) -> str:
    """Return why the installed AITER does not serve a need, of a *flydsl* kernel or another; else ""."""
    found = find()
    if found is None:
        return f"AITER is not installed; this kernel needs amd-aiter {need.since}"
    if need.text not in _text_of(found.path(need.file)):
        return f"{found.name} lacks {need.text!r} in {need.file}; this kernel needs amd-aiter {need.since}"
    return _flydsl_fault(found) if flydsl else ""


def _flydsl_fault(found: Installation) -> str:
    """Return why AITER cannot compile FlyDSL's kernels by the installed flydsl; "" where it can."""
    if not has_flydsl():
        return "AITER compiles FlyDSL's kernels by the package flydsl, which is not installed"
    spec = importlib.util.find_spec("flydsl")
    moved = Path(str(spec and spec.origin)).parent / "utils" / "smem_allocator.py"
    if f"smem_allocator import {_MOVED}" in _text_of(found.path("ops/flydsl/utils.py")) and f"\n{_MOVED}" not in _text_of(moved):
        return f"{found.name} imports what the installed flydsl lacks since 0.4; install the flydsl of AITER's requirements.txt"
    return ""


def _text_of(path: Path) -> str:
    """Return a file's text; "" where there is none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return ""


@functools.lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> str:
    """Return a file's text; *changed* makes an upgraded file another entry."""
    del changed
    return path.read_text(errors="replace")


def has_flydsl() -> bool:
    """Tell whether the package is installed that compiles FlyDSL's kernels."""
    return importlib.util.find_spec("flydsl") is not None


def function(module: str, name: str) -> Callable[..., Any]:
    """Import a function of AITER, not one that replaces it: that may call tunedgemm again.

    Raises:
        PluginError: AITER is absent, cannot be imported, lacks it, or something else has its name.
    """
    answer = attribute(module, name)
    home = getattr(inspect.unwrap(answer), "__module__", "") or ""
    if home.partition(".")[0] != PACKAGE:
        raise PluginError(f"{module}.{name} is replaced by a function of {home}, which may call tunedgemm; restore AITER's")
    return answer  # type: ignore[no-any-return]


def attribute(module: str, name: str) -> Any:
    """Import a name of AITER.

    Raises:
        PluginError: AITER is absent, broken or lacks it, or another module has its name.
    """
    with _importing:
        found = _import_package()
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # its modules may raise anything
            raise PluginError(f"{found.name} has no usable {module}.{name}: {type(error).__name__}: {error}") from error


def _import_package() -> Installation:
    """Import AITER, first in a child process, which a library of another ABI may end.

    Raises:
        PluginError: it is absent or cannot be imported, or another module has its name.
    """
    found = find()
    if found is None:
        raise PluginError("AITER is not installed")
    if PACKAGE not in sys.modules:
        if fault := load_fault(f"import {PACKAGE}, {PACKAGE}.tuned_gemm", found.folder / "__init__.py", timeout=_IMPORT_SECONDS):
            raise PluginError(f"{found.name} cannot be imported: {fault}")
        importlib.import_module(PACKAGE)
    home = Path(str(sys.modules[PACKAGE].__file__)).resolve().parent
    if home != found.folder:
        raise PluginError(f"module 'aiter' of this process is not AITER's (got {home}); call tunedgemm.integrations.aiter.uninstall()")
    return found
