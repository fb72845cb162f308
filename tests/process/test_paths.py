"""Paths of variables and flags: home folders are expanded at one place, and a process may have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.backends.artifact import cache_folder
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.process.paths import NO_HOME, expanded
from tunedgemm.table.folders import home_folder, named_file, table_layers

#: a number without an entry in the database of users
UNKNOWN_UID = 4_294_000_123


#: commands that read or write a user's folders -> their exit codes without a home
WITHOUT_HOME = {
    "plugins": 0, "table show": 0, "explain 1,64,64": 0, "coverage": 2, "tune": 2, "tune -i shapes.csv --libtype torch": 2, "asm list": 0,
    "triton check": 0,
}  # fmt: skip
#: Commands that name the home folder of an unknown user.
NAMING_HOMES = (
    "table check ~nobody-x/t.csv", "table merge ~nobody-x/o.csv shapes.csv", "table export --aiter ~nobody-x/y shapes.csv",
    "explain 1,64,64 --table ~nobody-x/t.csv", "shapes --model_dir ~/x", "coverage --csv ~nobody-x/y", "tune -i ~nobody-x/y",
    "tune -i shapes.csv -o ~nobody-x/y", "tune -i shapes.csv -o2 ~nobody-x/y", "new-plugin x --folder ~nobody-x", "asm check ~nobody-x",
    "triton check ~nobody-x",
)  # fmt: skip


def homeless(code: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code without HOME, as a user without an entry, in a folder that can be written."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.defpath, "OMP_NUM_THREADS": "1", **variables}

    def unknown_user() -> None:
        os.setresuid(UNKNOWN_UID, 0, 0)  # the effective user still reads the packages

    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=unknown_user,
        timeout=120,
    )


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the number of an unknown user")


@needs_root
def test_calls_without_a_home(tmp_path):
    """A call, also one that captures, works without a home folder, and writes nothing elsewhere."""
    code = """
import torch, tunedgemm
from tunedgemm.table.folders import home_folder
print(home_folder(), tunedgemm.gemm_a16w16(torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16()).shape)
"""
    for variables in ({}, {"AITER_TUNE_GEMM": "1"}):
        done = homeless(code, tmp_path, **variables)

        assert (done.returncode, done.stdout) == (0, f"{NO_HOME} torch.Size([2, 32])\n"), done.stderr
    assert "TUNEDGEMM_HOME" in done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_commands_without_a_home(tmp_path):
    """No command ends in a traceback; one that needs a home folder names the fault and a remedy."""
    (tmp_path / "shapes.csv").write_text("M,N,K,bias,dtype,outdtype\n1,64,64,False,torch.bfloat16,torch.bfloat16\n")
    code = """
import sys
from tunedgemm.cli import main
for line in sys.argv[1:]:
    print(f"{main(line.split())} {line}", file=sys.stderr)
"""
    done = homeless(code, tmp_path, *WITHOUT_HOME, *NAMING_HOMES)
    lines = done.stderr.splitlines()

    assert "Traceback" not in done.stderr
    assert [line for line in lines if line[2:] in WITHOUT_HOME] == [f"{code} {line}" for line, code in WITHOUT_HOME.items()]
    for command in NAMING_HOMES:
        assert "no home folder is known for ~" in lines[lines.index(f"2 {command}") - 1]
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.csv"]


def test_an_unknown_user(monkeypatch, caplog):
    """A variable that names the folder of an unknown user is named; the default folder counts."""
    op = op_named("a16w16")

    monkeypatch.setenv(op.columns.variable, "~nobody-x/y")
    with pytest.raises(UserError, match=f"^{op.columns.variable}: no home folder is known for ~nobody-x .*; write the whole path$"):
        table_layers(op)
    for variable, folder in (("TUNEDGEMM_HOME", home_folder), ("TUNEDGEMM_CACHE", cache_folder)):
        monkeypatch.delenv(variable, raising=False)
        default = folder()
        monkeypatch.setenv(variable, "~nobody-x/y")
        assert folder() == default
        assert f"{variable}: no home folder is known for ~nobody-x (got '~nobody-x/y'); write the whole path" in caplog.text


def test_home_folders_are_expanded(monkeypatch, tmp_path):
    """`~` means HOME in every variable and flag."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder in (("TUNEDGEMM_HOME", home_folder), ("TUNEDGEMM_CACHE", cache_folder)):
        monkeypatch.setenv(variable, "~/c")

        assert folder() == tmp_path / "c"
    assert named_file("~/t.csv") == expanded("~/t.csv") == tmp_path / "t.csv"


def test_an_older_platformdirs(monkeypatch):
    """A folder that is left with `~`, as by platformdirs before 4.10, is none."""
    import platformdirs

    monkeypatch.delenv("TUNEDGEMM_HOME")
    monkeypatch.setattr(platformdirs, "user_config_dir", lambda *_, **__: "~/.config/tunedgemm")

    assert home_folder() == NO_HOME
