"""Bad input to ``tunedgemm tune``: one line that names the mistake, exit code 2, and no lost
data."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows

UNTUNED = "M,N,K,bias,dtype,outdtype\n" + "".join(f"{m},64,128,False,fp32,fp32\n" for m in range(1, 9))

Mistake = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.csv").write_text(UNTUNED)
    return tmp_path


@pytest.fixture
def mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> Mistake:
    """Run ``tune`` with more flags, see that it ends as a mistake does, and return its line."""

    def run(*arguments: str) -> str:
        code = main(["tune", "-i", str(folder / "in.csv"), "-o", str(folder / "t.csv"), "--libtype", "torch", "--iters", "3", *arguments])
        err = capsys.readouterr().err
        assert code == 2, err
        assert err.startswith("tunedgemm: error: ") and err.count("\n") == 1, err
        return err

    return run


def tune(folder: Path, limit: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a child process whose files may have *limit* bytes,
    as on a nearly full disk."""
    command = [sys.executable, "-m", "tunedgemm", "tune", "-i", str(folder / "in.csv"), "-o", str(folder / "t.csv"), "--libtype", "torch"]
    path = os.pathsep.join(filter(None, sys.path))
    inherited = {name: value for name, value in os.environ.items() if not (limit and name.startswith("COV"))}  # it writes files, too
    variables = {**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    start = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    return subprocess.run([*command, "--iters", "3"], capture_output=True, text=True, env=variables, preexec_fn=start, timeout=120)


@pytest.mark.gpu
def test_a_gpu_index_out_of_range_does_not_run_on_the_cpu(folder: Path) -> None:
    """A CUDA_VISIBLE_DEVICES that names a missing GPU is an error, not hours of tuning the CPU."""
    done = tune(folder, CUDA_VISIBLE_DEVICES="99")

    assert done.returncode == 2, done.stdout + done.stderr
    assert "CUDA_VISIBLE_DEVICES" in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "t.csv").exists()


@pytest.mark.parametrize("libtype", ["nope", "fake_unimportable", "fake_raising"])
def test_no_usable_backend(mistake: Mistake, folder: Path, fake_plugins: Path, libtype: str) -> None:
    """A backend that is unknown, broken or refuses every shape is named,
    and no table is written."""
    if libtype == "fake_raising":  # it loads; that it can do nothing shows shape by shape
        assert main(["tune", "-i", str(folder / "in.csv"), "-o", str(folder / "t.csv"), "--libtype", libtype, "--iters", "3"]) == 1
    else:
        assert libtype in mistake("--libtype", libtype)
    assert not (folder / "t.csv").exists() or not read_rows(folder / "t.csv", op_named("a16w16"))[0]


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"\xff\xfe\x00\x01", b'{"schema": 99}\n', b'{"epoch": 1, "loss": 0.5}\n', b"[1, 2]\n"],
    ids=["text", "binary", "newer schema", "another program's", "no objects"],
)
def test_a_foreign_trial_log_is_not_touched(mistake: Mistake, folder: Path, content: bytes) -> None:
    """A foreign file in the trial log's place is named with a remedy and stays unchanged."""
    log = folder / "t.trials.jsonl"
    log.write_bytes(content)

    assert str(log) in mistake()

    assert log.read_bytes() == content
    assert not (folder / "t.csv").exists()


@pytest.mark.parametrize("name", ["in.csv", "t.csv", "t.trials.jsonl", "notes.txt"])
def test_a_profile_is_not_appended_to_another_file(mistake: Mistake, folder: Path, name: str) -> None:
    """-o2 refuses to append a profile to the shapes, the table, its trials or a foreign file."""
    (folder / "notes.txt").write_text("buy milk\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    assert str(folder / name) in mistake("-o2", str(folder / name))

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.nightly
def test_a_full_disk_stops_the_run_and_loses_nothing(folder: Path) -> None:
    """A full disk names the file and keeps what was written; the same command resumes elsewhere."""
    done = tune(folder, limit=6000)

    assert done.returncode == 2, done.stdout + done.stderr
    assert "t.trials.jsonl" in done.stderr and "Traceback" not in done.stderr
    rows = len(read_rows(folder / "t.csv", op_named("a16w16"))[0]) if (folder / "t.csv").exists() else 0
    assert rows < 8

    again = tune(folder)

    assert again.returncode == 0, again.stdout + again.stderr
    assert len(read_rows(folder / "t.csv", op_named("a16w16"))[0]) == 8
