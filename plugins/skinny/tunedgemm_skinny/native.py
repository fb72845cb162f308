"""Native: the launch itself, by the C extension, or by ctypes where that was not built."""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm_skinny.driver import Function


def _loaded() -> Any:
    try:
        return importlib.import_module("tunedgemm_skinny._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _loaded()

#: (stream, x, weight, bias, out, partial, counters) as addresses, then for scaled operands x_scale, w_scale -> the driver's status
Launch = Callable[..., int]

#: ``Args`` of ``kernels/portable.h`` after its eight pointers: n, k, m, splits, per_split.
_SIZES = struct.Struct("=qqiiq")
_POINTERS, _SCALES = 8, 2


@attrs.frozen
class Plan:
    """How a kernel is launched for a shape: everything but addresses.

    Attributes:
        grid: blocks along the three axes.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        overlaps: whether the kernel may begin while the one before it ends; it waits by itself for what that has written.
        n, k, m, splits, per_split: what the kernel is told; see ``Args`` in ``kernels/portable.h``.
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
        """The part of ``Args`` that follows the pointers."""
        return _SIZES.pack(self.n, self.k, self.m, self.splits, self.per_split)


def launch_of(function: Function, plan: Plan) -> Launch:
    """The launch of a function; safe to call from several threads, and other threads of the interpreter run meanwhile."""
    return by_ctypes(function, plan) if _extension is None else by_extension(function, plan)


def by_extension(function: Function, plan: Plan) -> Launch:
    """Through `shim.c`."""
    address = function.driver.address("launch overlapping" if plan.overlaps else "launch")
    made = _extension.Launch(address, function.address, plan.grid, plan.threads, plan.shared, plan.sizes, plan.overlaps, function)
    return made.launch  # type: ignore[no-any-return]


def by_ctypes(function: Function, plan: Plan) -> Launch:
    """Through ctypes, one kernel after the other."""
    call, address, (x, y, z), threads, shared = function.driver.functions["launch"], function.address, plan.grid, plan.threads, plan.shared
    args, sizes, pointer = struct.Struct(f"={_POINTERS}Q{_SIZES.size}s"), plan.sizes, ctypes.c_void_p

    def launch(stream: int, *addresses: int) -> int:
        if len(addresses) == _POINTERS - _SCALES:
            addresses += (0,) * _SCALES
        values = ctypes.create_string_buffer(args.pack(*addresses, sizes))
        parameters = (pointer * 1)(ctypes.addressof(values))
        return int(call(address, x, y, z, threads, 1, 1, shared, stream, parameters, None))

    return launch
