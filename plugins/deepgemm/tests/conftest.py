"""Shared fixtures: an artifact cache for each test, and the backend over the stand-in."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.testing.stand_in import installed


@pytest.fixture(scope="session")
def kept_cache() -> str:
    """Return the artifact cache of the environment, "" for the user's, for kernels of the GPU."""
    return os.environ.get("TUNEDGEMM_CACHE", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, kept_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an artifact cache for the test, and remove the variables that the library reads."""
    for name in [name for name in os.environ if name.startswith(("DG_", "TUNEDGEMM_DEEPGEMM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def fake() -> Iterator[ModuleType]:
    """Return the module of the backend over the stand-in."""
    with installed(Path(__file__).with_name("installed")):
        yield importlib.import_module("fake_deepgemm")


@pytest.fixture
def backend(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the backend over the stand-in, without open copies."""
    launch = importlib.import_module("tunedgemm_deepgemm.launch")
    monkeypatch.setattr(launch, "_copies", {})
    monkeypatch.setattr(fake, "opened", [])
    return fake.deepgemm
