"""The file of captured shapes: one appended line each; content of others stays."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.dtype import fp8_of
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload.capturefile import CaptureFile

OP = op_named("a16w16")
HEAD = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count,graph"
ONCE, THRICE, RECORDED = (1, 0), (3, 0), (0, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bf16_untuned_gemm.csv"


def shape(m: int, **more: object) -> Shape:
    return Shape("a16w16", m, 64, 64, **more)


def line(m: int, count: int = 1, graph: int = 0) -> str:
    return f"{m},64,64,False,torch.bfloat16,torch.bfloat16,False,False,{count},{graph}"


def entered(file: CaptureFile, *ms: int) -> set[int] | None:
    """Enter shapes with one call each; the rows (M) whose lines that wrote."""
    found = file.enter({shape(m): ONCE for m in ms}, 2.0)
    return None if found is None else {one.m for one in found}


def counts(path: Path) -> dict[int, tuple[int, int]]:
    return {entry.shape.m: (entry.count, entry.graph) for entry in read_untuned(path, OP)}


def test_a_new_shape_is_one_line_at_the_end(path: Path) -> None:
    """The file grows by a line and is not rewritten; existing bytes are unchanged."""
    path.write_text(f"{HEAD}\n{line(1, 7)}\n")
    before, file = path.stat(), CaptureFile(OP, path)

    assert entered(file, 2) == {2}
    assert file.enter({shape(3): RECORDED}, 2.0) == {shape(3)}

    assert path.read_text() == f"{HEAD}\n{line(1, 7)}\n{line(2)}\n{line(3, 0, 1)}\n"
    assert path.stat().st_ino == before.st_ino


def test_the_devices_fp8_is_left_out(tmp_path: Path, mi300: Device) -> None:
    """A list of block scales has AITER's columns for the device's own fp8; the other kind is stated."""
    op = op_named("a8w8_blockscale")
    own = op.columns.parse({"M": "16", "N": "256", "K": "512"})
    other = attrs.evolve(own, dtype="fp8_e4m3fn")
    path = tmp_path / "a8w8_blockscale_untuned_gemm.csv"
    CaptureFile(op, path).add({own: ONCE}, 2.0)
    assert own.dtype == fp8_of(mi300.gfx)
    assert path.read_text() == "M,N,K,count,graph\n16,256,512,1,0\n"
    CaptureFile(op, path).add({own: ONCE, other: ONCE}, 2.0)
    assert {line.shape: line.count for line in read_untuned(path, op)} == {own: 2, other: 1}


def test_a_known_shape_gets_no_second_line(path: Path) -> None:
    """Whoever wrote it, this process, another one, or a person in other words."""
    path.write_text(f"{HEAD},note\n1,64,64,False,bf16,bf16,0,0,,,by hand\n")
    one, two = CaptureFile(OP, path), CaptureFile(OP, path)

    assert entered(one, 1, 2) == {2}
    assert entered(two, 1, 2, 3) == {3}
    assert entered(one, 2, 3) == set()

    assert len(path.read_text().splitlines()) == 4


def test_only_appended_lines_are_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process resumes reading where it stopped, so a long file costs only its new lines."""
    one, two = CaptureFile(OP, path), CaptureFile(OP, path)
    one.add({shape(m): ONCE for m in range(1, 2001)}, 2.0)
    entered(two, 3001)
    entered(one, 3002)
    lines: list[int] = []
    real = CaptureFile._shapes_of
    monkeypatch.setattr(CaptureFile, "_shapes_of", lambda self, texts, sheet: lines.append(len(texts)) or real(self, texts, sheet))

    assert entered(two, 3002, 3003) == {3003}
    assert entered(one, 3003) == set()
    assert lines == [1, 1]


def test_columns_keep_their_order_and_lines_their_ends(path: Path, faults_of):
    """A line's fields follow the file's own line of column names, its end that of the others."""

    def check(ending: str):
        head = "graph,K,note,N,M,bpreshuffle,scaleAB,outdtype,count,dtype,bias"
        path.write_bytes(f"\ufeff{head}{ending}0,64,mine,64,1,,,,4,,{ending}".encode())

        assert entered(CaptureFile(OP, path), 1, 2) == {2}

        text = path.read_bytes().decode()
        assert text.endswith(f"4,,{ending}0,64,,64,2,False,False,torch.bfloat16,1,torch.bfloat16,False{ending}")
        assert text.count(ending) == 3

    assert not faults_of(check, ["\n", "\r\n", "\r"])


