"""Test launches through the C extension and through ctypes."""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import PluginError
from tunedgemm.tools import bind_driver
from tunedgemm_asm import native
from tunedgemm_asm.driver import HIP
from tunedgemm_asm.native import LaunchPlan, by_ctypes

SOURCE = Path(native.__file__).with_name("shim.c")
HIGH = 1 << 63
ARGUMENTS = bytes(range(1, 256)) + bytes(97)
PLAN = LaunchPlan(grid=(3, 5, 7), threads=96, arguments=ARGUMENTS, slots=(0x20, 0x00, 0x150, 0x30), shared=1234)
ADDRESSES = (HIGH + 1, HIGH + 2, 3, HIGH + 4, 5)
extension = pytest.mark.skipif(native._extension is None, reason="the C extension was not built")
ways = pytest.mark.parametrize("way", ["extension", "ctypes"])
#: The same shim serves CUDA's driver, whose kernels get the arguments as their one parameter.
CUDA = attrs.evolve(HIP, kind="nvidia")

#: A driver that records the last launch of each thread.
RECORDER = """
#include <string.h>
typedef struct {
    void *function; unsigned grid[3], block[3], shared; void *stream; unsigned char bytes[4096]; unsigned long long size;
    long words[5]; int parameters;
} Note;
static __thread Note note;
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                          void *stream, void **parameters, void **extra) {
    int i;
    note = (Note){function, {gx, gy, gz}, {bx, by, bz}, shared, stream, {0}, 0, {0}, parameters != 0};
    for (i = 0; extra && i < 5; i += 2)
        note.words[i] = (long)extra[i];
    note.size = extra ? *(unsigned long *)extra[3] : 352;
    memcpy(note.bytes, extra ? extra[1] : parameters[0], note.size);
    return (int)((unsigned long)stream % 1000);
}
const Note *told(void) { return &note; }
int hipModuleLoadData(void) { return 0; }
int hipModuleGetFunction(void) { return 0; }
const char *hipGetErrorString(int status) { return status ? "an error" : ""; }
"""


class Note(ctypes.Structure):
    """What the recording driver received last."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("bytes", ctypes.c_ubyte * 4096), ("size", ctypes.c_uint64), ("words", ctypes.c_long * 5),
        ("parameters", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of the recording driver and its notes."""
    if shutil.which("cc") is None:
        pytest.skip("the recording driver requires `cc`")
    path = tmp_path_factory.mktemp("recorder") / "librecorder.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=RECORDER, text=True, check=True)
    told = ctypes.CDLL(str(path)).told
    told.restype = ctypes.POINTER(Note)
    return SimpleNamespace(function=SimpleNamespace(driver=bind_driver(HIP, str(path)), address=HIGH + 99), told=told)


def launching(way: str, function: Any, plan: LaunchPlan = PLAN) -> native.Launch:
    """Return the launch of a function by extension or ctypes."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    return native.by_extension(function, plan) if way == "extension" else by_ctypes(function, plan)


def filled(*addresses: int) -> bytes:
    """Return the arguments with these addresses in the slots of `PLAN`."""
    buffer = bytearray(ARGUMENTS)
    for slot, address in zip(PLAN.slots, addresses, strict=True):
        buffer[slot : slot + 8] = address.to_bytes(8, "little")
    return bytes(buffer)


def faults(launch: native.Launch, told: Any, end: int = 3) -> list[str]:
    """Return what of a launch did not arrive."""
    status, note = launch(*ADDRESSES), told().contents
    found = {
        "status": (status, ADDRESSES[0] % 1000), "function": (note.function, HIGH + 99), "grid": (tuple(note.grid), PLAN.grid),
        "block": (tuple(note.block), (96, 1, 1)), "shared": (note.shared, 1234), "stream": (note.stream, ADDRESSES[0]),
        "size": (note.size, 352), "bytes": (bytes(note.bytes[:352]), filled(*ADDRESSES[1:])), "parameters": (note.parameters, int(not end)),
        # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        "words": (tuple(note.words), (1, 0, 2, 0, end) if end else (0,) * 5),
    }  # fmt: skip
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in found.items() if got != wanted]


@ways
def test_every_argument_reaches_its_place(way: str, recorder: Any) -> None:
    """Every argument of a launch reaches the driver, and its status returns."""
    assert not faults(launching(way, recorder.function), recorder.told)


def test_an_extension_of_another_text_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension of another version is ignored."""
    monkeypatch.setattr(native.importlib, "import_module", lambda _: SimpleNamespace(Launch=None))
    assert native._load_extension() is None
    current = SimpleNamespace(VERSION=native._VERSION)
    monkeypatch.setattr(native.importlib, "import_module", lambda _: current)
    assert native._load_extension() is current


