"""Launch kernels, through the C extension or, where it was not built, ctypes."""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm_skinny.driver import KernelFunction


def _load_extension() -> Any:
    try:
        return importlib.import_module("tunedgemm_skinny._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _load_extension()

#: (stream, x, weight, bias, out, partial, counters[, x_scale, w_scale]) as addresses -> driver
#: status.
Launch = Callable[..., int]

#: ``Args`` of ``kernels/portable.h`` after its eight pointers: n, k, m, splits, per_split.
_SIZES = struct.Struct("=qqiiq")
_POINTERS, _SCALES = 8, 2


@attrs.frozen
class LaunchPlan:
    """Everything of a launch but addresses.

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


def launch_of(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch of a function; it is thread-safe and releases the interpreter."""
    return by_ctypes(function, plan) if _extension is None else by_extension(function, plan)


def by_extension(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch through `shim.c`."""
    address = function.driver.address("launch overlapping" if plan.overlaps else "launch")
    launch = _extension.Launch(address, function.address, plan.grid, plan.threads, plan.shared, plan.sizes, plan.overlaps, function)
    return launch.launch  # type: ignore[no-any-return]


def by_ctypes(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch through ctypes, without overlap of kernels."""
    call, address, (x, y, z), threads, shared = function.driver.functions["launch"], function.address, plan.grid, plan.threads, plan.shared
    args, sizes, pointer = struct.Struct(f"={_POINTERS}Q{_SIZES.size}s"), plan.sizes, ctypes.c_void_p

    def launch(stream: int, *addresses: int) -> int:
        if len(addresses) == _POINTERS - _SCALES:
            addresses += (0,) * _SCALES
        values = ctypes.create_string_buffer(args.pack(*addresses, sizes))
        parameters = (pointer * 1)(ctypes.addressof(values))
        return int(call(address, x, y, z, threads, 1, 1, shared, stream, parameters, None))

    return launch