def test_a_file_that_cannot_be_appended_to_is_rewritten(path: Path, faults_of):
    """Nothing is appended to a file that is empty, lacks our columns, or has no line end;
    the rewriting mends it."""

    def check(content: str):
        path.write_text(content)
        file = CaptureFile(OP, path)

        assert entered(file, 2) is None
        assert path.read_text() == content
        file.add({shape(2): ONCE}, 2.0)
        assert entered(file, 3) == {3}

        assert path.read_text().splitlines()[0] == HEAD
        assert path.read_text().splitlines()[-2:] == [line(2), line(3)]

    assert not faults_of(check, ["", "\n", "M,N,K\n1,64,64\n", f"{HEAD}", f"{HEAD}\n{line(1)}", f"{HEAD}\n{line(1)[:9]}"])


def test_a_column_that_the_file_lacks_is_added(path: Path) -> None:
    """A shape that needs another column widens the file; existing lines keep their text."""
    file = CaptureFile(OP, path)
    file.add({shape(1): ONCE}, 2.0)
    assert file.enter({shape(2, layout="aiter32x16"): ONCE}, 2.0) is None
    file.add({shape(2, layout="aiter32x16"): ONCE}, 2.0)

    assert path.read_text().splitlines()[:2] == [f"{HEAD},layout", f"{line(1)},"]
    assert [entry.shape for entry in read_untuned(path, OP)] == [shape(1), shape(2, layout="aiter32x16")]


def test_calls_are_added_to_the_lines_of_their_shapes_alone(path: Path) -> None:
    """Counts of both kinds go up; every other line, a shape's second line included, keeps its bytes."""
    others = [" 5, 64,64,False,bf16,bf16,0,0,2,", '6,64,64,"False",x,,,,1,1', "", "what is this", "7,64,64,,,,,,many,0"]
    path.write_text("\n".join([HEAD, line(1, 4), line(2), *others, line(1, 9), ""]))

    CaptureFile(OP, path).add({shape(1): (2, 5), shape(5): (1, 0), shape(7): THRICE}, 2.0)

    assert path.read_text().splitlines() == [
        HEAD, line(1, 6, 5), line(2), "5,64,64,False,bf16,bf16,0,0,3,0", *others[1:], line(1, 9), line(7, 3),
    ]  # fmt: skip


def test_late_lines_move_to_the_new_file(path: Path) -> None:
    """A line that another writes to the file just replaced is kept, as is one without an end."""
    path.write_text(f"{HEAD}\n{line(1)}\n")
    file = CaptureFile(OP, path)
    with path.open("a") as first:
        file.add({shape(1): ONCE}, 2.0)
        print(line(7), file=first, flush=True)
        file.add({shape(1): ONCE}, 2.0)
        assert counts(path) == {1: (3, 0), 7: (1, 0)}

    with path.open("a") as last:
        file.add({shape(1): ONCE}, 2.0)
        last.write(line(9))
    assert file.may_have_late_lines

    file.move_late_lines(2.0)

    assert not file.may_have_late_lines
    assert counts(path) == {1: (4, 0), 7: (1, 0), 9: (1, 0)}


def test_a_cut_off_line_is_marked(path: Path) -> None:
    """After a power cut the half line stays on a separate line, which readers report; shapes follow."""
    path.write_text(f"{HEAD}\n{line(1)}\n7,64,6")
    file = CaptureFile(OP, path)
    file.add({shape(2): ONCE}, 2.0)
    entered(file, 3)

    assert path.read_text().splitlines() == [HEAD, line(1), "7,64,6,,,,,,,,cut off", line(2), line(3)]
    with pytest.raises(TableError, match=r"untuned_gemm.csv:3: more fields than columns .got 'cut off' beyond"):
        read_untuned(path, OP)
    CaptureFile(OP, path).add({shape(3): ONCE}, 2.0)
    assert path.read_text().splitlines()[2] == "7,64,6,,,,,,,,cut off"


