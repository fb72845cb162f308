"""``tunedgemm doctor --bring-up`` on the CPU: a report, its page, exit codes, and going on."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.table.sheet import locked


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "9999", "nan"])
def test_wrong_minutes(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes are a number above 0."""
    assert main(["doctor", "--bring-up", "--minutes", minutes]) == 2
    assert f"--minutes: must be above 0, at most 1440 (got '{minutes}')" in capsys.readouterr().err


def test_a_report_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page does not replace the report."""
    assert main(["doctor", "--bring-up", "-o", str(tmp_path / "r.html")]) == 2
    assert "-o: must end in .json, as a page is written with .html (got " in capsys.readouterr().err


def test_an_unknown_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A libtype that is not installed is an error that names it."""
    assert main(["doctor", "--bring-up", "--libtype", "nosuch", "-o", str(tmp_path / "r.json")]) == 2
    assert "nosuch" in capsys.readouterr().err and not (tmp_path / "r.json").exists()


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some seconds give results of every op, none of them a fault; a second call runs others."""
    path = tmp_path / "r.json"
    words = ["doctor", "--bring-up", "--libtype", "torch", "-o", str(path)]
    assert main([*words, "--minutes", "0.25"]) == 0
    out, first = capsys.readouterr().out, json.loads(path.read_text())
    assert {result["status"] for result in first["results"]} == {"ok"} and "left, which the same command runs" in out
    assert {"formats", "shuffles", "dispatch", "outputs"} <= {result["check"] for result in first["results"]}
    assert not {socket.gethostname(), str(tmp_path), sys.executable} & set(path.read_text().split('"'))
    if (user := getpass.getuser()) != "root":
        assert user not in path.read_text()
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_keeps_the_results(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """A stopped run leaves a whole report, in which no check counts as ended."""
    path = tmp_path / "r.json"
    words = [sys.executable, "-m", "tunedgemm", "doctor", "--bring-up", "--libtype", "torch", "-o", str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not (path.exists() and len(json.loads(path.read_text())["results"]) > 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code and "left, which the same command runs" in out
    assert json.loads(path.read_text())["begun"] is None


def test_sigterm_before_the_first_check(tmp_path: Path) -> None:
    """The exit code is the same while checks are listed, and no file is written."""
    words = [sys.executable, "-m", "tunedgemm", "doctor", "--bring-up", "-o", str(tmp_path / "r.json")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "listing the checks\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "tunedgemm: interrupted\n") and not list(tmp_path.iterdir())


def test_two_runs_share_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run of the same report is an error: it would drop the results of the first."""
    path = tmp_path / "r.json"
    with locked(path):
        assert main(["doctor", "--bring-up", "--libtype", "torch", "-o", str(path)]) == 2
    assert f"{path}: another process has held the lock" in capsys.readouterr().err and not path.exists()
