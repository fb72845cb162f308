"""``tunedgemm explain``: the row of a line on its device, tables for one question, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.device import current_device

HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
HERE = current_device()
SHORT = """M,N,K,lib,kernel_name,tflops,bandwidth_gb_s
4,32,64,torch,,1.5,2
5,32,64,asm,tn_128x64_bshuffle,1.4,2
"""


def line(device: str, libtype: str, us: float, name: str = "native", *, m: int = 4, shuffled: bool = False) -> str:
    """Return a row of [m, 32, 64] in bf16."""
    return f"{device},{m},32,64,False,torch.bfloat16,torch.bfloat16,False,{shuffled},{libtype},0,0,{us},{name},0.0,1,1"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table with a row of each fate."""
    here = f"{HERE.gfx},{HERE.cu_num}"
    path = tmp_path / "bf16_tuned_gemm.csv"
    rows = [
        line(here, "nosuch", 1.0, "k"),
        line(here, "torch", 2.0),
        line(here, "torch", 3.0, "mm"),
        line("gfx942,304", "torch", 2.0),
        line(here, "torch", 0.0, m=9),
        line("gfx942,304", "torch", 2.0, m=8, shuffled=True),
        line("gfx942,304", "torch", 4.0),
        line("gfx942,304", "torch", 4.0, "no_such_route", m=2),
    ]
    path.write_text("\n".join([HEAD, *rows, ""]))
    return path


def explain(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return what the command prints, or its error."""
    code = main(["explain", *map(str, words)])
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_a_line_of_a_table_is_its_row(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row is looked up in its file, on its device, for its layout; its own fate is the last line."""
    fates = {
        2: (HERE.gfx, "cannot serve it, as above"),
        3: (HERE.gfx, "serves it"),
        4: (HERE.gfx, f"is not needed: {table}:3 (instance), 2.00 us, exact M=4 comes first"),
        5: ("gfx942, 304 CUs", "serves it"),
        7: ("layout=aiter16x16 on gfx942, 304 CUs", "serves it"),
        8: ("gfx942, 304 CUs", "is never found: it repeats a better row"),
        9: ("gfx942, 304 CUs", "cannot serve it, as above"),
    }
    for number, (device, fate) in fates.items():
        first, *_, last = explain(capsys, f"{table}:{number}").splitlines()
        assert device in first and last.startswith(f"  {table}:{number} {fate}"), (number, first, last)
    assert "libtype 'nosuch'" in explain(capsys, f"{table}:2")
    assert "torch has no route 'no_such_route'" in explain(capsys, f"{table}:9")


def test_a_row_on_another_device(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--device asks about another device than the row's, where it does not answer."""
    for device, words in (("gfx950:304", "on gfx950, 304 CUs"), ("gfx942:80", "on gfx942, 80 CUs")):
        said = explain(capsys, f"{table}:5", "--device", device)
        assert words in said and said.rstrip().endswith(f"{table}:5 is for another device: gfx942, cu_num 304")


def test_the_short_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bshuffle line is about the shuffled weight, and a line without a name about the backend's choice."""
    (tmp_path / "short.csv").write_text(SHORT)
    assert "runs torch:native" in explain(capsys, f"{tmp_path}/short.csv:2") and "own choice" in explain(capsys, f"{tmp_path}/short.csv:2")
    shuffled = explain(capsys, f"{tmp_path}/short.csv:3", "--device", "gfx942:304")
    assert "layout=aiter16x16" in shuffled and "not asm:tn_128x64_bshuffle" in shuffled


def test_tables_of_one_question(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--table puts files above the others, for sizes and for the line of a list."""
    assert "untuned" in explain(capsys, "4,32,64")
    assert f"{table}:3" in explain(capsys, "4,32,64", "--table", table)
    shapes = tmp_path / "bf16_untuned_gemm.csv"
    shapes.write_text("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n4,32,64,False,torch.bfloat16,torch.bfloat16,False,False\n")
    assert f"{table}:3" in explain(capsys, f"{shapes}:2", "--table", table)
    assert "absent.csv" in explain(capsys, "4,32,64", "--table", tmp_path / "absent.csv")


def test_a_line_of_a_list_that_names_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untuned line with gfx and cu_num is explained for that device, with its fp8."""
    shapes = tmp_path / "a8w8_blockscale_untuned_gemm.csv"
    shapes.write_text("gfx,cu_num,M,N,K\ngfx942,304,8,2048,3072\n")
    said = explain(capsys, f"{shapes}:2", "--op", "a8w8_blockscale")
    assert "fp8_e4m3fnuz" in said.splitlines()[0] and "on gfx942, 304 CUs" in said.splitlines()[0]


def test_lines_that_are_no_rows(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that never wins, a line beyond the file and a row of half a device are errors with a remedy."""
    assert "must be a finite number above 0 (got 0.0); the row is never chosen" in explain(capsys, f"{table}:6")
    assert "no row in line 99; use a line from 2 to 9" in explain(capsys, f"{table}:99")
    (tmp_path / "half.csv").write_text(f"{HEAD}\n{line('gfx942,0', 'torch', 2.0)}\n")
    assert "names no device in full; name one with --device" in explain(capsys, f"{tmp_path}/half.csv:2")
    assert "serves it" in explain(capsys, f"{tmp_path}/half.csv:2", "--device", "gfx942:304")


def test_a_layout_that_cannot_be_is_a_mistake(capsys):
    """A wrong --layout ends in one line, as a wrong size does."""
    assert main(["explain", "4,32,64", "--layout", "gfx942:304"]) == 2
    assert "'layout' must be" in capsys.readouterr().err


def test_an_untuned_shape_names_the_row_of_another_device(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file, its line and both counts; a tuned shape names none."""
    text = explain(capsys, "2,32,64", "--table", table, "--device", "gfx942:80")
    assert f"untuned: {table}:9 has this shape for gfx942, 304 CUs; this device has 80" in text
    assert "untuned: " not in explain(capsys, "4,32,64", "--table", table)
    assert json.loads(explain(capsys, "2,32,64", "--table", table, "--json"))["elsewhere"].endswith(f"{HERE.gfx}, {HERE.cu_num}")
