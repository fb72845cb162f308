"""Load code objects through the driver, and report its errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
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


def test_a_code_object_is_loaded_once(library: Driver, fake: ModuleType, objects: ModuleType) -> None:
    """The kernels of one code object share one loaded module."""
    both, other = objects.made(["one", "two"]), objects.made(["one"])
    first = load_function(library, both, "one", -1)
    assert load_function(library, both, "one", -1) is first
    assert load_function(library, both, "two", -1).address != first.address
    assert fake.native(library.path).fake_loads() == 1
    assert load_function(library, other, "one", -1).address != first.address
    assert fake.native(library.path).fake_loads() == 2


def test_an_unloadable_object_is_refused_with_the_drivers_error(library: Driver, objects: ModuleType) -> None:
    """A code object or kernel that does not load raises with the driver's function and message."""
    with pytest.raises(LaunchError, match="hipModuleLoadData: device kernel image is invalid"):
        load_function(library, b"\x7fELF and then nothing of use" * 10, "one", -1)
    with pytest.raises(LaunchError, match="hipModuleLoadData: no kernel image is available for execution on the device"):
        load_function(library, objects.made(["one"], "gfx950"), "one", -1)
    with pytest.raises(LaunchError, match="hipModuleGetFunction: named symbol not found"):
        load_function(library, objects.made(["one"]), "another", -1)


def test_a_status_without_a_text_is_a_number(library: Driver) -> None:
    """A status without a message is reported by its number."""
    assert library.text(0) == "no error"
    assert library.text(700) == "an illegal memory access was encountered"
    silent = attrs.evolve(library, functions={**library.functions, "error": lambda status: None})
    assert silent.text(12) == "status 12"


def test_names_are_hips_own() -> None:
    """Functions and statuses match AMD's own bindings."""
    hip: Any = pytest.importorskip("rocm.bindings.hip")
    assert all(hasattr(hip, name) for name, _ in HIP.functions.values())
    named = {int(status): status.name for status in hip.hipError_t}
    assert [named[status] for status in (0, 1, 200, 209, 400, 500, 700, 702, 719)] == [
        *("hipSuccess", "hipErrorInvalidValue", "hipErrorInvalidImage", "hipErrorNoBinaryForGpu", "hipErrorInvalidHandle"),
        *("hipErrorNotFound", "hipErrorIllegalAddress", "hipErrorLaunchTimeOut", "hipErrorLaunchFailure"),
    ]