@ways
def test_a_driver_without_a_list_gets_one_parameter(way: str, recorder: Any) -> None:
    """CUDA's driver gets one parameter."""
    driver = attrs.evolve(recorder.function.driver, interface=CUDA)
    assert not faults(launching(way, SimpleNamespace(driver=driver, address=HIGH + 99)), recorder.told, end=0)


@ways
def test_threads_share_a_launch(way: str, recorder: Any) -> None:
    """Threads that share a launch get their own addresses."""
    launch, wrong, start = launching(way, recorder.function), [], threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(200):
            mine = tuple(1000 * number + turn + place for place in range(5))
            status, note = launch(*mine), recorder.told().contents
            if (status, note.stream, bytes(note.bytes[:352])) != (mine[0] % 1000, mine[0], filled(*mine[1:])):
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_plan_checks_where_addresses_go(failing: Any) -> None:
    """A launch plan rejects overlapping or outside slots."""

    def check(arguments: bytes, slots: tuple[int, ...], reason: str) -> None:
        with pytest.raises(PluginError, match=reason):
            LaunchPlan((1, 1, 1), 256, arguments, slots)

    assert not failing(
        check,
        [
            (bytes(16), (9,), "an address at byte 9 of 16 runs into byte 16"),
            (bytes(32), (8, 4), "an address at byte 4 of 32 runs into byte 8"),
            (bytes(32), (-8,), "an address at byte -8"),
            (bytes(4097), (), r"at most 4096 bytes of arguments \(got 4097\)"),
            (bytes(256), tuple(range(0, 136, 8)), r"'slots': at most 16 \(got 17\)"),
        ],
    )


@extension
def test_the_extension_checks_what_it_is_given() -> None:
    """The extension rejects wrong arguments and uninitialized objects."""
    kind = native._extension.Launch
    made = kind(1, 1, (1, 1, 1), 32, 0, bytes(32), (0, 8), 3, None, 0, ())
    with pytest.raises(TypeError, match=r"a stream and 2 addresses \(got 2 arguments\)"):
        made.launch(1, 2)
    with pytest.raises(TypeError, match=r"\(got 4 arguments\)"):
        made.launch(1, 2, 3, 4)
    with pytest.raises(TypeError):
        made.launch(*["address"] * 3)
    with pytest.raises(OverflowError):
        made.launch(*[-1] * 3)
    for slot in (25, 1 << 40):
        with pytest.raises(ValueError, match="slot 0 ends beyond the 32 bytes"):
            kind(1, 1, (1, 1, 1), 32, 0, bytes(32), (slot,), 3, None, 0, ())
    with pytest.raises(ValueError, match=r"at most 4096 bytes \(got 4097\)"):
        kind(1, 1, (1, 1, 1), 32, 0, bytes(4097), (), 3, None, 0, ())
    with pytest.raises(ValueError, match="at most 16 slots"):
        kind(1, 1, (1, 1, 1), 32, 0, bytes(256), tuple(range(17)), 3, None, 0, ())
    for slots in ((-1,), ("a",)):
        with pytest.raises((OverflowError, TypeError)):
            kind(1, 1, (1, 1, 1), 32, 0, bytes(32), slots, 3, None, 0, ())
    with pytest.raises(TypeError, match="no keywords"):
        kind(launch=1)
    with pytest.raises((TypeError, SystemError)):
        kind(1, 1, (1, 1, 1), 32, 0, bytes(32), [0], 3, None, 0, ())
    with pytest.raises(TypeError):
        kind(1, 1, (1, 1, 1), 32, 0, bytearray(32), (0,), 3, None, 0, ())
    with pytest.raises(RuntimeError, match="not initialised"):
        kind.__new__(kind).launch(0)


