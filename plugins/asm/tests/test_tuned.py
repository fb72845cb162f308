"""Tune and dispatch in real processes with the fake runtime in place of an AMD GPU."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import device_of

HERE = Path(__file__).parent
HEAD = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n"
SHAPE = "40,128,256,{bias},torch.bfloat16,torch.bfloat16,False,{shuffled}\n"
ROW = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n{}\n"
#: Statuses of right solutions.
RIGHT = ("ok", "screened")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(fake: ModuleType, tree: Path) -> Run:
    """Return a function that runs Python with the fake backends installed in a child process."""

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(HERE / "installed"), *filter(None, sys.path)])
        folders = os.pathsep.join([str(tree), f"{tree}-own"])
        own = {"PYTHONPATH": path, "FAKE_ASM_LIBRARY": str(fake.build()), "TUNEDGEMM_ASM_PACKS": folders, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True, check=False, timeout=300)

    return start


def statuses(folder: Path, shuffled: bool = False) -> dict[tuple[str, str], str]:
    """Return the status of every solution that was tried, by kernelName and splitK."""
    rows = csv.DictReader((folder / "profile.csv").open())
    return {(row["kernelName"], row["splitK"]): row["status"] for row in rows if row["bpreshuffle"] == str(shuffled)}


@pytest.fixture(scope="module")
def tuned(run: Run, fake: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tune a plain shape, one of whose kernels is wrong, and a shuffled one with a bias: folder,
    rows, the wrong kernel's name.
    """
    folder, wrong = tmp_path_factory.mktemp("tuned"), fake.bf16(32, shuffled=False, prefetch=3)["knl_name"]
    (folder / "shapes.csv").write_text(HEAD + "".join(SHAPE.format(bias=same, shuffled=same) for same in (False, True)))
    files = ("-i", str(folder / "shapes.csv"), "-o", str(folder / "tuned.csv"), "-o2", str(folder / "profile.csv"))
    done = run(
        "-m", "tunedgemm", "tune", *files, "--libtype", "fakeasm", "--iters", "5", "--warmup", "0", "--seconds", "0.2", FAKE_WRONG=wrong
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, list(csv.DictReader((folder / "tuned.csv").open())), wrong


def test_every_kernel_is_tried(tuned: Any) -> None:
    """Tuning times every kernel with every split, finds the wrong one, and names kernel, split and
    pack version in the row.
    """
    folder, rows, wrong = tuned
    row, found = next(row for row in rows if row["bpreshuffle"] == "False"), statuses(folder)
    assert (row["libtype"], row["libver"][:4]) == ("fakeasm", "asm ")
    assert found[row["kernelName"], row["splitK"]] in RIGHT
    assert found[wrong, "1"] == "wrong"
    assert {status for name, status in found.items() if name[0] not in (wrong, "native")} <= set(RIGHT)
    assert len(found) > 10


#: Serve one call for each table, bias and shuffled weight among the arguments, and explain it.
SERVED = """
import sys, torch
from tunedgemm import shuffle_weight
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.plugin import Shape, device_of
for table, bias, shuffled in (words.split(",") for words in sys.argv[1:]):
    bias, shuffled = bias == "True", shuffled == "True"
    gemm = TunedGemm()
    gemm.load_config(table)
    x, weight, added = (torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((40, 256), (128, 256), (128,)))
    out = gemm.gemm_a16w16(x, shuffle_weight(weight) if shuffled else weight, added if bias else None)
    exact = torch.nn.functional.linear(x.double(), weight.double(), added.double() if bias else None)
    assert (out.double() - exact).norm() < 0.01 * exact.norm(), table
    shape = Shape("a16w16", 40, 128, 256, epilogue="bias" if bias else "none", layout="aiter16x16" if shuffled else "row")
    print(gemm.dispatcher.explain(shape, device_of(-1)), end="\\0")
"""


def row_of(name: str, splits: int | str, shuffled: bool = False) -> str:
    """Return a table with one row of AITER's tuner for this machine in place of a GPU."""
    key = f"{device_of(-1).gfx},1,40,128,256,False,torch.bfloat16,torch.bfloat16,False,{shuffled}"  # one thread, as `run` has it
    return ROW.format(f"{key},fakeasm,3,{splits},7.5,{name},0.0,1,1")


def test_rows_dispatch(run: Run, tuned: Any, fake: ModuleType, tmp_path: Path) -> None:
    """Dispatch runs the kernel of a row, lowers a splitK that K does not allow, and leaves another
    architecture's row to torch.
    """
    folder, rows, _ = tuned
    name = fake.bf16(64, shuffled=False, splits=True)["knl_name"]
    fp4 = "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E"
    written = [(name, splits) for splits in (0, 3, 16)] + [(fp4, 1)]
    for number, row in enumerate(written):
        (tmp_path / f"{number}.csv").write_text(row_of(*row))
    served = run("-c", SERVED, f"{folder / 'tuned.csv'},True,True", *(f"{tmp_path / f'{number}.csv'},False,False" for number in range(4)))
    assert served.returncode == 0, served.stderr
    tuned_row, *others, miss = served.stdout.split("\0")[:5]
    shuffled = next(row for row in rows if row["bpreshuffle"] == "True")
    assert shuffled["libtype"] == "fakeasm"
    assert f"fakeasm:{shuffled['kernelName']}" in tuned_row
    assert all(f"fakeasm:{name}" in explained.splitlines()[1] for explained in others)
    assert "torch:native" in miss.splitlines()[1]
    assert f"the packs have {fp4} for gfx950, not for gfx942" in miss
