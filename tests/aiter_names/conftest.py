"""AITER's modules as `tunedgemm.integrations.aiter` serves them."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest
import tunedgemm_aiter_names as served


@pytest.fixture
def aiter() -> Iterator[types.ModuleType]:
    """Return the module ``aiter`` that we install."""
    served.install()
    yield importlib.import_module("aiter")
    served.uninstall()
