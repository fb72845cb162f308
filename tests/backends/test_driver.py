"""Drivers through ctypes, over a library compiled for the test: files, functions, words, contexts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends import driver
from tunedgemm.backends.driver import (
    DriverInterface,
    bind_driver,
    device_context,
    driver_interface,
    load_function,
    loaded_driver,
    mapped_files,
)
from tunedgemm.errors import LaunchError, PluginError

#: Loading and setting fail in a thread without a context; setting always.
SOURCE = """
static int current, retained = -1, failures;
int cuCtxGetCurrent(void **context) { *context = (void *)(current ? 7L : 0L); return 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { retained = device; *context = (void *)7; return 0; }
int cuCtxSetCurrent(void *context) { current = context == (void *)7; return 0; }
int cuModuleLoadData(void **module, const void *code) { failures += !current; *module = (void *)code; return current ? 0 : 201; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (char *)module + *name;
    return *name == 'x' ? 500 : 0;
}
int cuLaunchKernel(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 10 * attribute; return 0; }
static int granted[2];
int cuFuncSetAttribute(void *function, int attribute, int value) {
    granted[0] = attribute;
    granted[1] = value;
    return function ? value > 99000 ? 1 : 0 : 201;
}
int hipModuleLoadData(void **module, const void *code) { *module = (void *)code; return 0; }
int hipModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int hipModuleLaunchKernel(void) { return 0; }
int cuGetErrorString(int status, const char **text) { if (status == 201) *text = "no context"; return 0; }
const char *hipGetErrorString(int status) { return status ? "hip's word" : ""; }
int told_device(void) { return retained; }
int told_failures(void) { return failures; }
const int *told_grant(void) { return granted; }
"""
MINE = DriverInterface(
    plugin="mine",
    kind="nvidia",
    libraries=("libmine.so.1", "libmine.so"),
    functions={
        "load": ("cuModuleLoadData", (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)),
        "set": ("cuFuncSetAttribute", (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)),
    },
    error="cuGetErrorString",
    no_context=201,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The library, a new file, so that it starts without a context."""
    if shutil.which("cc") is None:
        pytest.skip("the library is compiled with `cc`")
    path = tmp_path / "a folder" / "libmine.so.1.2"
    path.parent.mkdir()
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=SOURCE, text=True, check=True)
    return path


def test_a_thread_without_a_context_gets_the_devices(library: Path) -> None:
    """A call that fails without a context makes the device's primary one current and is retried once."""
    found, native, module = bind_driver(MINE, str(library)), ctypes.CDLL(str(library)), ctypes.c_void_p()
    with pytest.raises(LaunchError, match="cuModuleLoadData: no context"):
        found.call("load", module, b"code")
    found.call("load", module, b"code", index=3)
    assert (native.told_device(), native.told_failures()) == (103, 2)
    found.call("load", module, b"code", index=3)
    assert native.told_failures() == 2
    with pytest.raises(LaunchError, match="cuFuncSetAttribute: no context"):
        found.call("set", None, 0, 0, index=3)


def test_each_vendors_status_is_read(library: Path) -> None:
    """CUDA writes a status text to a pointer, HIP returns it; a status without text is named by number."""
    cuda = bind_driver(MINE, str(library))
    hip = bind_driver(attrs.evolve(MINE, kind="amd", error="hipGetErrorString", no_context=-1), str(library))
    assert (cuda.text(201), cuda.text(12), hip.text(12), hip.text(0)) == ("no context", "status 12", "hip's word", "status 0")
    assert cuda.address("load") == ctypes.cast(ctypes.CDLL(str(library)).cuModuleLoadData, ctypes.c_void_p).value


def test_a_library_that_cannot_be_used(library: Path, tmp_path: Path) -> None:
    """The error names the plugin, the file and the fault; without any file, it names the newest."""
    with pytest.raises(PluginError, match=f"mine: {tmp_path}/nowhere.so cannot be used: .*No such file"):
        bind_driver(MINE, str(tmp_path / "nowhere.so"))
    with pytest.raises(PluginError, match="undefined symbol: cuUnheardOf"):
        bind_driver(attrs.evolve(MINE, functions={"load": ("cuUnheardOf", ())}), str(library))
    with pytest.raises(PluginError, match=r"libnobody\.so\.2 cannot be used"):
        loaded_driver(attrs.evolve(MINE, libraries=("libnobody.so.2", "libnobody.so")))


