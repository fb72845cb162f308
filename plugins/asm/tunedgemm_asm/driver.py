"""Load code through the module APIs of HIP and CUDA with ctypes; `native` launches it."""

from __future__ import annotations

import ctypes
import functools

import attrs
from tunedgemm.tools import Driver, DriverInterface, device_context

_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_LAUNCH = (_POINTER, *(_UINT,) * 7, _POINTER, _HANDLE, _HANDLE)

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
DYNAMIC_SHARED = 8


HIP = DriverInterface(
    plugin="asm",
    kind="amd",
    libraries=("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    functions={
        "load": ("hipModuleLoadData", (_HANDLE, _POINTER)),
        "function": ("hipModuleGetFunction", (_HANDLE, _POINTER, ctypes.c_char_p)),
        "launch": ("hipModuleLaunchKernel", _LAUNCH),
    },
    error="hipGetErrorString",
)
CUDA = DriverInterface(
    plugin="asm",
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
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT
)
INTERFACES = {interface.kind: interface for interface in (HIP, CUDA)}
#: Kind -> end of the list of extra launch arguments (HIP_LAUNCH_PARAM_END); 0 where the arguments
#: are one kernel parameter.
ENDS = {"amd": 3, "nvidia": 0}


@attrs.frozen(eq=False)
class KernelFunction:
    """A kernel loaded on a device.

    Attributes:
        driver: driver that loaded it.
        address: the driver's handle.
    """

    driver: Driver
    address: int


@functools.cache
def function_of(driver: Driver, code: bytes, entry: str, index: int) -> KernelFunction:
    """Load the kernel *entry* of a code object on the device with this index, -1 for host memory.

    Each kernel is loaded once and stays loaded, because a captured graph may be its only user.

    Raises:
        LaunchError: the driver rejects the code or the entry.
    """
    function = ctypes.c_void_p()
    with device_context(index):
        driver.call("function", function, _module(driver, code, index), entry.encode(), index=index)
    return KernelFunction(driver, int(function.value or 0))


@functools.cache
def _module(driver: Driver, code: bytes, index: int) -> ctypes.c_void_p:
    """Load a code object on the current device; one object may hold many kernels."""
    module = ctypes.c_void_p()
    driver.call("load", module, code, index=index)
    return module
