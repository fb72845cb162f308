"""Find QuACK without importing it; import it when a solution is bound or compiled.

Its import takes seconds: PyTorch's compiler, CuTe DSL and an MLIR of 190 MB.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.files import cache_folder, private_folder
from tunedgemm.tools.launching import ForkSafeLock, environment_with, load_fault

_QUACK, _DSL = "quack-kernels", "nvidia-cutlass-dsl"
_HINT = "pip install quack-kernels 'nvidia-cutlass-dsl[cu13]'"
#: First version whose gemm() returns a plan to launch again.
_OLDEST = (0, 6, 2)
#: Packages whose binaries decide whether the import works, and code that exchanges a tensor.
_PACKAGES = ("quack", "nvidia_cutlass_dsl", "cutlass", "tvm_ffi")
_LOAD = "import quack.gemm, torch, tvm_ffi; tvm_ffi.convert(torch.zeros(8))"
#: What a compiler without a GPU needs to know; the names are QuACK's and CuTe DSL's.
_TARGET = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
#: Variable that importing ``torch._dynamo`` sets to its default.
_OF_COMPILER = "TORCHINDUCTOR_CACHE_DIR"
#: Arguments of QuACK's functions that a launch passes by name.
_OF_GEMM = ("pingpong", "split_k", "rowvec_bias", "colvec_bias")
_OF_RUN = ("rowvec_bias", "colvec_bias")

_lock = ForkSafeLock()


@attrs.frozen
class Installation:
    """What is installed.

    Attributes:
        version: of QuACK and of CuTe DSL, as one text; "" where one is absent.
        fault: why it cannot be used; "" where it can, as far as no import can tell more.
    """

    version: str = ""
    fault: str = ""


@attrs.frozen
class Library:
    """QuACK's functions.

    Attributes:
        gemm: compiles if need be, launches, and returns a plan.
        run: launches a plan for other operands of the same dtypes and orders.
        compiled: returns the counts of QuACK's cache of kernels: hits, misses, limit, size.
    """

    gemm: Callable[..., Any]
    run: Callable[..., None]
    compiled: Callable[[], tuple[Any, ...]]


@functools.cache
def installation() -> Installation:
    """Return what is installed, from its metadata alone."""
    versions = []
    for name, package in ((_QUACK, "quack"), (_DSL, "cutlass")):
        try:
            versions.append(str(metadata.version(name)))
            found = find_spec(package) is not None
        except (metadata.PackageNotFoundError, ValueError, KeyError):
            return Installation(fault=f"{name}: not installed; {_HINT}")
        if not found:
            return Installation(fault=f"{name} {versions[-1]}: its package {package!r} is not importable; install it again")
    text = f"quack {versions[0]} cutlass-dsl {versions[1]}"
    if tuple(map(int, re.findall(r"\d+", versions[0])[:3])) < _OLDEST:
        return Installation(text, f"{_QUACK}: needs {'.'.join(map(str, _OLDEST))} or later (got {versions[0]}); {_HINT}")
    return Installation(text)


@functools.cache
def import_fault() -> str:
    """Return why an installed QuACK does not import, from a child process; "" where it does."""
    reason = "" if "quack.gemm" in sys.modules else load_fault(_LOAD, *_binaries())
    return f"{installation().version}: does not load: {reason}" if reason else ""


def load() -> Library:
    """Import QuACK, at the first call; a child process tries it first.

    Raises:
        PluginError: it does not import here, or is of another version.
    """
    with _lock:
        answer = _loaded()
    if isinstance(answer, str):
        raise PluginError(answer)
    return answer


@functools.cache
def _loaded() -> Library | str:
    """Return QuACK's functions, or why there are none."""
    here = installation()
    if fault := here.fault or import_fault():
        return fault
    try:
        return functions_of(_imported(), here.version)
    except PluginError as error:
        return str(error)
    except Exception as error:  # a library's import may raise anything
        return f"{here.version}: does not load: {type(error).__name__}: {error}"


def functions_of(module: ModuleType, version: str) -> Library:
    """Return the functions of a module ``quack.gemm``.

    Raises:
        PluginError: it lacks one, or an argument of one.
    """
    try:
        gemm, run, compiled = module.gemm, module.run_gemm_plan, module._compile_gemm.cache_info
    except AttributeError as error:
        missing = [str(error)]
    else:
        missing = [
            name
            for function, names in ((gemm, _OF_GEMM), (run, _OF_RUN))
            for name in names
            if name not in inspect.signature(function).parameters
        ]
    if missing:
        raise PluginError(f"{version}: not a version that this plugin knows: lacks {', '.join(missing)}; {_HINT}")
    return Library(gemm, run, compiled)


def kernel_folder() -> str:
    """Return the folder of compiled kernels: not QuACK's default, whose name in /tmp others may take.

    A process that imported QuACK before has that default.
    """
    ours = os.environ.get("QUACK_CACHE_DIR") or cache_folder() / "quack"
    folder = getattr(sys.modules.get("quack.cache"), "CACHE_DIR", ours)
    return os.path.realpath(folder) if folder else "QuACK's default"


def compiling_for_hopper() -> AbstractContextManager[None]:
    """Name the target in the environment for a compilation without a GPU; the user's values stay."""
    return environment_with({name: os.environ.get(name, value) for name, value in _TARGET.items()})


def _binaries() -> Iterator[Path]:
    """Yield the files whose change calls for another try."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from sorted(path for pattern in ("__init__.py", "**/*.so") for path in Path(folder).glob(pattern))


def _imported() -> ModuleType:
    """Import ``quack.gemm``; its kernels go to our cache, unless the process uses QuACK already.

    CuTe DSL replaces ``sys.excepthook``. Torch's compiler, which QuACK imports, sets a variable.
    The process gets its own back.
    """
    import torch

    first, hook, unset = "quack" not in sys.modules, sys.excepthook, _OF_COMPILER not in os.environ
    # CuTe DSL reads its target at import, and assumes sm_100a where it finds no GPU.
    target = contextlib.nullcontext() if torch.cuda.is_available() else compiling_for_hopper()
    try:
        with target:
            module = importlib.import_module("quack.gemm")
        if first and "QUACK_CACHE_DIR" not in os.environ:
            _keep_kernels_in_our_cache(importlib.import_module("quack.cache"))
    finally:
        sys.excepthook = hook
        if unset:
            os.environ.pop(_OF_COMPILER, None)
    return module


def _keep_kernels_in_our_cache(cache: Any) -> None:
    """Set QuACK's folder; without a private one its kernels stay in memory."""
    try:
        cache.CACHE_DIR = str(private_folder("quack"))
    except OSError:
        cache.CACHE_ENABLED = False
