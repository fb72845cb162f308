"""Worker: compilation in child processes; what dies or raises there costs one candidate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tunedgemm.device import device_of
from tunedgemm.registry import Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner.trial import Candidate
from tunedgemm.tuner.worker import Compilers

PLUGIN = """
import os, time
from tunedgemm.plugin import Launcher, Solution, hookimpl
OPS = ("a16w16",)
@hookimpl
def supports(): return True
@hookimpl
def enumerate_solutions(): return [Solution("brittle", name) for name in ("fine", "raises", "dies", "hangs")]
@hookimpl
def prepare(solution):
    if solution.kernel_name == "raises": raise ValueError("no such register")
    if solution.kernel_name == "dies": os.abort()
    if solution.kernel_name == "hangs": time.sleep(60)
@hookimpl
def bind(): return Launcher(lambda x, w: x @ w.t())
"""


@pytest.mark.slow
def test_each_way_to_fail_costs_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that raises, aborts its process or hangs is a status of its own solution alone."""
    (tmp_path / "brittle_plugin.py").write_text(PLUGIN)
    info = tmp_path / "brittle_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nbrittle = brittle_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), *sys.path])))
    backend, shape = Registry().get("brittle"), Shape("a16w16", 1, 16, 32)

    with Compilers(device_of(-1), jobs=2, timeout=20) as compilers:
        lost = compilers.prepare((shape, Candidate(solution, backend)) for solution in backend.solutions(shape, device_of(-1)))

    assert {timing.solution.kernel_name: timing.status for timing in lost} == dict.fromkeys(("raises", "dies", "hangs"), "compile_failed")
    details = {timing.solution.kernel_name: timing.detail for timing in lost}
    assert "no such register" in details["raises"]
    assert "died" in details["dies"]
    assert "20 s" in details["hangs"]


def test_backends_without_prepare_start_no_process() -> None:
    """The built-in backend compiles nothing, so nothing is started."""
    with Compilers(device_of(-1)) as compilers:
        backend = Registry(entries=()).get("torch")
        assert compilers.prepare([(Shape("a16w16", 1, 16, 32), Candidate(Solution("torch", "native"), backend))]) == []
        assert compilers._pool is None