@extension
def test_a_launch_holds_its_arguments_and_takes_few_bytes() -> None:
    """A launch references its argument template and stays small."""
    kind, template = native._extension.Launch, bytes(range(200)) + bytes(152)
    before = sys.getrefcount(template)
    made = kind(1, 1, (1, 1, 1), 32, 0, template, (0,), 3, None, 0, ())
    assert sys.getrefcount(template) == before + 1
    made.__init__(1, 1, (1, 1, 1), 32, 0, template, (0,), 3, None, 0, ())
    assert sys.getrefcount(template) == before + 1
    assert kind.__basicsize__ <= 256
    del made
    assert sys.getrefcount(template) == before


@extension
def test_the_owner_lives_as_long_as_the_launch() -> None:
    """The owner of a function lives as long as the launch."""

    class Owner:
        pass

    first, second = Owner(), Owner()
    told = weakref.ref(first), weakref.ref(second)
    made = native._extension.Launch(1, 1, (1, 1, 1), 32, 0, bytes(8), (), 3, first, 0, ())
    launch = made.launch
    del first, made
    gc.collect()
    assert told[0]() is not None
    launch.__self__.__init__(1, 1, (1, 1, 1), 32, 0, bytes(8), (), 3, second, 0, ())
    del second
    gc.collect()
    assert told[0]() is None
    assert told[1]() is not None
    del launch
    gc.collect()
    assert told[1]() is None


#: Text in the extension's source, and a replacement that must fail.
CHANGES = [
    ("self->grid[0], self->grid[1]", "self->grid[1], self->grid[0]"),
    ("self->grid[2], self->threads", "self->threads, self->grid[2]"),
    ("self->threads, 1, 1", "self->threads, 2, 1"),
    ("self->shared, stream,", "0, stream,"),
    ("self->shared, stream,", "self->shared, NULL,"),
    ("self->end ? NULL : parameters", "parameters"),
    ("(void *)BUFFER_POINTER, arguments", "(void *)BUFFER_SIZE, arguments"),
    ("(void *)BUFFER_SIZE, &bytes, (void *)self->end", "(void *)BUFFER_SIZE, &bytes, NULL"),
    ("PyLong_AsUnsignedLongLong(args[i + 1])", "PyLong_AsUnsignedLongLong(args[i])"),
    ("PyLong_AsUnsignedLongLong(args[0])", "PyLong_AsUnsignedLongLong(args[1])"),
    ("memcpy(arguments, self->arguments, bytes)", "memcpy(arguments, self->arguments, bytes - 100)"),
    ("self->arguments = PyBytes_AsString(constant)", "self->arguments = PyBytes_AsString(constant) + 1"),
    ("arguments + self->slot[i]", "arguments + self->slot[i] + 8"),
    ("&addresses[i], sizeof addresses[i]", "&addresses[i], 4"),
    ("self->function = (void *)(uintptr_t)function", "self->function = (void *)(uintptr_t)(unsigned)function"),
    ("size_t bytes = self->bytes;", "size_t bytes = self->bytes - 8;"),
    ("return PyLong_FromLong(status)", "return PyLong_FromLong(0)"),
]


@pytest.fixture(scope="module")
def includes() -> str:
    """Return the folder of Python's headers, or skip."""
    folder = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(folder, "Python.h").is_file():
        pytest.skip("compiling the extension requires `cc` and Python.h")
    return folder


def compiled(source: str, includes: str, folder: Path) -> Any:
    """Compile the extension from source and load it."""
    (folder / "shim.c").write_text(source)
    target = folder / "_shim.so"
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", target], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_asm._shim", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_each_part_of_the_extension_matters(recorder: Any, includes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted change of the extension is found."""
    source, unseen = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compiled(source.replace(text, other) if text else source, includes, folder))
        found = faults(native.by_extension(recorder.function, PLAN), recorder.told)
        assert text or not found
        unseen += [(text, other)] if text and not found else []
    assert not unseen


@extension
def test_other_threads_run_while_a_launch_waits() -> None:
    """A waiting launch releases the interpreter."""
    libc = ctypes.CDLL(None)
    wait = ctypes.cast(libc.usleep, ctypes.c_void_p).value  # takes what is the function for microseconds
    launch = native._extension.Launch(wait, 200_000, (1, 1, 1), 32, 0, bytes(8), (), 3, None, 0, ()).launch
    ticks, span = [], []

    def work() -> None:
        span.append(time.perf_counter())
        assert launch(0) == 0
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.005)
    thread.join()
    assert span[1] - span[0] >= 0.2
    assert sum(span[0] < tick < span[1] for tick in ticks) >= 3
