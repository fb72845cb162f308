"""The example of shared tables works as a wheel in a separate environment."""

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from tunedgemm.device import current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows

from .wheels import install, run

EXAMPLE = Path(__file__).parents[1] / "examples" / "tables-pack"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the example with a table of this machine's CPU, install it; return the environment's python."""
    folder = tmp_path_factory.mktemp("tables")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    here = current_device()
    row = Row(Shape("a16w16", 4, 64, 128), here.gfx, here.cu_num, here.name, Solution("torch", "native"), 5.0)
    write_rows(folder / "mine.csv", op_named("a16w16"), [row])
    published = source / "example_tables" / "cpu_bf16_tuned_gemm.csv"
    run(sys.executable, "-m", "tunedgemm", "table", "publish", folder / "mine.csv", "-o", published)
    python, wheel = install(source, folder)
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".so", ".pth"))], "data alone"
    return python


def environment(tmp_path):
    return {**os.environ, "TUNEDGEMM_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""}


def test_its_rows_serve(installed, tmp_path):
    """Rows of this CPU serve, rows of an H200 would, and `explain` names the distribution."""
    tunedgemm = [installed, "-m", "tunedgemm"]
    settings = {"cwd": tmp_path, "env": environment(tmp_path)}
    here = json.loads(run(*tunedgemm, "explain", "4,64,128", "--json", **settings))
    assert here["tuned"] and here["runs"]["table_layer"] == "distribution example-tables 0.1.0"
    there = run(*tunedgemm, "explain", "1,1280,8192", "--device", "sm_90:132:nvidia-h200", **settings)
    assert "_nvidia-h200_bf16_tuned_gemm.csv:8 (distribution example-tables 0.1.0)" in there.splitlines()[1]
    (listed,) = [line for line in run(*tunedgemm, "doctor", "--seconds", "0", code=None, **settings).splitlines() if "/cpu_bf16" in line]
    assert "layer distribution example-tables 0.1.0" in listed and "rows here 1" in listed.replace("_", " ")


def test_a_changed_file_is_named(installed, tmp_path):
    """An edited file gets a warning and serves nothing, and `table check` exits 2."""
    (file,) = installed.parents[1].glob("lib/python*/site-packages/example_tables/cpu_bf16_tuned_gemm.csv")
    text = file.read_text()
    try:
        file.write_text(text.replace(",5.0,", ",4.0,"))
        settings = {"cwd": tmp_path, "env": environment(tmp_path)}
        shown = run(installed, "-m", "tunedgemm", "explain", "4,64,128", **settings)
        assert "untuned; no other backend answers" in shown and "the checksum is not that of its content" in shown
        assert "get the file again" in run(installed, "-m", "tunedgemm", "table", "check", file, code=2, **settings)
    finally:
        file.write_text(text)
