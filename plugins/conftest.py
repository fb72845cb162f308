"""The rule for tests that need Triton's interpreter."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``interpreter`` where numpy breaks every loop in it."""
    reason = _fault()
    for item in items:
        if reason and item.get_closest_marker("interpreter"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _fault() -> str:
    """Return why the interpreter does not run, or an empty text."""
    try:
        triton, numpy = (tuple(map(int, re.findall(r"\d+", version(name))[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return "Triton 3.6's interpreter does not run with numpy 2.4 or later" if triton <= (3, 6) and numpy >= (2, 4) else ""
