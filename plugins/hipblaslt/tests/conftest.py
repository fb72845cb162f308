"""What the tests of this plugin share: the fake Lt libraries, and the module that drives them by ctypes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module beside this file: pytest imports tests by path, so they cannot import their siblings by name."""
    name = "tunedgemm_hipblaslt_tests_fake"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fake.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def fake_library(fake: ModuleType) -> Callable[[str], Path]:
    """Path of the fake library of a libtype, ``cublaslt`` or ``hipblaslt``, compiled at the first call of the session."""
    return fake.build
