"""The launch itself: the C extension and ctypes pass the same, every argument in its place, from many threads at once."""

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
from tunedgemm.plugin import Shape, bind_driver
from tunedgemm_skinny import native
from tunedgemm_skinny.names import Rows
from tunedgemm_skinny.native import CUDA, LaunchPlan, by_ctypes

SOURCE = Path(native.__file__).with_name("shim.c")
HIGH = 1 << 63
PLAN = LaunchPlan(grid=(3, 5, 1), threads=96, shared=1234, n=HIGH - 7, k=HIGH - 9, m=64, splits=5, per_split=HIGH - 11)
OVERLAPPING = attrs.evolve(PLAN, overlaps=True)
ADDRESSES = (HIGH + 1, HIGH + 2, 3, 4, HIGH + 5, 6, 7, HIGH + 8, 9)
#: Without the scales, the last two.
UNSCALED = ADDRESSES[:7]
extension = pytest.mark.skipif(native._extension is None, reason="the C extension was not built")
ways = pytest.mark.parametrize("way", ["extension", "ctypes"])

#: A driver that notes what it is given, one note for each thread that launches.
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
const Note *told(void) { return &note; }
int cuModuleLoadData(void) { return 0; }
int cuModuleGetFunction(void) { return 0; }
int cuFuncGetAttribute(void) { return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuGetErrorString(void) { return 0; }
"""


class Args(ctypes.Structure):
    """What a kernel takes."""

    _fields_ = [
        ("pointers", ctypes.c_uint64 * 8), ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("m", ctypes.c_int32), ("splits", ctypes.c_int32),
        ("per_split", ctypes.c_int64),
    ]  # fmt: skip


class Note(ctypes.Structure):
    """What the recording driver was given last."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("args", Args), ("extra", ctypes.c_int32), ("attribute", ctypes.c_int32), ("value", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of the recording driver, and what tells its notes."""
    if shutil.which("cc") is None:
        pytest.skip("the recording driver is compiled with `cc`")
    path = tmp_path_factory.mktemp("recorder") / "librecorder.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=RECORDER, text=True, check=True)
    told = ctypes.CDLL(str(path)).told
    told.restype = ctypes.POINTER(Note)
    return SimpleNamespace(function=SimpleNamespace(driver=bind_driver(CUDA, str(path)), address=HIGH + 99, index=-1), told=told)


def launching(way: str, function: Any, plan: LaunchPlan = PLAN) -> native.Launch:
    """The launch of a function in one of both ways."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    return native.by_extension(function, plan) if way == "extension" else by_ctypes(function, plan)


def faults(launch: native.Launch, told: Any, addresses: tuple[int, ...] = ADDRESSES, overlaps: bool = False) -> list[str]:
    """What of a launch does not reach its place."""
    status, note = launch(*addresses), told().contents
    args = note.args
    found = {
        "status": (status, ADDRESSES[0] % 1000), "function": (note.function, HIGH + 99), "grid": (tuple(note.grid), PLAN.grid),
        "block": (tuple(note.block), (96, 1, 1)), "shared": (note.shared, 1234), "stream": (note.stream, ADDRESSES[0]),
        "pointers": (tuple(args.pointers), (*addresses[1:], 0, 0)[:8]), "n": (args.n, PLAN.n), "k": (args.k, PLAN.k), "m": (args.m, 64),
        "splits": (args.splits, 5), "per_split": (args.per_split, PLAN.per_split), "extra": (note.extra, 0),
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        "attribute": ((note.attribute, note.value), (6, 1) if overlaps else (0, 0)),
    }  # fmt: skip
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in found.items() if got != wanted]


@ways
def test_every_argument_reaches_its_place(way: str, recorder: Any) -> None:
    """Addresses and sizes of 64 bits, grid, block, shared memory, stream, and the driver's status back."""
    launch = launching(way, recorder.function)
    assert not faults(launch, recorder.told)
    assert not faults(launch, recorder.told, UNSCALED)


@extension
def test_a_kernel_may_begin_while_the_one_before_it_ends(recorder: Any) -> None:
    """The driver is told so, and everything else as without."""
    assert not faults(native.by_extension(recorder.function, OVERLAPPING), recorder.told, overlaps=True)


@ways
def test_threads_share_a_launch(way: str, recorder: Any) -> None:
    """Eight threads launch at once, each with addresses of its own, and each launch has its own; the order of threads does not matter."""
    launch, wrong, start = launching(way, recorder.function), [], threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(500):
            mine = tuple(1000 * number + turn + place for place in range(9))
            status, note = launch(*mine), recorder.told().contents
            if (status, note.stream, *note.args.pointers) != (mine[0] % 1000, *mine) or note.args.per_split != PLAN.per_split:
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@extension
def test_the_extension_checks_what_it_is_given() -> None:
    """Wrong numbers and kinds of arguments raise, and an object that was not made is not launched."""
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
    """What the function belongs to goes with the last launch of it, also where the object is made again."""
    import gc
    import weakref

    class Owner:
        pass

    first, second = Owner(), Owner()
    told = weakref.ref(first), weakref.ref(second)
    made = native._extension.Launch(1, 1, (1, 1, 1), 32, 0, PLAN.sizes, False, first)
    launch = made.launch
    del first, made
    gc.collect()
    assert told[0]() is not None
    launch.__self__.__init__(1, 1, (1, 1, 1), 32, 0, PLAN.sizes, False, second)
    del second
    gc.collect()
    assert told[0]() is None
    assert told[1]() is not None
    del launch
    gc.collect()
    assert told[1]() is None


#: In the extension's source: a text, and another that must not pass.
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
    """The folder of Python's headers; skips where there is no compiler or no header."""
    folder = sysconfig.get_path("include")
    if shutil.which("cc") is None or not Path(folder, "Python.h").is_file():
        pytest.skip("the extension is compiled with `cc` and Python.h, and one is missing")
    return folder


def compiled(source: str, includes: str, folder: Path) -> Any:
    """The extension of that source, as a module."""
    (folder / "shim.c").write_text(source)
    target = folder / "_shim.so"
    flags = ("-O0", "-w", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030A0000", f"-I{includes}")
    subprocess.run(["cc", *flags, folder / "shim.c", "-o", target], check=True)
    loader = importlib.machinery.ExtensionFileLoader("tunedgemm_skinny._shim", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_each_part_of_the_extension_matters(recorder: Any, includes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source as it is passes; with any two arguments, sizes or numbers changed it does not."""
    source, unseen = SOURCE.read_text(), []
    for number, (text, other) in enumerate([("", ""), *CHANGES]):
        assert text in source, text
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(native, "_extension", compiled(source.replace(text, other) if text else source, includes, folder))
        launch = native.by_extension(recorder.function, PLAN)
        found = faults(launch, recorder.told) + faults(launch, recorder.told, UNSCALED)
        found += faults(native.by_extension(recorder.function, OVERLAPPING), recorder.told, overlaps=True)
        assert text or not found
        unseen += [(text, other)] if text and not found else []
    assert not unseen


@extension
def test_other_threads_run_while_a_launch_waits() -> None:
    """A launch that waits, here for a fifth of a second in place of a full queue, does not hold the interpreter up."""
    libc = ctypes.CDLL(None)
    wait = ctypes.cast(libc.usleep, ctypes.c_void_p).value  # takes what is the function for microseconds
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
@pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
def test_a_wrong_status_is_an_error(skinny: Any, over: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that the driver refuses is an error with the kernel's name and the driver's words; the next one works again."""
    if way == "extension" and native._extension is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setattr(native, "_extension", native._extension if way == "extension" else None)
    shape = Shape("a16w16", 2, 8, 64)
    case, name = over.case(shape), Rows(1, 1, 1, 1).name
    launcher = over.bound(skinny, name, shape)
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_LAUNCH_STATUS", "701")
        told = over.message(launcher, *case.plain)
    launches = {"nvidia": "cuLaunchKernel", "amd": "hipModuleLaunchKernel"}[skinny.host.kind]
    assert told == f"skinny {name}: {launches}: too many resources requested for launch"
    assert not case.launched(launcher)


def test_a_plan_is_packed_as_the_kernels_read_it() -> None:
    """n, k, then m and splits in one word, then per_split."""
    assert attrs.evolve(PLAN, n=1, k=2, m=3, splits=4, per_split=5).sizes == b"".join(
        number.to_bytes(size, "little") for number, size in ((1, 8), (2, 8), (3, 4), (4, 4), (5, 8))
    )
