"""Plugins whose texts a table would not give back: each costs itself, and no other row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows

OP = op_named("a16w16")

PLUGIN = """
import sys, torch
from tunedgemm.plugin import Backend, Launcher, Solution, hookimpl
@hookimpl
def library_version(): return {version!r}
@hookimpl
def supports(): return None
@hookimpl
def enumerate_solutions(shape): return [Solution({libtype!r}, {name!r} if shape.m == 64 else "linear")]
@hookimpl
def bind(): return Launcher(torch.nn.functional.linear)
backend = Backend("odd", sys.modules[__name__], ops=("a16w16",))
"""


def tuned(folder: Path, **plugin: str) -> tuple[subprocess.CompletedProcess[str], list[tuple[int, str, str]]]:
    """Tune three shapes with a plugin and torch; return the run, and its rows in short."""
    (folder / "plugin_odd.py").write_text(PLUGIN.format(libtype="odd", **plugin))
    info = folder / "plugin_odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-odd\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nodd = plugin_odd:backend\n")
    (folder / "in.csv").write_text("M,N,K,bias,dtype,outdtype\n" + "".join(f"{m},64,64,False,fp32,fp32\n" for m in (32, 64, 128)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [
        sys.executable,
        "-m",
        "tunedgemm",
        "tune",
        "-i",
        str(folder / "in.csv"),
        "-o",
        str(folder / "t.csv"),
        "--libtype",
        "odd,torch",
    ]
    done = subprocess.run([*command, "--iters", "2"], capture_output=True, text=True, env=environment, timeout=120)
    rows, problems = read_rows(folder / "t.csv", OP)
    assert problems == []
    return done, sorted((row.shape.m, row.solution.libtype, row.libver) for row in rows)


@pytest.mark.parametrize("name", ["a\0b", pytest.param("\ud800", marks=pytest.mark.nightly)], ids=ascii)
def test_a_lost_name_costs_its_solution(tmp_path, name):
    """A shape for which a plugin names such a kernel is tuned with the others; the message names both."""
    done, rows = tuned(tmp_path, version="1", name=name)
    assert [m for m, *_ in rows] == [32, 64, 128]
    assert rows[1][1] == "torch"
    assert "libtype 'odd': 'kernel_name' must be one line of text" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
