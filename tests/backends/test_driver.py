"""Drivers through ctypes, over a library compiled for the test: files, functions, words, contexts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.driver import DriverInterface, bind_driver, device_context, loaded_driver, mapped_files
from tunedgemm.errors import LaunchError, PluginError

#: Loading and setting fail in a thread without a context; setting always.
SOURCE = """
static int current, retained = -1, failures;
int cuCtxGetCurrent(void **context) { *context = (void *)(current ? 7L : 0L); return 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { retained = device; *context = (void *)7; return 0; }
int cuCtxSetCurrent(void *context) { current = context == (void *)7; return 0; }
int cuModuleLoadData(void **module, const void *code) { failures += !current; *module = (void *)code; return current ? 0 : 201; }
int cuFuncSetAttribute(void) { return 201; }
int cuGetErrorString(int status, const char **text) { if (status == 201) *text = "no context"; return 0; }
const char *hipGetErrorString(int status) { return status ? "hip's word" : ""; }
int told_device(void) { return retained; }
int told_failures(void) { return failures; }
"""
MINE = DriverInterface(
    plugin="mine",
    kind="nvidia",
    libraries=("libmine.so.1", "libmine.so"),
    functions={
        "load": ("cuModuleLoadData", (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)),
        "set": ("cuFuncSetAttribute", ()),
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
        found.call("set", index=3)


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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
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
