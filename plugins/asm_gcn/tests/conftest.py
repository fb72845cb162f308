"""The emulator of AMDGCN text, and fixtures of the plugin that loads the packs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.testing.siblings import module_at

_asm = module_at(Path(__file__).parents[2] / "asm" / "tests" / "conftest")

failing, no_other_packs = _asm.failing, _asm.no_other_packs


@pytest.fixture(scope="session")
def gcn() -> ModuleType:
    """Return the emulator."""
    return module_at(Path(__file__).with_name("gcn"))
