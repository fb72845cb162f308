"""An op or a backend that the core has never seen arrives as one file."""

import shutil
from pathlib import Path

import pytest
import tunedgemm

CORE = Path(__file__).parents[1] / "core" / "tunedgemm"

OP = '''
"""relu16: a16w16 with negative outputs cut off."""

import attrs

from tunedgemm.ops.a16w16 import op as plain

columns = attrs.evolve(plain.columns, tuned_file="relu_tuned.csv", parse=lambda row: attrs.evolve(plain.columns.parse(row), op="relu16"))
op = attrs.evolve(
    plain,
    name="relu16",
    columns=columns,
    shape_of=lambda *operands, **fields: attrs.evolve(plain.shape_of(*operands, **fields), op="relu16"),
    reference=lambda shape, operands: plain.reference(shape, operands).relu(),
)
'''
PLUGIN = '''
"""The backend fresh: relu16 by torch."""

import sys

from tunedgemm.plugin import Backend, Solution, Unsupported, hookimpl


@hookimpl
def supports(shape):
    return None if shape.outdtype == shape.dtype and shape.bias_dtype in ("", shape.dtype) else Unsupported("one dtype")


@hookimpl
def enumerate_solutions():
    return [Solution("fresh", "relu_v1")]


@hookimpl
def run(operands):
    import torch

    return torch.nn.functional.linear(*operands).relu_()


backend = Backend("fresh", sys.modules[__name__], ops=("relu16",))
'''
TEST = """
from tunedgemm.testing.conformance import BackendConformance


class TestFresh(BackendConformance):
    libtype = "fresh"
"""
TUNE = """
import pytest, tunedgemm
from tunedgemm.cli import main
from tunedgemm.ops import ops
from tunedgemm.backends.registry import Registry

print(tunedgemm.__file__, *sorted(ops()))
assert [b.libtype for b in Registry().select("all") if "relu16" in b.ops] == ["fresh"]
assert pytest.main(["-q", "-p", "no:cacheprovider", FOLDER + "/test_fresh.py"]) == 0
assert main(["tune", "--op", "relu16", "-i", FOLDER + "/shapes.csv", "-o", FOLDER + "/out.csv"]) == 0
print(open(FOLDER + "/out.csv").read())
"""


@pytest.fixture
def arrival(tmp_path):
    """Write a folder with a new plugin, its conformance test, and shapes to tune."""
    folder = tmp_path / "arrival"
    (folder / "fresh-1.dist-info").mkdir(parents=True)
    (folder / "fresh-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1\n")
    (folder / "fresh-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\nfresh = fresh:backend\n")
    (folder / "fresh.py").write_text(PLUGIN)
    (folder / "test_fresh.py").write_text(TEST)
    (folder / "shapes.csv").write_text("M,N,K\n4,48,64\n")
    return folder


def check_arrival(output: str, core: Path) -> None:
    """The core lists the op, passes its conformance test and tunes it."""
    lines = output.splitlines()
    module, *names = lines[0].split()
    assert module == str(core / "tunedgemm" / "__init__.py")
    assert {"a16w16", "relu16"} <= set(names)
    assert any("passed" in line and "failed" not in line for line in lines)
    assert any("fresh" in line and "relu_v1" in line for line in lines)


@pytest.mark.slow
def test_an_op_and_a_backend_of_others_arrive_without_a_change(arrival, child):
    """Both are found by entry points: the core does not know their names, and everything works."""
    (arrival / "relu16.py").write_text(OP)
    entry_points = arrival / "fresh-1.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + "[tunedgemm.ops]\nrelu16 = relu16:op\n")
    check_arrival(child(f"FOLDER = {str(arrival)!r}\n{TUNE}", arrival), Path(tunedgemm.__file__).parents[1])


@pytest.mark.slow
def test_an_op_of_ours_is_one_file(arrival, child, tmp_path):
    """A file in the core's ops/ is an op without being listed."""
    core = shutil.copytree(CORE, tmp_path / "core" / "tunedgemm", ignore=shutil.ignore_patterns("__pycache__")).parent
    (core / "tunedgemm" / "ops" / "relu16.py").write_text(OP)
    check_arrival(child(f"FOLDER = {str(arrival)!r}\n{TUNE}", core, arrival), core)
