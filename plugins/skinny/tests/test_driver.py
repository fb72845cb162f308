"""Drivers: code objects that load or do not, what a function tells of itself, and the words of errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import LaunchError, OutOfResources, PluginError, Shape
from tunedgemm_skinny import driver, rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.driver import CUDA, HIP, Driver, bind_functions, function_of, loaded
from tunedgemm_skinny.names import Rows

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
KERNEL, SHAPE = Rows(1, 1, 1, 1), Shape("a16w16", 1, 8, 64)


def drives(skinny: Any) -> Driver:
    """The fake driver of a backend."""
    return skinny.driver(driver.INTERFACES[skinny.host.kind])


def compiled(skinny: Any, kernel: Rows = KERNEL) -> bytes:
    """The code object of a kernel for that backend's device."""
    return code(build_of(kernel, 1, SHAPE, skinny.host.gfx), skinny.compiler(rtc.INTERFACES[skinny.host.kind]))


@both
def test_a_code_object_is_loaded_once(skinny: Any, over: ModuleType) -> None:
    """The same code on the same device is one module, and other code is another."""
    found, native = drives(skinny), over.native(skinny)
    prefix = "cu" if skinny.host.kind == "nvidia" else "hip"
    first = function_of(found, compiled(skinny), ENTRY, -1)
    loads = native.fake_calls(f"{prefix}ModuleLoadData".encode())
    assert function_of(found, compiled(skinny), ENTRY, -1) is first
    assert native.fake_calls(f"{prefix}ModuleLoadData".encode()) == loads
    other = function_of(found, compiled(skinny, Rows(2, 1, 1, 1)), ENTRY, -1)
    assert other.address != first.address
    assert native.fake_calls(f"{prefix}ModuleLoadData".encode()) == loads + 1


