"""From tuning to dispatch over the stand-in: a process loads the library for rows that name it alone."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from tunedgemm_vllm import library

INSTALLED = Path(__file__).with_name("installed")

DISPATCH = """
import sys, torch, tunedgemm
from tunedgemm_vllm.library import Vendor, is_registered

def multiply(rows):
    x, x_scale = tunedgemm.pertoken_quant(torch.randn(rows, 272), quant_dtype=torch.int8)
    weight, w_scale = tunedgemm.pertoken_quant(torch.randn(144, 272), quant_dtype=torch.int8)
    out = tunedgemm.gemm_a8w8(x, weight, x_scale, w_scale)
    exact = (x.double() @ weight.double().t()) * x_scale * w_scale.view(1, -1)
    assert (out.double() - exact).norm() < 0.01 * exact.norm()

vendor = Vendor("vllm_stand_in", "vllm_stand_in_C")
multiply(700)
print(is_registered(vendor), "vllm_stand_in" in sys.modules)
multiply(6)
print(is_registered(vendor), "vllm_stand_in" in sys.modules)
import vllm_stand_in_operators
print(vllm_stand_in_operators.calls)
"""


def test_a_row_is_tuned_and_served(stand_in: Path, tmp_path: Path) -> None:
    """The row states kernel and version; a call without a row loads nothing; vLLM is not imported."""
    path = os.pathsep.join([str(stand_in), str(INSTALLED), *filter(None, sys.path)])
    variables_of_all = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TUNEDGEMM_HOME": str(tmp_path / "home")}
    environment = {**os.environ, **variables_of_all}

    def run(*arguments: str, **variables: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shapes, tuned = tmp_path / "shapes.csv", tmp_path / "tuned.csv"
    shapes.write_text("M,N,K,q_dtype_w\n6,144,272,torch.int8\n")
    files = ("--op", "a8w8", "-i", str(shapes), "-o", str(tuned))
    run("-m", "tunedgemm", "tune", *files, "--libtype", "fakevllm", "--iters", "3", "--warmup", "0")
    [row] = csv.DictReader(tuned.open())
    assert (row["libtype"], row["kernelName"], row["libver"]) == ("fakevllm", library.PRODUCT, "vllm_stand_in 0.33.0")
    served = run("-c", DISPATCH, AITER_CONFIG_GEMM_A8W8=str(tuned)).splitlines()
    assert served == ["False False", "True False", "[(6, 144, 272, False)]"]
