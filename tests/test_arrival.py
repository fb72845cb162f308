"""An op or a backend that the core has never seen arrives as one file."""

import re
import shutil
from pathlib import Path

import pytest
import tunedgemm

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "tunedgemm"
OP = Path(__file__).with_name("thirdparty") / "a16w8.py"
PAGE = ROOT / "docs" / "writing-an-op.md"

PLUGIN = '''
"""The backend fresh: a16w8 by torch, scaled before or after the product."""

import sys

from tunedgemm.plugin import Backend, Launcher, Solution, Unsupported, hookimpl
from tunedgemm.tools.launching import torch_dtype

KERNELS = {
    "scaled_weight": lambda x, weight, scale: x @ (weight * scale.view(-1, 1)).t(),
    "scaled_output": lambda x, weight, scale: (x @ weight.t()).mul_(scale),
}


@hookimpl
def supports():
    return None


@hookimpl
def enumerate_solutions():
    return [Solution("fresh", name) for name in KERNELS]


@hookimpl
def heuristic_fallback():
    return Solution("fresh", "scaled_output")


@hookimpl
def bind(solution, shape):
    if solution.kernel_name not in KERNELS:
        return Unsupported(f"no kernel {solution.kernel_name!r}")
    product, dtype = KERNELS[solution.kernel_name], torch_dtype(shape.outdtype)

    def call(x, weight, w_scale, bias=None):
        out = product(x.float(), weight.float(), w_scale.reshape(-1))
        return (out if bias is None else out.add_(bias)).to(dtype)

    return Launcher(call)


backend = Backend("fresh", sys.modules[__name__], ops=("a16w8",))
'''
TEST = """
from tunedgemm.testing.conformance import BackendConformance


class TestFresh(BackendConformance):
    libtype = "fresh"
"""
#: Everything that a user does with an op, and the tests of its author.
USE = """
import os, pytest, torch, tunedgemm
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape

print(tunedgemm.__file__, *sorted(ops()))
assert [b.libtype for b in Registry().select("all") if "a16w8" in b.ops] == ["fresh"]
os.environ["TUNEDGEMM_HOME"], table = FOLDER, FOLDER + "/tuned.csv"
op, shape = op_named("a16w8"), Shape("a16w8", 4, 48, 64, scale="row", epilogue="bias", bias_dtype="fp32")
operands = op.make_inputs(shape, torch.device("cpu"), 0)
with pytest.raises(UserError, match="no backend supports it"):
    tunedgemm.TunedGemm().gemm_a16w8(*operands)
tunedgemm.TunedGemm(settings=Settings(capture=True, untuned=("fresh",))).gemm_a16w8(*operands)
assert main(["tune", "-i", FOLDER + "/a16w8_untuned_gemm.csv", "-o", table, "--iters", "3", "--warmup", "1"]) == 0
assert main(["table", "check", table]) == 0
os.environ["TUNEDGEMM_CONFIG_A16W8"] = table
assert main(["explain", "4,48,64", "--op", "a16w8", "--set", "bias=True"]) == 0
gemm = tunedgemm.TunedGemm()
assert gemm.of("a16w8").explain(shape).tuned
out, wanted = gemm.gemm_a16w8(*operands), op.reference(shape, operands)
torch.testing.assert_close(out.double(), wanted, atol=op.tolerance(shape).atol, rtol=op.tolerance(shape).rtol)
print(open(table).read())
assert pytest.main(["-q", "-p", "no:cacheprovider", FOLDER + "/test_fresh.py"]) == 0
assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", "a16w8", TESTS_OF_OPS]) == 0
"""


@pytest.fixture
def arrival(tmp_path):
    """Write a folder with a new plugin and its conformance test."""
    folder = tmp_path / "arrival"
    (folder / "fresh-1.dist-info").mkdir(parents=True)
    (folder / "fresh-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1\n")
    (folder / "fresh-1.dist-info" / "entry_points.txt").write_text("[tunedgemm.backends]\nfresh = fresh:backend\n")
    (folder / "fresh.py").write_text(PLUGIN)
    (folder / "test_fresh.py").write_text(TEST)
    return folder


def use(arrival: Path) -> str:
    return f"FOLDER, TESTS_OF_OPS = {str(arrival)!r}, {str(ROOT / 'tests' / 'ops' / 'test_ops.py')!r}\n{USE}"


def check_arrival(output: str, core: Path) -> None:
    """The core lists the op, captures, tunes, explains and calls it; both suites pass."""
    lines = output.splitlines()
    module, *names = lines[0].split()
    assert module == str(core / "tunedgemm" / "__init__.py")
    assert {"a16w16", "a16w8"} <= set(names)
    assert len([line for line in lines if re.match(r"\d+ passed", line)]) == 2
    assert any("fresh" in line and "scaled_" in line for line in lines)


@pytest.mark.slow
def test_an_op_and_a_backend_of_others_arrive_without_a_change(arrival, child):
    """Both are found by entry points: the core does not know their names, and everything works."""
    shutil.copy(OP, arrival)
    entry_points = arrival / "fresh-1.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + "[tunedgemm.ops]\na16w8 = a16w8:op\n")
    check_arrival(child(use(arrival), arrival), Path(tunedgemm.__file__).parents[1])


@pytest.mark.slow
def test_an_op_of_ours_is_one_file(arrival, child, tmp_path):
    """A file of at most 150 lines in the core's ops/ is an op without being listed."""
    assert len(OP.read_text().splitlines()) <= 150
    core = shutil.copytree(CORE, tmp_path / "core" / "tunedgemm", ignore=shutil.ignore_patterns("__pycache__")).parent
    shutil.copy(OP, core / "tunedgemm" / "ops")
    check_arrival(child(use(arrival), core, arrival), core)


def test_the_page_shows_the_columns_of_the_op():
    """The columns in docs/writing-an-op.md are those of the file, whose length the page gives."""
    page, source = PAGE.read_text(), OP.read_text()
    columns = re.search(r"^SCHEMA = Schema\(\n.*?^\)\n", source, re.MULTILINE | re.DOTALL)
    assert columns is not None and columns[0] in page
    assert f"is a whole op in {len(source.splitlines())} lines" in page
