"""Sheet: unchanged lines keep their text, and a broken line costs only itself."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.process import files
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import sheet as sheets
from tunedgemm.table.csvfile import Row, read_rows, upsert, write_rows
from tunedgemm.table.sheet import Record, Sheet, read_sheet
from tunedgemm.table.source import open_source

OP = op_named("a16w16")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
LINE = "gfx942,304,16,1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,3,4,9.1234,kernel_a,0.0,36.78,2332.71"


def row(m: int = 16, us: float = 9.0, device: str = "") -> Row:
    return Row(Shape("a16w16", m, 1280, 8192), "gfx942", 304, device, Solution("asm", "kernel_a", 4, 3), us)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bf16_tuned_gemm.csv"


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((*lines, "")))
    return path


@pytest.mark.timing
def test_a_line_of_ten_megabytes(path):
    """A far too long line or header is reported with its length at once, and other lines load."""
    for long in ("x" * (10 << 20), '"' * (10 << 20), "1," * (5 << 20)):
        start = time.perf_counter()
        [found], [problem] = read_rows(written(path, HEADER, long, LINE), OP)
        assert (problem.line, found.line) == (2, 3)
        assert "(got 10485760)" in problem.reason
        assert time.perf_counter() - start < 2.0
    with pytest.raises(TableError, match=r"line 1 is too long for a header .got 10485760 characters"):
        read_rows(written(path, "x" * (10 << 20), LINE), OP)


COMMENTS = ("# a note", "#", '"# a note, quoted by a spreadsheet",,', "  # indented", "#" + LINE, '# an unclosed " quote')


def test_comments_are_read_as_comments(path, faults_of):
    """A line that begins with # is nowhere a row or a fault: above the header, between rows, at the end."""

    def check(comment, newline):
        for lines in ((comment, HEADER, LINE), ("\ufeff" + comment, "", comment, HEADER, LINE), (HEADER, comment, LINE, comment)):
            path.write_text(newline.join((*lines, "")), newline="")
            [found], problems = read_rows(path, OP)
            assert not problems and found.line == lines.index(LINE) + 1
            path.write_text(newline.join(lines), newline="")  # without an end of its last line
            assert len(read_rows(path, OP)[0]) == 1
            [same] = open_source(path, OP)
            assert (same.line, same.shape) == (found.line, found.shape)

    assert not faults_of(check, [(comment, newline) for comment in COMMENTS for newline in ("\n", "\r\n")])


def test_rewriting_keeps_comments_in_their_places(path, faults_of):
    """A comment stays above its line, sorted or not, and the last ones stay last."""

    def check(comment, sort):
        other = LINE.replace(",16,", ",8,", 1)
        written(path, comment, HEADER, comment, LINE, comment, other, comment)

        upsert(path, OP, [row(us=1.5), row(m=32, us=9.1234)], sort)

        lines = path.read_text().splitlines()
        assert lines[:3] == [comment, HEADER, comment] and lines[-1] == comment
        assert lines.count(comment) == 4 and len(read_rows(path, OP)[0]) == 3
        replaced, kept = next(line for line in lines if ",1.5" in line), lines.index(other)
        assert lines[lines.index(replaced) - 1] == comment == lines[kept - 1]
        assert comment != lines[next(at for at, line in enumerate(lines) if ",32," in line) - 1]
        upsert(path, OP, [row(us=1.5)], sort)
        assert path.read_text().splitlines() == lines

    assert not faults_of(check, [(comment, sort) for comment in COMMENTS for sort in (True, False)])


def test_a_file_of_comments_alone(path):
    """It has no header, and is not replaced."""
    with pytest.raises(TableError, match=r"has comments alone; write a header"):
        read_rows(written(path, "# a note"), OP)
    with pytest.raises(TableError, match=r"has comments alone"):
        upsert(path, OP, [row()])
    assert path.read_text() == "# a note\n"


