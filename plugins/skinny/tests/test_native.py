"""Loaded functions, and launches by the C extension and by ctypes."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import LaunchError, OutOfResources, Shape
from tunedgemm.tools import Driver, bind_driver
from tunedgemm_skinny import driver, native, rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.driver import CUDA, function_of
from tunedgemm_skinny.names import Rows
from tunedgemm_skinny.native import LaunchPlan, by_ctypes

SOURCE = Path(native.__file__).with_name("shim.c")
HIGH = 1 << 63
PLAN = LaunchPlan(grid=(3, 5, 1), threads=96, shared=1234, n=HIGH - 7, k=HIGH - 9, m=64, splits=5, per_split=HIGH - 11)
OVERLAPPING = attrs.evolve(PLAN, overlaps=True)
ADDRESSES = (HIGH + 1, HIGH + 2, 3, 4, HIGH + 5, 6, 7, HIGH + 8, 9)
#: Addresses without the last two, the scales.
UNSCALED = ADDRESSES[:7]
extension = pytest.mark.skipif(native._extension is None, reason="C extension not built")
ways = pytest.mark.cases("way", ["extension", "ctypes"])
both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
#: A kernel to load, and its shape.
KERNEL, SMALL = Rows(1, 1, 1, 1), Shape("a16w16", 1, 8, 64)

#: A driver that records its last launch, per thread.
RECORDER = """
#include <string.h>
typedef struct { void *pointer[8]; long long n, k; int m, splits; long long per_split; } Args;
typedef struct { void *function; unsigned grid[3], block[3], shared; void *stream; Args args; int extra, attribute, value; } Note;
static __thread Note note;
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    note = (Note){function, {gx, gy, gz}, {bx, by, bz}, shared, stream, *(Args *)parameters[0], extra != 0, 0, 0};
    return (int)((size_t)stream % 1000);
}
typedef struct { unsigned grid[3], block[3], shared; void *stream; int *attributes; unsigned count; } Config; /* CUlaunchConfig */
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    const int id = config->count == 1 ? config->attributes[0] : -1, value = config->count == 1 ? config->attributes[2] : -1;
    note = (Note){function, {0}, {0}, config->shared, config->stream, *(Args *)parameters[0], extra != 0, id, value};
    memcpy(note.grid, config->grid, sizeof note.grid);
    memcpy(note.block, config->block, sizeof note.block);
    return (int)((size_t)config->stream % 1000);
}
const Note *last_note(void) { return &note; }
int cuModuleLoadData(void) { return 0; }
int cuModuleGetFunction(void) { return 0; }
int cuFuncGetAttribute(void) { return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuGetErrorString(void) { return 0; }
"""


class Args(ctypes.Structure):
    """Arguments of a kernel."""

    _fields_ = [
        ("pointers", ctypes.c_uint64 * 8), ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("m", ctypes.c_int32), ("splits", ctypes.c_int32),
        ("per_split", ctypes.c_int64),
    ]  # fmt: skip


class Note(ctypes.Structure):
    """Last launch of the recording driver."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("args", Args), ("extra", ctypes.c_int32), ("attribute", ctypes.c_int32), ("value", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile the recording driver; return a function of it and the reader of its notes."""
    if shutil.which("cc") is None:
        pytest.skip("cc not found")
    path = tmp_path_factory.mktemp("recorder") / "librecorder.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=RECORDER, text=True, check=True)
    last_note = ctypes.CDLL(str(path)).last_note
    last_note.restype = ctypes.POINTER(Note)
    return SimpleNamespace(function=SimpleNamespace(driver=bind_driver(CUDA, str(path)), address=HIGH + 99, index=-1), note=last_note)


def launching(way: str, function: Any, plan: LaunchPlan = PLAN) -> native.Launch:
    """Return the launch of a function by the extension or by ctypes."""
    if way == "extension" and native._extension is None:
        pytest.skip("C extension not built")
    return native.by_extension(function, plan) if way == "extension" else by_ctypes(function, plan)


def faults(launch: native.Launch, last_note: Any, addresses: tuple[int, ...] = ADDRESSES, overlaps: bool = False) -> list[str]:
    """List the arguments of a launch that do not arrive."""
    status, note = launch(*addresses), last_note().contents
    args = note.args
    arguments = {
        "status": (status, ADDRESSES[0] % 1000), "function": (note.function, HIGH + 99), "grid": (tuple(note.grid), PLAN.grid),
        "block": (tuple(note.block), (96, 1, 1)), "shared": (note.shared, 1234), "stream": (note.stream, ADDRESSES[0]),
        "pointers": (tuple(args.pointers), (*addresses[1:], 0, 0)[:8]), "n": (args.n, PLAN.n), "k": (args.k, PLAN.k), "m": (args.m, 64),
        "splits": (args.splits, 5), "per_split": (args.per_split, PLAN.per_split), "extra": (note.extra, 0),
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        "attribute": ((note.attribute, note.value), (6, 1) if overlaps else (0, 0)),
    }  # fmt: skip
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in arguments.items() if got != wanted]


