"""Drivers: HIP's and CUDA's module API through ctypes: code becomes a function on a device. Launches go through `native`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError, PluginError

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_LAUNCH = (_POINTER, *(_UINT,) * 7, _POINTER, _HANDLE, _HANDLE)

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
DYNAMIC_SHARED = 8


@attrs.frozen(eq=False)
class Interface:
    """A driver's functions (hip_runtime_api.h of ROCm 6 and 7, cuda.h of CUDA 12 and 13).

    Attributes:
        kind: whose devices it drives, as `Device.kind`.
        libraries: its file names, newest first; the last is what all start with.
        functions: our word -> (name, arguments); all return a status, of which 0 is success.
        error: the function that gives the text of a status: as its result, or on NVIDIA through a pointer.
        end: what ends the list of extra arguments of a launch; 0 where the arguments are the kernel's one parameter.
        no_context: the status of a call by a thread without a context; see `Driver.mend`.
    """

    kind: str
    libraries: tuple[str, ...]
    functions: Mapping[str, tuple[str, tuple[Any, ...]]]
    error: str
    end: int
    no_context: int = -1


HIP = Interface(
    kind="amd",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    functions={
        "load": ("hipModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("hipModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "launch": ("hipModuleLaunchKernel", _LAUNCH),
    },
    error="hipGetErrorString",
    end=3,  # HIP_LAUNCH_PARAM_END
)
CUDA = Interface(
    kind="nvidia",
    libraries=("libcuda.so.1", "libcuda.so"),
    functions={
        "load": ("cuModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("cuModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "launch": ("cuLaunchKernel", _LAUNCH),
        "set": ("cuFuncSetAttribute", (_POINTER, _INT, _INT)),
        "describe": ("cuTensorMapEncodeTiled", (_POINTER, _INT, _UINT, *(_POINTER,) * 5, *(_INT,) * 4)),
    },
    error="cuGetErrorString",
    end=0,
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT
)
INTERFACES = {interface.kind: interface for interface in (HIP, CUDA)}


@attrs.frozen(eq=False)
class Driver:
    """A loaded driver.

    Attributes:
        interface: which.
        path: the file.
        functions: by our word.
    """

    interface: Interface
    path: str
    functions: Mapping[str, Any]

    def call(self, word: str, *arguments: Any) -> None:
        """Call one of its functions.

        Raises:
            LaunchError: its status is not success.
        """
        if status := self.functions[word](*arguments):
            raise LaunchError(f"{self.interface.functions[word][0]}: {self.text(status)}")

    def ready(self, index: int) -> None:
        """Give the thread the device's context where it has none; nothing for host memory, or a driver without contexts."""
        if index >= 0 and self.interface.no_context >= 0:
            self._enter(index)

    def mend(self, word: str, status: int, index: int) -> None:
        """Make a second try of a failed call worthwhile, where the thread only had no context.

        A thread has none while it has called nothing of CUDA's runtime but what torch answers from its own memory.

        Raises:
            LaunchError: the call failed for another reason.
        """
        if status != self.interface.no_context or index < 0 or not self._enter(index):
            raise LaunchError(f"{self.interface.functions[word][0]}: {self.text(status)}")

    def _enter(self, index: int) -> bool:
        """Whether the thread had no context and now has the device's primary one, which is torch's and lives as long as the process."""
        native, device, context = ctypes.CDLL(self.path), ctypes.c_int(), ctypes.c_void_p()
        return not (
            native.cuCtxGetCurrent(ctypes.byref(context))
            or context.value
            or native.cuDeviceGet(ctypes.byref(device), index)
            or native.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or native.cuCtxSetCurrent(context)
        )

    def text(self, status: int) -> str:
        """The driver's own words for a status."""
        error, found = self.functions["error"], ctypes.c_char_p()
        if self.interface.kind == "nvidia":
            error(status, ctypes.byref(found))
        else:
            found.value = error(status)
        return (found.value or b"").decode(errors="replace") or f"status {status}"

    def address(self, word: str) -> int:
        """Where a function lies."""
        return int(ctypes.cast(self.functions[word], ctypes.c_void_p).value or 0)


@attrs.frozen(eq=False)
class Function:
    """A kernel that is loaded on a device.

    Attributes:
        driver: whose it is.
        address: the driver's handle of it.
    """

    driver: Driver
    address: int


def bind_functions(interface: Interface, path: str) -> Driver:
    """Load a driver's library and give its functions their arguments.

    Raises:
        PluginError: it cannot be loaded, or lacks a function.
    """
    try:
        loaded = ctypes.CDLL(path)
        functions = {word: getattr(loaded, name) for word, (name, _) in interface.functions.items()}
        functions["error"] = getattr(loaded, interface.error)
    except (OSError, AttributeError) as error:
        raise PluginError(f"asm: {path} cannot be used: {error}") from error
    for word, (_, arguments) in interface.functions.items():
        functions[word].argtypes, functions[word].restype = arguments, ctypes.c_int
    if interface.kind == "nvidia":
        functions["error"].argtypes, functions["error"].restype = (_INT, ctypes.POINTER(ctypes.c_char_p)), ctypes.c_int
    else:
        functions["error"].argtypes, functions["error"].restype = (_INT,), ctypes.c_char_p
    return Driver(interface, path, functions)


@functools.cache
def loaded(interface: Interface) -> Driver:
    """The driver of this kind in this process: the file that torch has loaded, else the first that the loader finds.

    Raises:
        PluginError: there is none.
    """
    import torch

    del torch  # it loads the driver that it was built for
    problems = []
    for name in (*mapped(interface.libraries[-1]), *interface.libraries):
        try:
            return bind_functions(interface, name)
        except PluginError as error:
            problems.append(str(error))
    raise PluginError(problems[0])


def mapped(stem: str) -> list[str]:
    """Paths of the files in the process's memory whose name starts with *stem*."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if stem in line)
    return [path for path in dict.fromkeys(paths) if Path(path).name.startswith(stem)]


def current(index: int) -> contextlib.AbstractContextManager[Any]:
    """A block in which the device with this index is the current one; -1 is host memory, which needs nothing."""
    import torch

    return torch.cuda.device(index) if index >= 0 else contextlib.nullcontext()


@functools.cache
def function_of(driver: Driver, code: bytes, entry: str, index: int) -> Function:
    """The kernel *entry* of a code object on the device with this index, -1 for host memory; loaded once.

    It stays loaded: a captured graph may hold it when nothing else does.

    Raises:
        LaunchError: the driver does not take it.
    """
    function = ctypes.c_void_p()
    with current(index):
        driver.call("function", function, _module(driver, code, index), entry.encode())
    return Function(driver, int(function.value or 0))


@functools.cache
def _module(driver: Driver, code: bytes, index: int) -> ctypes.c_void_p:
    """A code object on the current device, whose index is given: a pack may have many kernels in one."""
    module = ctypes.c_void_p()
    driver.call("load", module, code)
    del index
    return module
