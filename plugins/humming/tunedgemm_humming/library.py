"""Find Humming without importing it; import it to list, compile or bind.

Its import takes seconds. A kernel is compiled by NVRTC or nvcc in processes that Humming starts,
and needs no device: what Humming asks one about is stated here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.launching import ForkSafeLock, environment_with, load_fault

_DISTRIBUTION, _PACKAGE = "humming-kernels", "humming"
_HINT = "pip install 'humming-kernels[cu13]'"
#: First version whose sources were read.
_OLDEST = (0, 1, 20)
#: Imports what is used here, and loads the launcher, which is compiled for a torch older than 2.11.
_LOAD = "import humming.tune, humming.kernel; from humming.ops.utils import init_humming_launcher as load; load()"
#: Keeps the import from starting a compiler in the background.
_QUIET = {"HUMMING_DISABLE_PARALLEL_BUILD": "1"}
#: Arguments by name of a launch and of the choice.
_OF_LAUNCH = ("configs", "inputs", "weight", "weight_scale", "weight_scale_2", "zero_point", "outputs", "locks")
_OF_CHOICE = ("layer_config", "shape_m", "gemm_type", "device")
#: What Humming asks a device about to compile for Hopper.
_HOPPER = types.SimpleNamespace(index=0, is_ppu=False, sm_version=90, sm_major=9, sm_minor=0, max_registers_per_sm=1 << 16)
#: Bytes of shared memory of a multiprocessor of Hopper, and those that CUDA takes of each block.
_SHARED, _RESERVED = 228 << 10, 1 << 10

_lock = ForkSafeLock()


@attrs.frozen
class Installation:
    """What is installed.

    Attributes:
        version: of Humming, as text; "" where it is absent.
        fault: why it cannot be used; "" where it can, as far as no import can tell more.
    """

    version: str = ""
    fault: str = ""


@attrs.frozen
class Library:
    """Humming's functions. Configurations are its dicts: of a layer, and of a layer with its tuning.

    Attributes:
        choose: returns the tuning that Humming chooses for a layer, M and a device's index.
        check: raises an exception where a kernel cannot be; compiles nothing.
        build: compiles a kernel and returns the path of its binary.
        register: returns the number of a binary for launches.
        launch: launches a registered kernel.
    """

    choose: Callable[[dict[str, Any], int, int], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]
    build: Callable[[dict[str, Any]], str]
    register: Callable[[str], int]
    launch: Callable[..., Any]


@functools.cache
def installation() -> Installation:
    """Return what is installed, from its metadata alone."""
    try:
        version = str(metadata.version(_DISTRIBUTION))
        found = find_spec(_PACKAGE) is not None
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        return Installation(fault=f"{_DISTRIBUTION}: not installed; {_HINT}")
    if not found:
        return Installation(fault=f"{_DISTRIBUTION} {version}: its package {_PACKAGE!r} is not importable; install it again")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        return Installation(f"humming {version}", f"{_DISTRIBUTION}: needs {wanted} or later (got {version}); {_HINT}")
    return Installation(f"humming {version}")


@functools.cache
def import_fault() -> str:
    """Return why an installed Humming does not load, from a child process; "" where it does."""
    reason = "" if "humming.kernel" in sys.modules else load_fault(_LOAD, *_binaries())
    return f"{installation().version}: does not load: {reason}" if reason else ""


def _binaries() -> Iterator[Path]:
    """Yield the files whose change calls for another try."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(path for pattern in ("__init__.py", "**/*.so") for path in Path(folder).glob(pattern))


def load() -> Library:
    """Import Humming, at the first call.

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
    """Return Humming's functions, or why there are none."""
    here = installation()
    if here.fault:
        return here.fault
    try:
        with environment_with(_QUIET):
            return _functions(here.version)
    except Exception as error:  # a library's import may raise anything
        return str(error) if isinstance(error, PluginError) else f"{here.version}: does not load: {type(error).__name__}: {error}"


def _functions(version: str) -> Library:
    """Return the functions of the installed Humming.

    Raises:
        PluginError: one lacks an argument.
    """
    import torch
    from humming.kernel import HummingKernel
    from humming.ops import launch_kernel, register_kernel
    from humming.tune import get_heuristics_config

    for function, names in ((launch_kernel, _OF_LAUNCH), (get_heuristics_config, _OF_CHOICE)):
        if missing := [name for name in names if name not in inspect.signature(function).parameters]:
            raise PluginError(f"{version}: not a version that this plugin knows: {function.__name__} lacks {', '.join(missing)}; {_HINT}")

    class Checked(HummingKernel):  # type: ignore[misc]
        """A kernel that is not compiled."""

        def prepare(self) -> None: ...

        def register_kernel(self) -> None: ...

    class Compiled(HummingKernel):  # type: ignore[misc]
        """A kernel that is compiled, and not loaded."""

        def register_kernel(self) -> None: ...

    def choose(layer: dict[str, Any], m: int, index: int) -> dict[str, Any]:
        return dict(get_heuristics_config(layer, shape_m=m, gemm_type="dense", device=torch.device("cuda", index)))

    def check(config: dict[str, Any]) -> None:
        with _some_device():
            kernel = Checked(**config)
            needed = kernel.num_ctas_per_sm * (kernel.estimated_smem_size + _RESERVED)
        if needed > _SHARED:  # blocks that wait for each other must run at once
            raise ValueError(f"shared memory of a multiprocessor must be at least {needed} bytes (got {_SHARED})")

    def build(config: dict[str, Any]) -> str:
        with _some_device():
            return str(Compiled(**config).kernel_filename)

    return Library(choose, check, build, lambda path: int(register_kernel(path)[0]), launch_kernel)


@contextlib.contextmanager
def _some_device() -> Iterator[None]:
    """Describe Hopper to Humming where this process sees no device."""
    import torch
    from humming.device import current_device

    if torch.cuda.is_available():
        yield
        return
    old, current_device._value = current_device._value, _HOPPER
    try:
        yield
    finally:
        current_device._value = old
