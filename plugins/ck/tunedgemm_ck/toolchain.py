"""Find a compiler and the headers of a template library, and form the command of a compilation."""

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
from tunedgemm.tools.files import expanded
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_ck.problem import Problem

#: AITER's variable: a folder with clang++ for a4w4 only, which needs a newer LLVM than ROCm's.
FP4_CLANG = "GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH"
#: CMake's variables for the compilers, and the variables for the headers.
NVCC, HIPCC, CUTLASS_INCLUDE, CK_INCLUDE = "CUDACXX", "HIPCXX", "CUTLASS_INCLUDE", "CK_INCLUDE"
#: The first nvcc that supports each architecture.
OLDEST_NVCC = {"sm_100": (12, 8), "sm_120": (12, 8), "sm_103": (12, 9), "sm_121": (12, 9), "sm_110": (13, 0)}

#: Objects are loaded together with torch and with each other. Exported symbols, such as those of
#: the linked-in runtime, would resolve to another object's. The same holds for static variables of
#: templates, which GCC, not clang, makes unique in a process.
_HIDDEN = ("-fPIC", "-fvisibility=hidden")


@attrs.frozen
class Toolchain:
    """A compiler with the headers of a template library.

    Attributes:
        compiler: path of the compiler.
        version: its name and version.
        library: name and version of the template library.
        includes: folders of headers.
        options: of every source.
        target: architecture -> the options that select it.
    """

    compiler: str
    version: str
    library: str
    includes: tuple[str, ...]
    options: tuple[str, ...]
    target: Callable[[str], tuple[str, ...]] = attrs.field(eq=False, repr=False)

    @property
    def identity(self) -> str:
        """Return the part of the cache key that is neither source nor options."""
        return f"{self.library}, {self.version}"

    def command(self, source: Path, output: Path, gfx: str, flags: Iterable[str]) -> list[str]:
        """Return the command line that compiles a shared object."""
        includes = [f"-I{folder}" for folder in self.includes]
        return [self.compiler, *self.options, *self.target(gfx), *flags, *includes, "-o", str(output), str(source)]


#: Finds the toolchain for a problem; raises PluginError that names the missing part.
Finder = Callable[[Problem], Toolchain]


def cuda(problem: Problem) -> Toolchain:
    """Find nvcc and CUTLASS.

    Raises:
        PluginError: one of them is missing or too old.
    """
    compiler = _first_existing(_nvccs(), f"nvcc not found; install the CUDA toolkit or set {NVCC}")
    version = _version(compiler)
    oldest = OLDEST_NVCC.get(problem.gfx, (12, 0))
    if tuple(map(int, version.split(".")[:2])) < oldest:
        raise PluginError(f"{compiler}: {problem.gfx} needs CUDA {oldest[0]}.{oldest[1]} or newer (got {version}); set {NVCC}")
    include = _first_existing(
        (folder for folder in _cutlass() if (folder / "cutlass" / "version.h").is_file()),
        f"CUTLASS headers not found; pip install 'tunedgemm-ck[cutlass]' or set {CUTLASS_INCLUDE}",
    )
    defined = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH) (\d+)", (include / "cutlass" / "version.h").read_text()))
    library = f"CUTLASS {'.'.join(defined.get(part, '?') for part in ('MAJOR', 'MINOR', 'PATCH'))}"
    host = ",".join((*_HIDDEN, "-fno-gnu-unique"))
    # The runtime is linked statically: torch may have another major version, or hide its wheel's.
    options = ("-shared", "-O3", "-std=c++17", "-Xcompiler", host, "-cudart", "static", "-Xlinker", "--exclude-libs=ALL")
    return Toolchain(str(compiler), f"nvcc {version}", library, (str(include),), options, _sm)


def _sm(gfx: str) -> tuple[str, ...]:
    """Return the options for exactly this architecture, with its own instructions since sm_90a."""
    number = gfx.removeprefix("sm_")
    number += "a" * ARCHITECTURES[gfx].tma
    return ("-gencode", f"arch=compute_{number},code=sm_{number}")


def hip(problem: Problem) -> Toolchain:
    """Find hipcc, or clang++, and Composable Kernel of the user's ROCm.

    Raises:
        PluginError: one of them is missing.
    """
    rocm = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    folder = _path_from(FP4_CLANG) if problem.op == "a4w4_blockscale" else None
    if folder:
        compiler = _first_existing([folder / "clang++"], f"{FP4_CLANG}: clang++ not found in {folder}")
    else:
        compiler = _first_existing(_hipccs(rocm), f"hipcc not found; install ROCm's compiler, or set ROCM_PATH or {HIPCC}")
    include = _first_existing(
        (folder for folder in (_path_from(CK_INCLUDE), rocm / "include") if folder and (folder / "ck" / "ck.hpp").is_file()),
        f"Composable Kernel headers not found; install composablekernel-dev or set {CK_INCLUDE}",
    )
    options = ("-x", "hip", "-shared", "-O3", "-std=c++20", *_HIDDEN, "-fno-gpu-rdc")
    return Toolchain(
        str(compiler),
        f"clang {_version(compiler)}",
        _ck_version(include, rocm),
        (str(include),),
        options,
        lambda gfx: (f"--offload-arch={gfx}",),
    )


def _ck_version(include: Path, rocm: Path) -> str:
    """Return Composable Kernel's version, or that of its ROCm."""
    header, info = include / "ck" / "version.h", rocm / ".info" / "version"
    defined = dict(re.findall(r"#define CK_(VERSION|COMMIT_ID) +(\S+)", header.read_text())) if header.is_file() else {}
    rocms = f" of ROCm {info.read_text().strip()}" if info.is_file() else ""
    return f"Composable Kernel {' '.join(defined.values()) or 'of unknown version'}{rocms}"


def _nvccs() -> Iterator[Path]:
    """Yield candidates for nvcc: the named one, else on PATH, of a toolkit, of NVIDIA's wheels."""
    if named := _path_from(NVCC):
        yield named
        return
    if path := shutil.which("nvcc"):
        yield Path(path)
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
    yield from (Path(path) for name in ("amdclang++", "hipcc") if (path := shutil.which(name)))


def _cutlass() -> Iterator[Path]:
    """Yield candidates for CUTLASS's headers: as named, else in the wheel nvidia-cutlass.

    The wheel is not imported.
    """
    if named := _path_from(CUTLASS_INCLUDE):
        yield named
        return
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / "source" / "include"


def _path_from(variable: str) -> Path | None:
    text = os.environ.get(variable, "")
    return expanded(text, variable) if text else None


def _first_existing(paths: Iterable[Path], missing: str) -> Path:
    """Return the first path that exists.

    Raises:
        PluginError: none does.
    """
    for path in paths:
        if path.exists():
            return path
    raise PluginError(missing)


def _version(compiler: Path) -> str:
    """Return a compiler's version, as numbers joined by dots.

    Raises:
        PluginError: it does not run, or is not a compiler.
    """
    return _version_of(str(compiler), compiler.stat().st_mtime_ns)


@functools.cache
def _version_of(compiler: str, changed: int) -> str:
    """Return the version; *changed* makes an upgraded compiler another cache entry."""
    del changed
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{compiler} does not run: {error}") from error
    # nvcc: "release 13.0, V13.0.88"; clang, and hipcc through it: "clang version 19.1.7"
    match = re.search(r"V(\d+\.\d+\.\d+)|clang version (\d+\.\d+\.\d+)", done.stdout)
    if done.returncode or not match:
        output = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise PluginError(f"{compiler} --version: not nvcc or clang (got {output[:200] or f'exit code {done.returncode}'})")
    return match[1] or match[2]
