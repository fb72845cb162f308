"""Drivers: code objects that load or do not, what a function tells of itself, and the words of errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Driver, LaunchError, OutOfResources, Shape
from tunedgemm_skinny import native as driver
from tunedgemm_skinny import rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.names import Rows
from tunedgemm_skinny.native import function_of

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
    with pytest.raises(OutOfResources, match=r"128 registers each must be at most 512 \(got 544\)"):
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
            with pytest.raises(OutOfResources, match="shared memory of 233473 bytes refused: cuFuncSetAttribute: invalid argument"):
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
