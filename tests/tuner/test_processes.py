"""Processes: children that end before they begin are replaced a few times, then one error says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Imports of the main script that a child does not survive.
ENDINGS = {
    "exits with 0": "raise SystemExit",
    "exits with 3": "import sys; sys.exit(3)",
    "raises": "raise ValueError('of the script')",
    "leaves": "import os; os._exit(0)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is imported for ever": "import time; time.sleep(1000)",
}

TUNE = """
from pathlib import Path
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner import processes
processes._START_S = 3.0
try:
    tune("a16w16", [Shape("a16w16", 4, 64, 64, "fp32")], Path("t.csv"), Options(libtype="torch", device="cpu"))
except Exception as error:
    print(type(error).__name__, error)
"""

COMPILE = """
import attrs
from tunedgemm.backends.backend import Backend
from tunedgemm.device import current_device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.tuner import processes
from tunedgemm.tuner.compilers import Compilers
processes._START_S = 3.0
compilers = Compilers(2)
compilers._prepares = lambda libtype: True
shape, device = Shape("a16w16", 4, 64, 64, "fp32"), current_device()
compilers.start(["torch"])
for timing in compilers.finish(shape, [Solution("torch", str(number)) for number in range(50)], device):
    print(timing.status, timing.detail)
compilers.stop()
"""


def _run(tmp_path: Path, ending: str, body: str) -> list[str]:
    script = tmp_path / "mine.py"
    script.write_text(f"if __name__ != '__main__':\n    {ENDINGS[ending]}\n{body}")
    environment = {**os.environ, "TUNEDGEMM_HOME": str(tmp_path / "home"), "TUNEDGEMM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_main_script_that_a_child_cannot_import_ends_the_run_with_one_error(ending: str, tmp_path: Path) -> None:
    """The error names the script and the remedy, or the signal, and arrives in seconds."""
    (line,) = _run(tmp_path, ending, TUNE)
    assert line.startswith("UserError no device to tune on works")
    expected = ("SIGKILL", "free memory") if ending == "is killed" else ("mine.py", '`if __name__ == "__main__":`')
    assert all(text in line for text in expected)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_compilers_that_never_begin_are_given_up(ending: str, tmp_path: Path) -> None:
    """Each solution fails with the reason, and no process is started for each."""
    lines = _run(tmp_path, ending, COMPILE)
    assert len(lines) == 50
    assert len(set(lines)) == 1
    assert lines[0].startswith("compile_failed the compilers: ")