@ways
def test_every_argument_reaches_its_place(way: str, recorder: Any) -> None:
    """Every argument reaches the driver whole, and the status returns."""
    launch = launching(way, recorder.function)
    assert not faults(launch, recorder.note)
    assert not faults(launch, recorder.note, UNSCALED)


@extension
def test_programmatic_dependent_launch(recorder: Any) -> None:
    """The launch attribute is set, and all other arguments are the same."""
    assert not faults(native.by_extension(recorder.function, OVERLAPPING), recorder.note, overlaps=True)


@ways
def test_threads_share_a_launch(way: str, recorder: Any) -> None:
    """Eight threads share a launch, and each passes its own addresses."""
    launch, wrong, start = launching(way, recorder.function), [], threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(200):
            mine = tuple(1000 * number + turn + index for index in range(9))
            status, note = launch(*mine), recorder.note().contents
            if (status, note.stream, *note.args.pointers) != (mine[0] % 1000, *mine) or note.args.per_split != PLAN.per_split:
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@extension
def test_the_extension_checks_its_arguments() -> None:
    """Wrong arguments raise, and so does an object that was not initialised."""
    made = native._extension.Launch(1, 1, (1, 1, 1), 32, 0, PLAN.sizes, False, None)
    with pytest.raises(TypeError, match=r"takes 7 or 9 addresses \(got 3\)"):
        made.launch(1, 2, 3)
    with pytest.raises(TypeError, match=r"\(got 8\)"):
        made.launch(*[0] * 8)
    with pytest.raises(TypeError):
        made.launch(*["address"] * 7)
    with pytest.raises(OverflowError):
        made.launch(*[-1] * 7)
    with pytest.raises(ValueError, match=r"have 32 bytes \(got 31\)"):
        native._extension.Launch(1, 1, (1, 1, 1), 32, 0, bytes(31), False, None)
    with pytest.raises(TypeError, match="no keywords"):
        native._extension.Launch(launch=1)
    with pytest.raises(TypeError):
        native._extension.Launch(1, 2)
    with pytest.raises(RuntimeError, match="not initialised"):
        native._extension.Launch.__new__(native._extension.Launch).launch(*[0] * 7)


@extension
def test_the_owner_lives_as_long_as_the_launch() -> None:
    """A launch keeps its function's owner alive, also after a second initialisation."""
    import gc
    import weakref

    class Owner:
        pass

    first, second = Owner(), Owner()
    references = weakref.ref(first), weakref.ref(second)
    extension_launch = native._extension.Launch(1, 1, (1, 1, 1), 32, 0, PLAN.sizes, False, first)
    launch = extension_launch.launch
    del first, extension_launch
    gc.collect()
    assert references[0]() is not None
    launch.__self__.__init__(1, 1, (1, 1, 1), 32, 0, PLAN.sizes, False, second)
    del second
    gc.collect()
    assert references[0]() is None
    assert references[1]() is not None
    del launch
    gc.collect()
    assert references[1]() is None


