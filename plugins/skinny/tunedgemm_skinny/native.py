"""Loaded kernel functions of CUDA and HIP, and their launch through the C extension.

Where the extension was not built, ctypes launches, too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import threading
from collections.abc import Callable
from typing import Any

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


#: (stream, x, weight, bias, out, partial, counters[, x_scale, w_scale]) as addresses -> driver
#: status.
Launch = Callable[..., int]

#: ``Args`` of ``kernels/portable.h`` after its eight pointers: n, k, m, splits, per_split.
_SIZES = struct.Struct("=qqiiq")
_POINTERS, _SCALES = 8, 2


@attrs.frozen
class LaunchPlan:
    """Launch arguments of a kernel for a shape, all but the addresses.

    Attributes:
        grid: blocks along the three axes.
        threads: threads of a block.
        shared: bytes of dynamic shared memory.
        overlaps: whether the kernel may start before the previous one ends (programmatic dependent
            launch). The kernel itself waits for that one's writes.
        n, k, m, splits, per_split: fields of ``Args`` in ``kernels/portable.h``.
    """

    grid: tuple[int, int, int]
    threads: int
    shared: int
    n: int
    k: int
    m: int
    splits: int
    per_split: int
    overlaps: bool = False

    @property
    def sizes(self) -> bytes:
        """Pack the part of ``Args`` that follows the pointers."""
        return _SIZES.pack(self.n, self.k, self.m, self.splits, self.per_split)


def _load_extension() -> Any:
    try:
        return importlib.import_module("tunedgemm_skinny._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _load_extension()


def launch_of(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch of a function. It is thread-safe and releases the interpreter's lock."""
    return by_ctypes(function, plan) if _extension is None else by_extension(function, plan)


def by_extension(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Launch through `shim.c`."""
    address = function.driver.address("launch overlapping" if plan.overlaps else "launch")
    launch = _extension.Launch(address, function.address, plan.grid, plan.threads, plan.shared, plan.sizes, plan.overlaps, function)
    return launch.launch  # type: ignore[no-any-return]


def by_ctypes(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Launch through ctypes, without overlap of kernels."""
    call, address, (x, y, z), threads, shared = function.driver.functions["launch"], function.address, plan.grid, plan.threads, plan.shared
    args, sizes, pointer = struct.Struct(f"={_POINTERS}Q{_SIZES.size}s"), plan.sizes, ctypes.c_void_p

    def launch(stream: int, *addresses: int) -> int:
        if len(addresses) == _POINTERS - _SCALES:
            addresses += (0,) * _SCALES
        values = ctypes.create_string_buffer(args.pack(*addresses, sizes))
        parameters = (pointer * 1)(ctypes.addressof(values))
        return int(call(address, x, y, z, threads, 1, 1, shared, stream, parameters, None))

    return launch
