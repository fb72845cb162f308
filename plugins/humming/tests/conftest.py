"""Shared fixtures of this plugin's tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the session's artifact cache, and let `bind` compile."""
    folder = tmp_path_factory.getbasetemp() / "artifacts"
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder))
    monkeypatch.setenv("TUNEDGEMM_HUMMING_COMPILE", "1")
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the fake of Humming, with nothing compiled or launched yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("installed")))
    module = importlib.import_module("fake_humming")
    module.built.clear()
    module.launches.clear()
    yield module
