"""Drivers: CUDA's and HIP's through ctypes: a code object becomes a function on a device. Launches go through `native`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.plugin import LaunchError, OutOfResources, PluginError

from tunedgemm_skinny.mapped import mapped

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_HANDLE, _INTS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
_LAUNCH = (_POINTER, *(_UINT,) * 7, _POINTER, _HANDLE, _HANDLE)

#: Numbers of ``CUfunction_attribute`` and of ``hipFunction_attribute``, which are the same.
MAX_THREADS, LOCAL_BYTES, REGISTERS, DYNAMIC_SHARED = 0, 3, 4, 8
#: Dynamic shared memory in bytes that CUDA grants unasked.
UNASKED_SHARED = 48 << 10


@attrs.frozen(eq=False)
class Interface:
    """What differs between the two drivers (cuda.h of CUDA 12 and 13, hip_runtime_api.h of ROCm 6 and 7).

    Attributes:
        kind: whose devices it drives, as `Device.kind`.
        libraries: its file names, newest first; the last is what all start with.
        functions: our word -> (name, arguments); all return a status, of which 0 is success.
        error: the function that gives the text of a status: as its result, or through a pointer.
        asks_for_shared: whether much dynamic shared memory must be asked for.
        no_context: the status of a call by a thread without a context; see `Driver.mend`.
    """

    kind: str
    libraries: tuple[str, ...]
    functions: Mapping[str, tuple[str, tuple[Any, ...]]]
    error: str
    asks_for_shared: bool
    no_context: int


CUDA = Interface(
    kind="nvidia",
    libraries=("libcuda.so.1", "libcuda.so"),
    functions={
        "load": ("cuModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("cuModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "get": ("cuFuncGetAttribute", (_INTS, _INT, _POINTER)),
        "set": ("cuFuncSetAttribute", (_POINTER, _INT, _INT)),
        "launch": ("cuLaunchKernel", _LAUNCH),
        "launch overlapping": ("cuLaunchKernelEx", (_POINTER, _POINTER, _HANDLE, _HANDLE)),
    },
    error="cuGetErrorString",
    asks_for_shared=True,
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT
)
HIP = Interface(
    kind="amd",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    functions={
        "load": ("hipModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("hipModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "get": ("hipFuncGetAttribute", (_INTS, _INT, _POINTER)),
        "launch": ("hipModuleLaunchKernel", _LAUNCH),
    },
    error="hipGetErrorString",
    asks_for_shared=False,
    no_context=-1,
)
INTERFACES = {interface.kind: interface for interface in (CUDA, HIP)}


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

    def call(self, word: str, index: int, *arguments: Any) -> None:
        """Call one of its functions, with the device of this index being the current one.

        Raises:
            LaunchError: its status is not success.
        """
        while status := self.functions[word](*arguments):
            self.mend(word, status, index)

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
        loaded, device, context = ctypes.CDLL(self.path), ctypes.c_int(), ctypes.c_void_p()
        return not (
            loaded.cuCtxGetCurrent(ctypes.byref(context))
            or context.value
            or loaded.cuDeviceGet(ctypes.byref(device), index)
            or loaded.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or loaded.cuCtxSetCurrent(context)
        )

    def text(self, status: int) -> str:
        """The driver's own words for a status."""
        error, found = self.functions["error"], ctypes.c_char_p()
        if self.interface.kind == "amd":
            found.value = error(status)
        else:
            error(status, ctypes.byref(found))
        return (found.value or b"").decode(errors="replace") or f"status {status}"

    def address(self, word: str) -> int:
        """Where a function lies."""
        return int(ctypes.cast(self.functions[word], ctypes.c_void_p).value or 0)


@attrs.define(eq=False)
class Function:
    """A kernel that is loaded on a device.

    Attributes:
        driver: whose it is.
        index: of the device; -1 for host memory.
        address: the driver's handle of it.
        threads: of a block at most, with the registers that it has.
        registers: 32-bit registers a thread.
        local_bytes: memory a thread, of which spilled registers are the most.
        granted: dynamic shared memory in bytes that a block may have, the most that was asked for.
    """

    driver: Driver
    index: int
    address: int
    threads: int
    registers: int
    local_bytes: int
    granted: int = UNASKED_SHARED

    def allow(self, threads: int, shared: int) -> None:
        """Make sure that blocks of so many threads with so many bytes of dynamic shared memory can be launched.

        Raises:
            OutOfResources: they cannot.
        """
        if threads > self.threads:
            raise OutOfResources(f"blocks of {threads} threads with {self.registers} registers each; {self.threads} threads are the most")
        with _granting, current(self.index):
            # Launchers of several shapes share the function, and what one asked for must not be taken from it.
            if shared <= self.granted or not self.driver.interface.asks_for_shared:
                return
            try:
                self.driver.call("set", self.index, self.address, DYNAMIC_SHARED, shared)
            except LaunchError as error:
                raise OutOfResources(f"{shared} bytes of shared memory: {error}") from error
            self.granted = shared


_granting = threading.Lock()


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
        raise PluginError(f"skinny: {path} cannot be used: {error}") from error
    for word, (_, arguments) in interface.functions.items():
        functions[word].argtypes, functions[word].restype = arguments, ctypes.c_int
    amd = interface.kind == "amd"
    functions["error"].argtypes = (_INT,) if amd else (_INT, ctypes.POINTER(ctypes.c_char_p))
    functions["error"].restype = ctypes.c_char_p if amd else ctypes.c_int
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


def current(index: int) -> contextlib.AbstractContextManager[Any]:
    """A block in which the device with this index is the current one; -1 is host memory, which needs nothing."""
    import torch

    return torch.cuda.device(index) if index >= 0 else contextlib.nullcontext()


@functools.cache
def function_of(driver: Driver, code: bytes, entry: str, index: int) -> Function:
    """The function *entry* of a code object on the device with this index, -1 for host memory; loaded once.

    It stays loaded: a captured graph may hold it when nothing else does.

    Raises:
        LaunchError: the driver does not take it.
    """
    module, function, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    with current(index):
        driver.call("load", index, module, code)
        driver.call("function", index, function, module, entry.encode())
        numbers = []
        for attribute in (MAX_THREADS, REGISTERS, LOCAL_BYTES):
            # Asking makes CUDA load the function itself, too, which it otherwise puts off until the first launch.
            driver.call("get", index, found, attribute, function)
            numbers.append(found.value)
    return Function(driver, index, int(function.value or 0), *numbers)
