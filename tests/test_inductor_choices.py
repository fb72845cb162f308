"""benchmarks/inductor_choices.py: what max-autotune chooses, and what that costs, at a tiny size on the CPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "inductor_choices.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_arm_is_compiled_and_timed(tmp_path) -> None:
    """Each arm has a sample a round for each shape, and the arms without an offer take nothing of ours."""
    kept = tmp_path / "choices.json"
    command = [sys.executable, SCRIPT, "--shapes", "5,48,64", "--rounds", "3", "--json", kept]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    [cell] = json.loads(kept.read_text())["cells"]
    assert cell["shape"] == [5, 48, 64]
    assert {arm: len(samples) for arm, samples in cell["samples"].items()} == dict.fromkeys(("ATEN", "ATEN,TRITON", "offered", "our op"), 3)
    assert cell["took"]["our op"] == "our op" and "our op" not in (cell["took"]["ATEN"], cell["took"]["ATEN,TRITON"])
    assert cell["gain"]["ATEN"] == [1, 1, 1]
