"""Tensor maps of launches, through the C extension and through ctypes."""

from __future__ import annotations

import ctypes
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.backends.driver import KernelFunction, bind_driver, driver_interface
from tunedgemm.backends.native import Launch, LaunchPlan, launch_of
from tunedgemm.backends.tensormap import MapDescription, TensorMap
from tunedgemm.errors import PluginError

#: Two operands of two dimensions, and one of three between them.
X = MapDescription(9, (200, 37), (400,), (64, 64), 0, 3, 3, 0)
WEIGHT = MapDescription(0, (128, 73, 3), (128, 9344), (128, 96, 1), 1, 2, 3, 4)
OUT = MapDescription(6, (72, 37), (144,), (32, 64), 0, 2, 3, 0)
ARGUMENTS = bytes(range(1, 251)) + bytes(250)
PLAN = LaunchPlan((3, 1, 1), 96, ARGUMENTS, (264, 256), 1234, (TensorMap(128, 2, X), TensorMap(0, 3, WEIGHT), TensorMap(320, 0, OUT)))
#: An address that the driver rejects, and its status.
REFUSED, STATUS = 0xDEAD0, 77

#: A driver that writes its arguments into a tensor map and records a thread's last launch.
DRIVER = """
#include <string.h>
typedef struct { unsigned long address, sizes[3], strides[2]; unsigned type, rank, box[3], steps[3], kinds[4]; } Note;
static __thread unsigned char arguments[500];
static unsigned long described, launched;
int cuTensorMapEncodeTiled(void *to, int type, unsigned rank, void *address, const unsigned long *sizes, const unsigned long *strides,
                           const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    Note note = {(unsigned long)address, {0}, {0}, type, rank, {0}, {0}, {interleave, swizzle, promotion, fill}};
    __atomic_add_fetch(&described, 1, __ATOMIC_RELAXED);
    if ((unsigned long)address == 0xDEAD0 || (unsigned long)to % 64 || rank < 2 || rank > 3)
        return 77;
    memcpy(note.sizes, sizes, 8 * rank);
    memcpy(note.strides, strides, 8 * (rank - 1));
    memcpy(note.box, box, 4 * rank);
    memcpy(note.steps, steps, 4 * rank);
    memset(to, 0xEE, 128);
    memcpy(to, &note, sizeof note);
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    __atomic_add_fetch(&launched, 1, __ATOMIC_RELAXED);
    memcpy(arguments, parameters[0], sizeof arguments);
    return 0;
}
const unsigned char *last_arguments(void) { return arguments; }
unsigned long count(int launches) { return launches ? launched : described; }
int cuModuleLoadData(void) { return 0; }
int cuModuleGetFunction(void) { return 0; }
int cuGetErrorString(int status, const char **text) { *text = "an error"; return 0; }
"""


class Note(ctypes.Structure):
    """Arguments of the driver for one tensor map."""

    _fields_ = [
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 3), ("strides", ctypes.c_uint64 * 2), ("type", ctypes.c_uint32),
        ("rank", ctypes.c_uint32), ("box", ctypes.c_uint32 * 3), ("steps", ctypes.c_uint32 * 3), ("kinds", ctypes.c_int32 * 4),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def driver(c_library: Callable[[str], str]) -> Any:
    """Return a function of the driver, the reader of its last arguments, and its counters."""
    path = c_library(DRIVER)
    loaded = ctypes.CDLL(path)
    loaded.last_arguments.restype, loaded.count.restype = ctypes.POINTER(ctypes.c_ubyte * 500), ctypes.c_ulong
    function = KernelFunction(bind_driver(driver_interface("mine", "nvidia", "describe"), path), -1, 99)
    return SimpleNamespace(function=function, arguments=lambda: bytes(loaded.last_arguments().contents), count=loaded.count)


def wanted(description: MapDescription, address: int) -> bytes:
    """Return the expected tensor map of an operand."""
    sizes, rank = description.sizes, len(description.sizes)
    note = Note(address, sizes, description.strides, description.element, rank, description.box, (1,) * rank, description.kinds)
    return bytes(note).ljust(128, b"\xee")


