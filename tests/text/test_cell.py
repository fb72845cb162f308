"""Cell: a table gives back each text that it takes, and refuses the others where they are made."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.device import device_of
from tunedgemm.errors import PluginError, TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import csvfile
from tunedgemm.table.csvfile import Row, read_rows, upsert, write_rows
from tunedgemm.table.untuned import Untuned
from tunedgemm.testing.fakes import fake_backend, with_hooks
from tunedgemm.text.cell import is_kept

OP = op_named("a16w16")

#: Texts that a table would lose, change, or be broken by.
LOST = ["a\0b", "a\nb", "a\n", "a\rb", "a\r", " a", "a ", "a\u2003", "\ud800", "x\udfff", "x" * 9000]
#: Unusual texts that it keeps.
KEPT = ["", "a b", "µ日本語🙂", "a\tb", "<<<<<<< a", "0x1f", "\x1b[0m", "a\u2028b", "a;b"]


def row(m: int, **more: object) -> Row:
    fields = {"gfx": "gfx942", "cu_num": 304, "device": "", "solution": Solution("mine", "k"), "us": 1.0, **more}
    return Row(shape=Shape("a16w16", m, 64, 64), **fields)


@pytest.mark.parametrize("text", LOST, ids=ascii)
def test_a_lost_text_is_refused_where_it_is_made(text):
    """A kernel's name, a further column, a device, a version and a layer must be texts that a table keeps."""
    assert not is_kept(text)
    with pytest.raises(PluginError, match="libtype 'mine': 'kernel_name' must be"):
        Solution("mine", text)
    with pytest.raises(PluginError, match="libtype 'mine': 'block' must be"):
        Solution("mine", "k", extra=(("block", text),))
    for field in ("device", "libver"):
        with pytest.raises(TableError, match=f"'{field}' must be one line of text"):
            row(1, **{field: text})
    with pytest.raises(TableError, match="'layer' must be one line of text"):
        Untuned(Shape("a16w16", 1, 64, 64), layer=text)


@pytest.mark.parametrize("name", ["nan", "NULL", "n/a", "None"])
def test_a_kernel_whose_name_means_no_name(name):
    """A kernel's name that a table reads as none is refused."""
    with pytest.raises(PluginError, match="'kernel_name' must not be a table's word for no name"):
        Solution("mine", name)


@pytest.mark.parametrize("text", KEPT, ids=ascii)
def test_a_kept_text_is_read_as_it_was_written(tmp_path, text):
    """Unusual texts survive a table, also in its first column."""
    rows = [row(1, solution=Solution("mine", text), libver=text, device=text), row(2, extra=(("note", text),) if text else ())]
    upsert(tmp_path / "t.csv", OP, rows)
    assert read_rows(tmp_path / "t.csv", OP) == (rows, [])


@pytest.mark.parametrize("version", ["1\n2", "1\0", "\ud800", "x" * 9000], ids=ascii)
def test_a_lost_library_version_is_unknown(caplog, version):
    """A library version that a table cannot keep is none, with a warning that names the libtype."""
    mine, cpu = fake_backend("mine"), device_of(-1)
    assert with_hooks(mine, library_version=lambda: version).library_version(cpu) == ""
    [record] = caplog.records
    assert record.getMessage().startswith("libtype 'mine': library_version() must be one line of text")
    assert with_hooks(mine, library_version=lambda: " 1.2\r\n").library_version(cpu) == "1.2"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", LOST, ids=ascii)
def test_an_op_that_formats_a_lost_text_costs_its_row_alone(tmp_path, monkeypatch, caplog, text):
    """A row whose cells would not come back is left out and named, and the others are written."""
    real = csvfile.record_of

    def record_of(of: Row, op: object) -> object:
        record = real(of, op)
        return attrs.evolve(record, cells=record.cells | {"kernelName": text * 8}) if of.shape.m == 64 else record

    monkeypatch.setattr(csvfile, "record_of", record_of)
    path = tmp_path / "t.csv"
    for write in (upsert, write_rows):
        caplog.clear()
        write(path, OP, [row(m) for m in (32, 64, 128)])
        rows, problems = read_rows(path, OP)
        assert ([found.shape.m for found in rows], problems) == ([32, 128], [])
        [record] = caplog.records
        assert f"{path}: left out: the row of mine:k for" in record.getMessage()
        assert "M=64" in record.getMessage()


def test_an_unknown_column_that_is_lost(tmp_path, caplog):
    """A row with another column's text that a table cannot keep is left out."""
    upsert(tmp_path / "t.csv", OP, [row(1), row(2, extra=(("note", "a\nb"),))])
    assert [found.shape.m for found in read_rows(tmp_path / "t.csv", OP)[0]] == [1]
    assert "'note' cannot be written: a table would not give back this text (got 'a\\nb')" in caplog.text
