"""``tunedgemm report``: files in, one page out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows

pytest.importorskip("vl_convert")

SHAPE = Shape("a16w16", 64, 2048, 4096)


@pytest.fixture
def folder(tmp_path, monkeypatch, trial_log):
    """Stand in a folder with a table and its trial log."""
    monkeypatch.chdir(tmp_path)
    trial_log((SHAPE, "slow", 0, 12.0), (SHAPE, "fast", 0, 8.0))
    write_rows(Path("tuned.csv"), op_named("a16w16"), [Row(SHAPE, "cpu-avx2", 2, "cpu", Solution("fake", "fast"), 8.0)])
    return tmp_path


def test_a_table_becomes_a_page(folder, capsys):
    """Write the page, and say what it holds."""
    assert main(["report", "tuned.csv", "-o", "out.html"]) == 0

    assert (folder / "out.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == "out.html: 1 shape, 2 timings\n"
    assert main(["report", "tuned.csv", "-o", "out.html"]) == 0  # a report is replaced


def test_damaged_lines_change_the_exit_code(folder, capsys):
    """Name the file, the number and the first damaged line."""
    with (folder / "tuned.trials.jsonl").open("a") as file:
        file.write('{"schema": 2, "kind"\n')

    assert main(["report", "tuned.csv"]) == 1
    assert "left out: tuned.trials.jsonl: 1 line; the page names the first: line 4: not JSON" in capsys.readouterr().out


def test_without_files_the_users_tables_are_shown(folder, monkeypatch, capsys):
    """Show every table of the user folder, and say so where there is none."""
    assert main(["report"]) == 2
    assert "no tuned table; run `tunedgemm tune`" in capsys.readouterr().err

    monkeypatch.setenv("TUNEDGEMM_HOME", str(folder))
    (folder / "tuned.csv").rename(folder / "bf16_tuned_gemm.csv")
    assert main(["report"]) == 0
    assert "report.html: 1 shape, 0 timings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tuned.csv", "-o", "tuned.csv"], "tuned.csv: exists and is not a report; name another file with -o"),
        (["tuned.csv", "-o", "no/folder/x.html"], "no/folder/x.html: cannot be written: No such file or directory"),
        (["missing.csv"], "missing.csv: cannot be read: No such file or directory"),
        (["tuned.csv", "--device", "H200"], "a device must be GFX:CU"),
        (["tuned.csv", "--op", "a1w1"], "a1w1"),
        (["list.csv"], "no tuned shape; name a table or a log"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, words, message):
    """End in one line and exit code 2, and change no file."""
    (folder / "list.csv").write_text("M,N,K\n1,2,3\n")
    before = (folder / "tuned.csv").read_bytes()

    assert main(["report", *words]) == 2

    error = capsys.readouterr().err
    assert error.startswith("tunedgemm: error: ") and error.count("\n") == 1 and message in error
    assert (folder / "tuned.csv").read_bytes() == before


def test_a_missing_library_costs_no_reading(folder, monkeypatch, capsys):
    """Name the pip command before any file is read."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    assert main(["report", "missing.csv"]) == 2
    assert "pip install 'tunedgemm[report]'" in capsys.readouterr().err


def test_two_tables_are_compared(folder, capsys):
    """Show two tables side by side, and print the counts."""
    write_rows(Path("faster.csv"), op_named("a16w16"), [Row(SHAPE, "cpu-avx2", 2, "cpu", Solution("fake", "new"), 4.0)])

    assert main(["report", "tuned.csv", "faster.csv"]) == 0
    assert "faster.csv against tuned.csv: 0 slower, 1 faster, 0 equal, 0 new, 0 gone" in capsys.readouterr().out

    assert main(["report", "tuned.csv", "--against", "faster.csv"]) == 0
    assert "tuned.csv against faster.csv: 1 slower, 0 faster" in capsys.readouterr().out


def test_plots_go_to_a_folder(folder, capsys):
    """Draw the plots, and say how many."""
    assert main(["report", "tuned.csv", "--plots", "pictures"]) == 0

    assert "pictures: 10 pictures" in capsys.readouterr().out
    names = ("candidates", "cost", "rate-by-m", "roofline", "won")
    assert {path.name for path in Path("pictures").iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