def filled(addresses: tuple[int, ...], plan: LaunchPlan = PLAN) -> bytes:
    """Return the arguments of a launch with these addresses."""
    buffer = bytearray(plan.arguments)
    for slot, address in zip(plan.slots, addresses, strict=False):
        buffer[slot : slot + 8] = address.to_bytes(8, "little")
    for map_ in plan.maps:
        buffer[map_.slot : map_.slot + 128] = wanted(map_.description, addresses[map_.source])
    return bytes(buffer)


def addresses_of(number: int) -> tuple[int, ...]:
    """Return four addresses unique to a number."""
    return tuple((1 << 63) + 512 * (4 * number + index) for index in range(4))


def faults(launch: Launch, driver: Any) -> str:
    """Return the fault of launches with new, cached and rejected addresses."""
    before = driver.count(0)
    for number in (*range(40), *range(40), *range(39, -1, -1)):
        addresses = addresses_of(number)
        if status := launch(5, *addresses):
            return f"status {status}"
        if driver.arguments() != filled(addresses):
            return f"arguments of launch {number}"
    if (encoded := driver.count(0) - before) != 3 * 40:
        return f"{encoded} tensor maps of 120 operands"
    launches, status = driver.count(1), launch(5, *addresses_of(1)[:3], REFUSED)
    return "" if (status, driver.count(1)) == (-STATUS, launches) else f"status {status} of a tensor map that is refused"


def test_every_description_reaches_its_place(way: str, driver: Any) -> None:
    """Tensor maps are encoded once for an address, and their errors return negated."""
    assert faults(launch_of(driver.function, PLAN), driver) == ""


def test_a_full_cache_is_cleared(way: str, driver: Any) -> None:
    """A full cache is cleared, and launches stay right."""
    launch, before = launch_of(driver.function, PLAN), driver.count(0)
    for number in (*range(5000), 4999, 0):
        launch(5, *addresses_of(number))
        assert number % 97 or driver.arguments() == filled(addresses_of(number))
    assert driver.arguments() == filled(addresses_of(0))
    assert driver.count(0) - before == 3 * 5001  # the last is cached, the first is not


