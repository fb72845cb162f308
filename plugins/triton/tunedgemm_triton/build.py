"""Compile one Triton program for one class of shapes, without a device, into the artifact cache.

A program depends on sizes only through their divisors, and not on M.
One compile therefore serves many shapes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError, PluginError
from tunedgemm.tools.files import cache_folder, private_folder
from tunedgemm.tools.launching import ARCHITECTURES, ForkSafeLock

#: Triton's names of our dtypes.
TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "int8": "i8", "fp8_e4m3fn": "fp8e4nv", "fp8_e4m3fnuz": "fp8e4b8"}

Constant = int | float | bool | str

#: First line of a report of MLIR: an error with its place in the source, or a failed assertion.
_MLIR_ERROR = re.compile(r"^.*(?::\d+:\d+: error: |: (?=Assertion `))(.*)$", re.MULTILINE)

_lock = ForkSafeLock()


@attrs.frozen(cache_hash=True)
class Program:
    """All that a compile depends on, except the architecture.

    Attributes:
        function: ``file.function`` in `kernels`.
        types: (name, Triton type) of each parameter that is not constant.
        constants: (name, value) of each constexpr parameter.
        multiples: (name, power of two) that divides the integer, which allows wider loads.
        options: (name, value) of the compiler's options.
        name: shown in errors; not part of the identity.
    """

    function: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    multiples: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    name: str = attrs.field(default="", eq=False)

    @property
    def source(self) -> Any:
        """Return the Triton function."""
        module, _, name = self.function.partition(".")
        return getattr(importlib.import_module(f"tunedgemm_triton.kernels.{module}"), name)

    def compile(self, gfx: str) -> Any:
        """Return Triton's CompiledKernel, from the cache where present.

        Raises:
            LaunchError: the program does not compile; the message ends with the compiler's.
            PluginError: the compiler does not know an option.
        """
        import triton
        from triton.compiler import ASTSource

        function, types, values, multiples = self.source, dict(self.types), dict(self.constants), dict(self.multiples)
        signature = {name: "constexpr" if name in values else types[name] for name in function.arg_names}
        # Triton counts on tensors being aligned to 16 bytes.
        divisors = [16 if kind.startswith("*") else multiples.get(name, 1) for name, kind in signature.items()]
        attributes = {(index,): [["tt.divisibility", divisor]] for index, divisor in enumerate(divisors) if divisor > 1}
        target = target_of(gfx)
        # Triton 3.10 fuses no multiply and add unless asked, and 3.9 warns of it.
        options = checked_options({"enable_fp_fusion": True, **dict(self.options)}, target)
        try:
            # A server's threads may write to stderr meanwhile; the tuner's compilers have none.
            alone = threading.active_count() == 1
            with triton_cache(), reports_held() if alone else contextlib.nullcontext([]) as reports:
                return triton.compile(ASTSource(function, signature, values, attributes), target=target, options=options)
        except Exception as error:  # the compiler's passes raise plain RuntimeErrors in addition to its own types
            detail = ": ".join([str(error), *reports[:1]])
            raise LaunchError(f"triton {self.name} for {gfx}: compile failed: {type(error).__name__}: {detail}") from error


def checked_options(options: dict[str, int], target: Any) -> dict[str, int]:
    """Return the options after checking their names, since Triton ignores unknown ones.

    Raises:
        PluginError: the target's compiler has no such option.
    """
    if target.backend == "hip":
        from triton.backends.amd.compiler import HIPOptions as Known
    else:
        from triton.backends.nvidia.compiler import CUDAOptions as Known
    known = {field.name for field in dataclasses.fields(Known)}
    if unknown := sorted(set(options) - known):
        raise PluginError(f"triton for {target.backend}:{target.arch}: unknown compiler option {', '.join(unknown)}")
    return options


def target_of(gfx: str) -> Any:
    """Return Triton's target of an architecture."""
    from triton.backends.compiler import GPUTarget

    warp_size = ARCHITECTURES[gfx].warp_size
    return GPUTarget("cuda", int(gfx[3:]), warp_size) if gfx.startswith("sm_") else GPUTarget("hip", gfx, warp_size)


@contextlib.contextmanager
def triton_cache() -> Iterator[None]:
    """Set Triton's cache to our artifact folder for compiles in here only; one thread at a time."""
    from triton import knobs

    from tunedgemm_triton.cache import PrivateCache

    with _lock, knobs.cache.scope():
        knobs.cache.dir, knobs.cache.manager_class = _folder(cache_folder()), PrivateCache
        yield


@contextlib.contextmanager
def reports_held() -> Iterator[list[str]]:
    """Hold back what is written to stderr in here, and write it afterwards; yield a list.

    After an exception it has MLIR's errors. Its report, which is the whole module, is not written.
    A compiler that ends the process leaves the text in a file ``stderr-*.log`` in Triton's folder.
    """
    errors: list[str] = []
    try:
        saved = os.dup(2)
    except OSError:  # a process without stderr, as some services are
        yield errors
        return
    with tempfile.NamedTemporaryFile("r", prefix="stderr-", suffix=".log", dir=_folder(cache_folder()), errors="replace") as held:
        _write("")
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield errors
            failed = False
        finally:
            _write("")
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            text = held.read()
            found = list(_MLIR_ERROR.finditer(text)) if failed else []
            errors += [match[1] for match in found]
            _write(text[: found[0].start()] if found else text)


def _write(text: str) -> None:
    """Write to stderr at once, where there is one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


@functools.cache
def _folder(cache: Path) -> str:
    """Return Triton's folder of this cache, or a temporary one of this process where it cannot be used."""
    del cache  # the folder of the environment, by which this is cached
    with contextlib.suppress(OSError):
        private = str(private_folder("triton"))
        if os.access(private, os.W_OK):
            return private
    temporary = tempfile.mkdtemp(prefix="tunedgemm-triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
