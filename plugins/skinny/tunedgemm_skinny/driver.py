"""Load code through the module APIs of CUDA and HIP with ctypes; `native` launches it."""

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

#: Values of ``CUfunction_attribute``; those of ``hipFunction_attribute`` are the same.
MAX_THREADS, LOCAL_BYTES, REGISTERS, DYNAMIC_SHARED = 0, 3, 4, 8
#: Bytes of dynamic shared memory that CUDA grants by default.
DEFAULT_SHARED = 48 << 10

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
class KernelFunction:
    """A kernel loaded on a device.

    Attributes:
        driver: driver that loaded it.
        index: device index; -1 for host memory.
        address: the driver's handle.
        threads: most threads of a block with these registers.
        registers: 32-bit registers per thread.
        local_bytes: local memory per thread, mostly spilled registers.
        granted: dynamic shared memory in bytes granted to a block; the most requested so far.
    """

    driver: Driver
    index: int
    address: int
    threads: int
    registers: int
    local_bytes: int
    granted: int = DEFAULT_SHARED

    def allow(self, threads: int, shared: int) -> None:
        """Request blocks of so many threads with so many bytes of dynamic shared memory.

        Raises:
            OutOfResources: the device cannot run them.
        """
        if threads > self.threads:
            raise OutOfResources(f"threads of a block with {self.registers} registers each must be at most {self.threads} (got {threads})")
        with _granting, device_context(self.index):
            # Launchers of several shapes share the function, so the grant must never shrink.
            if shared <= self.granted or self.driver.interface.kind != "nvidia":  # HIP needs no grant
                return
            try:
                self.driver.call("set", self.address, DYNAMIC_SHARED, shared, index=self.index)
            except LaunchError as error:
                raise OutOfResources(f"shared memory of {shared} bytes refused: {error}") from error
            self.granted = shared


_granting = threading.Lock()


@functools.cache
def function_of(driver: Driver, code: bytes, entry: str, index: int) -> KernelFunction:
    """Load the function *entry* of a code object, once per device; index -1 is host memory.

    It stays loaded, because a captured graph may hold the last reference to it.

    Raises:
        LaunchError: the driver refuses the code object.
    """
    module, function, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    with device_context(index):
        driver.call("load", module, code, index=index)
        driver.call("function", function, module, entry.encode(), index=index)
        attributes = []
        for attribute in (MAX_THREADS, REGISTERS, LOCAL_BYTES):
            # The query also makes CUDA load the function now, not at its first launch.
            driver.call("get", value, attribute, function, index=index)
            attributes.append(value.value)
    return KernelFunction(driver, index, int(function.value or 0), *attributes)
