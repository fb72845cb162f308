"""Bit classes in tables: the column, the look-up of one class, and rows that break a group."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.ops.scale_order import M_MAJOR, ROW, with_order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.bit_classes import class_faults, one_class, pins_of
from tunedgemm.table.csvfile import fold, read_rows, upsert, write_rows
from tunedgemm.table.folders import table_layers, tuned_path
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.text.printable import warn_once

OP, BLOCKS = op_named("a16w16"), op_named("a8w8_blockscale")
H200 = Device("sm_90", 132, "nvidia-h200")
A, B = "a" * 16, "0123456789abcdef"


def row(kernel: str, m: int, bit_class: str = A, us: float = 5.0, *, n: int = 256, device: str = H200.name, **more: str) -> Row:
    shape = Shape("a16w16", m, n, 512, **more)
    return Row(shape, "sm_90", 132, device, Solution("triton", kernel), us, bit_class=bit_class)


def asked(m: int, n: int = 256, **more: str) -> Shape:
    return Shape("a16w16", m, n, 512, **more)


def found(table: Table, shape: Shape) -> list[str]:
    return [f"{match.row.solution.kernel_name} {match.granularity}" for match in table.candidates(shape, H200)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bf16_tuned_gemm.csv"


class TestColumn:
    """The column is in files with class rows alone."""

    def test_is_read_back(self, path: Path) -> None:
        """Class rows keep their class, and the column follows libver."""
        rows = [row("pin", 0), row("plain", 16, "")]
        write_rows(path, OP, rows)
        assert path.read_text().splitlines()[0].endswith(",libver,bit_class")
        assert read_rows(path, OP) == (rows, [])

    def test_is_absent_without_classes(self, path: Path) -> None:
        """A table without classes has the columns that it had before, also after a rewrite."""
        write_rows(path, OP, [row("plain", 16, "")])
        before = path.read_text()
        assert "bit_class" not in before
        upsert(path, OP, [row("plain", 16, "")])
        assert path.read_text() == before

    def test_comes_with_the_first_class_row(self, path: Path) -> None:
        """An upsert of a class row into a plain file appends the column; other lines keep their text."""
        write_rows(path, OP, [row("plain", 16, "")])
        upsert(path, OP, [row("pin", 0)])
        assert {each.bit_class for each in read_rows(path, OP)[0]} == {"", A}

    @pytest.mark.parametrize("text", ["a" * 15, "A" * 16, "a" * 17, "class one", "1.2e15"])
    def test_edited_by_hand_is_a_fault_of_its_line(self, path: Path, text: str) -> None:
        """Any other text leaves the line out, whichever way the file is read."""
        write_rows(path, OP, [row("pin", 0), row("other", 16)])
        path.write_text(path.read_text().replace(f"{A}\n", f"{text}\n", 1))
        for problems in (read_rows(path, OP)[1], Table.load(OP, [path]).problems):
            assert [problem.line for problem in problems] == [2]
            assert "'bit_class' must be 16 hexadecimal digits" in problems[0].reason
        with pytest.raises(TableError, match="16 hexadecimal digits"):
            row("pin", 0, text)


class TestLookUp:
    """The mode looks up the rows of one class."""

    rows = (
        row("pin", 0, us=9.0),
        row("exact", 13),
        row("padded", 16),
        row("other", 8, B),
        row("plain", 5, "", 0.1),
        row("alone", 16, n=512),
    )

    def test_exact_then_padded_then_nearest_then_any(self) -> None:
        """The row with M = 0 comes last, and neither another class nor a plain row serves."""
        table = Table(OP, [self.rows], invariant=True)
        assert found(table, asked(13)) == ["exact exact", "padded fine", "pin pinned"]
        assert found(table, asked(8)) == ["padded fine", "exact nearest", "pin pinned"]

        assert found(table, asked(4000)) == ["padded nearest", "pin pinned"]
        assert found(table, asked(16, 512)) == []

    def test_outside_the_mode_nothing_changes(self) -> None:
        """Pins come first there, and rows serve whatever their class is."""
        plain = Table(OP, [[attrs.evolve(each, bit_class="") for each in self.rows]])
        for m in (5, 8, 13, 16, 4000):
            assert found(Table(OP, [self.rows]), asked(m)) == found(plain, asked(m))

    def test_other_shapes_are_not_equivalent(self) -> None:
        """A row of another output dtype, which AITER's key cannot tell, has other bits."""
        table = Table(OP, [[row("pin", 0, epilogue="bias")]], invariant=True)
        assert found(table, asked(8, epilogue="bias")) == ["pin pinned"]
        assert found(table, asked(8, epilogue="bias", bias_dtype="fp32")) == []

    def test_the_higher_layer_determines_the_class(self) -> None:
        """Rows of a lower layer serve if they have its class."""
        below = [row("low", 16), row("faster", 8, B, 1.0), row("low pin", 0, B, 1.0)]
        table = Table(OP, [[row("pin", 0)], below], invariant=True)
        assert found(table, asked(16)) == ["low exact", "pin pinned"]
        assert found(table, asked(8)) == ["low fine", "pin pinned"]

    def test_rows_that_break_a_group_are_problems(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The log names the first and how many more there are."""
        write_rows(path, OP, self.rows)
        with caplog.at_level(logging.WARNING):
            table = Table.load(OP, [path], invariant=True)
        assert sorted(problem.line for problem in table.problems) == [5, 7]
        assert "and 1 more; `tunedgemm table check` lists them" in caplog.text

    def test_of_classes_is_the_table_in_the_mode(self, path: Path) -> None:
        """A table that was loaded outside the mode gives the same answers."""
        write_rows(path, OP, self.rows)
        loaded, other = Table.load(OP, [path], invariant=True), Table.load(OP, [path]).of_classes()
        assert loaded.fingerprint() == other.fingerprint() != Table.load(OP, [path]).fingerprint()
        assert [found(loaded, asked(m)) for m in range(1, 99)] == [found(other, asked(m)) for m in range(1, 99)]

    def test_the_fingerprint_has_the_class(self) -> None:
        """Ranks whose rows differ in their class alone have other fingerprints."""
        first, second = (Table(OP, [[row("pin", 0, bit_class)]], invariant=True).fingerprint() for bit_class in (A, B))
        assert first != second

    @pytest.mark.parametrize("seed", range(20))
    def test_any_table_offers_one_class(self, seed: int) -> None:
        """Whatever rows there are, in any layers, all offers for all M of a weight have one class."""
        draw, sizes = random.Random(seed), (0, 0, 1, 8, 16, 100, 128)
        rows = [
            row(f"k{at}", draw.choice(sizes), draw.choice((A, B, "")), draw.uniform(1, 9), device=draw.choice((H200.name, "")))
            for at in range(draw.randrange(1, 40))
        ]
        cut = draw.randrange(len(rows))
        table = Table(OP, [rows[:cut], rows[cut:]], invariant=True)
        offered = [[match.row for match in table.candidates(asked(m), H200)] for m in (1, 2, 8, 13, 100, 127, 4096)]
        classes = {each.bit_class for each in itertools.chain(*offered)}
        assert len(classes) <= 1 and "" not in classes
        assert all(offered) == any(offered) and all(any(not each.shape.m for each in each_m) for each_m in offered if each_m)


class TestFiles:
    """Files of the mode."""

    def test_the_users_table_is_in_its_own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outside the mode it is not read; a variable names one file for both."""
        monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
        assert tuned_path(OP, invariant=True) == tmp_path / "batch_invariant" / "bf16_tuned_gemm.csv"
        layers = [[layer.paths for layer in table_layers(OP, invariant=on) if layer.name == "user"] for on in (False, True)]
        assert layers == [[(tuned_path(OP),)], [(tuned_path(OP, invariant=True),)]]
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "one.csv"))
        assert tuned_path(OP, invariant=True) == tuned_path(OP) == tmp_path / "one.csv"

    def test_a_table_without_classes_is_named_once(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The warning says how to tune classes."""
        write_rows(path, OP, [row("plain", 16, "")])
        warn_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert not any(Table.load(OP, [path], invariant=True).rows for _ in range(2))
        assert caplog.text.count(f"{path}: no row has a bit class") == 1 and "tune --batch-invariant" in caplog.text

    def test_an_upsert_of_a_new_class_removes_the_old_one(self, path: Path) -> None:
        """Lines of the group's other M go with it; other groups and plain lines stay."""
        write_rows(path, OP, [row("pin", 0), row("old", 16), row("plain", 8, ""), row("other", 0, n=512)])
        upsert(path, OP, [row("new", 0, B)])
        assert sorted(each.solution.kernel_name for each in read_rows(path, OP)[0]) == ["new", "other", "plain"]

    def test_a_merge_keeps_one_class(self, path: Path) -> None:
        """The class of the fastest row with M = 0 stays, and the conflict is named."""
        write_rows(path, OP, [row("pin", 0, us=9.0), row("old", 16, us=1.0), row("older", 8)])
        conflicts = fold(path, OP, [row("better", 0, B, 8.0), row("new", 16, B, 2.0)])
        assert [each.solution.kernel_name for each in read_rows(path, OP)[0]] == ["better", "new"]
        named = [(each.kept.solution.kernel_name, [other.solution.kernel_name for other in each.others]) for each in conflicts]
        assert named == [("better", ["pin"]), ("new", ["old"]), ("better", ["older"])]


def test_faults_name_the_row_and_the_class() -> None:
    """A group without M = 0, and a row of another class than the fastest row with M = 0."""
    rows = [row("slow", 0, us=9.0), row("pin", 0, B), row("plain", 1, ""), row("alone", 4, n=512)]
    faults = {each.solution.kernel_name: why for each, why in class_faults(rows)}
    assert faults.keys() == {"slow", "alone"}
    assert f"its class is {A}, that of the row with M = 0 is {B}" in faults["slow"]
    assert "no row with M = 0 of N=512, K=512" in faults["alone"]


def test_a_row_for_any_m_has_no_order_of_scales() -> None:
    """Such a row is never looked up in the mode, so it is a fault and gives its group no class."""
    shape = Shape("a8w8_blockscale", 0, 256, 512, "fp8_e4m3fn", scale="block")
    pin, other = (attrs.evolve(row("pin", 0), shape=with_order(shape, order)) for order in (ROW, M_MAJOR))
    assert not list(class_faults([pin])) and Table(BLOCKS, [[pin]], invariant=True).pin(shape.with_m(3), H200)
    [(fault, why)] = class_faults([other])
    assert fault is other and "must have the default order of scales (got m_major)" in why
    assert not Table(BLOCKS, [[other]], invariant=True).pin(other.shape.with_m(3), H200)


def test_one_class_leaves_plain_rows_alone() -> None:
    """Only a plain row with the key of a class row goes."""
    plain, twin = row("plain", 8, "", 1.0), row("twin", 0, "", 1.0)
    assert one_class([plain, twin]) == [plain, twin]
    assert one_class([plain, twin, row("pin", 0)]) == [plain, row("pin", 0)]


def test_a_row_for_any_m_names_a_kernel() -> None:
    """torch's library chooses kernels by M, so a row by hand would give several bits as one class."""
    native = attrs.evolve(row("native", 0), solution=Solution("torch", "native"))
    rows = [native, row("one", 1)]
    assert not pins_of(rows)
    faults = [why for _, why in class_faults(rows)]
    assert "cannot name torch's call, whose library chooses kernels by M (got torch:native)" in faults[0]
    assert "no row with M = 0" in faults[1]
