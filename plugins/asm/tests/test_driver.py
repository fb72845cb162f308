"""Load code objects through the driver, and report its errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import LaunchError
from tunedgemm.testing.stand_in import bind_driver
from tunedgemm.tools.launching import Driver, load_function
from tunedgemm_asm.driver import HIP


@pytest.fixture
def library(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a separate fake driver for gfx942."""
    monkeypatch.setenv("FAKE_GFX", "gfx942")
    return bind_driver(HIP, str(fake.copy_of()))


def test_an_unloadable_object_is_refused_with_the_drivers_error(library: Driver, objects: ModuleType) -> None:
    """A code object or kernel that does not load raises with the driver's function and message."""
    with pytest.raises(LaunchError, match="hipModuleLoadData: device kernel image is invalid"):
        load_function(library, b"\x7fELF and then nothing of use" * 10, "one", -1)
    with pytest.raises(LaunchError, match="hipModuleLoadData: no kernel image is available for execution on the device"):
        load_function(library, objects.made(["one"], "gfx950"), "one", -1)
    with pytest.raises(LaunchError, match="hipModuleGetFunction: named symbol not found"):
        load_function(library, objects.made(["one"]), "another", -1)


def test_names_are_hips_own() -> None:
    """Functions and statuses match AMD's own bindings."""
    hip: Any = pytest.importorskip("rocm.bindings.hip")
    assert all(hasattr(hip, name) for name, _ in HIP.functions.values())
    named = {int(status): status.name for status in hip.hipError_t}
    assert [named[status] for status in (0, 1, 200, 209, 400, 500, 700, 702, 719)] == [
        *("hipSuccess", "hipErrorInvalidValue", "hipErrorInvalidImage", "hipErrorNoBinaryForGpu", "hipErrorInvalidHandle"),
        *("hipErrorNotFound", "hipErrorIllegalAddress", "hipErrorLaunchTimeOut", "hipErrorLaunchFailure"),
    ]