def test_a_line_that_does_not_change_keeps_its_text(path, faults_of):
    """Blanks, quotes, surplus fields, line ends and broken lines stay; a new row adds commas alone."""

    def check(end, mark, last):
        lines = [
            f" {HEADER.replace('us', 'soltimes')} ,,note", f"{LINE.replace(',16,', ' , 16.0 ,')},7\t, Null", "", ",,,",
            f'{LINE.replace(",16,", ",17,")},,"a, b"',
            '"gfx942",304,banana,"torn', "<<<<<<< HEAD", LINE.replace(",16,", ",18,"), f"{LINE.replace(',16,', ',19,')},,,1,2",
            f"{LINE.replace(',16,', ',20,')},,",
        ]  # fmt: skip
        before = (mark + end.join(lines) + (end if last else "")).encode()
        path.write_bytes(before)
        rows, _ = read_rows(path, OP)
        assert [found.shape.m for found in rows] == [16, 17, 18, 20]

        upsert(path, OP, rows, sort=False)
        assert path.read_bytes() == before

        upsert(path, OP, [row(18, us=1.0, device="amd-instinct-mi300x"), row(40)], sort=False)
        after = path.read_bytes().decode().split(end)
        assert after[0] == f"{mark}{lines[0]},device"
        assert after[1:7] == [f"{lines[1]},", "", ",,,", f"{lines[4]},", lines[5], lines[6]]
        assert "amd-instinct-mi300x" in after[7] and ",1.0," in after[7]
        assert after[8:10] == [f"{LINE.replace(',16,', ',19,')},,,,1,2", f"{lines[9]},"]
        assert ",40," in after[10]
        assert [found.shape.m for found in read_rows(path, OP)[0]] == [16, 17, 18, 20, 40]

    assert not faults_of(check, itertools.product(["\n", "\r\n", "\r"], ["", "\ufeff"], ["", "end"]))


def test_columns_in_another_order_are_rewritten(path):
    """Reordered columns format all lines anew, without blank ones; broken ones stay."""
    sheet = read_sheet(written(path, "a,b,,c", "1, 2,x,3", "", '"torn', "4", "5,6,7,8,9"))
    assert [record.cells for record in sheet.records if record.cells] == [
        {"a": "1", "b": "2", "c": "3"}, {"a": "4"}, {"a": "5", "b": "6", "c": "8"}
    ]  # fmt: skip
    sheet.columns = ["c", "a", "b", "d"]
    assert sheet.text() == 'c,a,b,d\n3,1,2,\n"torn\n,4,,\n8,5,6,,9\n'


def test_a_changed_cell_rewrites_its_line_alone(path):
    """The other lines keep their blanks."""
    sheet = read_sheet(written(path, "a, b", "1, 2", "3, 4"))
    sheet.records[0].cells["b"] = "5"
    sheet.records.append(Record(cells={"b": "6", "e": "not of this file"}))
    assert sheet.text() == "a, b\n1,5\n3, 4\n,6\n"


def test_a_file_made_from_columns_and_records():
    """Columns and records make a file."""
    assert Sheet(["a", "b"], [Record(cells={"b": "x,y"}), Record(raw="<<<<<<<")]).text() == 'a,b\n,"x,y"\n<<<<<<<\n'


def test_columns_by_other_names(path):
    """A column may go by another name here than in its file, which keeps it."""
    sheet = read_sheet(written(path, "soltimes,b", "1,2"))
    sheet.rename({"soltimes": "us"})
    assert (sheet.columns, sheet.records[0].cells) == (["us", "b"], {"us": "1", "b": "2"})
    sheet.records[0].cells["us"] = "3"
    assert sheet.text() == "soltimes,b\n3,2\n"


def test_mode_and_link_are_kept(tmp_path, path):
    """A rewritten file keeps its mode, and a link stays a link to it."""
    write_rows(path, OP, [row()])
    path.chmod(0o640)
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    upsert(link, OP, [row(2)])
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(read_rows(path, OP)[0]) == 2


def test_a_place_that_cannot_be_written(tmp_path):
    """If no folder can be made, the error says so with a remedy."""
    (tmp_path / "file").write_text("")
    for write in (upsert, write_rows):
        with pytest.raises(TableError, match=r"cannot be written: .*name another output file"):
            write(tmp_path / "file" / "t.csv", OP, [row()])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path, path):
    """In a read-only folder writing fails with a clear error and the table stays."""
    write_rows(path, OP, [row()])
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(TableError, match="cannot be written"):
            upsert(path, OP, [row(2)])
        assert read_rows(path, OP)[0] == [row()]
    finally:
        tmp_path.chmod(0o755)


def test_a_full_disk_leaves_the_old_table(path, monkeypatch):
    """When the disk is full, the old table stays and no temporary file remains."""
    write_rows(path, OP, [row()])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(TableError, match="No space left on device"):
        upsert(path, OP, [row(2)])
    assert read_rows(path, OP)[0] == [row()]
    assert {file.name for file in path.parent.iterdir()} - {f"{path.name}.lock"} == {path.name}  # some versions of filelock remove it


