"""The kernel of docs/tuning-triton.md, tuned through the command, on the CPU in Triton's
interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.interpreter
GUIDE = Path(__file__).parents[3] / "docs" / "tuning-triton.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Install the guide's module as a package; return its folder."""
    found = re.search(r"^```py\n(# rowgemm\.py\n.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    (tmp_path / "rowgemm.py").write_text(found[1])
    info = tmp_path / "rowgemm-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rowgemm\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nrowgemm = rowgemm:backend\n")
    return tmp_path


def _child(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        "TUNEDGEMM_HOME": str(folder / "home"),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        **environment,
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=500
    )


CALL = """
import torch, tunedgemm
from tunedgemm.plugin import Shape
x, weight = torch.randn(9, 64, dtype=torch.float16), torch.randn(48, 64, dtype=torch.float16)
print(tunedgemm.explain(x, weight))
print(torch.allclose(tunedgemm.gemm_a16w16(x, weight).float(), x.float() @ weight.float().t(), atol=0.05))
"""


@pytest.mark.nightly
def test_the_guides_kernel_is_tuned_and_dispatched(package: Path) -> None:
    """The guide's command line tunes it in worker processes; its files answer an untuned call."""
    line = next(line for line in GUIDE.read_text().splitlines() if line.startswith("tunedgemm triton tune --libtype rowgemm"))
    # One shape, two of the four configurations: a call takes the interpreter 10 ms, and a sample
    # has many.
    fewer = ["--n", "48", "--m", "16", "--candidates", "2", "--num-iters", "1", "--seconds", "0", "--cache", "hot"]
    words = [*line.split()[1:], *fewer, "--device", "cpu"]

    tuned = _child(package, "-m", "tunedgemm", *words)

    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    files = sorted((package / "home" / "triton" / "gemm").glob("*.json"))
    assert [path.name.partition("-GEMM-")[2] for path in files] == ["ROWGEMM-N=48-K=64.json", "ROWGEMM.json"]
    entries = json.loads(files[0].read_text())
    assert list(entries) == ["M_LEQ_16", "any"]
    assert set(entries["any"]) == {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps"}
    assert "Search space size: 4 configurations" in tuned.stdout
    assert "Number of (N, K): 1, 1 shapes" in tuned.stdout
    assert re.search(r"Tuning for ROWGEMM-N=48-K=64 took [\d.]+ seconds", tuned.stdout)

    called = _child(package, "-c", CALL, TUNEDGEMM_FALLBACK="rowgemm")

    assert called.returncode == 0, called.stderr
    text = ";".join(f"{name}={value}" for name, value in entries["M_LEQ_16"].items())
    assert f"runs rowgemm:rowgemm_r1;{text}" in called.stdout
    assert called.stdout.splitlines()[-1] == "True"

    checked = _child(package, "-m", "tunedgemm", "triton", "check", "--libtype", "rowgemm")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 files, 0 faults, 0 notes" in checked.stdout
