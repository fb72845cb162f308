"""Both libraries from tuning to dispatch, with the fakes as the vendors' libraries."""

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
#: Solutions of the fake hipBLASLt: the fastest, wrong numbers, failing launch.
FASTEST, WRONG, FAILS = "sol1022_v100200_fake0001", "sol1012_v100200_fake0001", "sol1017_v100200_fake0001"
#: Statuses of correct trials.
CORRECT = ("ok", "screened")

LISTED = """
import fake_lt
from tunedgemm.plugin import Shape, device_of
for solution in fake_lt.cu.solutions(Shape("a16w16", 4, 48, 128, epilogue="bias"), device_of(-1)):
    print(solution.kernel_name)
"""

DISPATCH = """
import sys, torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
gemm = TunedGemm()
gemm.load_config(sys.argv[1])
x, weight, bias = (torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((4, 128), (48, 128), (48,)))
out = gemm.gemm_a16w16(x, weight, bias)
exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
assert (out.double() - exact).norm() < 0.01 * exact.norm()
from tunedgemm.plugin import Shape, device_of
print(gemm.dispatcher.explain(Shape("a16w16", 4, 48, 128, epilogue="bias"), device_of(-1)))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(fake: ModuleType) -> Run:
    """Return a function that runs Python in a process with the fake backends installed."""
    [folder] = {fake.build(libtype).parent for libtype in ("cublaslt", "hipblaslt")}

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(HERE / "installed"), *filter(None, sys.path)])
        fixed = {"PYTHONPATH": path, "FAKE_LT_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "FAKE_LT_WORKSPACE_ALIGN": "64"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**os.environ, **fixed, **variables}, capture_output=True, text=True, check=False, timeout=900)

    return start


def tune(run: Run, folder: Path, libtype: str, *more: str, bias: bool = False, shuffled: bool = False, **variables: str) -> dict[str, str]:
    """Tune one shape with one backend and return the row of its table."""
    (folder / "shapes.csv").write_text(SHAPES.format(bias=bias, shuffled=shuffled))
    files = ("-i", str(folder / "shapes.csv"), "-o", str(folder / "tuned.csv"), "-o2", str(folder / "profile.csv"))
    done = run("-m", "tunedgemm", "tune", *files, "--libtype", libtype, "--iters", "3", "--warmup", "0", *more, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = csv.DictReader((folder / "tuned.csv").open())
    return row


def read_statuses(folder: Path) -> dict[str, str]:
    """Map the kernelName of each trial to its status."""
    return {row["kernelName"]: row["status"] for row in csv.DictReader((folder / "profile.csv").open())}


@pytest.fixture(scope="module")
def hipblaslt_folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Tune a biased shape with hipBLASLt and return the folder and the row."""
    folder = tmp_path_factory.mktemp("hipblaslt")
    return folder, tune(run, folder, "fakehip", bias=True)


@pytest.fixture(scope="module")
def cublaslt_folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Tune a biased shape with cuBLASLt and return the folder and the row."""
    folder = tmp_path_factory.mktemp("cublaslt")
    return folder, tune(run, folder, "fakecu", bias=True)


def test_all_indices_are_tried(hipblaslt_folder: tuple[Path, dict[str, str]]) -> None:
    """hipBLASLt's full list is tried, and the row holds index, version and revision."""
    folder, row = hipblaslt_folder
    name = re.fullmatch(r"sol(\d+)_v100200_fake0001(_after)?", row["kernelName"])
    assert name is not None
    assert (row["libtype"], row["solidx"], row["libver"]) == ("fakehip", name[1], "fakehip 100200 fake0001")
    statuses = read_statuses(folder)
    assert statuses[FASTEST] in CORRECT
    assert statuses[WRONG] == "wrong"
    assert statuses[FAILS] == "failed"
    assert sum(status in CORRECT for status in statuses.values()) > 20


def test_hipblaslts_row_is_dispatched(run: Run, hipblaslt_folder: tuple[Path, dict[str, str]]) -> None:
    """A biased call runs the tuned solution; with another version of the library it runs torch."""
    folder, row = hipblaslt_folder
    done = run("-c", DISPATCH, str(folder / "tuned.csv"))
    assert done.returncode == 0, done.stderr
    assert f"fakehip:{row['kernelName']}" in done.stdout.splitlines()[1]
    done = run("-c", DISPATCH, str(folder / "tuned.csv"), FAKE_LT_VERSION="100300", FAKE_LT_REVISION="fake0002")
    assert done.returncode == 0, done.stderr
    assert "torch:native" in done.stdout.splitlines()[1]
    assert "100200" in done.stdout
    assert "--stale" in done.stdout


def test_shuffled_weights(run: Run, tmp_path: Path) -> None:
    """AITER's shuffled weights are tuned on an emulated MI300."""
    row = tune(run, tmp_path, "fakehip", shuffled=True)
    assert (row["libtype"], row["bpreshuffle"]) == ("fakehip", "True")


@pytest.mark.slow
def test_the_search_goes_beyond_the_heuristic(run: Run, cublaslt_folder: tuple[Path, dict[str, str]]) -> None:
    """Neighbours of cuBLASLt's results are tried after them."""
    folder, row = cublaslt_folder
    assert row["libtype"] == "fakecu"
    done = run("-c", LISTED)
    assert done.returncode == 0, done.stderr
    listed = set(done.stdout.split())
    tried = {name for name, status in read_statuses(folder).items() if name.startswith("id") and status in CORRECT}
    assert listed & tried
    assert len(tried - listed) > len(listed)


@pytest.mark.slow
def test_cublaslts_row_is_dispatched(run: Run, cublaslt_folder: tuple[Path, dict[str, str]]) -> None:
    """A biased call runs the tuned solution and is right."""
    folder, row = cublaslt_folder
    done = run("-c", DISPATCH, str(folder / "tuned.csv"))
    assert done.returncode == 0, done.stderr
    assert f"fakecu:{row['kernelName']}" in done.stdout.splitlines()[1]
