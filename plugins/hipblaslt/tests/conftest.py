"""What the tests of this plugin share: the fake Lt libraries, driven by ctypes or by the plugin's backends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _module(stem: str) -> ModuleType:
    """A module beside this file: pytest imports tests by path, so they cannot import their siblings by name."""
    name = f"tunedgemm_hipblaslt_tests_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module that drives the fake libraries by ctypes."""
    return _module("fake")


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with the plugin's backends over the fakes, whose launches last as long as the product alone."""
    import torch

    monkeypatch.setenv("FAKE_LT_COST", "0")
    monkeypatch.setenv("FAKE_LT_WORKSPACE_ALIGN", "64")  # as torch gives host memory
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several take longer over what is so small
    yield _module("over")
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def backends(fake_library: Callable[[str], Path]) -> dict[str, Any]:
    """Both backends over the fakes: a CPU that stands for an H200, and one that stands for an MI300X."""
    return {libtype: _module("over").backend(fake_library(libtype), libtype) for libtype in ("cublaslt", "hipblaslt")}


@pytest.fixture
def lt(backends: dict[str, Any], over: ModuleType, request: pytest.FixtureRequest) -> Any:
    """The backend of the libtype that is the test's parameter."""
    return backends[request.param]


@pytest.fixture(scope="session")
def headers() -> ModuleType:
    """The module that finds the headers of cuBLASLt."""
    return _module("headers")


@pytest.fixture(scope="session")
def text(headers: ModuleType) -> str:
    """The headers of cuBLASLt; skips where there are none."""
    return headers.text() or pytest.skip("no headers of cuBLASLt: neither a CUDA toolkit nor the wheel nvidia-cublas")


@pytest.fixture(scope="session")
def fake_library(fake: ModuleType) -> Callable[[str], Path]:
    """Path of the fake library of a libtype, ``cublaslt`` or ``hipblaslt``, compiled at the first call of the session."""
    return fake.build


@pytest.fixture(scope="session")
def fakes(fake: ModuleType) -> dict[str, Any]:
    """Both fake libraries, each with a handle."""
    return {libtype: fake.Library(libtype) for libtype in ("cublaslt", "hipblaslt")}


@pytest.fixture
def library(fakes: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake library of the libtype that is the test's parameter, nothing counted; launches last as long as the product alone."""
    monkeypatch.setenv("FAKE_LT_COST", "0")
    found = fakes[request.param]
    found.native.fake_reset()
    yield found
    assert found.live() == 1, "the handle alone"
