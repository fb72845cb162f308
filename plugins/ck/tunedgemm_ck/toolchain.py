"""Toolchain: a compiler, the headers of a template library, and the command that makes a shared object of a source."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_ck.problem import Problem

#: A folder with clang++ for a4w4 alone, which needs a newer LLVM than ROCm's: AITER's variable.
FP4_CLANG = "GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH"
#: Variables of CMake for the compilers, and those for the headers.
NVCC, HIPCC, CUTLASS_INCLUDE, CK_INCLUDE = "CUDACXX", "HIPCXX", "CUTLASS_INCLUDE", "CK_INCLUDE"
#: The first nvcc that knows sm_90a.
OLDEST_NVCC = (12, 0)

#: Objects are loaded side by side with torch and with each other. What one exports beside its own functions, as the runtime that is
#: linked into it, would be taken for another's; so would the static variables of templates, which GCC, not clang, makes unique in a
#: process.
_HIDDEN = ("-fPIC", "-fvisibility=hidden")


@attrs.frozen
class Toolchain:
    """What compiles.

    Attributes:
        compiler: path of the compiler.
        version: its name and version.
        library: name and version of the template library.
        includes: folders of headers.
        options: for every source.
        target: architecture -> the options that choose it.
    """

    compiler: str
    version: str
    library: str
    includes: tuple[str, ...]
    options: tuple[str, ...]
    target: Callable[[str], tuple[str, ...]] = attrs.field(eq=False, repr=False)

    @property
    def identity(self) -> str:
        """What makes an object another one, beside source and options."""
        return f"{self.library}, {self.version}"

    def command(self, source: Path, output: Path, gfx: str, flags: Iterable[str]) -> list[str]:
        """The command line that makes a shared object."""
        includes = [f"-I{folder}" for folder in self.includes]
        return [self.compiler, *self.options, *self.target(gfx), *flags, *includes, "-o", str(output), str(source)]


#: What finds the toolchain for a problem; raises PluginError, which says what is missing.
Finder = Callable[[Problem], Toolchain]


def cuda(problem: Problem) -> Toolchain:
    """nvcc and CUTLASS.

    Raises:
        PluginError: one of them is not there, or too old.
    """
    del problem
    compiler = _first_existing(_nvccs(), f"no nvcc is there: install the CUDA toolkit, or name it in {NVCC}")
    version = _version(compiler)
    if tuple(map(int, version.split(".")[:2])) < OLDEST_NVCC:
        raise PluginError(f"{compiler} is of CUDA {version}; sm_90a needs {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or newer: name it in {NVCC}")
    include = _first_existing(
        (folder for folder in _cutlass() if (folder / "cutlass" / "version.h").is_file()),
        f"no headers of CUTLASS are there: pip install 'tunedgemm-ck[cutlass]', or name their folder in {CUTLASS_INCLUDE}",
    )
    defined = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", (include / "cutlass" / "version.h").read_text()))
    library = f"CUTLASS {'.'.join(defined.get(part, '?') for part in ('MAJOR', 'MINOR', 'PATCH'))}"
    host = ",".join((*_HIDDEN, "-fno-gnu-unique"))
    # The runtime is linked in: torch may have another major version of it, or one that its own wheel hides.
    options = ("-shared", "-O3", "-std=c++17", "-Xcompiler", host, "-cudart", "static", "-Xlinker", "--exclude-libs=ALL")
    return Toolchain(str(compiler), f"nvcc {version}", library, (str(include),), options, _sm)


def _sm(gfx: str) -> tuple[str, ...]:
    """Code for exactly this architecture; of Hopper with the instructions that it alone has."""
    number = gfx.removeprefix("sm_")
    number += "a" * (number == "90")
    return ("-gencode", f"arch=compute_{number},code=sm_{number}")


def hip(problem: Problem) -> Toolchain:
    """hipcc, or clang++, and Composable Kernel of the user's ROCm.

    Raises:
        PluginError: one of them is not there.
    """
    rocm = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    folder = os.environ.get(FP4_CLANG) if problem.op == "a4w4_blockscale" else ""
    if folder:
        compiler = _first_existing([Path(folder) / "clang++"], f"{FP4_CLANG} names {folder}, where no clang++ is")
    else:
        compiler = _first_existing(_hipccs(rocm), f"no hipcc is there: install ROCm's compiler, set ROCM_PATH, or name it in {HIPCC}")
    include = _first_existing(
        (place for place in (_path_from(CK_INCLUDE), rocm / "include") if place and (place / "ck" / "ck.hpp").is_file()),
        f"no headers of Composable Kernel are there: install composablekernel-dev, or name their folder in {CK_INCLUDE}",
    )
    options = ("-x", "hip", "-shared", "-O3", "-std=c++20", *_HIDDEN, "-fno-gpu-rdc")
    return Toolchain(str(compiler), f"clang {_version(compiler)}", _ck_version(include, rocm), (str(include),), options, _gfx)


def _gfx(gfx: str) -> tuple[str, ...]:
    return (f"--offload-arch={gfx}",)


def _ck_version(include: Path, rocm: Path) -> str:
    """Composable Kernel's version, or that of the ROCm it came with."""
    header, info = include / "ck" / "version.h", rocm / ".info" / "version"
    defined = dict(re.findall(r"#define CK_(VERSION|COMMIT_ID) +(\S+)", header.read_text())) if header.is_file() else {}
    rocms = f" of ROCm {info.read_text().strip()}" if info.is_file() else ""
    return f"Composable Kernel {' '.join(defined.values()) or 'of unknown version'}{rocms}"


