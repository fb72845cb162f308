"""The fixtures of the core's tests, which these tests share."""

from __future__ import annotations

from pathlib import Path

from tunedgemm.testing.siblings import module_at

_core = module_at(Path(__file__).parents[3] / "tests" / "conftest")

own_folders, faulty_plugin, cpu = _core.own_folders, _core.faulty_plugin, _core.cpu