def test_a_lock_that_is_kept(path):
    """A writer that waits too long names the lock and its holder."""
    with sheets.locked(path), pytest.raises(TableError, match="another process has held"), sheets.locked(path, 0.05):
        raise AssertionError("the lock was taken twice")


_ADD_ROWS = """
import sys
from pathlib import Path
from tunedgemm.table.csvfile import Row, upsert
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
for m in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
    row = Row(shape=Shape("a16w16", m, 64, 64), gfx="sm_90", cu_num=132, device="", solution=Solution("asm"), us=1.0)
    upsert(Path(sys.argv[1]), op_named("a16w16"), [row])
"""


def test_two_processes_write_one_table(path):
    """Concurrent processes and threads lose no row of one table."""
    workers = [subprocess.Popen([sys.executable, "-c", _ADD_ROWS, str(path), first, "20"]) for first in ("100", "200")]
    threads = [threading.Thread(target=lambda m=m: upsert(path, OP, [row(m)])) for m in range(300, 320)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [worker.wait() for worker in workers] == [0, 0]
    rows, problems = read_rows(path, OP)
    assert problems == []
    assert sorted(found.shape.m for found in rows) == [first + i for first in (100, 200, 300) for i in range(20)]


def test_a_table_and_a_link_to_it_share_one_lock(tmp_path, path):
    """Two processes that write a table by its name and by a link lose no row."""
    link = tmp_path / "other" / "link.csv"
    link.parent.mkdir()
    link.symlink_to(path)
    workers = [subprocess.Popen([sys.executable, "-c", _ADD_ROWS, str(name), first, "60"]) for name, first in ((path, "1"), (link, "101"))]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert sorted(found.shape.m for found in read_rows(path, OP)[0]) == [*range(1, 61), *range(101, 161)]
    assert [file.name for file in link.parent.iterdir()] == ["link.csv"]


def test_a_loop_of_links(path):
    """A writer and a reader report links that lead to themselves."""
    path.symlink_to(path.with_name("other.csv"))
    path.with_name("other.csv").symlink_to(path)
    with pytest.raises(TableError, match="cannot be written: the symbolic links lead to themselves; name the file itself"):
        upsert(path, OP, [row()])
    with pytest.raises(TableError, match="cannot be read: Too many levels of symbolic links"):
        read_rows(path, OP)


def test_a_link_in_place_of_the_lock(tmp_path, path):
    """A lock that is a link to another file leaves that file alone."""
    victim = written(tmp_path / "victim", "precious")
    (tmp_path / f"{path.name}.lock").symlink_to(victim)
    with pytest.raises(TableError, match="is a symbolic link; remove the link"):
        upsert(path, OP, [row()])
    assert victim.read_text() == "precious\n"


def _write_for_ever(path: Path, texts: list[str]) -> None:
    while True:
        for text in texts:
            with sheets.locked(path):
                sheets.replace_text(path, text)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize(("number", "says"), [(errno.ENOSYS, ""), (errno.ENOLCK, "cannot be written: No locks available; ")])
def test_a_file_system_without_locks(path, monkeypatch, number, says):
    """Without flock, a file that only one process can create is the lock; an error of flock is named."""

    def refuse(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(TableError, match=says) if says else contextlib.nullcontext():
        upsert(path, OP, [row(16)])
        upsert(path, OP, [row(32)])

    assert path.exists() is not bool(says)


def test_a_killed_writer_leaves_a_whole_table(path):
    """A killed writer leaves one complete table, and does not delay the next writer."""
    texts = []
    for us in (1.0, 2.0):
        write_rows(path, OP, [row(m, us=us) for m in range(1, 2000)])
        texts.append(path.read_text() * 20)
    context = multiprocessing.get_context("fork")
    for attempt in range(20):
        worker = context.Process(target=_write_for_ever, args=(path, texts))
        worker.start()
        time.sleep(0.02 + 0.0023 * attempt)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        assert path.read_text() in (*texts, texts[1][: len(texts[1]) // 20])
    for left in path.parent.glob(".*.tmp"):
        os.utime(left, (0, 0))
    write_rows(path, OP, [row(1)])
    assert {file.name for file in path.parent.iterdir()} - {f"{path.name}.lock"} == {path.name}  # some versions of filelock remove it
    assert read_rows(path, OP)[0] == [row(1)]