#: Mutations of the extension's source: text, replacement.
CHANGES = [
    ("self->grid[0], self->grid[1]", "self->grid[1], self->grid[0]"),
    ("self->grid[2], self->threads", "self->threads, self->grid[2]"),
    ("self->threads, 1, 1", "self->threads, 2, 1"),
    ("self->shared, stream,", "0, stream,"),
    ("self->shared, stream,", "self->shared, NULL,"),
    (
        "self->shared,\n                                           stream,",
        "self->shared,\n                                           NULL,",
    ),
    ("{OVERLAPPING, 0, 1, {0}}", "{OVERLAPPING, 1, 0, {0}}"),
    ("stream, &attribute, 1}", "stream, &attribute, 0}"),
    ("self->grid[2]}, {self->threads, 1, 1}", "self->grid[1]}, {self->threads, 1, 1}"),
    ("parameters, NULL);", "parameters, parameters);"),
    ("(void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i + 1])", "(void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i])"),
    ("PyLong_AsUnsignedLongLong(args[0])", "PyLong_AsUnsignedLongLong(args[1])"),
    ("memcpy(values.sizes, self->sizes, SIZES)", "memcpy(values.sizes, self->sizes, SIZES - 8)"),
    ("memcpy(self->sizes, sizes, SIZES)", "memcpy(self->sizes, sizes + 8, SIZES - 8)"),
    ("self->function = (void *)(uintptr_t)function", "self->function = (void *)(uintptr_t)(unsigned)function"),
    ("return PyLong_FromLong(status)", "return PyLong_FromLong(0)"),
    ("values.pointer[POINTERS - 2] = values.pointer[POINTERS - 1] = NULL", "values.pointer[POINTERS - 2] = self"),
    ("i < count - 1", "i < POINTERS - SCALES"),
]


@pytest.fixture(scope="module")
def includes() -> str:
    """Return the folder of Python's headers; skip without a compiler or headers."""
    folder = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(folder, "Python.h").is_file():
        pytest.skip("cc or Python.h not found")
    return folder


def compiled(source: str, includes: str, folder: Path) -> Any:
    """Compile the extension from a source and load it."""
    (folder / "shim.c").write_text(source)
    library = folder / "_shim.so"
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", library], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_skinny._shim", str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_every_mutation_of_the_extension_is_found(recorder: Any, includes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension's source passes, and each mutation of it fails."""
    source, unseen = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compiled(source.replace(text, other) if text else source, includes, folder))
        launch = native.by_extension(recorder.function, PLAN)
        errors = faults(launch, recorder.note) + faults(launch, recorder.note, UNSCALED)
        errors += faults(native.by_extension(recorder.function, OVERLAPPING), recorder.note, overlaps=True)
        assert text or not errors
        unseen += [(text, other)] if text and not errors else []
    assert not unseen


@extension
def test_a_launch_releases_the_interpreters_lock() -> None:
    """Other threads run while a launch waits for a fifth of a second."""
    libc = ctypes.CDLL(None)
    wait = ctypes.cast(libc.usleep, ctypes.c_void_p).value  # takes the function's address for microseconds
    launch = native._extension.Launch(wait, 200_000, (1, 1, 1), 32, 0, PLAN.sizes, False, None).launch
    ticks, span = [], []

    def work() -> None:
        span.append(time.perf_counter())
        assert launch(*[0] * 7) == 0
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.005)
    thread.join()
    assert span[1] - span[0] >= 0.2
    assert sum(span[0] < tick < span[1] for tick in ticks) >= 3


