"""Compile the fake Lt libraries.

The C source in ``fake/`` documents its checks, its algorithms and its settings (``FAKE_LT_*``).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("fake")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")


class NoCompilerError(RuntimeError):
    """Missing C compiler, or one that does not compile the fake libraries."""


#: Folder of the compiled libraries, set by the session's fixture.
cache: Path | None = None


def build(libtype: str, folder: Path | None = None) -> Path:
    """Compile the fake library of a libtype, once for a source and a folder.

    Args:
        libtype: ``cublaslt`` or ``hipblaslt``.
        folder: where to put it; by default `cache`.

    Raises:
        NoCompilerError: ``cc`` is missing or refuses the source.
    """
    folder = folder or cache
    assert folder is not None
    files = sorted(SOURCES.iterdir())
    text = "".join([*FLAGS, *(file.read_text() for file in files)])
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:16] / f"libfake_{libtype}.so"
    if target.exists():
        return target
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError("fake Lt libraries: `cc` not found on PATH; install a C compiler (gcc or clang)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled = Path(scratch, target.name)
        sources = [str(file) for file in files if file.suffix in (".c", ".cpp")]
        command = [compiler, *FLAGS, f"-DFAKE_{libtype.upper()}", *sources, "-o", str(compiled), "-lm", "-lpthread", "-lstdc++"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompilerError(f"fake {libtype}: {compiler} failed: {done.stderr[-2000:]}")
        compiled.replace(target)  # atomic: another process never loads a partial file
    return target
