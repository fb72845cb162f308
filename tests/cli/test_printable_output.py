"""Output of every command: no character of a file reaches the terminal that obeys or hides it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.text.printable import printable

#: Sets a terminal's title, clears it, reverses the line, breaks it, and hides letters.
HOSTILE = "x\x1b]0;own\x07\x9b2J\u202e\u2028\u200b\x7f"

HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw,device,layer"
LINE = "gfx942,304,{m},1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,3,4,{us},{kernel},0.0,36.78,2332.71,{device},"

#: Commands, {a} and {b} being tables, {u} for a list of shapes, {h} for a hostile text.
COMMANDS = [
    "table show {a}", "table check {a}", "table diff {a} {b}", "table merge {out} {a} {b}", "table export --aiter {out} {a}",
    "table show {broken}", "table check {broken}", "table merge {out} {broken}", "table show {h}", "table show {a} --op {h}",
    "explain {a}:2", "explain {a}:5", "explain 16,1280,8192 --table {a} --device gfx942:304", "explain {h}", "explain 1,2,3 --set {h}={h}",
    "coverage {u} --device gfx942:304 --table {a} -v --by layer", "coverage {u} --csv {out} --next 3", "coverage {broken}",
    "tune -i {u} -o {out} --libtype torch --iters 2 -v", "tune -i {u} -o {out} --libtype {h}", "tune -i {broken} -o {out} --libtype torch",
    "tune -i {u} -o {log} --libtype torch", "shapes --model_dir {model}", "shapes --model_dir {model} --layers {h}", "shapes --indtype {h}",
    "table show {a} --json", "table diff {a} {b} --json", "explain {a}:2 --json", "plugins -v --json", "plugins --matrix --json",
    "coverage {u} --device gfx942:304 --table {a} --json",
    "plugins -v", "asm check {pack} -v", "triton check {jsons}", "triton export --op a8w8 -o {out} {jsons}", "{h}",
    "doctor --seconds 0", "doctor --seconds 0 --json", "doctor --seconds {h}",
]  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    """Write hostile files of every kind, and name them."""
    tables = []
    for number in (0, 1):
        lines = [LINE.format(m=16 * m, us=m + number, kernel=f"{HOSTILE}{number}", device=HOSTILE) for m in (1, 2)]
        lines += [LINE.format(m=HOSTILE, us=1, kernel="k", device="d"), f"{LINE.format(m=4, us=HOSTILE, kernel='k', device='d')},{HOSTILE}"]
        tables.append(tmp_path / f"{HOSTILE}{number}.csv")
        tables[-1].write_text("\n".join([f"{HEADER},{HOSTILE}", *lines, ""]))
    names = {
        "u": f"M,N,K,bias,dtype,outdtype,layer\n1,64,128,False,fp32,fp32,{HOSTILE}\n{HOSTILE},64,128,False,fp32,fp32,\n",
        "broken": f"{HOSTILE},{HOSTILE}\n1,{HOSTILE}\n",
        "log.trials.jsonl": f'{{"schema": 1, "kind": "{HOSTILE.encode("ascii", "backslashreplace").decode()}"}}\n{HOSTILE}\n',
    }
    for name, text in names.items():
        (tmp_path / os.fsdecode(name.encode() + b"\xff") if name == "u" else tmp_path / name).write_text(text)
    for folder in ("model", "jsons", "pack"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": HOSTILE, HOSTILE: HOSTILE}))
    (tmp_path / "jsons" / "gfx942-GEMM-A8W8.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE + "\ud800"}}))
    (tmp_path / "pack" / "pack.json").write_text(json.dumps({HOSTILE: HOSTILE, "manifest": HOSTILE, "op": HOSTILE, "gfx": HOSTILE}))
    (tmp_path / "pack" / "m.csv").write_text(f"knl_name,co_name,{HOSTILE}\n{HOSTILE},{HOSTILE},1\n")
    names = {name: str(tmp_path / name) for name in ("broken", "model", "jsons", "pack", "log", "out")}
    return names | {"a": str(tables[0]), "b": str(tables[1]), "u": str(tmp_path / os.fsdecode(b"u\xff")), "h": HOSTILE}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(
    words: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Names, keys, values and paths of files show escapes, in results, errors and logs."""
    monkeypatch.setenv("TUNEDGEMM_TRITON_JSON", HOSTILE)
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", HOSTILE)
    try:
        main([word.format(**words) for word in command.split()])
    except SystemExit as end:
        assert end.code in (0, 2)
    out, err = capsys.readouterr()
    assert out + err
    assert printable(out + err) == out + err


def test_a_coverage_file_names_any_path(tmp_path: Path) -> None:
    """A table whose name is not UTF-8, or has two lines, does not keep the CSV from being written."""
    table = tmp_path / os.fsdecode(b"t\xff\n.csv")
    table.write_text("M,N,K,libtype,us,bias,dtype,outdtype\n1,64,128,torch,1.0,False,fp32,fp32\n")
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype,outdtype\n1,64,128,False,fp32,fp32\n")
    output = tmp_path / "out.csv"
    assert main(["coverage", str(tmp_path / "u.csv"), "--table", str(table), "--csv", str(output), "--device", "gfx942:304"]) == 0
    assert r"t\udcff .csv:2 (instance), 1.00 us" in output.read_text()


#: A name that begins another line of output.
FORGED = "x\nFORGED"


@pytest.mark.parametrize("command", ["table show {h}", "table check {h}", "tune -i {h}", "explain {h}:2", "triton check {jsons}", "{h}"])
def test_a_name_forges_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A newline in a path, an argument or a key of a file begins no line of errors and findings."""
    (tmp_path / "jsons").mkdir()
    (tmp_path / "jsons" / "gfx942-GEMM-A8W8.json").write_text(json.dumps({FORGED: {FORGED: FORGED}, "any": {FORGED: 1}}))
    table = tmp_path / f"{FORGED}.csv"
    table.write_text("M,N,K,libtype,us\n1,64,128,,1.0\n")
    words = {"h": str(table), "jsons": str(tmp_path / "jsons")}
    assert main([word.format(**words) for word in command.split()]) in (0, 1, 2)
    lines = "".join(capsys.readouterr()).splitlines()
    assert lines and not [line for line in lines if line.startswith("FORGED")]


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    """Characters that the terminal's encoding lacks are printed as escapes."""
    (tmp_path / "t.csv").write_text("M,N,K,libtype,us,kernelName\n1,64,128,torch,1.0,\u00e9\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tunedgemm", "table", "show", str(tmp_path / "t.csv")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"torch:\xe9" in done.stdout