@ways
@both
def test_a_failed_launch_is_an_error(skinny: Any, over: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused launch raises the kernel's name and the driver's text; the next one works."""
    if way == "extension" and native._extension is None:
        pytest.skip("C extension not built")
    monkeypatch.setattr(native, "_extension", native._extension if way == "extension" else None)
    shape = Shape("a16w16", 2, 8, 64)
    case, name = over.case(shape), Rows(1, 1, 1, 1).name
    launcher = over.bound(skinny, name, shape)
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_LAUNCH_STATUS", "701")
        message = over.message(launcher, *case.plain)
    launches = {"nvidia": "cuLaunchKernel", "amd": "hipModuleLaunchKernel"}[skinny.host.kind]
    assert message == f"skinny {name}: {launches}: too many resources requested for launch"
    assert not case.launched(launcher)


def test_a_plan_is_packed_like_args() -> None:
    """A plan packs n, k, then m and splits in one word, then per_split."""
    assert attrs.evolve(PLAN, n=1, k=2, m=3, splits=4, per_split=5).sizes == b"".join(
        number.to_bytes(size, "little") for number, size in ((1, 8), (2, 8), (3, 4), (4, 4), (5, 8))
    )


def driver_of(skinny: Any) -> Driver:
    """Return the fake driver of a backend."""
    return skinny.driver(driver.INTERFACES[skinny.host.kind])


def code_of(skinny: Any, kernel: Rows = KERNEL) -> bytes:
    """Return the code object of a kernel for the backend's device."""
    return code(build_of(kernel, 1, SMALL, skinny.host.gfx), skinny.compiler(rtc.INTERFACES[skinny.host.kind]))


@both
def test_a_code_object_is_loaded_once(skinny: Any, over: ModuleType) -> None:
    """A code object is loaded once per device."""
    driver, counts = driver_of(skinny), over.native(skinny)
    prefix = "cu" if skinny.host.kind == "nvidia" else "hip"
    first = function_of(driver, code_of(skinny), ENTRY, -1)
    loads = counts.fake_calls(f"{prefix}ModuleLoadData".encode())
    assert function_of(driver, code_of(skinny), ENTRY, -1) is first
    assert counts.fake_calls(f"{prefix}ModuleLoadData".encode()) == loads
    other = function_of(driver, code_of(skinny, Rows(2, 1, 1, 1)), ENTRY, -1)
    assert other.address != first.address
    assert counts.fake_calls(f"{prefix}ModuleLoadData".encode()) == loads + 1


@both
def test_a_function_has_its_attributes(skinny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded function has its registers, spilled bytes and most threads.

    Larger blocks are refused.
    """
    monkeypatch.setenv("FAKE_REGISTERS", "128")
    monkeypatch.setenv("FAKE_LOCAL_BYTES", "24")
    function = function_of(driver_of(skinny), code_of(skinny, Rows(4, 1, 1, 1)), ENTRY, -1)
    assert (function.registers, function.local_bytes, function.threads) == (128, 24, 512)
    function.allow(512, 0)
    with pytest.raises(OutOfResources, match=r"128 registers each must be at most 512 \(got 544\)"):
        function.allow(544, 0)


def test_large_shared_memory_is_requested(backends: dict[str, Any], over: ModuleType) -> None:
    """CUDA is asked for more than 48 KiB and its refusal is quoted; HIP is not asked."""
    for kind, skinny in backends.items():
        function, counts = function_of(driver_of(skinny), code_of(skinny, Rows(8, 1, 1, 1)), ENTRY, -1), over.native(skinny)
        counts.fake_reset()
        function.allow(32, 48 << 10)
        assert counts.fake_calls(b"cuFuncSetAttribute") == 0
        function.allow(32, 60 << 10)
        assert counts.fake_calls(b"cuFuncSetAttribute") == (kind == "nvidia")
        assert counts.fake_calls(b"hipFuncSetAttribute") == 0
        if kind == "nvidia":
            with pytest.raises(OutOfResources, match="shared memory of 233473 bytes refused: cuFuncSetAttribute: invalid argument"):
                function.allow(32, (228 << 10) + 1)


@both
def test_a_wrong_code_object_is_refused(skinny: Any) -> None:
    """Errors name the driver's function and quote its message."""
    prefix = "cu" if skinny.host.kind == "nvidia" else "hip"
    with pytest.raises(LaunchError, match=f"{prefix}ModuleLoadData: device kernel image is invalid"):
        function_of(driver_of(skinny), b"\x7fELF, then garbage" * 15, ENTRY, -1)
    with pytest.raises(LaunchError, match=f"{prefix}ModuleGetFunction: named symbol not found"):
        function_of(driver_of(skinny), code_of(skinny), "another", -1)


def test_code_of_the_other_vendor_is_refused(backends: dict[str, Any]) -> None:
    """A code object of AMD does not load on NVIDIA."""
    with pytest.raises(LaunchError, match="no kernel image is available"):
        function_of(driver_of(backends["nvidia"]), code_of(backends["amd"]), ENTRY, -1)


@both
def test_every_status_has_a_text(skinny: Any) -> None:
    """Known statuses have the driver's text, unknown ones their number."""
    driver = driver_of(skinny)
    assert driver.text(0) == "no error"
    assert driver.text(700) == "an illegal memory access was encountered"
    assert driver.text(123456) in ("status 123456", "unknown error")
