"""Special files in place of every file that the commands read: an error at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.source import open_source
from tunedgemm.workload.capturefile import CaptureFile

OP = op_named("a16w16")
UNTUNED = "M,N,K,bias,dtype,outdtype\n1,64,128,False,fp32,fp32\n"

#: A command, and the file of it that is special. {at} is that file, {folder} its folder.
READERS = {
    "table": ("table check {at}", "t.csv"),
    "table merge": ("table merge {folder}/merged.csv {at}", "t.csv"),
    "table diff": ("table diff {at} {at}", "t.csv"),
    "output": ("tune -i {folder}/in.csv -o {at} --libtype torch", "t.csv"),
    "untuned": ("tune -i {at} -o {folder}/t.csv --libtype torch", "u.csv"),
    "trial log": ("tune -i {folder}/in.csv -o {folder}/t.csv --libtype torch", "t.trials.jsonl"),
    "explain": ("explain {at}:2 --op a16w16", "t.csv"),
    "config.json": ("shapes --model_dir {folder} -o {folder}/u.csv", "config.json"),
    "coverage": ("coverage {at} --op a16w16", "u.csv"),
    "coverage --table": ("coverage {folder}/in.csv --table {at}", "t.csv"),
    "Triton's JSON": ("triton check {at}", "gfx942-GEMM-A8W8.json"),
    "Triton's space": ("tune -i {folder}/in.csv -o {folder}/t.csv --libtype triton --triton-space {at}", "space.json"),
}


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """End a test that waits for a special file."""

    def late(*_: object) -> None:
        raise AssertionError("waits for a special file")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)  # seconds; a tuner starts under load, too
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def zeros(path: Path) -> None:
    """Make a link to an endless device."""
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, zeros])
@pytest.mark.parametrize("reader", READERS)
def test_a_special_file_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reader: str, make: Callable[[Path], None]
) -> None:
    """A command that would read a pipe or an endless device names it and ends with an error."""
    command, name = READERS[reader]
    (tmp_path / "in.csv").write_text(UNTUNED)
    make(tmp_path / name)
    code = main(command.format(at=tmp_path / name, folder=tmp_path).split())
    output = "".join(capsys.readouterr())
    assert code in (1, 2), output
    assert name in output and "regular file" in output, output


@pytest.mark.parametrize("make", [os.mkfifo, zeros])
def test_serving_reads_no_special_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]) -> None:
    """A special file among the tables, the captured shapes or the indexes does not stop a process."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
    make(tmp_path / "t.csv")
    make(untuned_path(OP))
    with pytest.raises(Exception, match="regular file"):
        open_source(tmp_path / "t.csv", OP)
    for write in (CaptureFile(OP, untuned_path(OP)).enter, CaptureFile(OP, untuned_path(OP)).add):
        with pytest.raises(Exception, match="regular file"):
            write({Shape("a16w16", 1, 64, 64): (1, 0)}, 1.0)


#: Commands with {loop} as a link that leads to itself.
LOOPS = (
    "table merge {loop} {folder}/tuned.csv", "table merge {folder}/o.csv {loop}", "table show {loop}",
    "table export --aiter {folder}/o.csv {loop}",
    "coverage {loop}", "coverage {folder}/in.csv -o {loop}", "coverage {folder}/in.csv --csv {loop}", "tune -i {loop} --libtype torch",
    "tune -i {folder}/in.csv -o {loop} --libtype torch", "tune -i {folder}/in.csv -o {folder}/t.csv -o2 {loop} --libtype torch",
    "shapes --model_dir {loop}", "explain {loop}:2", "explain 1,2,3 --table {loop}",
)  # fmt: skip


@pytest.mark.parametrize("command", LOOPS)
def test_a_loop_of_links_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A link that leads to itself is named in one line, as input and as output."""
    (tmp_path / "in.csv").write_text(UNTUNED)
    (tmp_path / "tuned.csv").write_text("M,N,K,libtype,us\n1,64,128,torch,1.0\n")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    assert main(command.format(loop=tmp_path / "loop.csv", folder=tmp_path).split()) in (1, 2)
    assert "loop.csv" in "".join(capsys.readouterr())
