"""Share the stand-in for AITER and an artifact cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tunedgemm.testing.stand_in import installed as installed_in

INSTALLED = Path(__file__).with_name("installed")
#: Packages of the stand-in, which must not stay loaded.
_PACKAGES = ("aiter", "flydsl", "fake_aiter")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an artifact cache for the session: the stand-in's first import needs a child process."""
    folder = tmp_path_factory.getbasetemp() / "aiter-artifacts"
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder))
    return folder


@pytest.fixture
def stand_in() -> Iterator[Path]:
    """Install the stand-in for AITER, and forget its modules afterwards."""
    with installed_in(INSTALLED):
        yield INSTALLED
    for name in list(sys.modules):
        if name.partition(".")[0] in _PACKAGES:
            del sys.modules[name]
