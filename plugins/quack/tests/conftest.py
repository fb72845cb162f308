"""Shared fixtures of this plugin's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm_quack import Quack


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the session's artifact cache, and no folder of QuACK's."""
    folder = tmp_path_factory.getbasetemp() / "artifacts"
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder))
    for name in ("QUACK_CACHE_DIR", "QUACK_ARCH", "CUTE_DSL_ARCH"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the fake of ``quack.gemm``, with no launches yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("installed")))
    from fake_quack import gemm

    gemm.launches.clear()
    yield gemm
    gemm._kernels.clear()


@pytest.fixture
def backend(fake: ModuleType) -> Quack:
    """Return the plugin's backend over the fake."""
    plugin: Quack = sys.modules["fake_quack"].fakequack
    return plugin
