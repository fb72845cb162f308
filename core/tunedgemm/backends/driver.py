"""The CUDA and HIP drivers through ctypes, for plugins that load code objects.

`native` launches the loaded kernels. Signatures are those of cuda.h (CUDA 12 and 13) and
hip_runtime_api.h (ROCm 6 and 7).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from tunedgemm.errors import LaunchError, PluginError
from tunedgemm.process.forksafe import ForkSafeLock

Bound = TypeVar("Bound")

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_HANDLE, _INTS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
_LAUNCH = (_POINTER, *(_UINT,) * 7, _POINTER, _HANDLE, _HANDLE)
#: Kind of device -> word -> (function, arguments) for loading and launching kernels.
_FUNCTIONS: Mapping[str, Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "nvidia": {
        "load": ("cuModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("cuModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "launch": ("cuLaunchKernel", _LAUNCH),
        "get": ("cuFuncGetAttribute", (_INTS, _INT, _POINTER)),
        "set": ("cuFuncSetAttribute", (_POINTER, _INT, _INT)),
        "launch overlapping": ("cuLaunchKernelEx", (_POINTER, _POINTER, _HANDLE, _HANDLE)),
        "describe": ("cuTensorMapEncodeTiled", (_POINTER, _INT, _UINT, *(_POINTER,) * 5, *(_INT,) * 4)),
    },
    "amd": {
        "load": ("hipModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("hipModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "launch": ("hipModuleLaunchKernel", _LAUNCH),
        "get": ("hipFuncGetAttribute", (_INTS, _INT, _POINTER)),
    },
}
#: Kind of device -> (files of the driver, function of a status's text, status without a context).
_DRIVERS = {
    "nvidia": (("libcuda.so.1", "libcuda.so"), "cuGetErrorString", 201),  # CUDA_ERROR_INVALID_CONTEXT
    "amd": (("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"), "hipGetErrorString", -1),
}
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and the bytes that CUDA grants by default.
_DYNAMIC_SHARED, _DEFAULT_SHARED = 8, 48 << 10
_granting = ForkSafeLock()


@attrs.frozen(eq=False, kw_only=True)
class DriverInterface:
    """The functions of a driver that a plugin uses.

    Attributes:
        plugin: name of the plugin, for messages.
        kind: kind of devices, as in `Device.kind`.
        libraries: file names of the library, newest first; the last is their common prefix.
        functions: the plugin's word -> (function name, argument types); all return a status, 0 for
            success.
        error: name of the function that returns a status's text, on NVIDIA through a pointer.
        no_context: status of a call in a thread without a context, see `Driver.mend`; -1 if there
            are no contexts.
    """

    plugin: str
    kind: str
    libraries: tuple[str, ...]
    functions: Mapping[str, tuple[str, tuple[Any, ...]]]
    error: str
    no_context: int = -1


def driver_interface(plugin: str, kind: str, *words: str) -> DriverInterface:
    """Return the functions of CUDA's (*kind* ``nvidia``) or HIP's driver (``amd``) that load and
    launch kernels, and these further ones.

    Args:
        plugin: name of the plugin.
        kind: kind of the driven devices.
        words: of ``get`` (attributes of a function), and for NVIDIA ``set`` (them, needed for more
            than 48 KiB of shared memory), ``launch overlapping`` and ``describe`` (tensor maps).

    Raises:
        PluginError: the kind or a word is unknown.
    """
    if kind not in _DRIVERS:
        raise PluginError(f"{plugin}: devices of kind {kind}: no driver known; use one of {', '.join(_DRIVERS)}")
    if unknown := set(words) - set(_FUNCTIONS[kind]):
        raise PluginError(f"{plugin}: driver of {kind}: no function {min(unknown)!r}; use {', '.join(_FUNCTIONS[kind])}")
    libraries, error, no_context = _DRIVERS[kind]
    functions = {word: _FUNCTIONS[kind][word] for word in ("load", "function", "launch", *words)}
    return DriverInterface(plugin=plugin, kind=kind, libraries=libraries, functions=functions, error=error, no_context=no_context)


@attrs.frozen(eq=False)
class Driver:
    """A loaded driver.

    Attributes:
        interface: its interface.
        path: its file.
        functions: by the plugin's word.
    """

    interface: DriverInterface
    path: str
    functions: Mapping[str, Any]

    def call(self, word: str, *arguments: Any, index: int = -1) -> None:
        """Call a function; *index*: the current device, where the thread may lack a context.

        Raises:
            LaunchError: its status is not success.
        """
        while status := self.functions[word](*arguments):
            self.mend(word, status, index)

    def mend(self, word: str, status: int, index: int) -> None:
        """Enter the device's context if a call failed because the thread had none.

        A thread has none before its first call of the CUDA runtime.

        Raises:
            LaunchError: the call failed for another reason.
        """
        if status != self.interface.no_context or index < 0 or not self._enter(index):
            raise LaunchError(f"{self.interface.functions[word][0]}: {self.text(status)}")

    def _enter(self, index: int) -> bool:
        """Enter the device's primary context if the thread has none; return whether it had none.

        It is torch's context, which lives as long as the process.
        """
        loaded, device, context = ctypes.CDLL(self.path), ctypes.c_int(), ctypes.c_void_p()
        return not (
            loaded.cuCtxGetCurrent(ctypes.byref(context))
            or context.value
            or loaded.cuDeviceGet(ctypes.byref(device), index)
            or loaded.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or loaded.cuCtxSetCurrent(context)
        )

    def text(self, status: int) -> str:
        """Return the driver's message for a status."""
        error, message = self.functions["error"], ctypes.c_char_p()
        if self.interface.kind == "nvidia":
            error(status, ctypes.byref(message))
        else:
            message.value = error(status)
        return (message.value or b"").decode(errors="replace") or f"status {status}"

    def address(self, word: str) -> int:
        """Return the address of a function."""
        return int(ctypes.cast(self.functions[word], ctypes.c_void_p).value or 0)


