"""JSON files on a GPU: tuned by the command, then used by untuned calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.plugin import Launcher, Shape, Solution, device_of
from tunedgemm.tools.tables import ops
from tunedgemm_triton import heuristic, launch
from tunedgemm_triton.jsonfiles import buckets, files
from tunedgemm_triton.jsonfiles.dialect import OURS

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU not found")]

SPACE = {
    "BLOCK_SIZE_M": [16, 64],
    "BLOCK_SIZE_N": [32, 64],
    "BLOCK_SIZE_K": 128,
    "num_warps": [2, 4],
    "num_stages": [2, 3],
    "NUM_KSPLIT": [1, 2],
}


@pytest.mark.slow
def test_a_weight_is_tuned_and_its_files_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command tunes a user's search space in worker processes; every M then gets a correct
    kernel of the file.
    """
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    device = device_of(0)
    fp8 = "fp8_e4m3fnuz" if device.gfx == "gfx942" else "fp8_e4m3fn"
    words = [
        "--op",
        "a8w8_blockscale",
        "--n",
        "576,1024",
        "--k",
        "1024,512",
        "--m",
        "16,64,300",
        "--set",
        f"dtype={fp8}",
        "--seconds",
        "0.2",
    ]
    words += ["--search-space", str(tmp_path / "space.json"), "--mp", "1"]
    environment = {**os.environ, "TUNEDGEMM_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "tunedgemm", "triton", "tune", *words]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stdout + answer.stderr

    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    names = sorted(path.name for path in files.user_folder().glob("*.json"))
    assert names == sorted(f"{device.gfx}-GEMM-A8W8_BLOCKSCALE{suffix}.json" for suffix in ("", "-N=1024-K=512", "-N=576-K=1024"))
    for m in (1, 16, 40, 300, 1000):
        for n, k in ((576, 1024), (1024, 512), (256, 256)):
            shape = Shape("a8w8_blockscale", m, n, k, fp8, "bf16", scale="block")
            auto = heuristic.resolve(Solution("triton", "auto"), shape, device)
            entries = files.read(files.find(device.gfx, "GEMM-A8W8_BLOCKSCALE", (("N", n), ("K", k))))  # type: ignore[arg-type]
            assert auto == OURS.solution_of(entries[str(buckets.find(entries, m))], shape, device)[0]
            launcher = launch.bind(Solution("triton", "auto"), shape, device)
            assert isinstance(launcher, Launcher), launcher
            operands = ops()[shape.op].make_inputs(shape, device.torch_device, 3)
            out, expected = launcher.call(*operands), ops()[shape.op].reference(shape, operands)
            error = (out.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
            assert error.max().item() < ops()[shape.op].tolerance(shape).row_error
