"""Find DeepGEMM and nvcc, check that the library loads, and open private copies of it.

Importing `deep_gemm` would share its process-wide settings and its cache with the user. A private
copy of its extension has separate ones. Each device has a copy, because the library remembers the
first device that it meets. The extension is a module of Python's, `_C`, or registers operations of
torch: vLLM's `_C_extension` since 2.8, next to a module `_C.py`, and SGLang's `_C`.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.files import private_folder
from tunedgemm.tools.launching import load_fault

from tunedgemm_deepgemm import registered

#: Packages that may hold the library, and its folder in each.
PLACES = (("deep_gemm", ""), ("vllm", "third_party/deep_gemm"))
#: The first version whose settings vary more than the SMs, and that compiles without a device.
OLDEST = (2, 4)
#: Begins the version of SGLang's copy, which has numbers apart and states them in a file.
_SGLANG = "sglang-"
#: Functions that this plugin calls: those of products, and all.
PRODUCTS = ("bf16_gemm_nt", "fp8_gemm_nt")
FUNCTIONS = ("init", "set_num_sms", "get_num_sms", "set_pdl", "set_block_size_multiple_of", *PRODUCTS)
#: Folder of a system's CUDA toolkit.
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
#: Loads the extension in a child process.
_LOAD = "import pathlib, sys; from tunedgemm_deepgemm.library import load_copy; load_copy(pathlib.Path(sys.argv[1]))"
#: The search path is this process's, without the working folder.
_CHILD = "import sys; sys.path[:] = {path!r}; from tunedgemm_deepgemm import child; child.main()"
#: Name of vLLM's extension that registers operations.
_REGISTERED = "_C_extension"
_numbers = itertools.count()


@attrs.frozen
class Installation:
    """An installed DeepGEMM.

    Attributes:
        folder: of the package, with its headers.
        extension: its compiled module.
        version: its ``__version__``.
        owner: the distribution whose copy it is, with version; empty for `deep_gemm` itself.
    """

    folder: Path
    extension: Path
    version: str
    owner: str = ""

    @property
    def identity(self) -> str:
        """Return a text that changes with the file."""
        status = self.extension.stat()
        return f"{self.extension} {status.st_size} {status.st_mtime_ns}"


@attrs.frozen
class Toolkit:
    """A CUDA toolkit.

    Attributes:
        nvcc: its compiler.
    """

    nvcc: Path

    @property
    def home(self) -> Path:
        """Return the folder of the toolkit."""
        return self.nvcc.parent.parent

    @property
    def identity(self) -> str:
        """Return a text that changes with the compiler."""
        return f"{self.nvcc} {self.nvcc.stat().st_mtime_ns}"


@functools.cache
def find() -> Installation:
    """Return the first installed DeepGEMM that has an extension for this Python.

    Raises:
        PluginError: there is none; the message says what was found.
    """
    faults = []
    for package, inside in PLACES:
        for root in _roots(package):
            folder = Path(root, inside)
            if not (folder / "__init__.py").is_file():
                continue
            version = _version(folder)
            if not version.startswith(_SGLANG) and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
                faults.append(f"{folder}: must be {'.'.join(map(str, OLDEST))} or newer (got {version})")
                continue
            if extension := _extension_of(folder):
                return Installation(folder, extension, version, "" if package == "deep_gemm" else _owner(package))
            others = ", ".join(path.name for path in sorted(folder.glob("_C*"))) or "none"
            python = f"{sys.version_info[0]}.{sys.version_info[1]}"
            faults.append(f"{folder}, {version}: needs _C for Python {python}, or _C.py and one {_REGISTERED}*.so (got {others})")
    raise PluginError(
        f"deepgemm: {'; '.join(faults) or 'deep_gemm not found'}; install deep_gemm, or a vLLM that has third_party/deep_gemm"
    )


def _extension_of(folder: Path) -> Path | None:
    """Return the extension in a package for this Python, or None."""
    modules = (folder / f"_C{end}" for end in importlib.machinery.EXTENSION_SUFFIXES)
    if module := next((path for path in modules if path.is_file()), None):
        return module
    found = sorted(folder.glob(f"{_REGISTERED}*.so")) if (folder / "_C.py").is_file() else []
    return found[0] if len(found) == 1 else None


def _roots(package: str) -> list[str]:
    """Return the folders of a package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a spec, as tests put into sys.modules
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _version(folder: Path) -> str:
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", (folder / "__init__.py").read_text(errors="replace"), re.MULTILINE)
    if match:
        return match[1]
    stated = folder / "VERSION"
    return f"{_SGLANG}{stated.read_text(errors='replace').strip()[:40]}" if stated.is_file() else "unknown"


def _owner(package: str) -> str:
    try:
        return f"{package}-{importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


