"""Assemble PTX with ptxas into the artifact cache; without ptxas the driver assembles it on
loading.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tunedgemm.plugin import LaunchError
from tunedgemm.tools.files import artifact

from tunedgemm_asm.ptx.kernel import TARGET, text_of
from tunedgemm_asm.ptx.names import Variant

#: Path of ptxas in a CUDA toolkit and in Triton.
_IN_TOOLKIT, _IN_TRITON = Path("bin") / "ptxas", Path("backends") / "nvidia" / "bin" / "ptxas"
_SECONDS = 120
#: ptxas's warning that it serializes wgmma instructions (C7510 to C7520), which makes them slow.
_SERIALIZED = "wgmma.mma_async instructions are serialized"


def _in_triton() -> Iterator[Path]:
    """Yield the path of Triton's ptxas without importing Triton."""
    spec = importlib.util.find_spec("triton")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(location) / _IN_TRITON


def _paths() -> Iterator[Path]:
    yield from _in_triton()  # kernels are tested with this one
    if on_path := shutil.which("ptxas"):
        yield Path(on_path)
    yield from (Path(os.environ[name]) / _IN_TOOLKIT for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))


@functools.cache
def ptxas() -> tuple[Path, str] | None:
    """Return the first ptxas that runs and its version, or None; Triton's, then PATH's, then the
    toolkit's.
    """
    for path in _paths():
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return path, " ".join(done.stdout.split()[-2:])
    return None


def code(variant: Variant) -> bytes:
    """Return the code of a kernel as the driver loads it; without ptxas, its text.

    Raises:
        LaunchError: ptxas rejects the text.
    """
    text, assembler = text_of(variant), ptxas()
    if assembler is None:
        return text.encode() + b"\0"
    return artifact(f"asm {TARGET} {assembler[1]}\n{text}", lambda: assembled(text, assembler[0])[0])


def assembled(text: str, assembler: Path) -> tuple[bytes, str]:
    """Return the code of a text and the report of ptxas on its registers.

    Raises:
        LaunchError: ptxas rejects the text, or serializes its wgmma instructions.
    """
    with tempfile.TemporaryDirectory(prefix="tunedgemm-ptx-") as folder:
        source, result = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        try:
            done = subprocess.run(
                [assembler, f"-arch={TARGET}", "-v", source, "-o", result], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"{assembler}: {error}") from error
        said = done.stdout + done.stderr
        if done.returncode or _SERIALIZED in said:
            raise LaunchError(f"ptxas: {' '.join(said.split())[:400]}")
        return result.read_bytes(), said
