"""From text to code: by ptxas where there is one, into the artifact cache, else by the driver when it loads the text."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tunedgemm.plugin import LaunchError, artifact

from tunedgemm_asm.ptx.kernel import TARGET, text_of
from tunedgemm_asm.ptx.names import Variant

#: Where ptxas lies below the folder of a toolkit, and of Triton.
_IN_TOOLKIT, _IN_TRITON = Path("bin") / "ptxas", Path("backends") / "nvidia" / "bin" / "ptxas"
_SECONDS = 120
#: What ptxas says of matrix instructions that it makes wait for each other (C7510 to C7515), which costs much of their speed.
_SERIALIZED = "wgmma.mma_async instructions are serialized"


def _in_triton() -> Iterator[Path]:
    """Triton's own, which is found and not imported."""
    spec = importlib.util.find_spec("triton")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(location) / _IN_TRITON


def _places() -> Iterator[Path]:
    yield from _in_triton()  # the one that kernels are tested with
    if found := shutil.which("ptxas"):
        yield Path(found)
    yield from (Path(os.environ[name]) / _IN_TOOLKIT for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))


@functools.cache
def ptxas() -> tuple[Path, str] | None:
    """The assembler and what it says of its version: the first that runs of Triton's, PATH's, the toolkit's; None where there is none."""
    for place in _places():
        try:
            told = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return place, " ".join(told.stdout.split()[-2:])
    return None


def code(variant: Variant) -> bytes:
    """The code of a kernel as the driver loads it; without an assembler its text.

    Raises:
        LaunchError: it does not assemble.
    """
    text, found = text_of(variant), ptxas()
    if found is None:
        return text.encode() + b"\0"
    return artifact(f"asm {TARGET} {found[1]}\n{text}", lambda: assembled(text, found[0])[0])


def assembled(text: str, assembler: Path) -> tuple[bytes, str]:
    """The code of a text, and what ptxas says of its registers.

    Raises:
        LaunchError: it does not assemble, or its matrix instructions would wait for each other.
    """
    with tempfile.TemporaryDirectory(prefix="tunedgemm-ptx-") as folder:
        source, result = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        try:
            told = subprocess.run(
                [assembler, f"-arch={TARGET}", "-v", source, "-o", result], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"{assembler}: {error}") from error
        said = told.stdout + told.stderr
        if told.returncode or _SERIALIZED in said:
            raise LaunchError(f"ptxas: {' '.join(said.split())[:400]}")
        return result.read_bytes(), said
