"""``tunedgemm coverage``: its first line, its output at 80 columns, exit codes and printed
commands."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.device import current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows

OP = op_named("a16w16")
HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"
QUICK = ["--libtype", "torch", "--iters", "3", "--warmup", "1", "--seconds", "0.1", "--cache", "hot", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["coverage", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, hide: Callable[[str], None]) -> Path:
    """Return a folder with captured shapes and rows for two of the four:
    one padded, one of an absent backend."""
    hide("ck")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    lines = ("16,64,128,False,fp32,fp32,30,0", "15,64,128,False,fp32,fp32,20,0", "8,96,128,False,fp32,fp32,40,0")
    (tmp_path / "in.csv").write_text(HEAD + "\n".join(lines) + "\n4,80,128,False,fp32,fp32,0,1\n")
    here = current_device()

    def row(m: int, n: int, us: float, libtype: str, kernel: str) -> Row:
        shape = Shape("a16w16", m, n, 128, "fp32")
        return Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=Solution(libtype, kernel), us=us)

    write_rows(tmp_path / "t.csv", OP, [row(16, 64, 10.0, "torch", "native"), row(8, 96, 5.0, "ck", "k")])
    write_rows(tmp_path / "real.csv", OP, [row(15, 64, 8.0, "torch", "onednn")])
    return tmp_path


def test_the_first_line_is_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line has the share by calls and by time; graphs count by their replays."""
    code, out, err = run(capsys, "in.csv", "--table", "t.csv", "--replays", "10")

    assert (code, err) == (0, "")
    assert out.startswith("exact 30.0 % of calls, ")
    assert out.splitlines()[0].endswith(" % of the time")
    assert "100 calls of 4 shapes in in.csv, on " in out


