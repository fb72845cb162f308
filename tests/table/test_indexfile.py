"""The on-disk index of a large file: used for exactly the content it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
from tunedgemm.backends.artifact import cache_folder
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.table import indexfile, scan
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.indexfile import open_source

OP = op_named("a16w16")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"


def line(m: int, us: float = 5.0, kernel: str = "k", gfx: str = "gfx942,304") -> str:
    return f"{gfx},{m},1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,1,0,{us},{kernel},0.0,1.0,2.0"


def write(file: Path, *more: str) -> None:
    """Write a table with a duplicate, two devices, a broken line, one that never wins, and *more*."""
    draw = random.Random(4)
    body = [line(m, round(draw.uniform(1, 9), 2), gfx=draw.choice(["gfx942,304", "gfx950,256"])) for m in range(1, 200)]
    file.write_text("\n".join([HEADER, *body, line(7), "gfx942,many,1", line(9, 0.0), '"gfx942"' + line(11)[6:], *more, ""]))


@pytest.fixture
def scans(monkeypatch) -> list[Path]:
    """All files are large; the paths that were scanned since."""
    found: list[Path] = []
    real = scan.scan

    def counted(path, op, content):
        found.append(path)
        return real(path, op, content)

    monkeypatch.setattr(indexfile, "LARGE", 0)
    monkeypatch.setattr(scan, "scan", counted)
    return found


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "t.csv"
    write(path)
    return path


def kept() -> list[Path]:
    return sorted((cache_folder() / "tables").glob("*"))


def agree(file: Path, op=OP) -> None:
    """Check that a source matches its file, in its numbers and in its rows."""
    source = open_source(file, op)
    rows, problems = read_rows(file, op)
    assert (list(source), source.problems) == (rows, problems)
    fresh = scan.scan(file, op, scan.normalise(file.read_bytes()))
    for name in ("keys", "us", "device_numbers", "starts", "lines", "devices", "kinds", "sorted", "pinned", "content"):
        assert getattr(source, name) == getattr(fresh, name), name
    assert source.split() == fresh.split()


def test_the_second_load_scans_nothing(file, scans):
    """A file is scanned once; then its index gives the same rows, lines and problems."""
    open_source(file, OP)
    assert (len(scans), len(kept())) == (1, 1)
    source = open_source(file, OP)
    assert len(scans) == 1
    assert not source.parsed
    agree(file)
    assert [problem.line for problem in source.problems] == [202, 203]


def test_what_is_kept_is_private(file, scans):
    """Only the user may read the index, and the folder has no other file."""
    open_source(file, OP)
    [index] = kept()
    assert index.stat().st_mode & 0o077 == 0
    assert index.parent.stat().st_mode & 0o077 == 0


def test_other_line_ends_and_marks(file, scans, faults_of):
    """A byte order mark and other line ends change neither the rows nor that the index is used."""

    def check(newline):
        write(file)
        scans.clear()
        file.write_text("\ufeff" + file.read_text().replace("\n", newline), encoding="utf-8", newline="")
        open_source(file, OP)
        open_source(file, OP)
        assert len(scans) == 1
        assert list(open_source(file, OP)) == read_rows(file, OP)[0]

    assert not faults_of(check, ["\n", "\r\n"])


def test_an_edit_is_seen_whatever_the_clock_says(file, scans):
    """A file of the same size and the same times with one other digit is scanned again."""
    open_source(file, OP)
    before, text = file.stat(), file.read_text()
    file.write_text(text.replace(",k,", ",j,", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    agree(file)
    assert next(iter(open_source(file, OP))).solution.kernel_name == "j"
    file.write_text(text)
    assert next(iter(open_source(file, OP))).solution.kernel_name == "k"
    assert len(kept()) == 1


def test_a_copy_elsewhere_and_another_op(file, scans, tmp_path):
    """An index belongs to one path and one op: a copy has another, and another op's file is refused."""
    open_source(file, OP)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(file.read_bytes())
    assert [row.source for row in open_source(copy, OP)][:1] == [copy]
    assert len(kept()) == 2
    with pytest.raises(TableError):
        open_source(file, op_named("batched_bf16"))
    renamed = attrs.evolve(OP, columns=attrs.evolve(OP.columns, own=("layout",)))
    scans.clear()
    open_source(file, renamed)
    assert len(scans) == 1


