"""Children import what their parent does, and their ends have names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.process.children import import_variables, signal_name


def test_a_child_imports_from_the_same_folders_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parent's folders come first, in order; an empty entry is the parent's working directory."""
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "own"), *sys.path])

    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    found = json.loads(subprocess.check_output(command, env={**os.environ, **import_variables()}, cwd="/"))

    assert found[:2] == [str(tmp_path), str(tmp_path / "own")]
    assert not {"", "/"} & set(found)
    assert {folder for folder in sys.path[2:] if Path(folder).is_dir()} <= set(found)


@pytest.mark.parametrize(("code", "name"), [(-signal.SIGKILL, "SIGKILL"), (0, ""), (3, ""), (-1000, "")])
def test_a_signal_has_its_name(code: int, name: str) -> None:
    """Exit codes, and numbers of no signal, have none."""
    assert signal_name(code) == name
