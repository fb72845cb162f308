"""Drivers: CUDA's and HIP's through ctypes: a code object becomes a function on a device. Launches go through `native`."""

from __future__ import annotations

import ctypes
import functools
import threading

import attrs
from tunedgemm.plugin import LaunchError, OutOfResources
from tunedgemm.tools import Driver, DriverInterface, device_context

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_HANDLE, _INTS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
_LAUNCH = (_POINTER, *(_UINT,) * 7, _POINTER, _HANDLE, _HANDLE)

#: Numbers of ``CUfunction_attribute`` and of ``hipFunction_attribute``, which are the same.
MAX_THREADS, LOCAL_BYTES, REGISTERS, DYNAMIC_SHARED = 0, 3, 4, 8
#: Dynamic shared memory in bytes that CUDA grants unasked.
UNASKED_SHARED = 48 << 10


CUDA = DriverInterface(
    plugin="skinny",
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
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT
)
HIP = DriverInterface(
    plugin="skinny",
    kind="amd",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    functions={
        "load": ("hipModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("hipModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "get": ("hipFuncGetAttribute", (_INTS, _INT, _POINTER)),
        "launch": ("hipModuleLaunchKernel", _LAUNCH),
    },
    error="hipGetErrorString",
)
INTERFACES = {interface.kind: interface for interface in (CUDA, HIP)}


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
        with _granting, device_context(self.index):
            # Launchers of several shapes share the function, and what one asked for must not be taken from it.
            if shared <= self.granted or self.driver.interface.kind != "nvidia":  # HIP grants it unasked
                return
            try:
                self.driver.call("set", self.address, DYNAMIC_SHARED, shared, index=self.index)
            except LaunchError as error:
                raise OutOfResources(f"{shared} bytes of shared memory: {error}") from error
            self.granted = shared


_granting = threading.Lock()


@functools.cache
def function_of(driver: Driver, code: bytes, entry: str, index: int) -> Function:
    """The function *entry* of a code object on the device with this index, -1 for host memory; loaded once.

    It stays loaded: a captured graph may hold it when nothing else does.

    Raises:
        LaunchError: the driver does not take it.
    """
    module, function, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    with device_context(index):
        driver.call("load", module, code, index=index)
        driver.call("function", function, module, entry.encode(), index=index)
        numbers = []
        for attribute in (MAX_THREADS, REGISTERS, LOCAL_BYTES):
            # Asking makes CUDA load the function itself, too, which it otherwise puts off until the first launch.
            driver.call("get", found, attribute, function, index=index)
            numbers.append(found.value)
    return Function(driver, index, int(function.value or 0), *numbers)
