"""Launch kernels and C functions with precomputed arguments, in which only addresses vary.

The C extension launches within 0.2 us; without it, ctypes does within 4 us.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import operator
import struct
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm.backends.driver import KernelFunction
from tunedgemm.backends.tensormap import MAP_BYTES, MapCache, TensorMap
from tunedgemm.errors import PluginError

#: Most bytes of arguments (addresses and tensor maps included), slots and tensor maps; as in
#: ``native.c``.
MAX_BYTES, MAX_SLOTS, MAX_MAPS = 4096, 16, 8
#: Bytes of an address.
_ADDRESS = 8
#: HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END (hip_runtime_api.h).
_BUFFER_POINTER, _BUFFER_SIZE, _BUFFER_END = 1, 2, 3

#: Version of ``native.c``.
_VERSION = 1


class _Convention(enum.IntEnum):
    """How a function takes the arguments; as in ``native.c``."""

    PARAMETER = 0
    BUFFER = 1
    OVERLAPPING = 2
    STRUCT = 3


def _load_extension() -> Any:
    try:
        extension = importlib.import_module("tunedgemm.backends._native")
    except ImportError:  # installed without a C compiler
        return None
    return extension if getattr(extension, "VERSION", 0) == _VERSION else None  # built from an older source


_extension = _load_extension()

#: (stream, addresses of slots in order, addresses that only tensor maps use) -> the status of the
#: driver or of the function; negated, that of a tensor map that the driver does not encode.
Launch = Callable[..., int]


_StructFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _check(arguments: bytes, slots: tuple[int, ...], maps: tuple[TensorMap, ...] = ()) -> None:
    """Check that addresses and tensor maps are within the arguments and apart.

    Raises:
        PluginError: they are not, or there are too many.
    """
    for what, count, most in (("bytes", len(arguments), MAX_BYTES), ("slots", len(slots), MAX_SLOTS), ("tensor maps", len(maps), MAX_MAPS)):
        if count > most:
            raise PluginError(f"arguments of a launch: at most {most} {what} (got {count})")
    taken = sorted([*((slot, _ADDRESS, "an address") for slot in slots), *((map_.slot, MAP_BYTES, "a tensor map") for map_ in maps)])
    ends = [*(slot for slot, _, _ in taken[1:]), len(arguments)]
    for (slot, size, what), after in zip(taken, ends, strict=False):
        if slot < 0 or slot + size > after:
            raise PluginError(f"{what} at byte {slot} of {len(arguments)} runs into byte {after}")


@attrs.frozen
class LaunchPlan:
    """A kernel launch without addresses.

    Attributes:
        grid: blocks along the three axes.
        threads: threads per block.
        arguments: the kernel's argument buffer, without addresses.
        slots: offset of each address, in the order of a launch's arguments.
        shared: bytes of dynamic shared memory per block.
        maps: tensor maps among the arguments. NVIDIA only; the driver needs ``describe``.
        overlaps: whether the kernel may start before the previous one ends (programmatic dependent
            launch). The kernel must wait for that one's writes. NVIDIA only; the driver needs
            ``launch overlapping``.
            buffer: whether arguments are passed through ``extra``, for code objects without
                parameter metadata. AMD only.
    """

    grid: tuple[int, int, int]
    threads: int
    arguments: bytes
    slots: tuple[int, ...]
    shared: int = 0
    maps: tuple[TensorMap, ...] = ()
    overlaps: bool = False
    buffer: bool = False

    def __attrs_post_init__(self) -> None:
        _check(self.arguments, self.slots, self.maps)
        if self.buffer and (self.overlaps or self.maps):
            raise PluginError("launch: a buffer is for AMD, tensor maps and overlaps for NVIDIA (got both); choose one")
        if sources := {map_.source for map_ in self.maps} - set(range(self.addresses)):
            raise PluginError(f"tensor map of address {min(sources)}: out of range; a launch takes {self.addresses} addresses")

    @property
    def addresses(self) -> int:
        """Return the number of addresses that a launch takes."""
        return len({*range(len(self.slots)), *(map_.source for map_ in self.maps)})


@attrs.frozen
class CallPlan:
    """A C function call without addresses.

    The function is an ``int f(const struct *arguments, void *stream)``.

    Attributes:
        arguments: the struct, without addresses.
        slots: offset of each address, in the order of the call's arguments.
    """

    arguments: bytes
    slots: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        _check(self.arguments, self.slots)


def launch_of(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the function that launches a kernel; thread-safe, releases the GIL.

    Raises:
        PluginError: the plan is for the other vendor.
    """
    driver, kind = function.driver, function.driver.interface.kind
    if (plan.buffer and kind != "amd") or ((plan.overlaps or plan.maps) and kind == "amd"):
        raise PluginError(f"{driver.interface.plugin}: launch: a buffer is for AMD, tensor maps and overlaps for NVIDIA (got {kind})")
    if _extension is None:
        return _launch_by_ctypes(function, plan)
    convention = _Convention.BUFFER if plan.buffer else _Convention.OVERLAPPING if plan.overlaps else _Convention.PARAMETER
    called, describe = driver.address("launch overlapping" if plan.overlaps else "launch"), driver.address("describe") if plan.maps else 0
    fields = tuple(map_.fields for map_ in plan.maps)
    launch = _extension.Launch(
        convention, called, function.address, plan.grid, plan.threads, plan.shared, plan.arguments, plan.slots, describe, fields, function,
    )  # fmt: skip
    return launch.launch  # type: ignore[no-any-return]


