"""The production op before and after tuning, and the rows that are replaced."""

from __future__ import annotations

import io
import os
from pathlib import Path

import attrs
import pytest
from rich.console import Console
from tunedgemm.analysis.compare import compare, print_compared
from tunedgemm.device import device_of
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.tuner import Options
from tunedgemm.tuner.trial import Outcome

OP = op_named("a16w16")
QUICK = Options(libtype="turbo", device="cpu", iters=15, warmup=2, seconds=0.1)


def wide(m: int) -> Shape:
    return Shape("a16w16", m, 64, 128, "fp32")


def kernels(path: Path) -> dict[int, str]:
    return {found.shape.m: found.solution.kernel_name for found in read_rows(path, OP)[0]}


@pytest.mark.nightly
def test_compare_in_worker_processes(tmp_path, brittle, listed, row):
    """One worker tunes and another compares; the row of a crashing kernel is replaced."""
    table = tmp_path / "table.csv"
    write_rows(table, OP, [row(wide(2), "", solution=Solution("brittle", "dies"))])
    options = attrs.evolve(QUICK, libtype="brittle", all=True, iters=2, warmup=1, kernel_timeout=10.0)

    compared = compare("a16w16", listed, table, options, update=True)

    decisions = {change.shape.m: change.decision for change in compared.changes}
    assert decisions[2] == "no_baseline"
    assert set(decisions) == {1, 2, 4}
    assert compared.failed == []
    assert kernels(table)[2] == "good"


