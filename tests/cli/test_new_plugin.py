"""``tunedgemm new-plugin``: the package that it writes is complete, and its tests pass."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm import __version__
from tunedgemm.cli import main
from tunedgemm.cli.new_plugin import FILES

ROOT = Path(__file__).parents[2]

#: Commands as a user has them, for a process that must not change the environment that it runs in.
COMMANDS = {
    "python": 'exec "{python}" "$@"',
    "pip": 'exec "{python}" -m pip -q --disable-pip-version-check "$@" --no-index --no-deps --no-build-isolation --target "{site}"',
    "tunedgemm": 'exec "{python}" -m tunedgemm "$@"',
}


@pytest.mark.slow
def test_the_ten_minutes_of_the_docs(tmp_path):
    """The block of docs/writing-a-plugin.md runs: written, installed, listed, tested, tuned, and serving its shape."""
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    block = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{text.format(python=sys.executable, site=tmp_path / 'site')}\n")
        command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    done = subprocess.run(["sh", "-e", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"mine .*tunedgemm-mine", done.stdout)
    assert re.search(r"\d+ passed", done.stdout) and "failed" not in done.stdout.split("passed")[0]
    with (tmp_path / "tuned.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["M"], row["N"], row["K"], row["libtype"], row["kernelName"]) == ("4", "512", "1024", "mine", "mm_v1")
    assert "mine:mm_v1" in done.stdout.rpartition("1 tuned")[2]


def test_every_template_is_a_file_of_the_package(tmp_path, capsys):
    """All templates are used, no name is left to fill in, and the paths are printed."""
    assert main(["new-plugin", "fast8", "--folder", str(tmp_path / "new")]) == 0

    folder = tmp_path / "new" / "tunedgemm-fast8"
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == ["README.md", "pyproject.toml", "tests/test_fast8.py", "tunedgemm_fast8.py"]
    assert sorted(FILES) == sorted(path.name for path in (ROOT / "core" / "tunedgemm" / "templates" / "plugin").iterdir())
    for path in written:
        text = (folder / path).read_text()
        assert "fast8" in text and "$" not in text
    assert f'"tunedgemm>={__version__}"' in (folder / "pyproject.toml").read_text()
    out = capsys.readouterr().out
    assert all(str(folder / path) in out for path in written)


def test_what_it_writes_is_as_our_own_sources(tmp_path):
    """The package passes this repository's linter and formatter."""
    main(["new-plugin", "fast8", "--folder", str(tmp_path)])
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path / "tunedgemm-fast8")]

    for words in (["check", "--config", "lint.isort.known-first-party=['tunedgemm_fast8']"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch", "a backend 'torch' is installed already"),
        ("flydsl", "tables of AITER or of ours have rows of 'flydsl'"),
        ("rocblas", "tables of AITER or of ours have rows of 'rocblas'"),
        ("Fast", "lower-case letter"),
        ("8fast", "lower-case letter"),
        ("fast-8", "lower-case letter"),
        ("a+b", "lower-case letter"),
        ("_fast", "lower-case letter"),
    ],
)
def test_names_that_cannot_be(tmp_path, capsys, name, message):
    """A libtype that is taken, or is no part of a module's name, is refused in one line, and nothing is written."""
    assert main(["new-plugin", name, "--folder", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.glob("tunedgemm-*")) == []


def test_nothing_is_overwritten(tmp_path, capsys):
    """A folder that is there stays as it is; a place that is no folder is a mistake that is told."""
    (tmp_path / "tunedgemm-fast8").mkdir()
    (tmp_path / "file").touch()

    assert main(["new-plugin", "fast8", "--folder", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert list((tmp_path / "tunedgemm-fast8").iterdir()) == []
    assert main(["new-plugin", "fast8", "--folder", str(tmp_path / "file")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_it_names_a_path_to_pip(tmp_path, capsys, monkeypatch):
    """The hint to install begins with a dot where the path is relative: pip takes a bare name for one of its index."""
    monkeypatch.chdir(tmp_path)

    assert main(["new-plugin", "fast8"]) == 0
    assert "pip install ./tunedgemm-fast8;" in capsys.readouterr().out
