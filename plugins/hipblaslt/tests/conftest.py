"""Fixtures of this plugin: the fake Lt libraries, by ctypes or under its backends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.testing.siblings import module_at


def _import_sibling(stem: str) -> ModuleType:
    """Return a module or package next to this file."""
    return module_at(Path(__file__).with_name(stem))


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return the module that compiles the fake libraries, with a folder for its builds."""
    module, folder = _import_sibling("fake"), tmp_path_factory.getbasetemp()
    module.cache = (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "fake-lt"
    return module


@pytest.fixture(scope="session")
def fake_library(fake: ModuleType) -> Callable[[str], Path]:
    """Return a function that compiles a libtype's fake library once and returns its path."""
    return fake.build


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module that runs the backends over the fakes, without simulated time."""
    import torch

    monkeypatch.setenv("FAKE_LT_COST", "0")
    monkeypatch.setenv("FAKE_LT_WORKSPACE_ALIGN", "64")  # the alignment of torch's host memory
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower on tensors this small
    yield _import_sibling("harness")
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def backends(fake_library: Callable[[str], Path]) -> dict[str, Any]:
    """Return both backends over the fakes: one CPU emulates an H200, the other an MI300X."""
    return {libtype: _import_sibling("harness").make_backend(fake_library(libtype), libtype) for libtype in ("cublaslt", "hipblaslt")}


@pytest.fixture
def lt(backends: dict[str, Any], harness: ModuleType, request: pytest.FixtureRequest) -> Any:
    """Return the backend of the libtype in the test's parameter."""
    return backends[request.param]


@pytest.fixture(scope="session")
def headers() -> ModuleType:
    """Return the module that finds cuBLASLt's headers."""
    return _import_sibling("headers")


@pytest.fixture(scope="session")
def header_text(headers: ModuleType) -> str:
    """Return the text of cuBLASLt's headers; skip where they are not installed."""
    return headers.read_headers() or pytest.skip("cuBLASLt's headers not found; install a CUDA toolkit or the wheel nvidia-cublas")