def call_of(function: Any, plan: CallPlan) -> Launch:
    """Return the function that calls a C function of a `ctypes.CDLL`; thread-safe, no GIL."""
    if _extension is not None:
        called = ctypes.cast(function, ctypes.c_void_p).value or 0
        launch = _extension.Launch(_Convention.STRUCT, called, 0, (1, 1, 1), 0, 0, plan.arguments, plan.slots, 0, (), function)
        return launch.launch  # type: ignore[no-any-return]
    typed, fill, byref = ctypes.cast(function, _StructFunction), _filling(plan, len(plan.slots)), ctypes.byref

    def call(stream: int, *addresses: int) -> int:
        return int(typed(byref(fill(addresses)), stream))

    return call


def _filling(plan: LaunchPlan | CallPlan, count: int) -> Callable[[tuple[int, ...]], Any]:
    """Return the function that copies the arguments of a plan and writes *count* addresses."""
    # `itemgetter` returns a tuple of two items or more, so an empty constant comes first.
    order, constants, layout, start = [count], [b""], "<0s", 0
    for slot, index in sorted((slot, index) for index, slot in enumerate(plan.slots)):
        if slot > start:
            layout += f"{slot - start}s"
            order.append(count + len(constants))
            constants.append(plan.arguments[start:slot])
        layout += "Q"
        order.append(index)
        start = slot + _ADDRESS
    order.append(count + len(constants))
    constants.append(plan.arguments[start:])
    pack, pick = struct.Struct(f"{layout}{len(plan.arguments) - start}s").pack, operator.itemgetter(*order)
    memory = ctypes.c_char * len(plan.arguments)

    def fill(addresses: tuple[int, ...]) -> Any:
        if len(addresses) != count:
            raise TypeError(f"launch takes a stream and {count} addresses (got {len(addresses) + 1} arguments)")
        try:
            return memory.from_buffer_copy(pack(*pick((*addresses, *constants))))
        except struct.error as error:
            raise TypeError(f"launch takes addresses as integers: {error}") from error

    return fill


#: A CUlaunchConfig of cuda.h: grid, block, shared memory, stream, attributes and their number.
_Config = struct.Struct("=7I4xQQI4x")
#: A CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, switched on.
_OVERLAPS = ctypes.create_string_buffer(struct.pack("=iii60x", 6, 0, 1))


def _launch_by_ctypes(function: KernelFunction, plan: LaunchPlan) -> Launch:
    """Return the launch through ctypes."""
    fill, call, at = _filling(plan, plan.addresses), _calling(function, plan), ctypes.addressof
    maps = [(map_.slot, map_.source, MapCache(function.driver.functions["describe"], map_.description)) for map_ in plan.maps]

    def launch(stream: int, *addresses: int) -> int:
        arguments = fill(addresses)
        for slot, source, cache in maps:
            if isinstance(encoded := cache[addresses[source]], int):
                return -encoded
            ctypes.memmove(at(arguments) + slot, encoded, MAP_BYTES)
        return int(call(stream, at(arguments)))

    return launch


def _calling(function: KernelFunction, plan: LaunchPlan) -> Callable[[int, int], int]:
    """Return the function (stream, address of the arguments) -> status, through ctypes."""
    called, address = function.driver.functions["launch overlapping" if plan.overlaps else "launch"], function.address
    (x, y, z), threads, shared, size = plan.grid, plan.threads, plan.shared, len(plan.arguments)
    pointers, pack, attributes = ctypes.c_void_p * 5, _Config.pack, ctypes.addressof(_OVERLAPS)

    def overlapping(stream: int, arguments: int) -> int:
        return int(called(pack(x, y, z, threads, 1, 1, shared, stream, attributes, 1), address, pointers(arguments), None))

    def buffer(stream: int, arguments: int) -> int:
        held = ctypes.c_size_t(size)
        extra = pointers(_BUFFER_POINTER, arguments, _BUFFER_SIZE, ctypes.addressof(held), _BUFFER_END)
        return int(called(address, x, y, z, threads, 1, 1, shared, stream, None, extra))

    def parameter(stream: int, arguments: int) -> int:
        return int(called(address, x, y, z, threads, 1, 1, shared, stream, pointers(arguments), None))

    return overlapping if plan.overlaps else buffer if plan.buffer else parameter
