"""Launches of kernels and calls of C functions, through the C extension and through ctypes."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.backends import native
from tunedgemm.backends.driver import KernelFunction, bind_driver, driver_interface
from tunedgemm.backends.native import CallPlan, LaunchPlan, call_of, launch_of
from tunedgemm.errors import PluginError

HIGH = 1 << 63
ARGUMENTS = bytes(range(1, 256)) + bytes(97)
PLAN = LaunchPlan(grid=(3, 5, 7), threads=96, arguments=ARGUMENTS, slots=(0x20, 0x00, 0x150, 0x30), shared=1234)
BUFFER, OVERLAPPING = attrs.evolve(PLAN, buffer=True), attrs.evolve(PLAN, overlaps=True)
ADDRESSES = (HIGH + 1, HIGH + 2, 3, HIGH + 4, 5)
#: A struct of two addresses, a number between them, and one after.
CALL = CallPlan(bytes(8) + (HIGH - 1).to_bytes(8, "little") + bytes(8) + bytes(range(16)), (16, 0))
#: A driver and a function that record the last launch of each thread.
RECORDER = """
#include <string.h>
typedef struct {
    void *function; unsigned grid[3], block[3], shared; void *stream; unsigned char bytes[4096]; unsigned long long size;
    long words[5]; int parameters, attribute, value;
} Note;
static __thread Note note;
static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  void *stream, void **parameters, void **extra) {
    int i;
    note = (Note){function, {gx, gy, gz}, {bx, by, bz}, shared, stream, {0}, 0, {0}, parameters != 0};
    for (i = 0; extra && i < 5; i += 2)
        note.words[i] = (long)extra[i];
    note.size = extra ? *(unsigned long *)extra[3] : 352;
    memcpy(note.bytes, extra ? extra[1] : parameters[0], note.size);
    return (int)((unsigned long)stream % 1000);
}
int hipModuleLaunchKernel() __attribute__((alias("launch")));
int cuLaunchKernel() __attribute__((alias("launch")));
typedef struct { unsigned grid[3], block[3], shared; void *stream; int *attributes; unsigned count; } Config; /* CUlaunchConfig */
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    const unsigned *grid = config->grid, *block = config->block;
    launch(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared, config->stream, parameters, extra);
    note.attribute = config->count == 1 ? config->attributes[0] : -1;
    note.value = config->count == 1 ? config->attributes[2] : -1;
    return (int)((unsigned long)config->stream % 1000);
}
int function(const unsigned char *arguments, void *stream) {
    note = (Note){0};
    note.stream = stream;
    memcpy(note.bytes, arguments, 40);
    return -1;
}
const Note *last_note(void) { return &note; }
int hipModuleLoadData(void) { return 0; }
int hipModuleGetFunction(void) { return 0; }
const char *hipGetErrorString(int status) { return status ? "an error" : ""; }
int cuModuleLoadData(void) { return 0; }
int cuModuleGetFunction(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuGetErrorString(void) { return 0; }
"""


class Note(ctypes.Structure):
    """Last launch of the recording driver."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("bytes", ctypes.c_ubyte * 4096), ("size", ctypes.c_uint64), ("words", ctypes.c_long * 5),
        ("parameters", ctypes.c_int32), ("attribute", ctypes.c_int32), ("value", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recorder(c_library: Callable[[str], str]) -> Any:
    """Return functions of the recording drivers, the plain function, and the reader of the last note."""
    path = c_library(RECORDER)
    library = ctypes.CDLL(path)
    library.last_note.restype = ctypes.POINTER(Note)
    cuda, hip = driver_interface("mine", "nvidia", "launch overlapping", "describe"), driver_interface("mine", "amd")
    nvidia, amd = (KernelFunction(bind_driver(interface, path), -1, HIGH + 99) for interface in (cuda, hip))
    return SimpleNamespace(nvidia=nvidia, amd=amd, function=library.function, note=library.last_note)


def filled(*addresses: int) -> bytes:
    """Return the arguments with these addresses in the slots of `PLAN`."""
    buffer = bytearray(ARGUMENTS)
    for slot, address in zip(PLAN.slots, addresses, strict=True):
        buffer[slot : slot + 8] = address.to_bytes(8, "little")
    return bytes(buffer)


def faults(function: KernelFunction, plan: LaunchPlan, last_note: Any) -> list[str]:
    """List the arguments of a launch that do not arrive."""
    status, note = launch_of(function, plan)(*ADDRESSES), last_note().contents
    arrived = {
        "status": (status, ADDRESSES[0] % 1000), "function": (note.function, HIGH + 99), "grid": (tuple(note.grid), PLAN.grid),
        "block": (tuple(note.block), (96, 1, 1)), "shared": (note.shared, 1234), "stream": (note.stream, ADDRESSES[0]),
        "size": (note.size, 352), "bytes": (bytes(note.bytes[:352]), filled(*ADDRESSES[1:])),
        "parameters": (note.parameters, int(not plan.buffer)),
        # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        "words": (tuple(note.words), (1, 0, 2, 0, 3) if plan.buffer else (0,) * 5),
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        "attribute": ((note.attribute, note.value), (6, 1) if plan.overlaps else (0, 0)),
    }  # fmt: skip
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in arrived.items() if got != wanted]


def call_faults(recorder: Any) -> list[str]:
    """List the faults of a function's call."""
    status, note = call_of(recorder.function, CALL)(HIGH + 1, HIGH + 2, 3), recorder.note().contents
    wanted = (3).to_bytes(8, "little") + CALL.arguments[8:16] + (HIGH + 2).to_bytes(8, "little") + CALL.arguments[24:]
    arrived = {"status": (status, -1), "stream": (note.stream, HIGH + 1), "struct": (bytes(note.bytes[:40]), wanted)}
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in arrived.items() if got != wanted]


