"""Published tables: read as any table, and refused once a byte of them changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, fold, infer_op, read_rows, upsert, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import Provenance, provenance_of, published_text, refuse_published
from tunedgemm.table.source import open_source
from tunedgemm.tuner.store import Store

OP = op_named("a16w16")
STATED = Provenance("a16w16", {"device": "sm_90, 132 SMs", "driver": "NVIDIA 570.86", "tuned": "2026-11-24"})


def row(m: int, us: float = 5.0) -> Row:
    return Row(Shape("a16w16", m, 64, 128), "sm_90", 132, "nvidia-h200", Solution("triton", f"k{m}"), us)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a published table of two rows, next to its source `plain.csv`."""
    write_rows(tmp_path / "plain.csv", OP, [row(1), row(2)])
    path = tmp_path / "published.csv"
    path.write_text(published_text(STATED, (tmp_path / "plain.csv").read_text()))
    return path


def test_it_reads_as_its_table(published: Path) -> None:
    """Every reader returns the rows of the table that was published, with the lines of the file."""
    rows, problems = read_rows(published, OP)
    assert rows == read_rows(published.parent / "plain.csv", OP)[0] == list(open_source(published, OP)) and not problems
    lines = published.read_text().splitlines()
    assert [f"k{found.shape.m}" in lines[found.line - 1] for found in rows] == [True, True]
    assert provenance_of(published) == STATED and provenance_of(published.parent / "plain.csv") is None


def test_other_line_ends_and_a_mark_keep_the_checksum(published: Path) -> None:
    """A checkout with other line ends, and a byte order mark of an editor, are no change."""
    published.write_bytes(b"\xef\xbb\xbf" + published.read_bytes().replace(b"\n", b"\r\n"))
    assert len(read_rows(published, OP)[0]) == 2 == len(open_source(published, OP))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("k1", "k9", "the checksum is not that of its content"),
        ("570.86", "580.95", "the checksum is not that of its content"),
        ("# driver: NVIDIA 570.86\n", "", "the checksum is not that of its content"),
        ("# sha256: ", "# sha255: ", "the file states none"),
        ("# op: ", "# op ", "damaged provenance in line 2"),
        ("# driver", "# device", "damaged provenance in line 4"),
        ("table: 1", "table: one", "damaged provenance in its first line (got 'one')"),
        ("table: 1", f"table: {'1' * 5000}", "damaged provenance in its first line"),
        ("table: 1", "table: 2", "published in a later format (got 2; this tunedgemm reads 1)"),
        ("\nsm_90,132,2,64", "\nsm_90,132,4,64", "the checksum is not that of its content"),
    ],
)
def test_a_changed_file_serves_no_call(published: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, fault: str) -> None:
    """Any change is named by every reader, and a look-up finds none of the rows."""
    text = published.read_text()
    assert text.count(old) >= 1
    published.write_text(text.replace(old, new, 1))
    for read in (lambda: read_rows(published, OP), lambda: open_source(published, OP)):
        with pytest.raises(TableError, match=r"published\.csv: ") as raised:
            read()
        assert fault in str(raised.value) and ";" in str(raised.value)
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(published))
    table = Table.load(OP)
    assert not table.rows and fault in str(table.problems[0])


def test_it_does_not_change(published: Path) -> None:
    """The tuner, a merge and an upsert refuse to write into it, before anything is measured."""
    before = published.read_bytes()
    store = Store(OP, published)
    for write in (lambda: upsert(published, OP, [row(3)]), lambda: fold(published, OP, [row(3)]), lambda: store.open({})):
        with pytest.raises(TableError, match=r"a published table, which does not change; copy its rows with `tunedgemm table merge"):
            write()
    assert published.read_bytes() == before


def test_it_states_its_op(published: Path) -> None:
    """The stated op precedes the columns and the file's name."""
    other = published.with_name("a8w8_tuned_gemm.csv")
    other.write_text(published_text(Provenance("batched_bf16"), "B,M,N,K\n"))
    assert infer_op([published]) is OP and infer_op([other]).name == "batched_bf16"


def test_facts_are_single_lines() -> None:
    """A fact with a line break or a control character cannot forge another line."""
    lines = published_text(Provenance("a16w16", {"driver": "1\n# sha256: 0\x1b[2J", "empty": ""}), "M\n").splitlines()
    assert lines[2] == "# driver: 1 # sha256: 0\\x1b[2J" and lines[3].startswith("# sha256: ") and lines[4] == "M"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Neither question about a file waits for the writer of a pipe."""
    os.mkfifo(tmp_path / "pipe.csv")
    refuse_published(tmp_path / "pipe.csv")
    assert provenance_of(tmp_path / "pipe.csv") is None