@both
def test_a_function_tells_what_it_has(skinny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers, spilled bytes, and the threads of a block that this leaves; more of them are refused."""
    monkeypatch.setenv("FAKE_REGISTERS", "128")
    monkeypatch.setenv("FAKE_LOCAL_BYTES", "24")
    found = function_of(drives(skinny), compiled(skinny, Rows(4, 1, 1, 1)), ENTRY, -1)
    assert (found.registers, found.local_bytes, found.threads) == (128, 24, 512)
    found.allow(512, 0)
    with pytest.raises(OutOfResources, match="blocks of 544 threads with 128 registers each; 512 threads"):
        found.allow(544, 0)


def test_much_shared_memory_is_asked_for(backends: dict[str, Any], over: ModuleType) -> None:
    """CUDA grants 48 KiB unasked and more when asked; what the device has not is refused in the driver's words; HIP is not asked."""
    for kind, skinny in backends.items():
        function, native = function_of(drives(skinny), compiled(skinny, Rows(8, 1, 1, 1)), ENTRY, -1), over.native(skinny)
        native.fake_reset()
        function.allow(32, 48 << 10)
        assert native.fake_calls(b"cuFuncSetAttribute") == 0
        function.allow(32, 60 << 10)
        assert native.fake_calls(b"cuFuncSetAttribute") == (kind == "nvidia")
        assert native.fake_calls(b"hipFuncSetAttribute") == 0
        if kind == "nvidia":
            with pytest.raises(OutOfResources, match="233473 bytes of shared memory: cuFuncSetAttribute: invalid argument"):
                function.allow(32, (228 << 10) + 1)


@both
def test_what_is_no_code_object_is_refused_in_the_drivers_words(skinny: Any) -> None:
    """The error names the function that was called; a program of another entry has none of ours."""
    prefix = "cu" if skinny.host.kind == "nvidia" else "hip"
    with pytest.raises(LaunchError, match=f"{prefix}ModuleLoadData: device kernel image is invalid"):
        function_of(drives(skinny), b"\x7fELF and then nothing of use" * 10, ENTRY, -1)
    with pytest.raises(LaunchError, match=f"{prefix}ModuleGetFunction: named symbol not found"):
        function_of(drives(skinny), compiled(skinny), "another", -1)


def test_code_of_the_other_vendor_is_refused(backends: dict[str, Any]) -> None:
    """A code object holds for its own devices."""
    with pytest.raises(LaunchError, match="no kernel image is available"):
        function_of(drives(backends["nvidia"]), compiled(backends["amd"]), ENTRY, -1)


@both
def test_a_status_without_a_text_is_told_by_its_number(skinny: Any) -> None:
    """Every status has words."""
    found = drives(skinny)
    assert found.text(0) == "no error"
    assert found.text(700) == "an illegal memory access was encountered"
    assert found.text(123456) in ("status 123456", "unknown error")


@pytest.mark.parametrize("interface", [CUDA, HIP], ids=lambda interface: interface.kind)
def test_a_library_that_cannot_be_used(interface: driver.Interface, fake: ModuleType, tmp_path: Path) -> None:
    """The error names the file and what is wrong with it; where no name is found the newest is told."""
    with pytest.raises(PluginError, match=f"skinny: {tmp_path}/nowhere.so cannot be used: .*No such file"):
        bind_functions(interface, str(tmp_path / "nowhere.so"))
    with pytest.raises(PluginError, match=f"undefined symbol: {interface.functions['load'][0]}"):
        bind_functions(interface, str(fake.build("nvrtc")))
    with pytest.raises(PluginError, match=r"libnobody\.so\.2 cannot be used"):
        loaded(attrs.evolve(interface, libraries=("libnobody.so.2", "libnobody.so")))


CONTEXT = """
static int current, retained = -1, failures;
int cuCtxGetCurrent(void **context) { *context = (void *)(current ? 7L : 0L); return 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { retained = device; *context = (void *)7; return 0; }
int cuCtxSetCurrent(void *context) { current = context == (void *)7; return 0; }
int cuModuleLoadData(void **module, const void *code) { failures += !current; return current ? 0 : 201; }
int cuModuleGetFunction(void) { return 0; }
int cuFuncGetAttribute(void) { return 0; }
int cuFuncSetAttribute(void) { return 201; }
int cuLaunchKernel(void) { return 0; }
int cuLaunchKernelEx(void) { return 0; }
int cuGetErrorString(int status, const char **text) { *text = "no context"; return 0; }
int told_device(void) { return retained; }
int told_failures(void) { return failures; }
"""


def test_a_thread_without_a_context_gets_the_devices(tmp_path: Path) -> None:
    """Where a call fails for the want of a context, the device's primary one is made current and the call repeated, once."""
    path = tmp_path / "libcontext.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=CONTEXT, text=True, check=True)
    found, native = bind_functions(CUDA, str(path)), ctypes.CDLL(str(path))
    module = ctypes.c_void_p()
    found.call("load", 3, module, b"code")
    assert (native.told_device(), native.told_failures()) == (103, 1)
    found.call("load", 3, module, b"code")
    assert native.told_failures() == 1
    with pytest.raises(LaunchError, match="cuFuncSetAttribute: no context"):
        found.call("set", 3, 0, driver.DYNAMIC_SHARED, 1)
    with pytest.raises(LaunchError, match="no context"):
        found.call("set", -1, 0, driver.DYNAMIC_SHARED, 1)


PROCESS = """
import ctypes, sys
import attrs
from tunedgemm_skinny.driver import CUDA, loaded
from tunedgemm_skinny.mapped import mapped
mine = attrs.evolve(CUDA, libraries=("libcudaOfMine.so.1", "libcudaOfMine.so"))
assert mapped("libcudaOfMine.so") == []
ctypes.CDLL(sys.argv[1])
assert mapped("libcudaOfMine.so") == [sys.argv[1]]
assert mapped("OfMine.so") == []
assert loaded(mine).path == sys.argv[1]
"""


def test_the_mapped_driver_is_taken(fake: ModuleType, tmp_path: Path) -> None:
    """The file that torch has loaded is used, wherever it lies; a file is mapped by its own name, not by the end of another's."""
    place = tmp_path / "a folder" / "libcudaOfMine.so.1.2"
    place.parent.mkdir()
    place.write_bytes(fake.build("cuda").read_bytes())
    done = subprocess.run([sys.executable, "-c", PROCESS, str(place)], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