def all_faults(recorder: Any) -> list[str]:
    """List the faults of every kind of launch."""
    found = faults(recorder.nvidia, PLAN, recorder.note) + faults(recorder.amd, PLAN, recorder.note)
    found += faults(recorder.amd, BUFFER, recorder.note) + faults(recorder.nvidia, OVERLAPPING, recorder.note)
    return found + call_faults(recorder)


def test_every_argument_reaches_its_place(way: str, recorder: Any) -> None:
    """Every argument reaches the driver or the function whole, and the status returns."""
    assert not all_faults(recorder)


def test_an_extension_of_another_text_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension of another version is ignored."""
    monkeypatch.setattr(native.importlib, "import_module", lambda _: SimpleNamespace(Launch=None))
    assert native._load_extension() is None
    current = SimpleNamespace(VERSION=native._VERSION)
    monkeypatch.setattr(native.importlib, "import_module", lambda _: current)
    assert native._load_extension() is current


def test_the_lists_keys_are_hips_own() -> None:
    """The keys of HIP's list match AMD's own bindings."""
    hip: Any = pytest.importorskip("rocm.bindings.hip")
    keys = (hip.HIP_LAUNCH_PARAM_BUFFER_POINTER, hip.HIP_LAUNCH_PARAM_BUFFER_SIZE, hip.HIP_LAUNCH_PARAM_END)
    assert keys == (native._BUFFER_POINTER, native._BUFFER_SIZE, native._BUFFER_END)


def test_a_call_with_other_arguments_is_an_error(way: str, recorder: Any) -> None:
    """A wrong number of addresses and addresses that are not integers raise, and nothing is launched."""
    launch, call = launch_of(recorder.nvidia, PLAN), call_of(recorder.function, CALL)
    launch(*ADDRESSES)
    before = bytes(recorder.note().contents)
    for wrong in (ADDRESSES[:4], (*ADDRESSES, 6)):
        with pytest.raises(TypeError, match=rf"a stream and 4 addresses \(got {len(wrong)} arguments"):
            launch(*wrong)
    for wrong in ((1, 2), (1, 2, 3, 4), (1, "address", 3), (1, 2, -3)):
        with pytest.raises((TypeError, OverflowError)):
            call(*wrong)
    assert bytes(recorder.note().contents) == before


def test_a_plan_checks_where_addresses_go(faults_of: Any) -> None:
    """Plans reject overlapping or outside slots, and too many of them."""

    def check(arguments: bytes, slots: tuple[int, ...], reason: str) -> None:
        with pytest.raises(PluginError, match=reason):
            LaunchPlan((1, 1, 1), 256, arguments, slots)
        with pytest.raises(PluginError, match=reason):
            CallPlan(arguments, slots)

    assert not faults_of(
        check,
        [
            (bytes(16), (9,), "an address at byte 9 of 16 runs into byte 16"),
            (bytes(32), (8, 4), "an address at byte 4 of 32 runs into byte 8"),
            (bytes(32), (-8,), "an address at byte -8"),
            (bytes(4097), (), r"at most 4096 bytes \(got 4097\)"),
            (bytes(256), tuple(range(0, 136, 8)), r"at most 16 slots \(got 17\)"),
        ],
    )


def test_a_plan_is_for_one_vendor(recorder: Any) -> None:
    """A buffer is refused on NVIDIA, programmatic dependent launch on AMD, and both together."""
    with pytest.raises(PluginError, match="choose one"):
        attrs.evolve(PLAN, buffer=True, overlaps=True)
    for function, plan in ((recorder.nvidia, BUFFER), (recorder.amd, OVERLAPPING)):
        with pytest.raises(PluginError, match="mine: launch: a buffer is for AMD"):
            launch_of(function, plan)


def test_the_extension_checks_its_arguments(extension: Any) -> None:
    """The extension rejects wrong arguments."""
    kind = extension.Launch

    def made(arguments: Any = bytes(32), slots: Any = (0, 8), maps: Any = ()) -> Any:
        return kind(0, 1, 1, (1, 1, 1), 32, 0, arguments, slots, 0, maps, None)

    with pytest.raises(TypeError, match=r"a stream and 2 addresses \(got 2 arguments\)"):
        made().launch(1, 2)
    with pytest.raises(TypeError):
        made().launch(*["address"] * 3)
    with pytest.raises(OverflowError):
        made().launch(*[-1] * 3)
    for slot in (25, 1 << 40):
        with pytest.raises(ValueError, match="slot 0 ends beyond the 32 bytes"):
            made(slots=(slot,))
    with pytest.raises(ValueError, match=r"at most 4096 bytes \(got 4097\)"):
        made(bytes(4097), ())
    with pytest.raises(ValueError, match=r"slots: at most 16 \(got 17\)"):
        made(bytes(256), tuple(range(17)))
    for slots in ((-1,), ("a",), [0]):
        with pytest.raises((OverflowError, TypeError, SystemError)):
            made(slots=slots)
    with pytest.raises(TypeError, match="no keywords"):
        kind(launch=1)
    with pytest.raises(TypeError):
        made(bytearray(32))
    with pytest.raises(TypeError):
        kind.__new__(kind)


def test_a_launch_takes_few_bytes(extension: Any) -> None:
    """A launch references its template, so launches of one shape share it."""
    assert extension.Launch.__basicsize__ <= 256


def test_the_owner_lives_as_long_as_the_launch(extension: Any) -> None:
    """The owner of a function lives as long as the launch, and no longer."""

    class Owner:
        pass

    owner = Owner()
    reference = weakref.ref(owner)
    launch = extension.Launch(0, 1, 1, (1, 1, 1), 32, 0, bytes(8), (), 0, (), owner).launch
    del owner
    gc.collect()
    assert reference() is not None
    del launch
    gc.collect()
    assert reference() is None


#: Text in the extension's source, and a replacement that must fail.
CHANGES = [
    ("self->call)(self->function, self->grid[0], self->grid[1]", "self->call)(self->function, self->grid[1], self->grid[0]"),
    ("self->grid[2], self->threads, 1, 1, self->shared", "self->threads, self->grid[2], 1, 1, self->shared"),
    ("self->threads, 1, 1, self->shared", "self->threads, 2, 1, self->shared"),
    ("1, 1, self->shared, stream,", "1, 1, 0, stream,"),
    ("1, 1, self->shared, stream,", "1, 1, self->shared, NULL,"),
    ("BUFFER ? NULL : parameters", "BUFFER ? parameters : parameters"),
    ("BUFFER ? extra : NULL", "BUFFER ? extra : extra"),
    ("(void *)BUFFER_POINTER, arguments", "(void *)BUFFER_SIZE, arguments"),
    ("&bytes, (void *)BUFFER_END", "&bytes, NULL"),
    ("size_t bytes = self->bytes;", "size_t bytes = self->bytes - 8;"),
    ("{OVERLAPS, 0, 1, {0}}", "{OVERLAPS, 1, 0, {0}}"),
    ("stream, &attribute, 1}", "stream, &attribute, 0}"),
    ("self->shared, stream, &attribute", "0, stream, &attribute"),
    ("self->shared, stream, &attribute", "self->shared, NULL, &attribute"),
    ("self->grid[2]}, {self->threads, 1, 1}", "self->grid[1]}, {self->threads, 1, 1}"),
    ("(arguments, stream)", "(arguments, NULL)"),
    ("read_address(*args++, &failed)", "read_address(*args, &failed)"),
    ("memcpy(arguments, self->arguments, self->bytes)", "memcpy(arguments, self->arguments, self->bytes / 2)"),
    ("self->arguments = PyBytes_AsString(constant)", "self->arguments = PyBytes_AsString(constant) + 1"),
    ("arguments + self->slots[i]", "arguments + self->slots[i] + 8"),
    ("&addresses[i], sizeof addresses[i]", "&addresses[i], 4"),
    ("self->function = (void *)(uintptr_t)function", "self->function = (void *)(uintptr_t)(unsigned)function"),
    ("    return PyLong_FromLong(status)", "    return PyLong_FromLong(0)"),
]


def test_each_part_of_the_extension_matters(recorder: Any, missed: Callable[..., list[tuple[str, str]]]) -> None:
    """Each planted change of the extension is found."""
    assert not missed(CHANGES, lambda: all_faults(recorder))


def test_other_threads_run_while_a_launch_waits(extension: Any) -> None:
    """A waiting launch releases the interpreter."""
    libc = ctypes.CDLL(None)
    wait = ctypes.cast(libc.usleep, ctypes.c_void_p).value  # takes the function's address for microseconds
    launch = extension.Launch(0, wait, 200_000, (1, 1, 1), 32, 0, bytes(8), (), 0, (), None).launch
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
