"""``tunedgemm table publish``: provenance from the trial log, rows without a gain, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from tunedgemm import device
from tunedgemm.cli import main
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.published import provenance_of
from tunedgemm.timing import Timing
from tunedgemm.tuner.store import Store
from tunedgemm.tuner.trial import Outcome, Place, Task

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200", 0)
PLACE = Place(H200, "secret-host")
NATIVE = Solution("torch", "native")
#: M -> the winner's microseconds where torch takes 10; the last one is torch's own.
US = {1: 5.0, 2: 9.95, 4: 9.0, 8: 10.0}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a table that the store wrote with its log, as a run on an H200 would."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n")
    monkeypatch.setattr(device, "DRIVERS", {"NVIDIA": tmp_path / "version"})
    store = Store(OP, tmp_path / "table.csv")
    store.open({"torch": "2.13.0", "triton of tunedgemm-triton": "0.1.0", "torch of tunedgemm": "0.1.0"})
    store.use(H200, {"torch": "2.13.0"})
    for m, us in US.items():
        shape = Shape("a16w16", m, 64, 128)
        baseline = Timing(shape, NATIVE, "ok", us=10.0, noise=0.001)
        best = Timing(shape, Solution("triton", f"k{m}"), "ok", us=us, noise=0.002 * m) if us < 10 else baseline
        lost = Timing(shape, Solution("triton", "slow"), "screened", us=30.0)
        refused = Timing(shape, Solution("triton", "refused"), "unsupported", detail="no")
        libver = "2.13.0" if best is baseline else ""
        store.record(Outcome(Task(shape, 1), best, baseline, (best, lost, refused, baseline), libver=libver, place=PLACE))
    store.finish()
    return tmp_path / "table.csv"


def published(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["table", "publish", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_it_states_what_the_log_says(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has device, driver, versions, day, tuner, candidates and noise, and neither host nor path."""
    code, shown = published(capsys, tuned, "-o", out := tmp_path / "out.csv")
    stated = provenance_of(out)
    assert code == 0 and stated.op == "a16w16"
    assert stated.facts | {"tuned": ""} == {
        "device": "sm_90, 132 SMs (nvidia-h200)", "driver": "NVIDIA 570.86.15", "torch": "2.13.0", "tuner": "tunedgemm 0.1.0",
        "plugins": "tunedgemm-triton 0.1.0", "libraries": "torch: 2.13.0", "tuned": "", "rows": "4",
        "candidates": "11 timed, for 4 rows", "noise": "0.30 % (median of 4 rows)",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", stated.facts["tuned"])
    assert all(f"{name}: {text}" in shown for name, text in stated.facts.items())
    assert "secret-host" not in out.read_text() and str(tmp_path) not in out.read_text()
    assert read_rows(out, OP)[0] == read_rows(tuned, OP)[0]


def test_rows_without_a_gain_name_torchs_call(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows below `--least_gain` name torch's call, those without a time of torch stay out."""
    more = Row(Shape("a16w16", 16, 64, 128), "sm_90", 132, "nvidia-h200", Solution("triton", "k16"), 1.0)
    write_rows(tuned, OP, [*read_rows(tuned, OP)[0], more])
    code, _ = published(capsys, tuned, "--least_gain", 0.01, "-o", out := tmp_path / "out.csv")
    rows = {row.shape.m: row for row in read_rows(out, OP)[0]}
    assert code == 0 and {m: row.solution.kernel_name for m, row in rows.items()} == {1: "k1", 2: "native", 4: "k4", 8: "native"}
    assert (rows[2].us, rows[2].libver, rows[2].solution) == (10.0, "", NATIVE)
    facts = provenance_of(out).facts
    assert facts["of_torch"] == "2 rows: gain over torch below 1 %"
    assert facts["left_out"] == "1 row: no time of torch in the trial log"
    code, shown = published(capsys, tuned, "--least_gain", 3, "-o", tmp_path / "none.csv")
    assert code == 2 and "no row to publish (4 rows: gain over torch below 300 %;" in shown


def test_logs_of_a_merged_table_are_named(tuned: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--trials` names the logs of a merged table's parts, and the output is named for the device."""
    merged = tmp_path / "elsewhere" / "merged.csv"
    assert main(["table", "merge", str(merged), str(tuned)]) == 0
    monkeypatch.chdir(merged.parent)
    code, shown = published(capsys, merged, "--least_gain", 0.01)
    assert code == 2 and "4 rows: no time of torch in the trial log" in shown
    assert published(capsys, merged, "--least_gain", 0.01, "--trials", tuned.with_name("table.trials.jsonl"))[0] == 0
    assert len(read_rows(Path("nvidia-h200_bf16_tuned_gemm.csv"), OP)[0]) == 4
    code, shown = published(capsys, merged, "--trials", "nowhere.jsonl")
    assert code == 2 and "nowhere.jsonl: no such file; --trials takes trial logs" in shown


def test_a_published_table_keeps_its_origin(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Publishing a published table without its log keeps what it states."""
    (tmp_path / "a").mkdir()
    published(capsys, tuned, "-o", first := tmp_path / "a" / "first.csv")
    published(capsys, first, "-o", second := tmp_path / "a" / "second.csv")
    assert provenance_of(second) == provenance_of(first) and second.read_text() == first.read_text()


def test_refusals_name_the_remedy(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults of the table, an existing output and a wrong share are refused, and nothing is written."""
    out = tmp_path / "out.csv"
    rows = read_rows(tuned, OP)[0]
    bad = [attrs.evolve(rows[0], solution=Solution("unknown", "k")), attrs.evolve(rows[1], err_ratio=0.9)]
    write_rows(tmp_path / "bad.csv", OP, bad)
    code, shown = published(capsys, tmp_path / "bad.csv", "-o", out)
    assert code == 2 and "unknown libtype 'unknown'" in shown and "err_ratio 0.9 exceeds 0.2" in shown and "mend the table" in shown
    code, shown = published(capsys, tuned, "-o", out, "--least_gain", -1)
    assert code == 2 and "--least_gain: must be at least 0" in shown and not out.exists()
    out.touch()
    code, shown = published(capsys, tuned, "-o", out)
    assert code == 2 and "exists already; name a new file with -o" in shown and not out.read_text()