def test_a_file_replaced_or_edited_in_place_is_read_again(path: Path) -> None:
    """A replaced, shortened or reordered file is read again, and lines follow its columns."""
    file = CaptureFile(OP, path)
    file.add({shape(m): ONCE for m in range(1, 40)}, 2.0)
    text = path.read_text()

    path.write_text(text.replace(line(5) + "\n", ""))  # the same inode
    assert entered(file, 5, 6) == {5}
    path.write_text(text.replace(line(7) + "\n", "") + line(50) + "\n" + line(51) + "\n")
    assert entered(file, 7, 8, 50, 51) == {7}
    other = path.with_suffix(".new")
    other.write_text("count,graph,bias,dtype,outdtype,scaleAB,bpreshuffle,K,N,M\n1,0,,,,,,64,64,1\n")
    other.replace(path)
    assert entered(file, 1, 2) == {2}
    assert path.read_text().splitlines()[-1] == "1,0,False,torch.bfloat16,torch.bfloat16,False,False,64,64,2"
    path.unlink()
    assert entered(file, 1) is None


def test_a_file_that_cannot_be_read_is_left_alone(path: Path, faults_of):
    """It raises the readers' error, and the file keeps every byte."""

    def check(content: bytes):
        path.write_bytes(content + b"\n")
        file = CaptureFile(OP, path)

        for write in (file.enter, file.add):
            with pytest.raises(TableError, match=r"not a text file|occurs twice"):
                write({shape(1): ONCE}, 2.0)
        assert path.read_bytes() == content + b"\n"

    assert not faults_of(check, [b"\xff\xfe", b"M,N\x00", b"M,N,K,M\n"])


def test_nothing_is_left_half_written(path: Path, file_limit: Callable[[int], contextlib.AbstractContextManager[None]], faults_of):
    """Where a line does not fit on the disk, the file is unchanged; later writes succeed."""

    def check(room: int):
        path.unlink(missing_ok=True)
        file = CaptureFile(OP, path)
        file.add({shape(1): ONCE}, 2.0)
        before = path.read_bytes()

        with file_limit(len(before) + room):
            for write in (file.enter, file.add):
                with pytest.raises(TableError, match=r"untuned_gemm.csv: cannot be written: File too large"):
                    write({shape(2): ONCE}, 2.0)
                assert path.read_bytes() == before
        assert entered(file, 1, 2) == {2}
        assert counts(path) == {1: (1, 0), 2: (1, 0)}

    assert not faults_of(check, [0, 1, 40])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    """Shapes are written while there is room; a full disk breaks nothing, and writing resumes."""
    path, ballast, file = (
        small_disk / "bf16_untuned_gemm.csv",
        small_disk / "ballast",
        CaptureFile(OP, small_disk / "bf16_untuned_gemm.csv"),
    )
    file.add({shape(1): ONCE}, 2.0)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as filler:
        while True:
            filler.write(b"\0" * 1024)
    held = {1}
    with pytest.raises(TableError, match="No space left on device"):
        for m in range(2, 1000):
            assert entered(file, m) == {m}
            held.add(m)

    assert len(held) > 10 and counts(path).keys() == held
    ballast.unlink()
    assert entered(file, 1, 2, 1001) == {1001}
    assert counts(path).keys() == held | {1001}
    assert sorted(file.name for file in small_disk.iterdir()) == [path.name, f"{path.name}.lock"]


@pytest.mark.parametrize("count", ["True", "-1", "1e300", "x", "9" * 20])
def test_a_line_without_a_count_is_not_a_line_of_its_shape(path: Path, count: str) -> None:
    """A shape whose only line has an impossible count gets another line at once."""
    path.write_text(f"{HEAD}\n{line(1).replace(',1,0', f',{count},0')}\n")

    assert entered(CaptureFile(OP, path), 1) == {1}
    assert path.read_text().endswith(f"\n{line(1)}\n")
