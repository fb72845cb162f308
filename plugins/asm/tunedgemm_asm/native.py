"""Launch kernels and cache tensor maps, through the C extension or, where it was not built, ctypes."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import struct
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm.driver import ENDS, KernelFunction
from tunedgemm_asm.ptx.abi import MAP_BYTES
from tunedgemm_asm.ptx.tensormap import Operand, Pool

#: Most argument bytes (addresses and tensor maps included), slots and tensor maps; as in
#: ``shim.c``.
MOST_BYTES, MOST_SLOTS, MOST_MAPS = 4096, 16, 3
#: Bytes of an address.
_ADDRESS = 8
#: HIP_LAUNCH_PARAM_BUFFER_POINTER and HIP_LAUNCH_PARAM_BUFFER_SIZE (hip_runtime_api.h).
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2

#: Version of ``shim.c``.
_VERSION = 4


def _load_extension() -> Any:
    try:
        extension = importlib.import_module("tunedgemm_asm._shim")
    except ImportError:  # installed without a C compiler
        return None
    return extension if getattr(extension, "VERSION", 1) == _VERSION else None  # built from an older source


_extension = _load_extension()

#: (stream, addresses of slots in order, addresses used only by tensor maps) -> the driver's status.
#: A failed tensor map returns its negated status or raises LaunchError.
Launch = Callable[..., int]


@attrs.frozen
class Map:
    """Tensor map among the arguments, made from an operand's address and cached.

    Attributes:
        slot: offset of its 128 bytes.
        source: index of its address among those of a launch.
        operand: the rest of the driver's description.
    """

    slot: int
    source: int
    operand: Operand


def _slots(_: object, attribute: attrs.Attribute[tuple[int, ...]], slots: tuple[int, ...]) -> None:
    if len(slots) > MOST_SLOTS:
        raise PluginError(f"{attribute.name!r}: at most {MOST_SLOTS} (got {len(slots)})")


@attrs.frozen
class LaunchPlan:
    """Everything of a launch but addresses.

    Attributes:
        grid: workgroups along the three axes.
        threads: threads of a workgroup.
        arguments: argument buffer with addresses left out.
        slots: offset of each address, in the order in which a launch takes them.
        shared: bytes of dynamic shared memory or LDS.
        maps: tensor maps among the arguments.
        index: index of the device of the tensor maps.
    """

    grid: tuple[int, int, int]
    threads: int
    arguments: bytes
    slots: tuple[int, ...] = attrs.field(validator=_slots)
    shared: int = 0
    maps: tuple[Map, ...] = ()
    index: int = -1

    def __attrs_post_init__(self) -> None:
        if len(self.arguments) > MOST_BYTES:
            raise PluginError(f"at most {MOST_BYTES} bytes of arguments (got {len(self.arguments)})")
        if len(self.maps) > MOST_MAPS:
            raise PluginError(f"at most {MOST_MAPS} tensor maps (got {len(self.maps)})")
        taken = sorted(
            [*((slot, _ADDRESS, "an address") for slot in self.slots), *((map_.slot, MAP_BYTES, "a tensor map") for map_ in self.maps)]
        )
        for (slot, size, what), after in itertools.zip_longest(taken, [begin for begin, *_ in taken[1:]], fillvalue=len(self.arguments)):
            if slot < 0 or slot + size > after:
                raise PluginError(f"{what} at byte {slot} of {len(self.arguments)} runs into byte {after}")
        if sources := {map_.source for map_ in self.maps} - set(range(self.addresses)):
            raise PluginError(f"tensor map of address {min(sources)}: out of range; a launch takes {self.addresses} addresses")

    @property
    def addresses(self) -> int:
        """Return the number of addresses that a launch takes."""
        return len({*range(len(self.slots)), *(map_.source for map_ in self.maps)})


def launch_of(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch of a function; it is thread-safe and releases the interpreter."""
    return by_ctypes(function, plan) if _extension is None else by_extension(function, plan)


def by_extension(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch through `shim.c`."""
    driver = function.driver
    launch = _extension.Launch(
        driver.address("launch"),
        function.address,
        plan.grid,
        plan.threads,
        plan.shared,
        plan.arguments,
        plan.slots,
        ENDS[driver.interface.kind],
        function,
        driver.address("describe") if plan.maps else 0,
        tuple((map_.slot, map_.source, map_.operand.type, *map_.operand.dimensions, map_.operand.kinds) for map_ in plan.maps),
    )
    return launch.launch  # type: ignore[no-any-return]


def by_ctypes(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch through ctypes."""
    call, address, (x, y, z), threads, shared = function.driver.functions["launch"], function.address, plan.grid, plan.threads, plan.shared
    arguments, slots, end, pack = plan.arguments, plan.slots, ENDS[function.driver.interface.kind], struct.Struct("<Q").pack_into
    pointers, size_t, count = ctypes.c_void_p * 5, ctypes.c_size_t, plan.addresses
    maps = [(map_.slot, map_.source, Pool(function.driver, map_.operand, plan.index)) for map_ in plan.maps]

    def launch(stream: int, *addresses: int) -> int:
        if len(addresses) != count:
            raise TypeError(f"launch takes a stream and {count} addresses (got {len(addresses) + 1} arguments)")
        buffer, size = ctypes.create_string_buffer(arguments, len(arguments)), size_t(len(arguments))
        for slot, value in zip(slots, addresses, strict=False):
            pack(buffer, slot, value)
        for slot, source, pool in maps:
            ctypes.memmove(ctypes.addressof(buffer) + slot, pool[addresses[source]], MAP_BYTES)
        if not end:
            return int(call(address, x, y, z, threads, 1, 1, shared, stream, pointers(ctypes.addressof(buffer)), None))
        extra = pointers(_BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), end)
        return int(call(address, x, y, z, threads, 1, 1, shared, stream, None, extra))

    return launch
