"""Command: one number of each run, and no process left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from tunedgemm.analysis.ab import Arm, Failure, run_command
from tunedgemm.analysis.ab.command import number_of

ARM = Arm("b", {"SPEED": "2.5"})


def python(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", source]


@pytest.mark.parametrize(
    ("text", "pattern", "number"),
    [("12.5\n", "", 12.5), ("\n 1e-3 \n", "", 1e-3), ("latency: 3 ms\n", "", 3.0), ("P50 3 P99 7 v1.2", r"P99 (\d+)", 7.0),
     ("Throughput: 4.72 requests/s, 3262.58 total tokens/s, 708.33 output tokens/s", r"([\d.]+) output tokens/s", 708.33),
     ("Decode.  median latency: 0.012 s\nDecode.  median latency: 0.011 s\n", r"(?s).*Decode.  median latency: ([\d.]+)", 0.011),
     ("tput: 1,234.5", r"tput: ([\d.,]+)", 1234.5)],
)  # fmt: skip
def test_the_number_is_found(text, pattern, number):
    """It is the only one that stands alone, or the one of the pattern's group."""
    assert number_of(text, pattern) == number


@pytest.mark.parametrize(
    ("text", "pattern", "got"),
    [("", "", "got none"), ("done\n", "", "got none"), ("1 2\n", "", "got 2: 1, 2"), ("x 1 x 2", r"x (\d)", "got 2"),
     ("0", "", "above 0 (got 0)"), ("-3", "", "got -3"), ("a b", r"a (\w)", "got b"), ("nan", "", "got none"),
     ("x", r"x(\d)?", "got none")],
)  # fmt: skip
def test_no_number_or_two_are_a_failure(text, pattern, got):
    """The message names what was printed instead, and the flag that selects."""
    with pytest.raises(Failure) as failure:
        number_of(text, pattern)

    assert got in str(failure.value)


def test_a_command_gets_its_arms_variables():
    """The number is that of the arm's environment; the present one stays."""
    assert run_command(python("import os; print(os.environ['SPEED'])"), ARM) == 2.5
    assert "SPEED" not in os.environ


@pytest.mark.parametrize(
    ("source", "what"),
    [("import sys; print(1); print('oh no', file=sys.stderr); sys.exit(3)", "failed (got exit code 3)"),
     ("import os; print('oh no', flush=True); os.abort()", "failed (got SIGABRT)"), ("print('oh no')", "no single number")],
)  # fmt: skip
def test_a_failed_command_is_named(source, what):
    """The failure has the arm, the reason and the end of the output."""
    with pytest.raises(Failure) as failure:
        run_command(python(source), ARM)

    assert f"arm b {what}" in str(failure.value) or what in str(failure.value)
    assert failure.value.lines[-1] == "oh no"


def test_a_program_that_is_missing_is_named():
    """It is a failure, not a traceback."""
    with pytest.raises(Failure, match="no-such-program: cannot be run"):
        run_command(["no-such-program"], ARM)


def test_a_hung_command_ends_with_its_children(tmp_path: Path):
    """After the timeout no process of the arm is left."""
    source = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    begun = time.monotonic()
    with pytest.raises(Failure, match="hung"):
        run_command(python(source), ARM, timeout=0.5)

    assert time.monotonic() - begun < 10
    child = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
