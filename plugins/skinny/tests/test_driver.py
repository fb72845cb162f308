"""Loaded kernels, and launches that fail."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import LaunchError, OutOfResources, Shape
from tunedgemm.testing.launching import without_extension
from tunedgemm.tools.launching import Driver
from tunedgemm_skinny import driver, launch, rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.driver import load_kernel
from tunedgemm_skinny.names import Rows

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
#: A kernel to load, and its shape.
KERNEL, SMALL = Rows(1, 1, 1, 1), Shape("a16w16", 1, 8, 64)


@pytest.mark.cases("extension", [True, False])
@both
def test_a_failed_launch_is_an_error(skinny: Any, over: ModuleType, extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused launch raises the kernel's name and the driver's text; the next one works."""
    shape = Shape("a16w16", 2, 8, 64)
    case, name = over.case(shape), Rows(1, 1, 1, 1).name
    with contextlib.nullcontext() if extension else without_extension():
        launcher = over.bound(skinny, name, shape)
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_LAUNCH_STATUS", "701")
        message = over.message(launcher, *case.plain)
    launches = {"nvidia": "cuLaunchKernel", "amd": "hipModuleLaunchKernel"}[skinny.host.kind]
    assert message == f"skinny {name}: {launches}: too many resources requested for launch"
    assert not case.launched(launcher)


def test_a_plan_has_the_arguments_of_args() -> None:
    """Addresses come first, then n, k, m, splits and elements of a split.

    Those of scales are taken where the shape has them.
    """
    scaled = Shape("a8w8", 2, 8, 512, "fp8_e4m3fn", "bf16", scale="row")
    for shape, pointers in ((Shape("a16w16", 2, 8, 512), 6), (scaled, 8)):
        plan = launch._plan(KERNEL, 4, shape, "sm_90")
        assert plan.slots == tuple(range(0, 8 * pointers, 8))
        numbers = ((0, 64), (8, 8), (512, 8), (2, 4), (4, 4), (launch.per_split(KERNEL, 4, shape, "sm_90"), 8))
        assert plan.arguments == b"".join(number.to_bytes(size, "little") for number, size in numbers)


def driver_of(skinny: Any) -> Driver:
    """Return the fake driver of a backend."""
    return skinny.hooks.driver(driver.INTERFACES[skinny.host.kind])


def code_of(skinny: Any, kernel: Rows = KERNEL) -> bytes:
    """Return the code object of a kernel for the backend's device."""
    return code(build_of(kernel, 1, SMALL, skinny.host.gfx), skinny.hooks.compiler(rtc.INTERFACES[skinny.host.kind]))


@both
def test_a_function_has_its_attributes(skinny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded function has its registers, spilled bytes and most threads.

    Larger blocks are refused.
    """
    monkeypatch.setenv("FAKE_REGISTERS", "128")
    monkeypatch.setenv("FAKE_LOCAL_BYTES", "24")
    function = load_kernel(driver_of(skinny), code_of(skinny, Rows(4, 1, 1, 1)), ENTRY, -1)
    assert (function.registers, function.local_bytes, function.threads) == (128, 24, 512)
    function.allow(512, 0)
    with pytest.raises(OutOfResources, match=r"128 registers each must be at most 512 \(got 544\)"):
        function.allow(544, 0)


def test_large_shared_memory_is_requested(backends: dict[str, Any], over: ModuleType) -> None:
    """CUDA is asked for more than 48 KiB and its refusal is quoted; HIP is not asked."""
    for kind, skinny in backends.items():
        function, counts = load_kernel(driver_of(skinny), code_of(skinny, Rows(8, 1, 1, 1)), ENTRY, -1), over.native(skinny)
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
        load_kernel(driver_of(skinny), b"\x7fELF, then garbage" * 15, ENTRY, -1)
    with pytest.raises(LaunchError, match=f"{prefix}ModuleGetFunction: named symbol not found"):
        load_kernel(driver_of(skinny), code_of(skinny), "another", -1)


def test_code_of_the_other_vendor_is_refused(backends: dict[str, Any]) -> None:
    """A code object of AMD does not load on NVIDIA."""
    with pytest.raises(LaunchError, match="no kernel image is available"):
        load_kernel(driver_of(backends["nvidia"]), code_of(backends["amd"]), ENTRY, -1)