def _nvccs() -> Iterator[Path]:
    """Where an nvcc may be: as named, on PATH, of a toolkit, of NVIDIA's wheels."""
    if named := _path_from(NVCC):
        yield named
        return
    if found := shutil.which("nvcc"):
        yield Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := _path_from(variable):
            yield home / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)


def _hipccs(rocm: Path) -> Iterator[Path]:
    if named := _path_from(HIPCC):
        yield named
        return
    yield from (rocm / "bin" / name for name in ("amdclang++", "hipcc"))
    yield rocm / "llvm" / "bin" / "clang++"
    yield from (Path(found) for name in ("amdclang++", "hipcc") if (found := shutil.which(name)))


def _cutlass() -> Iterator[Path]:
    """Where CUTLASS's headers may be: as named, or in the wheel nvidia-cutlass, which is not imported for it."""
    if named := _path_from(CUTLASS_INCLUDE):
        yield named
        return
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / "source" / "include"


def _path_from(variable: str) -> Path | None:
    text = os.environ.get(variable, "")
    return Path(text) if text else None


def _first_existing(places: Iterable[Path], missing: str) -> Path:
    """The first that is there.

    Raises:
        PluginError: none is.
    """
    for place in places:
        if place.exists():
            return place
    raise PluginError(missing)


def _version(compiler: Path) -> str:
    """The version that a compiler tells, as numbers joined by dots.

    Raises:
        PluginError: it does not run, or is no compiler.
    """
    return _version_of(str(compiler), compiler.stat().st_mtime_ns)


@functools.cache
def _version_of(compiler: str, changed: int) -> str:
    """The version; *changed* makes an upgraded compiler another one."""
    del changed
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{compiler} does not run: {error}") from error
    # nvcc: "release 13.0, V13.0.88"; clang, and hipcc through it: "clang version 19.1.7"
    found = re.search(r"V(\d+\.\d+\.\d+)|clang version (\d+\.\d+\.\d+)", done.stdout)
    if done.returncode or not found:
        told = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise PluginError(f"{compiler} --version says neither CUDA's nor clang's version: {told[:200] or f'exit code {done.returncode}'}")
    return found[1] or found[2]