@functools.cache
def find_toolkit() -> Toolkit:
    """Return the CUDA toolkit: of CUDA_HOME or CUDA_PATH, else on PATH, else of NVIDIA's wheels.

    Raises:
        PluginError: there is none.
    """
    homes = [Path(named) for variable in ("CUDA_HOME", "CUDA_PATH") if (named := os.environ.get(variable))]
    if path := shutil.which("nvcc"):
        homes.append(Path(path).resolve().parent.parent)
    homes += [SYSTEM_TOOLKIT, *(home for root in _roots("nvidia") for home in sorted(Path(root).glob("cu*"), reverse=True))]
    for home in homes:
        if (home / "bin" / "nvcc").is_file():
            return Toolkit(home / "bin" / "nvcc")
    raise PluginError("deepgemm: nvcc not found, which compiles its kernels; install the CUDA toolkit or set CUDA_HOME")


def fault_of(installation: Installation) -> str:
    """Return why the library does not load, from a child process, or an empty text."""
    fault = load_fault(_LOAD, installation.extension)
    return f"deepgemm: deep_gemm {installation.version}, {installation.extension}, does not load: {fault}" if fault else ""


def run_child(question: Mapping[str, Any], variables: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Ask `child` a question, in a process without devices.

    Raises:
        PluginError: the process did not start, or took too long.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-c", _CHILD.format(path=list(filter(None, sys.path)))]
    try:
        return subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, check=False, env=environment, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"deepgemm: a child process failed: {error}") from error


def variables(toolkit: Toolkit) -> dict[str, str]:
    """Return the variables that a copy of the library reads at its first use.

    Without the last two it would create a cuBLASLt handle and 32 MiB of workspace. Since 2.8 it
    looks for the toolkit there.
    """
    return {
        "CUDA_HOME": str(toolkit.home),
        "DG_JIT_CACHE_DIR": str(private_folder("deepgemm")),
        "DG_JIT_NVCC_COMPILER": str(toolkit.nvcc),
        "DG_JIT_USE_NVRTC": "0",
        "DG_USE_PYTORCH_CUBLASLT_HANDLE": "1",
        "DG_USE_TEMP_CUBLASLT_WORKSPACE": "1",
    }


def open_copy(installation: Installation, toolkit: Toolkit) -> Any:
    """Load a private copy of the library; each call returns another one.

    Raises:
        ImportError: it does not load.
    """
    module = load_copy(installation.extension)
    module.init(str(installation.folder), str(toolkit.home))
    return module


@functools.cache
def registers(extension: Path) -> bool:
    """Return whether an extension registers operations of torch; the others are modules of Python."""
    content = extension.read_bytes() if extension.is_file() else b""
    return registered.NAMESPACE in content and b"PyInit__C\0" not in content


def load_copy(extension: Path) -> Any:
    """Load the extension from memory.

    The dynamic linker and Python know a library by its path: each copy spells it in another way.

    Raises:
        ImportError: it does not load, lacks a function, or has one that takes other arguments.
    """
    import torch  # loads the libraries that the extension needs

    del torch
    number = next(_numbers)
    with os.fdopen(os.memfd_create("deepgemm"), "wb") as content:
        original, namespace, is_registered = extension.read_bytes(), f"dg{number:07d}", registers(extension)
        content.write(registered.private_content(original, namespace) if is_registered else original)
        content.flush()
        path = f"/proc/self/fd/{'./' * number}{content.fileno()}"
        module = registered.load(path, namespace) if is_registered else _load_module(f"tunedgemm_deepgemm_copy{number}._C", path)
    if missing := [function for function in FUNCTIONS if not hasattr(module, function)]:
        raise ImportError(f"it lacks {', '.join(missing)}")
    for function in PRODUCTS:
        stated = getattr(module, function).__doc__  # pybind11's has the signature
        if stated and "compiled_dims" not in stated:
            raise ImportError(f"{function} must take compiled_dims (got {stated.splitlines()[0]})")
    return module


def _load_module(name: str, path: str) -> Any:
    """Load a module of Python's from a path.

    Raises:
        ImportError: it does not load.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@attrs.frozen(eq=False)
class Access:
    """Ways to the library, which tests replace.

    Attributes:
        find: finds the library.
        toolkit: finds the compiler.
        fault: says why the library does not load.
        open: opens a private copy.
        compile: compiles ahead; see `build.compile_ahead`.
        steps: kernels around products of experts; see `experts.steps.TritonSteps`.
    """

    find: Callable[[], Installation]
    toolkit: Callable[[], Toolkit]
    fault: Callable[[Installation], str]
    open: Callable[[Installation, Toolkit], Any]
    compile: Callable[..., list[str]]
    steps: Any
