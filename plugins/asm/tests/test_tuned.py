"""From shape to dispatch: real tuner processes, real tables, AITER's rows, the fake runtime in place of an AMD GPU."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.plugin import device_of

HERE = Path(__file__).parent
SHAPES = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n40,128,256,{bias},torch.bfloat16,torch.bfloat16,False,{shuffled}\n"
ROW = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n{}\n"
#: Statuses of what ran and was right.
RIGHT = ("ok", "screened")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(fake: ModuleType, tree: Path) -> Run:
    """Python, with the fake backends installed, in a process of its own."""

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(HERE / "installed"), *filter(None, sys.path)])
        folders = os.pathsep.join([str(tree), f"{tree}-own"])
        own = {"PYTHONPATH": path, "FAKE_ASM_LIBRARY": str(fake.build()), "TUNEDGEMM_ASM_PACKS": folders, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True, check=False, timeout=300)

    return start


def tune(run: Run, folder: Path, *more: str, bias: bool = False, shuffled: bool = False, **variables: str) -> dict[str, str]:
    """Tune one shape; the row of its table."""
    (folder / "shapes.csv").write_text(SHAPES.format(bias=bias, shuffled=shuffled))
    files = ("-i", str(folder / "shapes.csv"), "-o", str(folder / "tuned.csv"), "-o2", str(folder / "profile.csv"))
    done = run("-m", "tunedgemm", "tune", *files, "--libtype", "fakeasm", "--iters", "5", "--warmup", "0", *more, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = csv.DictReader((folder / "tuned.csv").open())
    return row


def statuses(folder: Path) -> dict[tuple[str, str], str]:
    """kernelName and splitK -> status of every solution that was tried."""
    return {(row["kernelName"], row["splitK"]): row["status"] for row in csv.DictReader((folder / "profile.csv").open())}


def test_every_kernel_is_tried(run: Run, tmp_path: Path, fake: ModuleType) -> None:
    """All kernels with all splits are timed, wrong numbers are found, and the row names kernel, split and the packs' version."""
    wrong = fake.bf16(32, shuffled=False, prefetch=3)["knl_name"]
    row = tune(run, tmp_path, FAKE_WRONG=wrong)
    found = statuses(tmp_path)
    assert (row["libtype"], row["libver"][:4]) == ("fakeasm", "asm ")
    assert found[row["kernelName"], row["splitK"]] in RIGHT
    assert found[wrong, "1"] == "wrong"
    assert {status for name, status in found.items() if name[0] not in (wrong, "native")} <= set(RIGHT)
    assert len(found) > 10


def test_shuffled_weights_go_through_the_whole_way(run: Run, tmp_path: Path) -> None:
    """AITER's shuffled weights are tuned and dispatched, with a bias."""
    row = tune(run, tmp_path, shuffled=True, bias=True)
    assert (row["libtype"], row["bpreshuffle"]) == ("fakeasm", "True")
    served = run("-c", SERVED, str(tmp_path / "tuned.csv"), "True", "True")
    assert served.returncode == 0, served.stderr
    assert f"fakeasm:{row['kernelName']}" in served.stdout


@pytest.mark.slow
def test_a_kernel_that_faults_costs_one_solution(run: Run, tmp_path: Path, fake: ModuleType) -> None:
    """The process dies of it, all others are tried, and the shape gets a row."""
    faulty = fake.bf16(64, shuffled=False, prefetch=3)["knl_name"]
    row = tune(run, tmp_path, FAKE_FAULT=faulty)
    found = statuses(tmp_path)
    assert row["kernelName"] not in ("", faulty)
    assert found[faulty, "1"] not in RIGHT
    assert {status for name, status in found.items() if name[0] != faulty} <= set(RIGHT)


@pytest.mark.slow
def test_a_kernel_that_hangs_costs_one_solution(run: Run, tmp_path: Path, fake: ModuleType) -> None:
    """It is given up at its deadline."""
    hanging = fake.bf16(64, shuffled=False, prefetch=3)["knl_name"]
    row = tune(run, tmp_path, "--timeout", "5", FAKE_HANG=hanging)
    found = statuses(tmp_path)
    assert row["kernelName"] not in ("", hanging)
    assert found[hanging, "1"] == "hung"
    assert {status for name, status in found.items() if name[0] != hanging} <= set(RIGHT)


SERVED = """
import sys, torch
from tunedgemm import shuffle_weight
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.plugin import Shape, device_of
table, bias, shuffled = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
gemm = TunedGemm()
if table:
    gemm.load_config(table)
x, weight, added = (torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((40, 256), (128, 256), (128,)))
out = gemm.gemm_a16w16(x, shuffle_weight(weight) if shuffled else weight, added if bias else None)
exact = torch.nn.functional.linear(x.double(), weight.double(), added.double() if bias else None)
assert (out.double() - exact).norm() < 0.01 * exact.norm()
shape = Shape("a16w16", 40, 128, 256, epilogue="bias" if bias else "none", layout="aiter16x16" if shuffled else "row")
print(gemm.dispatcher.explain(shape, device_of(-1)))
"""


def row_of(name: str, splits: int | str, shuffled: bool = False) -> str:
    """A table with one row as AITER's tuner writes it, for this machine in place of a GPU."""
    key = f"{device_of(-1).gfx},1,40,128,256,False,torch.bfloat16,torch.bfloat16,False,{shuffled}"  # one thread, as `run` has it
    return ROW.format(f"{key},fakeasm,3,{splits},7.5,{name},0.0,1,1")


@pytest.mark.parametrize("splits", [0, 3, 16])
def test_aiters_rows_dispatch(run: Run, tmp_path: Path, fake: ModuleType, splits: int) -> None:
    """The kernel that a row names runs; a splitK of 0 is chosen, one that is too large is lowered, as AITER's launcher does."""
    name = fake.bf16(64, shuffled=False, splits=True)["knl_name"]
    (tmp_path / "table.csv").write_text(row_of(name, splits))
    served = run("-c", SERVED, str(tmp_path / "table.csv"), "False", "False")
    assert served.returncode == 0, served.stderr
    assert f"fakeasm:{name}" in served.stdout.splitlines()[1]


def test_a_row_of_another_architecture_is_a_miss(run: Run, tmp_path: Path) -> None:
    """A name that the packs have for another architecture alone is not launched; explain says so, and torch serves."""
    fp4 = "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E"
    (tmp_path / "table.csv").write_text(row_of(fp4, 1))
    served = run("-c", SERVED, str(tmp_path / "table.csv"), "False", "False")
    assert served.returncode == 0, served.stderr
    assert "torch:native" in served.stdout.splitlines()[1]
    assert f"the packs have {fp4} for gfx950, not for gfx942" in served.stdout