@attrs.define(eq=False)
class KernelFunction:
    """A kernel loaded on a device.

    Attributes:
        driver: driver that loaded it.
        index: device index; -1 for host memory.
        address: the driver's handle.
        granted: bytes of dynamic shared memory allowed per block: the most requested so far.
    """

    driver: Driver
    index: int
    address: int
    granted: int = _DEFAULT_SHARED

    def attribute(self, number: int) -> int:
        """Return an attribute (CUfunction_attribute, hipFunction_attribute); needs ``get``.

        The query also makes CUDA load the function now, not at its first launch.

        Raises:
            LaunchError: the driver does not answer.
        """
        value = ctypes.c_int()
        with device_context(self.index):
            self.driver.call("get", value, number, self.address, index=self.index)
        return value.value

    def grant(self, shared: int) -> None:
        """Allow this many bytes of dynamic shared memory per block; needs ``set`` on NVIDIA.

        It never shrinks, since shapes share the function. HIP needs no such call.

        Raises:
            LaunchError: the driver refuses.
        """
        with _granting, device_context(self.index):
            if shared > self.granted and self.driver.interface.kind == "nvidia":
                self.driver.call("set", self.address, _DYNAMIC_SHARED, shared, index=self.index)
                self.granted = shared

    def mend(self, status: int) -> None:
        """Enter the device's context if a launch failed because the thread had none.

        Args:
            status: its status; negated, that of a tensor map.

        Raises:
            LaunchError: it failed for another reason, which is the driver's text.
        """
        self.driver.mend("launch" if status > 0 else "describe", abs(status), self.index)


@functools.cache
def load_function(driver: Driver, code: bytes, entry: str, index: int) -> KernelFunction:
    """Load the kernel *entry* of a code object on the device with this index; -1 for host memory.

    Kernels are loaded once and never unloaded, since a captured graph may still use them.

    Raises:
        LaunchError: the driver refuses the code or the entry.
    """
    function = ctypes.c_void_p()
    with device_context(index):
        driver.call("function", function, _module(driver, code, index), entry.encode(), index=index)
    return KernelFunction(driver, index, int(function.value or 0))


@functools.cache
def _module(driver: Driver, code: bytes, index: int) -> ctypes.c_void_p:
    """Load a code object on the current device; one object may hold many kernels."""
    module = ctypes.c_void_p()
    driver.call("load", module, code, index=index)
    return module


def bind_driver(interface: DriverInterface, path: str) -> Driver:
    """Load a driver's library and declare its functions' arguments.

    Raises:
        PluginError: it cannot be loaded, or lacks a function.
    """
    try:
        loaded = ctypes.CDLL(path)
        functions = {word: getattr(loaded, name) for word, (name, _) in interface.functions.items()}
        functions["error"] = getattr(loaded, interface.error)
    except (OSError, AttributeError) as error:
        raise PluginError(f"{interface.plugin}: {path} cannot be used: {error}") from error
    for word, (_, arguments) in interface.functions.items():
        functions[word].argtypes, functions[word].restype = arguments, ctypes.c_int
    nvidia = interface.kind == "nvidia"
    functions["error"].argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)) if nvidia else (ctypes.c_int,)
    functions["error"].restype = ctypes.c_int if nvidia else ctypes.c_char_p
    return Driver(interface, path, functions)


@functools.cache
def loaded_driver(interface: DriverInterface) -> Driver:
    """Return this process's driver of this kind: the file that torch has loaded, else the loader's first.

    Raises:
        PluginError: there is none.
    """
    import torch

    del torch  # importing it loads the driver that it was built for
    return first_usable((*mapped_files(interface.libraries[-1]), *interface.libraries), lambda path: bind_driver(interface, path))


def first_usable(paths: Iterable[str], bind: Callable[[str], Bound]) -> Bound:
    """Bind the first usable path of a library, of at least one.

    Raises:
        PluginError: *bind* refuses all; the reason is that of the first.
    """
    problems = []
    for path in paths:
        try:
            return bind(path)
        except PluginError as error:
            problems.append(error)
    raise problems[0]


def mapped_files(stem: str) -> list[str]:
    """Return paths of the files mapped by this process whose name starts with *stem*, as ``libcuda.so``."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if stem in line)
    return [path for path in dict.fromkeys(paths) if Path(path).name.startswith(stem)]


def device_context(index: int) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which the device with this index is current; -1 is host memory, which needs none."""
    import torch

    return torch.cuda.device(index) if index >= 0 else contextlib.nullcontext()