def test_another_version_is_not_used(file, scans, faults_of):
    """An undamaged index of another version of code, format or interpreter is rebuilt."""

    def check(name):
        for old in kept():
            old.unlink()
        scans.clear()
        open_source(file, OP)
        [index] = kept()
        raw = index.read_bytes()
        end = raw.index(b"\n", 32)
        head = json.loads(raw[32:end])
        head[name] = "other"
        rest = json.dumps(head).encode() + raw[end:]
        index.write_bytes(indexfile._digest([rest]) + rest)
        agree(file)
        assert len(scans) == 3  # the first, the one instead of the index, and the one that was compared
        assert index.read_bytes() == raw

    assert not faults_of(check, ["format", "code", "hashing", "columns", "content"])


def test_damage_is_noticed(file, scans):
    """A truncated, overwritten or empty index is made again."""
    open_source(file, OP)
    [index] = kept()
    raw = index.read_bytes()
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1
    for damaged in (b"", raw[:10], raw[:32], raw[: len(raw) // 2], raw[:-1], bytes(flipped), raw + b"x", b"\0" * len(raw), HEADER.encode()):
        index.write_bytes(damaged)
        scans.clear()
        assert list(open_source(file, OP)) == read_rows(file, OP)[0]
        assert len(scans) == 1
        assert index.read_bytes() == raw


def test_a_folder_that_cannot_be_written(file, scans, monkeypatch, tmp_path):
    """An unwritable cache folder only costs the index."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(blocked))
    for _ in range(2):
        assert list(open_source(file, OP)) == read_rows(file, OP)[0]
    assert len(scans) == 2


def test_a_full_disk_leaves_nothing_behind(file, scans, monkeypatch):
    """Where the last step of writing fails the table is read all the same, and no part of an index stays."""

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert list(open_source(file, OP)) == read_rows(file, OP)[0]
    assert kept() == []


def test_small_files_are_not_kept(file):
    """A file that is scanned in no time has no index."""
    open_source(file, OP)
    assert kept() == []


def test_special_and_broken_files_are_not_kept(tmp_path, scans):
    """A file that cannot be scanned is read line by line each time; a broken one raises its error."""
    short = tmp_path / "short.csv"
    short.write_text("M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n16,128,64,hipblaslt,x,1.5,2\n")
    for _ in range(2):
        assert list(open_source(short, OP)) == read_rows(short, OP)[0]
    broken = tmp_path / "broken.csv"
    broken.write_bytes(b"\0\1")
    with pytest.raises(TableError, match="not a text file"):
        open_source(broken, OP)
    with pytest.raises(TableError, match="no such file"):
        open_source(tmp_path / "missing.csv", OP)


def test_processes_that_write_at_once(file, child):
    """Processes that write one index at once all read the right rows and leave one good index."""
    source = f"""
import os, sys
from pathlib import Path
from tunedgemm.table import indexfile
from tunedgemm.ops import op_named
indexfile.LARGE = 0
found = set()
for _ in range(15):
    for kept in Path(os.environ["TUNEDGEMM_CACHE"]).glob("tables/*.index"):
        kept.unlink(missing_ok=True)
    source = indexfile.open_source(Path({str(file)!r}), op_named("a16w16"))
    found.add((len(source), sum(row.us for row in source), tuple(map(str, source.problems))))
print(len(found), len(source), "torch" in sys.modules)
"""
    with ThreadPoolExecutor(3) as pool:
        printed = list(pool.map(child, [source] * 3))
    assert printed == [f"1 {len(read_rows(file, OP)[0])} False"] * 3
    assert len(kept()) <= 1
    assert not [path for path in kept() if path.suffix != ".index"]


NAMES = ("rows", "parts", "kinds", "devices", "problems", "sorted", "pinned")
FORGED = [
    *((name, value) for name in NAMES for value in (None, "x", -1, [[]], {})),
    *(("kinds", [[[*words, extra], units]]) for words, extra, units in [("abcde", [], -1), ([[]] * 5, [], 1), ("abcde", [["x", []]], 1)]),
    ("rows", 10**30), ("parts", [1] * 256), ("parts", [0] * 255), ("kinds", [[["a"] * 5, -1]]), ("devices", []), ("devices", [["a", 7]]),
    ("problems", [["3", "x"]]), ("content", None),
]  # fmt: skip


def test_a_forged_index_is_made_again(file, scans, faults_of):
    """An index with the digest of other content than an index has costs a scan and no more."""
    open_source(file, OP)
    [index] = kept()
    raw = index.read_bytes()
    end = raw.index(b"\n", 32)

    def check(name, value):
        head = {**json.loads(raw[32:end]), name: value}
        body = json.dumps(head).encode() + raw[end:]
        index.write_bytes(hashlib.blake2b(body, digest_size=32).digest() + body)
        scans.clear()
        assert list(open_source(file, OP)) == read_rows(file, OP)[0]
        assert len(scans) == 1
        assert index.read_bytes() == raw

    assert not faults_of(check, FORGED)
