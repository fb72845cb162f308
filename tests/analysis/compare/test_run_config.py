"""run_config: timing and checking the production op without tuning."""

from __future__ import annotations

import io
import os
from pathlib import Path

import attrs
import pytest
import tunedgemm
from rich.console import Console
from tunedgemm.analysis.compare import print_checked, run_config
from tunedgemm.device import device_of
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.untuned import read_untuned
from tunedgemm.tuner import Options

OP = op_named("a16w16")
QUICK = Options(libtype="turbo", device="cpu", iters=15, warmup=2, seconds=0.1)


def wide(m: int) -> Shape:
    return Shape("a16w16", m, 64, 128, "fp32")


class TestRunConfig:
    """The production op without tuning."""

    def test_each_row_of_a_table_has_its_status(self, tmp_path, here, turbo, row):
        """Each row reports right, wrong, raising or not installed;
        failed rows are returned as shapes."""
        here(turbo("good", "zeros", "raises"), bench=None)
        table = tmp_path / "table.csv"
        rows = [row(wide(1), "good"), row(wide(2), "zeros"), row(wide(3), "raises"), row(wide(4), "x", solution=Solution("absent", "x"))]
        rows += [
            row(wide(5), "zeros", gfx="gfx942", cu_num=304),
            row(wide(6), "zeros", device="another-cpu"),
            row(wide(7), "zeros", us=0.0),
        ]
        write_rows(table, OP, rows)

        checked = run_config("a16w16", None, table, QUICK)

        found = {one.shape.m: one for one in checked.served}
        assert list(found) == [1, 2, 3, 4]
        assert found[1].ok
        assert found[1].us > 0 < found[1].samples
        assert str(found[1].solution) == "turbo:good"
        assert str(table) in found[1].why
        assert found[2].status.startswith("mismatch:err_ratio=")
        assert found[3].status.startswith("error:") and "boom" in found[3].status
        assert "torch:native instead" in found[3].detail
        assert found[4].status.startswith("error:no row serves it: absent:x: libtype 'absent'")
        assert "3 rows of other devices" in " ".join(checked.notes)
        (tmp_path / "repro.csv").write_text(checked.repro)
        assert [one.shape for one in read_untuned(tmp_path / "repro.csv", OP)] == [wide(2), wide(3), wide(4)]

    def test_the_errors_of_a_row_may_be_those_of_its_tuning(self, tmp_path, here, turbo, row):
        """About 7 % of wrong elements are a mismatch, unless the row was tuned with that many; AITER adds 5 %."""
        here(turbo("rough"))
        shape, table = Shape("a16w16", 16, 256, 128), tmp_path / "table.csv"
        statuses = []
        for err_ratio in (0.0, 0.05):
            write_rows(table, OP, [row(shape, "rough", err_ratio=err_ratio)])
            statuses.append(run_config("a16w16", None, table, QUICK).served[0].status)

        assert statuses[0].startswith("mismatch:err_ratio=0.07")
        assert statuses[1] == "ok"

    def test_without_a_table_the_shapes_are_served_as_configured(self, tmp_path, here, listed, monkeypatch, turbo, row):
        """The user's table answers where it has a row, torch where it has none; both are right."""
        here(turbo("good"))
        home = Path(os.environ["TUNEDGEMM_HOME"])
        home.mkdir()
        write_rows(home / "bf16_tuned_gemm.csv", OP, [row(wide(2), "good")])

        checked = run_config("a16w16", listed, None, QUICK)

        assert {one.shape.m: str(one.solution) for one in checked.served} == {1: "torch:native", 2: "turbo:good", 4: "torch:native"}
        assert checked.failed == []
        assert checked.repro == ""

    def test_the_process_is_unchanged(self, tmp_path, here, monkeypatch, turbo, row):
        """Neither the environment nor the default instance notices, and no shape is captured."""
        monkeypatch.setenv("AITER_TUNE_GEMM", "1")
        here(turbo("good"))
        write_rows(tmp_path / "table.csv", OP, [row(wide(1), "good")])
        before, launchers = dict(os.environ), dict(tunedgemm.tgemm.dispatcher.launchers)

        assert not run_config("a16w16", None, tmp_path / "table.csv", QUICK).failed

        assert dict(os.environ) == before
        assert tunedgemm.tgemm.dispatcher.launchers == launchers
        assert not Path(os.environ["TUNEDGEMM_HOME"]).exists()

    def test_a_pinned_row_is_checked_at_several_m(self, tmp_path, here, turbo, row):
        """A pinned row (M = 0) is run at several M, because it names none."""
        here(turbo("good"))
        write_rows(tmp_path / "table.csv", OP, [row(wide(0), "good")])

        checked = run_config("a16w16", None, tmp_path / "table.csv", QUICK)

        assert [(one.shape.m, str(one.solution), one.ok) for one in checked.served] == [(1, "turbo:good", True), (256, "turbo:good", True)]

    def test_a_shape_that_cannot_be_run_is_an_error(self, tmp_path, here, turbo, row):
        """No file, no row for this device, a cluster: each has a message with the fault."""
        here(turbo("good"))
        write_rows(tmp_path / "table.csv", OP, [row(wide(1), "good", gfx="gfx942", cu_num=304, device="amd-instinct-mi300x")])

        with pytest.raises(TableError, match=r"no row for cpu.*its rows are for gfx942/304 amd-instinct-mi300x"):
            run_config("a16w16", None, tmp_path / "table.csv", QUICK)
        with pytest.raises(TableError, match="no such file"):
            run_config("a16w16", None, tmp_path / "none.csv", QUICK)
        with pytest.raises(TableError, match="no shapes"):
            run_config("a16w16", None, None, QUICK)
        with pytest.raises(UserError, match="on this machine"):
            run_config("a16w16", None, tmp_path / "table.csv", Options(executor="ray"))


