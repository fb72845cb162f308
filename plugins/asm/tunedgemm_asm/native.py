"""Native: the launch itself, by the C extension, or by ctypes where that was not built."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import struct
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm.driver import ENDS, Function

#: Bytes of arguments at most, and addresses among them; ``shim.c`` has the same numbers.
MOST_BYTES, MOST_SLOTS = 4096, 16
#: Bytes of an address.
_ADDRESS = 8
#: HIP_LAUNCH_PARAM_BUFFER_POINTER and HIP_LAUNCH_PARAM_BUFFER_SIZE (hip_runtime_api.h).
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2


#: Of ``shim.c``.
_VERSION = 3


def _loaded() -> Any:
    try:
        extension = importlib.import_module("tunedgemm_asm._shim")
    except ImportError:  # installed without a C compiler
        return None
    return extension if getattr(extension, "VERSION", 1) == _VERSION else None  # built from an older text


_extension = _loaded()

#: (stream, for each slot in their order an address, or the bytes that go there) -> the driver's status
Launch = Callable[..., int]


def _slots(_: object, attribute: attrs.Attribute[tuple[int, ...]], slots: tuple[int, ...]) -> None:
    if len(slots) > MOST_SLOTS:
        raise PluginError(f"{attribute.name!r}: at most {MOST_SLOTS} (got {len(slots)})")


@attrs.frozen
class Plan:
    """How a kernel is launched for a shape: everything but addresses.

    Attributes:
        grid: workgroups along the three axes.
        threads: of a workgroup.
        arguments: the kernel's argument buffer, in which addresses are left out.
        slots: where in it each address goes, or bytes such as a descriptor, in the order in which a launch gets them.
        shared: bytes of dynamic LDS.
    """

    grid: tuple[int, int, int]
    threads: int
    arguments: bytes
    slots: tuple[int, ...] = attrs.field(validator=_slots)
    shared: int = 0

    def __attrs_post_init__(self) -> None:
        if len(self.arguments) > MOST_BYTES:
            raise PluginError(f"at most {MOST_BYTES} bytes of arguments (got {len(self.arguments)})")
        for slot, after in itertools.zip_longest(sorted(self.slots), sorted(self.slots)[1:], fillvalue=len(self.arguments)):
            if slot < 0 or slot + _ADDRESS > after:
                raise PluginError(f"an address at byte {slot} of {len(self.arguments)} runs into byte {after}")


def launch_of(function: Function, plan: Plan) -> Launch:
    """The launch of a function; safe to call from several threads, and other threads of the interpreter run meanwhile."""
    return by_ctypes(function, plan) if _extension is None else by_extension(function, plan)


def by_extension(function: Function, plan: Plan) -> Launch:
    """Through `shim.c`."""
    driver = function.driver
    made = _extension.Launch(
        driver.address("launch"),
        function.address,
        plan.grid,
        plan.threads,
        plan.shared,
        plan.arguments,
        plan.slots,
        ENDS[driver.interface.kind],
        function,
    )
    return made.launch  # type: ignore[no-any-return]


def by_ctypes(function: Function, plan: Plan) -> Launch:
    """Through ctypes."""
    call, address, (x, y, z), threads, shared = function.driver.functions["launch"], function.address, plan.grid, plan.threads, plan.shared
    arguments, slots, end, pack = plan.arguments, plan.slots, ENDS[function.driver.interface.kind], struct.Struct("<Q").pack_into
    pointers, size_t = ctypes.c_void_p * 5, ctypes.c_size_t

    def launch(stream: int, *addresses: int | bytes) -> int:
        buffer, size = ctypes.create_string_buffer(arguments, len(arguments)), size_t(len(arguments))
        for slot, each in zip(slots, addresses, strict=True):
            if isinstance(each, bytes):
                ctypes.memmove(ctypes.addressof(buffer) + slot, each, min(len(each), len(arguments) - slot))
            else:
                pack(buffer, slot, each)
        if not end:
            return int(call(address, x, y, z, threads, 1, 1, shared, stream, pointers(ctypes.addressof(buffer)), None))
        extra = pointers(_BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), end)
        return int(call(address, x, y, z, threads, 1, 1, shared, stream, None, extra))

    return launch
