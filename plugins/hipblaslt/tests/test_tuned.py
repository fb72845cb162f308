"""Both libraries from shape to dispatch: real tuner processes, real tables, the fakes in place of the vendors' files."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
SHAPES = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n4,48,128,{bias},torch.bfloat16,torch.bfloat16,False,{shuffled}\n"
#: The fastest of the fake hipBLASLt, which is not among its first answers, one with wrong numbers, and one that fails.
BEYOND, WRONG, FAILS = "sol1022_v100200_fake0001", "sol1012_v100200_fake0001", "sol1017_v100200_fake0001"

#: Statuses of what ran and was right.
RIGHT = ("ok", "screened")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(fake: ModuleType) -> Run:
    """Python, with the fake backends installed, in a process of its own."""
    [folder] = {fake.build(libtype).parent for libtype in ("cublaslt", "hipblaslt")}

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(HERE / "installed"), *filter(None, sys.path)])
        own = {"PYTHONPATH": path, "FAKE_LT_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "FAKE_LT_WORKSPACE_ALIGN": "64"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True, check=False, timeout=300)

    return start


def tune(run: Run, folder: Path, libtype: str, *more: str, bias: bool = False, shuffled: bool = False, **variables: str) -> dict[str, str]:
    """Tune one shape with one backend; the row of its table."""
    (folder / "shapes.csv").write_text(SHAPES.format(bias=bias, shuffled=shuffled))
    files = ("-i", str(folder / "shapes.csv"), "-o", str(folder / "tuned.csv"), "-o2", str(folder / "profile.csv"))
    done = run("-m", "tunedgemm", "tune", *files, "--libtype", libtype, "--iters", "5", "--warmup", "0", *more, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = csv.DictReader((folder / "tuned.csv").open())
    return row


def statuses(folder: Path) -> dict[str, str]:
    """kernelName -> status of every solution that was tried."""
    return {row["kernelName"]: row["status"] for row in csv.DictReader((folder / "profile.csv").open())}


def test_all_numbers_are_tried(run: Run, tmp_path: Path) -> None:
    """hipBLASLt's full list is tried, the wrong and the failing are told, and the row names number, version and revision."""
    row = tune(run, tmp_path, "fakehip")
    number = re.fullmatch(r"sol(\d+)_v100200_fake0001", row["kernelName"])
    assert number is not None
    assert (row["libtype"], row["solidx"], row["libver"]) == ("fakehip", number[1], "fakehip 100200 fake0001")
    found = statuses(tmp_path)
    assert found[BEYOND] in RIGHT
    assert found[WRONG] == "wrong"
    assert found[FAILS] == "failed"
    assert sum(status in RIGHT for status in found.values()) > 20


def test_shuffled_weights_go_through_the_whole_way(run: Run, tmp_path: Path) -> None:
    """AITER's shuffled weights are tuned and dispatched on what stands for an MI300."""
    row = tune(run, tmp_path, "fakehip", shuffled=True)
    assert (row["libtype"], row["bpreshuffle"]) == ("fakehip", "True")


@pytest.mark.slow
def test_the_search_goes_beyond_the_heuristic(run: Run, tmp_path: Path) -> None:
    """Neighbours of cuBLASLt's answers are tried beside them."""
    row = tune(run, tmp_path, "fakecu")
    assert row["libtype"] == "fakecu"
    listed = run("-c", LISTED)
    assert listed.returncode == 0, listed.stderr
    answers = listed.stdout.split()
    tried = {name for name, status in statuses(tmp_path).items() if name.startswith("id") and status in RIGHT}
    assert set(answers) & tried
    assert len(tried - set(answers)) > len(answers)


LISTED = """
import fake_lt
from tunedgemm.plugin import Shape, device_of
for solution in fake_lt.cu.enumerate_solutions(Shape("a16w16", 4, 48, 128), device_of(-1)):
    print(solution.kernel_name)
"""

SERVED = """
import sys, torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
gemm = TunedGemm()
gemm.load_config(sys.argv[1])
x, weight, bias = (torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((4, 128), (48, 128), (48,)))
out = gemm.gemm_a16w16(x, weight, bias)
exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
assert (out.double() - exact).norm() < 0.01 * exact.norm()
from tunedgemm import explain
from tunedgemm.plugin import Shape, device_of
print(gemm.dispatcher.explain(Shape("a16w16", 4, 48, 128, epilogue="bias"), device_of(-1)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("libtype", ["fakehip", "fakecu"])
def test_dispatch_runs_the_row(run: Run, tmp_path: Path, libtype: str) -> None:
    """A biased call runs the tuned solution and is right."""
    row = tune(run, tmp_path, libtype, bias=True)
    served = run("-c", SERVED, str(tmp_path / "tuned.csv"))
    assert served.returncode == 0, served.stderr
    assert f"{libtype}:{row['kernelName']}" in served.stdout.splitlines()[1]


@pytest.mark.slow
def test_another_version_is_a_miss_and_tuned_again_when_asked(run: Run, tmp_path: Path) -> None:
    """A number of another version of hipBLASLt is never launched: the call is torch's, the reason is told, --stale redoes the row."""
    tune(run, tmp_path, "fakehip", bias=True)
    newer = {"FAKE_LT_VERSION": "100300", "FAKE_LT_REVISION": "fake0002"}
    served = run("-c", SERVED, str(tmp_path / "tuned.csv"), **newer)
    assert served.returncode == 0, served.stderr
    assert "torch:native" in served.stdout.splitlines()[1]
    assert "100200" in served.stdout
    assert "--stale" in served.stdout
    row = tune(run, tmp_path, "fakehip", "--stale", bias=True, **newer)
    assert row["kernelName"].endswith("_v100300_fake0002")
    assert row["libver"] == "fakehip 100300 fake0002"