@pytest.mark.nightly
def test_a_kernel_that_ends_its_process_costs_its_shape(tmp_path, brittle, row):
    """In worker processes an abort or a hang is an error of its row; all other rows are served."""
    table = tmp_path / "table.csv"
    names = {1: "good", 2: "dies", 3: "good", 4: "hangs", 5: "good"}
    write_rows(table, OP, [row(wide(m), "", solution=Solution("brittle", name)) for m, name in names.items()])
    told = []

    checked = run_config("a16w16", None, table, attrs.evolve(QUICK, iters=2, warmup=1, kernel_timeout=10.0), progress=told.append)

    statuses = {one.shape.m: one.status for one in checked.served}
    assert [statuses[m] for m in (1, 3, 5)] == ["ok", "ok", "ok"]
    assert statuses[2].startswith("error:crashed: ") and "SIGABRT" in statuses[2]
    assert statuses[4].startswith("error:hung: ")
    assert told == list(checked.served)


def test_rows_of_several_tables_are_checked(tmp_path, here, turbo, row):
    """Of A:B both tables' rows are the only ones, and the fastest of a shape is served, as in AITER."""
    here(turbo("good", "other"))
    write_rows(tmp_path / "a.csv", OP, [row(wide(1), "good", us=5.0), row(wide(2), "good")])
    write_rows(tmp_path / "b.csv", OP, [row(wide(1), "other", us=4.0), row(wide(3), "other")])

    checked = run_config("a16w16", None, (tmp_path / "a.csv", tmp_path / "b.csv"), QUICK)

    assert {one.shape.m: one.solution.kernel_name for one in checked.served} == {1: "other", 2: "good", 3: "other"}
    assert not checked.failed and checked.kind == "tuned"


def test_results_are_readable_and_shapes_can_be_copied(tmp_path, here, turbo, row):
    """Also on a narrow terminal the lines that scripts for AITER's tuners parse are whole."""
    here(turbo("good", "zeros"))
    write_rows(tmp_path / "table.csv", OP, [row(wide(1), "good"), row(wide(2), "zeros")])
    out = io.StringIO()

    print_checked(run_config("a16w16", None, tmp_path / "table.csv", QUICK), Console(file=out, width=40))

    lines = out.getvalue().splitlines()
    assert "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count" in lines
    assert "2,64,128,False,torch.float32,torch.float32,False,False,1" in lines
    assert lines[-1] == "1 ok, 1 failed"
    statuses = [(line.partition(")")[0], line.split(" | ")[-1].strip()) for line in lines if line.endswith(("OK", "MISMATCH"))]
    assert statuses == [("(1, 64, 128, fp32", "OK"), ("(2, 64, 128, fp32", "MISMATCH")]
    assert any(line.startswith("reason: err_ratio=") for line in lines)
    assert any("Repro CSV (1 failed shapes)" in line for line in lines)


@pytest.mark.gpu
def test_on_a_gpu_the_op_is_timed_in_a_graph(tmp_path):
    """Through dispatch, captured, in a child process."""
    shape = Shape("a16w16", 16, 4096, 4096)
    device = device_of(0)
    fields = {"gfx": device.gfx, "cu_num": device.cu_num, "device": device.name}
    write_rows(tmp_path / "table.csv", OP, [Row(shape=shape, solution=Solution("torch", "native"), us=9.0, **fields)])

    (served,) = run_config("a16w16", None, tmp_path / "table.csv", Options()).served

    assert served.ok
    assert served.origin == "table"
    assert 3 < served.us < 1000
