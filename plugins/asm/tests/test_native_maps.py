"""Test tensor maps of launches through the C extension and through ctypes."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import LaunchError, PluginError
from tunedgemm.tools import bind_driver
from tunedgemm_asm import native
from tunedgemm_asm.driver import CUDA
from tunedgemm_asm.native import LaunchPlan, Map
from tunedgemm_asm.ptx.tensormap import Operand

SOURCE = Path(native.__file__).with_name("shim.c")
extension = pytest.mark.skipif(native._extension is None, reason="the C extension was not built")
ways = pytest.mark.parametrize("way", ["extension", "ctypes"])
#: A row-wise operand, one in columns, and an output of 64 bytes in a row of its box.
X, WEIGHT, OUT = Operand("bf16", 37, 200, 64), Operand("fp8_e4m3fn", 73, 384, 96, columns=True), Operand("fp16", 37, 72, 64, 64)
ARGUMENTS = bytes(range(1, 251)) + bytes(250)
PLAN = LaunchPlan((3, 1, 1), 96, ARGUMENTS, (264, 256), 1234, (Map(128, 2, X), Map(0, 3, WEIGHT), Map(320, 0, OUT)))
#: An address that the driver rejects, and its status.
REFUSED, STATUS = 0xDEAD0, 77

#: A driver that writes its arguments into a tensor map and records a thread's last launch.
DRIVER = """
#include <string.h>
typedef struct { unsigned long address, sizes[3], strides[2]; unsigned type, rank, box[3], every[3], kinds[4]; } Told;
static __thread unsigned char arguments[500];
static unsigned long described, launched;
int cuTensorMapEncodeTiled(void *to, int type, unsigned rank, void *address, const unsigned long *sizes, const unsigned long *strides,
                           const unsigned *box, const unsigned *every, int interleave, int swizzle, int promotion, int fill) {
    Told told = {(unsigned long)address, {0}, {0}, type, rank, {0}, {0}, {interleave, swizzle, promotion, fill}};
    __atomic_add_fetch(&described, 1, __ATOMIC_RELAXED);
    if ((unsigned long)address == 0xDEAD0 || (unsigned long)to % 64 || rank < 2 || rank > 3)
        return 77;
    memcpy(told.sizes, sizes, 8 * rank);
    memcpy(told.strides, strides, 8 * (rank - 1));
    memcpy(told.box, box, 4 * rank);
    memcpy(told.every, every, 4 * rank);
    memset(to, 0xEE, 128);
    memcpy(to, &told, sizeof told);
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    __atomic_add_fetch(&launched, 1, __ATOMIC_RELAXED);
    memcpy(arguments, parameters[0], sizeof arguments);
    return 0;
}
const unsigned char *told(void) { return arguments; }
unsigned long count(int launches) { return launches ? launched : described; }
int cuModuleLoadData(void) { return 0; }
int cuModuleGetFunction(void) { return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuGetErrorString(int status, const char **text) { *text = "an error"; return 0; }
"""


class Told(ctypes.Structure):
    """What the driver received for a tensor map."""

    _fields_ = [
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 3), ("strides", ctypes.c_uint64 * 2), ("type", ctypes.c_uint32),
        ("rank", ctypes.c_uint32), ("box", ctypes.c_uint32 * 3), ("every", ctypes.c_uint32 * 3), ("kinds", ctypes.c_int32 * 4),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of the driver, its last arguments and its counters."""
    if shutil.which("cc") is None:
        pytest.skip("the driver requires `cc`")
    path = tmp_path_factory.mktemp("driver") / "libdriver.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=DRIVER, text=True, check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.told.restype, loaded.count.restype = ctypes.POINTER(ctypes.c_ubyte * 500), ctypes.c_ulong
    function = SimpleNamespace(driver=bind_driver(CUDA, str(path)), address=99)
    return SimpleNamespace(function=function, arguments=lambda: bytes(loaded.told().contents), count=loaded.count)


def launching(way: str, function: Any, plan: LaunchPlan = PLAN) -> native.Launch:
    """Return the launch of a function by extension or ctypes."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    return native.by_extension(function, plan) if way == "extension" else native.by_ctypes(function, plan)


def wanted(operand: Operand, address: int) -> bytes:
    """Return the expected tensor map of an operand."""
    sizes, strides, box = operand.dimensions
    told = Told(address, sizes, strides, operand.type, len(sizes), box, (1,) * len(sizes), operand.kinds)
    return bytes(told).ljust(128, b"\xee")


def filled(addresses: tuple[int, ...], plan: LaunchPlan = PLAN) -> bytes:
    """Return the arguments of a launch with these addresses."""
    buffer = bytearray(plan.arguments)
    for slot, address in zip(plan.slots, addresses, strict=False):
        buffer[slot : slot + 8] = address.to_bytes(8, "little")
    for each in plan.maps:
        buffer[each.slot : each.slot + 128] = wanted(each.operand, addresses[each.source])
    return bytes(buffer)


def addresses_of(number: int) -> tuple[int, ...]:
    """Return four addresses unique to a number."""
    return tuple((1 << 63) + 512 * (4 * number + place) for place in range(4))


def faults(launch: native.Launch, driver: Any) -> str:
    """Return the fault of launches with new, cached and rejected addresses."""
    before = driver.count(0)
    for number in (*range(40), *range(40), *range(39, -1, -1)):
        given = addresses_of(number)
        if status := launch(5, *given):
            return f"status {status}"
        if driver.arguments() != filled(given):
            return f"arguments of launch {number}"
    if (made := driver.count(0) - before) != 3 * 40:
        return f"{made} descriptors of 120 operands"
    launches = driver.count(1)
    try:
        status = launch(5, *addresses_of(1)[:3], REFUSED)
    except LaunchError as error:
        status = -STATUS if "cuTensorMapEncodeTiled: an error" in str(error) else 0
    return "" if (status, driver.count(1)) == (-STATUS, launches) else f"status {status} of a descriptor that is not made"


@ways
def test_every_descriptor_reaches_its_place(way: str, driver: Any) -> None:
    """Tensor maps are encoded once for an address, and errors return."""
    assert faults(launching(way, driver.function), driver) == ""


@ways
def test_a_full_cache_of_descriptors_is_cleared(way: str, driver: Any) -> None:
    """A full cache is cleared, and launches stay right."""
    launch, before = launching(way, driver.function), driver.count(0)
    for number in (*range(5000), 4999, 0):
        launch(5, *addresses_of(number))
        assert number % 97 or driver.arguments() == filled(addresses_of(number))
    assert driver.arguments() == filled(addresses_of(0))
    assert driver.count(0) - before == 3 * 5001  # the last is known, the first is not


@ways
def test_threads_share_descriptors(way: str, driver: Any) -> None:
    """Threads share cached tensor maps."""
    launch, wrong, start, before = launching(way, driver.function), [], threading.Barrier(8), driver.count(0)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(400):
            mine = addresses_of((turn * (2 * number + 1)) % 300)
            if launch(5, *mine) or driver.arguments() != filled(mine):
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert driver.count(0) - before <= 3 * 300 * 8


def test_a_plan_checks_where_descriptors_go(failing: Any) -> None:
    """A launch plan rejects overlapping or outside tensor maps."""

    def check(changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(PluginError, match=reason):
            attrs.evolve(PLAN, **changes)

    assert not failing(
        check,
        [
            ({"maps": (Map(384, 0, X),)}, "a tensor map at byte 384 of 500 runs into byte 500"),
            ({"maps": (Map(0, 0, X), Map(120, 0, X))}, "a tensor map at byte 0 of 500 runs into byte 120"),
            ({"maps": (Map(256, 0, X),)}, "an address at byte 256 of 500 runs into byte 256"),
            ({"maps": (Map(0, 0, X),) * 4}, r"at most 3 tensor maps \(got 4\)"),
            ({"maps": (Map(0, 3, X),)}, "tensor map of address 3: out of range; a launch takes 3 addresses"),
        ],
    )


@ways
def test_a_launch_takes_the_addresses_that_it_has(way: str, driver: Any) -> None:
    """A wrong number of addresses raises."""
    launch = launching(way, driver.function)
    for count in (3, 5):
        with pytest.raises(TypeError, match=rf"a stream and 4 addresses \(got {count + 1} arguments"):
            launch(5, *range(count))


TOLD: tuple[Any, ...] = (0, 0, 9, (64, 64), (128,), (64, 8), (0, 3, 3, 0))


@extension
def test_the_extension_checks_descriptions_of_operands(failing: Any) -> None:
    """The extension rejects wrong descriptions of operands."""

    def check(maps: Any, error: Any) -> None:
        kind = native._extension.Launch
        with pytest.raises(error):
            kind(1, 1, (1, 1, 1), 32, 0, bytes(500), (0,), 0, None, 1, maps)
        with pytest.raises(ValueError, match="a function that makes them"):
            kind(1, 1, (1, 1, 1), 32, 0, bytes(500), (200,), 0, None, 0, (TOLD,))
        kind(1, 1, (1, 1, 1), 32, 0, bytes(500), (200,), 0, None, 1, (TOLD,))

    assert not failing(
        check,
        [
            ([TOLD], (TypeError, SystemError)),
            ((list(TOLD),), TypeError),
            ((TOLD[:-1],), TypeError),
            ((TOLD,) * 4, ValueError),
            (((380, *TOLD[1:]),), ValueError),
            (((0, 19, *TOLD[2:]),), ValueError),
            (((*TOLD[:3], (), *TOLD[4:]),), ValueError),
            (((*TOLD[:3], (1, 2, 3, 4), *TOLD[4:]),), ValueError),
            (((*TOLD[:4], (128, 128), *TOLD[5:]),), ValueError),
            (((*TOLD[:5], (64,), TOLD[6]),), ValueError),
            (((*TOLD[:3], ("a", 64), *TOLD[4:]),), TypeError),
            (((*TOLD[:3], 5, *TOLD[4:]),), (TypeError, SystemError)),
        ],
    )


@extension
def test_descriptors_go_with_their_launch(driver: Any) -> None:
    """The cache is freed with its launch."""
    tracemalloc.start()
    try:
        launch = launching("extension", driver.function)
        empty = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            launch(5, *addresses_of(number))
        full = tracemalloc.get_traced_memory()[0]
        launch.__self__.__init__(1, 1, (1, 1, 1), 32, 0, ARGUMENTS, (), 0, None, 1, (TOLD,))
        anew = tracemalloc.get_traced_memory()[0]
        del launch
        assert full - empty > 3 * 2000 * 128
        # Other code of the process allocates, too.
        assert max(anew, tracemalloc.get_traced_memory()[0]) - empty < (full - empty) / 3
    finally:
        tracemalloc.stop()


@extension
def test_a_launch_remade_while_a_descriptor_is_made(driver: Any) -> None:
    """Reinitializing a launch during encoding does not use freed memory."""
    made: list[Any] = []

    def describe(*_: Any) -> int:
        made[0].__init__(*arguments)
        return 0

    types = CUDA.functions["describe"][1]
    callback = ctypes.CFUNCTYPE(ctypes.c_int, *types)(describe)
    where, launch = ctypes.cast(callback, ctypes.c_void_p).value, driver.function.driver.address("launch")
    arguments = (launch, 1, (1, 1, 1), 32, 0, ARGUMENTS, (), 0, None, where, ((0, 0, *TOLD[2:]),))
    made.append(native._extension.Launch(*arguments))
    for number in range(1, 200):
        assert made[0].launch(0, 512 * number) == 0


#: Text in the extension's source, and a replacement that must fail.
CHANGES = [
    ("told.type, told.rank", "told.rank, told.type"),
    ("told.sizes, told.strides", "told.strides, told.sizes"),
    ("told.box, every", "every, told.box"),
    ("told.kinds[1], told.kinds[2]", "told.kinds[2], told.kinds[1]"),
    ("(MAP_BOUNDARY - 1));", "(MAP_BOUNDARY - 1) ^ 16);"),
    ("    memcpy(to, aligned, MAP_BYTES);", "    memcpy(to, aligned, MAP_BYTES / 2);"),
    ("memcpy(to, found->bytes, MAP_BYTES)", "memcpy(to, found->bytes, MAP_BYTES / 2)"),
    ("memcpy(to->bytes, bytes, MAP_BYTES)", "memcpy(to->bytes, bytes, MAP_BYTES / 2)"),
    ("        keep(map, address, aligned);", "        ;"),
    ("to->address = address;", "to->address = address + 2048;"),
    ("&& entries[at].address != address)", "&& (entries[at].address ^ address) >> 16)"),
    ("map->entries[i].address) = map->entries[i];", "map->entries[0].address) = map->entries[i];"),
    ("addresses[self->maps[i].source]", "addresses[i]"),
    ("arguments + self->maps[i].slot", "arguments + self->maps[i].slot + 8"),
    ("-(long)status", "(long)status"),
    ("    if (status != 0)\n        return status;\n", ""),
    ("self->addresses = map->source + 1", "self->addresses = map->source + 3"),
]


def compiled(source: str, folder: Path) -> Any:
    """Compile the extension from source and load it."""
    (folder / "shim.c").write_text(source)
    target, includes = folder / "_shim.so", sysconfig.get_path("include")
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", target], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_asm._shim", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_each_part_of_the_extension_matters(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted change of the extension is found."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("compiling the extension requires Python.h")
    source, unseen = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compiled(source.replace(text, other) if text else source, folder))
        try:
            found = faults(native.by_extension(driver.function, PLAN), driver)
        except TypeError as error:
            found = str(error)
        assert text or not found, found
        unseen += [(text, other)] if text and not found else []
    assert not unseen