def test_the_output_is_complete_at_80_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has each answer's share, the worst regret, unused rows with what to install, and
    the layers to tune next."""
    _, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--against", "real.csv", "--replays", "10", "--by", "layer")

    assert "exact: a row of exactly this M" in out
    assert "fallback: torch's own call" in out
    assert "regret of padded rows: 25.0 % in all, at worst 25.0 %, known of 20 of 20 calls" in out
    assert "torch:native 10.00 us (row at M=16), 8.00 us with torch:onednn (against, real.csv)" in out
    assert "40 calls (" in out and "have a row of ck that is not used: not installed; pip install tunedgemm[ck]" in out
    assert "with all of these rows in use: exact 70.0 % of calls" in out
    assert "by layer" in out and "a16w16 N=96 K=128 fp32->fp32" in out
    assert "what to tune next" in out
    tables = [line for line in out.splitlines() if line.startswith(("│", "┃"))]
    assert tables and all(len(line) <= 80 for line in tables)


def test_shapes_are_listed_one_by_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By shape each has its answer and the time of a call; a single call is in the singular."""
    (folder / "in.csv").write_text(HEAD + "8,96,128,False,fp32,fp32,1,0\n16,64,128,False,fp32,fp32,2,0\n")
    _, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--by", "shape", "--next", "0")

    [line] = [line for line in out.splitlines() if "a16w16 M=16" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")][1::2] == ["2", "exact"] and "10.00" in line
    assert "1 call (" in out and " has a row of ck that is not used" in out
    assert "what to tune next" not in out and "tunedgemm tune" not in out


def test_the_commands_that_are_printed_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first printed command writes shapes and prints the second,
    which tunes them to 100 % exact rows."""
    _, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--next", "5")
    write, tune = (line for line in out.splitlines() if line.startswith("tunedgemm "))
    assert write == "tunedgemm coverage in.csv --table t.csv --next 5 -o next.csv"

    assert main(shlex.split(write)[1:]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("tunedgemm ")] == [tune]
    assert main([*shlex.split(tune)[1:], *QUICK]) == 0
    capsys.readouterr()
    code, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--min-exact", "100")
    assert code == 0 and out.startswith("exact 100.0 % of calls, 100.0 % of the time\n")
    assert "nothing to tune" in out
    assert "none.csv: not written" in run(capsys, "in.csv", "--table", "t.csv", "-o", "none.csv")[1]
    assert not (folder / "none.csv").exists()


def test_a_share_that_is_too_small_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1 where too few calls have rows of exactly their M, pins among them."""
    code, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--replays", "10", "--min-exact", "30")
    assert code == 0 and "below" not in out
    code, out, _ = run(capsys, "in.csv", "--table", "t.csv", "--replays", "10", "--min-exact", "30.1")
    assert code == 1 and out.splitlines()[-1].startswith("below --min-exact 30.1: 30.0 % of calls")
    (folder / "in.csv").write_text(HEAD + "16,64,128,False,fp32,fp32,29,0\n15,64,128,False,fp32,fp32,71,0\n")
    assert run(capsys, "in.csv", "--table", "t.csv", "--min-exact", "29")[0] == 0  # as numbers, 29 of 100 are less than 29 %


def test_every_shape_is_written_as_csv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CSV has a line per shape with answer, time and reasons;
    it replaces only a file like itself."""
    for _ in range(2):
        assert run(capsys, "in.csv", "--table", "t.csv", "--against", "real.csv", "--csv", "all.csv")[0] == 0
    with (folder / "all.csv").open(newline="") as file:
        lines = {int(line["M"]): line for line in csv.DictReader(file)}

    assert {m: line["how"] for m, line in lines.items()} == {16: "exact", 15: "fine", 8: "fallback", 4: "fallback"}
    assert (lines[15]["us"], lines[15]["us_from"], lines[15]["regret"], lines[15]["row_M"]) == ("10.0000", "padded row", "0.2500", "16")
    assert "not ck:k: not installed" in lines[8]["why"] and lines[8]["row"] == "exact"
    for other in ("in.csv", "t.csv"):
        before = (folder / other).read_text()
        code, _, err = run(capsys, "in.csv", "--csv", other)
        assert code == 2 and "would be lost" in err and (folder / other).read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.csv"], "nope.csv: no such file"),
        (["t.csv"], "t.csv: a tuned table, not a list of shapes"),
        (["empty.csv"], "empty.csv: the file is empty"),
        ([], "no shapes are captured"),
        (["in.csv", "--op", "folded"], "unknown op 'folded'"),
        (["in.csv", "--op", "batched_bf16"], "in.csv: lacks the column 'B'"),
        (["in.csv", "--replays", "0"], "--replays: expected a whole number in 1 to"),
        (["in.csv", "--replays", "often"], "--replays: expected a whole number for all graphs"),
        (["in.csv", "--replays", "4:-1"], "--replays: M and its replays"),
        (["in.csv", "--replays", "16:3"], "--replays: no calls with M=16 were recorded into graphs; those of M=4 were"),
        (["in.csv", "--by", "colour"], "--by: invalid choice: 'colour' (choose from "),
        (["nope.csv", "--next", "-1"], "--next: must be at least 0"),
        (["in.csv", "--min-exact", "120"], "--min-exact: expected per cent in 0 to 100"),
        (["in.csv", "--min-exact", "nan"], "--min-exact: expected per cent in 0 to 100"),
        (["in.csv", "--measure", "-5"], "--measure: expected a positive number of seconds"),
        (["in.csv", "--measure", "--device", "sm_90:132"], "--measure and --device"),
        (["in.csv", "--device", "H200"], "a device must be GFX:CU, such as gfx942:304 (got 'H200')"),
        (["in.csv", "--table", "nope.csv"], "--table nope.csv: no such file"),
        (["in.csv", "--table", "in.csv"], "a list of shapes, not a tuned table"),
        (["in.csv", "--against", "in.csv"], "a list of shapes, not a tuned table"),
        (["in.csv", "--table", "t.csv", "--table", "real.csv"], "are both tables of a16w16"),
        (["in.csv", "--against", "other/a8w8_tuned_gemm.csv"], "is a table of a8w8, and the calls are of a16w16"),
        (["in.csv", "-o", "next.csv", "--next", "0"], "leave out one of them"),
        (["in.csv", "-o", "in.csv"], "in.csv: is one of the files with the captured calls"),
        (["in.csv", "-o", "t.csv"], "t.csv: would overwrite this file"),
        (["in.csv", "-o", "empty.csv/x.csv"], "cannot be written"),
        (["in.csv", "--csv", "empty.csv/x.csv"], "cannot be written"),
    ],
)
def test_usage_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """The fault is one line of standard error, with exit code 2 and no report."""
    (folder / "empty.csv").write_text("")
    (folder / "other").mkdir()
    (folder / "other" / "a8w8_tuned_gemm.csv").write_text(
        "gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio\ngfx942,304,1,64,128,torch.int8,1,0,3.0,k,1,1,0\n"
    )
    code, out, err = run(capsys, *arguments)

    assert (code, out) == (2, "")
    assert err.startswith("tunedgemm: error: ") and err.count("\n") == 1
    assert message in err