class TestCompare:
    """Tuning into a candidate table, and the rows that reach the output."""

    @pytest.fixture
    def tables(self, tmp_path, row):
        """Write a table with a slow, a wrong and a tuned row, next to rows that must stay."""

        def make(**more):
            path = tmp_path / "table.csv"
            rows = [row(wide(1), "slow", **more), row(wide(2), "zeros", **more), row(wide(4), "twin", **more)]
            rows += [row(wide(99), "slow", extra=(("note", "by hand"),)), row(wide(1), "k", gfx="gfx942", cu_num=304, device="")]
            write_rows(path, OP, rows)
            return path

        return make

    def compared(self, table, listed, **more):
        options = attrs.evolve(QUICK, all=True)
        return compare("a16w16", listed, table, options, **{"update": False, **more})

    def test_the_table_is_not_touched_without_update(self, tables, here, listed, turbo):
        """Decisions are made and reported; the file has the bytes that it had, and the candidate the new rows."""
        here(turbo("fast", "twin", "zeros", "slow"))
        table = tables()
        before = table.read_bytes()

        compared = self.compared(table, listed)

        assert table.read_bytes() == before
        decisions = {change.shape.m: (change.decision, change.updated) for change in compared.changes}
        assert decisions == {1: ("threshold_met", False), 2: ("no_baseline", False), 4: ("skip", False)}
        assert set(kernels(compared.candidate).values()) <= {"fast", "twin", "slow", "k"}
        assert {change.shape.m: change.count for change in compared.changes}[2] == 10
        first = compared.changes[0]
        assert first.improvement_pct == pytest.approx(66.7, abs=1.0)
        assert (first.before.us, first.after.us) == (pytest.approx(30, rel=0.01), pytest.approx(10, rel=0.01))
        assert not compared.failed
        text = compared.report.read_text()
        assert "Total shapes: 3 | Would update: 2 (improved: 1, new: 1) | Skipped: 1" in text
        assert ": unchanged. Re-run with --update_improved" in text

    def test_update_replaces_the_rows_that_qualify_and_no_others(self, tables, here, listed, turbo, row):
        """The slow and the wrong row are replaced; the tie, other devices' rows and columns of the user stay."""
        here(turbo("fast", "zeros", "slow", "twin"))
        table = tables()
        rows_before = {found.key: found for found in read_rows(table, OP)[0]}

        compared = self.compared(table, listed, update=True)

        rows_after = {found.key: found for found in read_rows(table, OP)[0]}
        changed = {key[3].m for key in rows_after if rows_after[key] != rows_before[key]}
        assert set(rows_after) == set(rows_before)
        assert changed == {1, 2} == {change.shape.m for change in compared.changes if change.updated}
        assert all(rows_after[row(wide(m), "").key].solution.kernel_name in ("fast", "twin") for m in (1, 2))
        assert rows_after[row(wide(99), "").key].extra == (("note", "by hand"),)

    def test_a_row_without_a_device_is_replaced_in_its_place(self, tables, here, listed, turbo):
        """AITER's rows name no device,
        so a new row next to one with a lower time would never be used."""
        here(turbo("fast", "zeros", "slow", "twin"))
        table = tables(device="")

        compared = self.compared(table, listed, update=True)

        assert {change.shape.m: change.decision for change in compared.changes} == {1: "threshold_met", 2: "no_baseline", 4: "skip"}
        found = [one for one in read_rows(table, OP)[0] if one.shape == wide(1) and one.gfx == device_of(-1).gfx]
        assert [(one.device, one.solution.kernel_name in ("fast", "twin")) for one in found] == [("", True)]

    def test_shapes_of_the_table_are_skipped_without_all(self, tables, here, listed, turbo):
        """As in tuning: shapes with rows are not tuned, so nothing is compared."""
        here(turbo("fast", "twin", "zeros", "slow"))

        compared = compare("a16w16", listed, tables(), QUICK, update=True)

        assert compared.changes == ()
        assert {shape.m for shape in compared.skipped} == {1, 2, 4}

    def test_a_table_that_others_change_meanwhile_keeps_their_rows(self, tables, here, listed, turbo):
        """The row that would be replaced is not the one that was compared: it stays, and the report says why."""
        here(turbo("fast", "twin", "zeros", "slow"))
        table = tables()

        def others(place, event):
            if isinstance(event, Outcome) and event.task.shape.m == 4:
                rows = [one if one.shape != wide(1) or one.cu_num == 304 else attrs.evolve(one, us=4.0) for one in read_rows(table, OP)[0]]
                write_rows(table, OP, rows)

        compared = self.compared(table, listed, update=True, progress=others)

        assert {change.shape.m: change.updated for change in compared.changes} == {1: False, 2: True, 4: False}
        assert "changed during the comparison" in compared.changes[0].reason
        assert kernels(table)[2] != "zeros"
        assert any(one.us == 4.0 for one in read_rows(table, OP)[0])

    def test_an_output_that_does_not_exist_yet(self, tmp_path, here, listed, turbo):
        """The baseline is dispatch without the output;
        --update creates it with only the qualifying rows."""
        here(turbo("slow", "fast"))

        compared = self.compared(tmp_path / "new.csv", listed, update=True)

        assert {str(change.before.solution) for change in compared.changes} == {"torch:native"}
        assert {change.decision for change in compared.changes} == {"skip"}
        assert not (tmp_path / "new.csv").exists()

    def test_a_shape_without_a_solution_is_reported(self, tmp_path, here, listed, turbo):
        """It has no row to compare, and counts as failed."""
        here(turbo("zeros"))

        compared = self.compared(tmp_path / "new.csv", listed, update=True)

        assert {shape.m for shape in compared.failed} == {1, 2, 4}
        assert "no solution passed: a16w16 M=1" in compared.report.read_text()

    def test_the_configured_layers_decide_both_sides(self, tmp_path, here, listed, monkeypatch, turbo, row):
        """A table that ranks above the output hides its rows on both sides, so nothing is gained."""
        here(turbo("fast", "twin", "zeros", "slow"))
        top = tmp_path / "top.csv"
        write_rows(top, OP, [row(wide(m), "slow") for m in (1, 2, 4)])
        home = Path(os.environ["TUNEDGEMM_HOME"])
        home.mkdir()
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{top}{os.pathsep}default")

        compared = self.compared(home / "bf16_tuned_gemm.csv", listed, update=True)

        assert {(str(change.after.solution), change.reason) for change in compared.changes} == {
            ("turbo:slow", "the same solution serves it")
        }

    def test_shapes_that_cannot_be_compared_are_errors(self, tmp_path, here, listed, turbo):
        """Pins, clusters and invalid thresholds are refused; and two at once on one table."""
        here(turbo("fast"))
        for options, least, message in [
            (Options(batch_invariant=True), 3.0, "a pin is not chosen per shape"),
            (Options(executor="ray"), 3.0, "on this machine"),
            (QUICK, -1.0, "--min_improvement_pct"),
        ]:
            with pytest.raises(UserError, match=message):
                compare("a16w16", listed, tmp_path / "t.csv", options, update=False, min_improvement_pct=least)

        def again(place, event):
            with pytest.raises(UserError, match="another process is comparing it"):
                compare("a16w16", listed, tmp_path / "t.csv", QUICK, update=False)
            refused.append(event)

        refused = []
        compare("a16w16", listed, tmp_path / "t.csv", QUICK, update=False, progress=again)
        assert refused

    def test_an_interrupted_comparison_resumes(self, tables, here, listed, turbo):
        """The same command does not tune finished shapes again, but compares them."""
        here(turbo("fast", "twin", "zeros", "slow"))
        table, seen = tables(), []

        def stop(place, event):
            if isinstance(event, Outcome):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.compared(table, listed, progress=stop)
        compared = self.compared(table, listed, progress=lambda place, event: seen.append(event))

        assert {change.shape.m for change in compared.changes} == {1, 2, 4}
        resumed = [event for event in seen if isinstance(event, Outcome) and not event.seconds]
        assert len(resumed) == 1

    def test_a_comparison_is_readable(self, tables, here, listed, turbo):
        """A line has both solutions of a shape, the gain, the decision and its reason."""
        here(turbo("fast", "twin", "zeros", "slow"))
        compared = self.compared(tables(), listed, update=True)
        out = io.StringIO()

        print_compared(compared, Console(file=out, width=220))

        text = out.getvalue()
        assert all(word in text for word in ("turbo:slow", "mismatch:err_ratio", "UPDATE", "NEW", "2 rows replaced in"))
        assert "Compare Report" in text and "Updated: 2 (improved: 1, new: 1)" in text
        assert str(compared.candidate) in text