PROCESS = """
import ctypes, sys
import attrs
from test_driver import MINE
from tunedgemm.backends.driver import loaded_driver, mapped_files
assert mapped_files("libmine.so") == []
ctypes.CDLL(sys.argv[1])
assert mapped_files("libmine.so") == [sys.argv[1]]
assert mapped_files("mine.so") == []
assert loaded_driver(MINE).path == sys.argv[1]
"""


def test_the_mapped_driver_is_taken(library: Path) -> None:
    """The file mapped by the process is used, wherever it is, and matched by its full name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", PROCESS, str(library)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_not_a_library(library: Path, tmp_path: Path) -> None:
    """Of a mapped file the folder's name does not count."""
    folder = tmp_path / "libnamesake.so"
    folder.mkdir()
    ctypes.CDLL(str(shutil.copy(library, folder / "notlibnamesake.so.1")))
    assert mapped_files("libnamesake.so") == []


def test_host_memory_has_no_current_device() -> None:
    """Index -1 calls no driver."""
    with device_context(-1) as entered:
        assert entered is None


def test_a_kernel_is_loaded_once_for_each_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one code object share its module; each device loads it while it is current."""
    found, entered, loads = bind_driver(driver_interface("mine", "amd"), str(library)), [], []
    load = found.functions["load"]

    @contextlib.contextmanager
    def current(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.append(-index)

    def loading(*arguments: object) -> int:
        loads.append(entered[-1])
        return int(load(*arguments))

    monkeypatch.setattr(driver, "device_context", current)
    counted = attrs.evolve(found, functions={**found.functions, "load": loading})
    functions = [load_function(counted, b"code", entry, index) for entry in ("one", "two") for index in (3, 4)]
    assert (loads, entered) == ([3, 4], [3, -3, 4, -4, 3, -3, 4, -4])
    assert [load_function(counted, b"code", "one", index) for index in (3, 4)] == functions[:2]
    assert len({id(function) for function in functions}) == 4


def cuda_function(library: Path) -> driver.KernelFunction:
    """Return a function of CUDA's driver, whose thread has a context."""
    loaded = bind_driver(driver_interface("mine", "nvidia", "get", "set", "describe"), str(library))
    ctypes.CDLL(str(library)).cuCtxSetCurrent(ctypes.c_void_p(7))
    return load_function(loaded, b"code", "one", -1)


def test_a_function_has_attributes_and_is_granted_shared_memory(library: Path) -> None:
    """Attributes are the driver's; a grant of shared memory beyond the default never shrinks."""
    function, library_of_c = cuda_function(library), ctypes.CDLL(str(library))
    library_of_c.told_grant.restype = ctypes.POINTER(ctypes.c_int * 2)
    assert function.attribute(4) == 40
    for shared, granted in ((48 << 10, (0, 0)), (60000, (8, 60000)), (50000, (8, 60000)), (70000, (8, 70000))):
        function.grant(shared)
        assert tuple(library_of_c.told_grant().contents) == granted
    with pytest.raises(LaunchError, match="cuFuncSetAttribute: status 1"):
        function.grant(99001)
    assert function.granted == 70000
    load_function(bind_driver(driver_interface("mine", "amd"), str(library)), b"code", "one", -1).grant(99001)  # HIP needs none


def test_a_failed_launch_is_mended_or_an_error(library: Path) -> None:
    """A negative status is that of a tensor map; without a device index nothing can be mended."""
    function = cuda_function(library)
    for status, reason in (
        (12, "cuLaunchKernel: status 12"),
        (-12, "cuTensorMapEncodeTiled: status 12"),
        (201, "cuLaunchKernel: no context"),
    ):
        with pytest.raises(LaunchError, match=reason):
            function.mend(status)
    ctypes.CDLL(str(library)).cuCtxSetCurrent(None)
    attrs.evolve(function, index=3).mend(201)  # the thread lacked a context, and has one now
    with pytest.raises(LaunchError, match="cuModuleGetFunction: status 500"):
        load_function(function.driver, b"code", "x", -1)


def test_an_unknown_kind_or_word_is_an_error() -> None:
    """A driver's kind and words are those that the core knows."""
    with pytest.raises(PluginError, match="mine: devices of kind cpu: no driver known; use one of nvidia, amd"):
        driver_interface("mine", "cpu")
    with pytest.raises(PluginError, match="mine: driver of amd: no function 'set'; use load, function, launch, get"):
        driver_interface("mine", "amd", "set")
