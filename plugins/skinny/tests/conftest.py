"""What the tests of this plugin share: the fake GPUs, driven by ctypes or by the plugin's backend."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _module(stem: str) -> ModuleType:
    """A module beside this file: pytest imports tests by path, so they cannot import their siblings by name."""
    name = f"tunedgemm_skinny_tests_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artifact cache of the session: what the fake compilers make must not be found by the real drivers."""
    folder = tmp_path_factory.getbasetemp() / "artifacts"
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module that drives the fake libraries by ctypes."""
    return _module("fake")


@pytest.fixture(scope="session")
def programs(fake: ModuleType) -> ModuleType:
    """The module with programs of the kernels, their operands and references."""
    return _module("programs")


@pytest.fixture(scope="session")
def machines(programs: ModuleType, fake: ModuleType) -> dict[int, Any]:
    """Both fake GPUs by the width of their warps: 32 and 64."""
    return {32: programs.Machine(fake, 32), 64: programs.Machine(fake, 64)}


@pytest.fixture
def machine(machines: dict[int, Any], request: pytest.FixtureRequest) -> Any:
    """The fake GPU whose warps are as wide as the test's parameter, with nothing registered or counted."""
    found = machines[request.param]
    found.driver.native.fake_reset()
    return found


@pytest.fixture(scope="session")
def over(fake: ModuleType) -> ModuleType:
    """The module with the plugin's backends over the fakes."""
    return _module("over")


@pytest.fixture(scope="session")
def drawing() -> ModuleType:
    """The module that draws random products with hypothesis."""
    return _module("drawing")


@pytest.fixture(scope="session")
def backends(over: ModuleType, fake: ModuleType) -> dict[str, Any]:
    """The backend over the fakes, on a CPU that stands for an H200 (``nvidia``) and for an MI300X (``amd``)."""
    return {kind: over.backend(fake, kind) for kind in ("nvidia", "amd")}


@pytest.fixture
def skinny(backends: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """The backend of the kind of device that is the test's parameter."""
    return backends[request.param]