def test_threads_share_tensor_maps(way: str, driver: Any) -> None:
    """Threads share cached tensor maps."""
    launch, wrong, start, before = launch_of(driver.function, PLAN), [], threading.Barrier(8), driver.count(0)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(400):
            mine = addresses_of((turn * (2 * number + 1)) % 300)
            if launch(5, *mine) or driver.arguments() != filled(mine):
                wrong.append(mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong
    assert driver.count(0) - before <= 3 * 300 * 8


def test_a_plan_checks_where_tensor_maps_go(faults_of: Any) -> None:
    """A launch plan rejects overlapping or outside tensor maps, and a buffer with them."""

    def check(changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(PluginError, match=reason):
            attrs.evolve(PLAN, **changes)

    assert not faults_of(
        check,
        [
            ({"maps": (TensorMap(384, 0, X),)}, "a tensor map at byte 384 of 500 runs into byte 500"),
            ({"maps": (TensorMap(0, 0, X), TensorMap(120, 0, X))}, "a tensor map at byte 0 of 500 runs into byte 120"),
            ({"maps": (TensorMap(256, 0, X),)}, "an address at byte 256 of 500 runs into byte 256"),
            ({"maps": (TensorMap(0, 0, X),) * 9}, r"at most 8 tensor maps \(got 9\)"),
            ({"maps": (TensorMap(0, 3, X),)}, "tensor map of address 3: out of range; a launch takes 3 addresses"),
            ({"buffer": True}, "choose one"),
        ],
    )


def test_a_description_checks_its_dimensions(faults_of: Any) -> None:
    """A description has 1 to 5 dimensions, one stride less, and a box of as many."""

    def check(changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(PluginError, match=reason):
            attrs.evolve(X, **changes)

    assert not faults_of(
        check,
        [
            ({"sizes": ()}, r"1 to 5 dimensions \(got 0\)"),
            ({"sizes": (1,) * 6}, r"1 to 5 dimensions \(got 6\)"),
            ({"strides": (128, 128)}, r"1 strides and a box of 2 \(got 2 strides and a box of 2\)"),
            ({"box": (64,)}, r"\(got 1 strides and a box of 1\)"),
        ],
    )


#: Fields of a tensor map that the extension accepts.
FIELDS: tuple[Any, ...] = (0, 0, 9, (64, 64), (128,), (64, 8), (0, 3, 3, 0))


def test_the_extension_checks_descriptions(extension: Any, faults_of: Any) -> None:
    """The extension rejects wrong descriptions of operands."""

    def launch(describe: int, maps: Any) -> Any:
        return extension.Launch(0, 1, 1, (1, 1, 1), 32, 0, bytes(500), (200,), describe, maps, None)

    def check(maps: Any, error: Any) -> None:
        with pytest.raises(error):
            launch(1, maps)

    assert not faults_of(
        check,
        [
            ([FIELDS], (TypeError, SystemError)),
            ((list(FIELDS),), TypeError),
            ((FIELDS[:-1],), TypeError),
            ((FIELDS,) * 9, ValueError),
            (((380, *FIELDS[1:]),), ValueError),
            (((0, 24, *FIELDS[2:]),), ValueError),
            (((*FIELDS[:3], (), *FIELDS[4:]),), ValueError),
            (((*FIELDS[:3], (1, 2, 3, 4, 5, 6), *FIELDS[4:]),), ValueError),
            (((*FIELDS[:4], (128, 128), *FIELDS[5:]),), ValueError),
            (((*FIELDS[:5], (64,), FIELDS[6]),), ValueError),
            (((*FIELDS[:3], ("a", 64), *FIELDS[4:]),), TypeError),
            (((*FIELDS[:3], 5, *FIELDS[4:]),), (TypeError, SystemError)),
        ],
    )
    with pytest.raises(ValueError, match="a function that encodes them"):
        launch(0, (FIELDS,))
    assert launch(1, (FIELDS,))


def test_tensor_maps_go_with_their_launch(extension: Any, driver: Any) -> None:
    """The cache is freed with its launch."""
    tracemalloc.start()
    try:
        launch = launch_of(driver.function, PLAN)
        empty = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            launch(5, *addresses_of(number))
        full = tracemalloc.get_traced_memory()[0]
        del launch
        assert full - empty > 3 * 2000 * 128
        # Other code of the process allocates, too.
        assert tracemalloc.get_traced_memory()[0] - empty < (full - empty) / 3
    finally:
        tracemalloc.stop()


#: Text in the extension's source, and a replacement that must fail.
CHANGES = [
    ("description->type, description->rank", "description->rank, description->type"),
    ("address, description->sizes,", "address, description->strides,"),
    ("description->strides, description->box, ones", "description->sizes, description->box, ones"),
    ("description->box, ones", "ones, description->box"),
    (
        "description->kinds[1],\n                            description->kinds[2]",
        "description->kinds[2],\n                            description->kinds[1]",
    ),
    ("(MAP_ALIGNMENT - 1));", "(MAP_ALIGNMENT - 1) ^ 16);"),
    ("memcpy(to, aligned, MAP_BYTES);", "memcpy(to, aligned, MAP_BYTES / 2);"),
    ("memcpy(to, entry->bytes, MAP_BYTES)", "memcpy(to, entry->bytes, MAP_BYTES / 2)"),
    ("memcpy(entry->bytes, bytes, MAP_BYTES)", "memcpy(entry->bytes, bytes, MAP_BYTES / 2)"),
    ("        cache(map, address, aligned);", "        ;"),
    ("entry->address = address;", "entry->address = address + 2048;"),
    ("&& entries[at].address != address)", "&& (entries[at].address ^ address) >> 16)"),
    ("map->entries[i].address) = map->entries[i];", "map->entries[0].address) = map->entries[i];"),
    ("addresses[self->maps[i].source]", "addresses[i]"),
    ("arguments + self->maps[i].slot", "arguments + self->maps[i].slot + 8"),
    ("-(long)status", "(long)status"),
    ("    if (status != 0)\n        return status;\n", ""),
    ("self->address_count = map->source + 1", "self->address_count = map->source + 3"),
]


def test_each_part_of_the_extension_matters(driver: Any, missed: Callable[..., list[tuple[str, str]]]) -> None:
    """Each planted change of the cache and of the encoding is found."""
    assert not missed(CHANGES, lambda: faults(launch_of(driver.function, PLAN), driver))
