"""``table check --remeasure``: the upgrade gate, with a plugin whose library changed and real times."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import attrs
import pytest
from tunedgemm.analysis.compare import Change, Served
from tunedgemm.analysis.remeasure import Remeasured, Retimed
from tunedgemm.cli import main, parser
from tunedgemm.cli.table.remeasure import summary_lines
from tunedgemm.device import Device, current_device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.match import Match

OP = op_named("a16w16")
PLUGIN = """
import sys, time
import torch
from tunedgemm.plugin import Backend, Launcher, Solution, Unsupported, hookimpl
@hookimpl
def supports(): return None
@hookimpl
def enumerate_solutions(): return [Solution("upgraded", "quick"), Solution("upgraded", "slow")]
@hookimpl
def library_version(device): return "2"
@hookimpl
def bind(solution):
    if solution.kernel_name == "gone": return Unsupported("version 2 has no such kernel")
    def launch(*operands):
        if solution.kernel_name == "slow": time.sleep(0.0005)
        return torch.nn.functional.linear(*operands)
    return Launcher(launch)
backend = Backend("upgraded", sys.modules[__name__], ops=("a16w16",))
"""


@pytest.fixture
def table(tmp_path, monkeypatch, one_thread):
    """Install the plugin, and write a table of a (kernel, version) for each row."""
    folder = tmp_path / "site" / "upgraded_plugin-1.dist-info"
    folder.mkdir(parents=True)
    (folder.parent / "upgraded_plugin.py").write_text(PLUGIN)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: upgraded-plugin\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[tunedgemm.backends]\nupgraded = upgraded_plugin:backend\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder.parent), *sys.path])))
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))

    def write(*kernels: tuple[str, str]) -> Path:
        here, path = current_device(), tmp_path / "t.csv"
        fields = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name}
        rows = [
            Row(shape=Shape("a16w16", m, 64, 128, "fp32"), solution=Solution("upgraded", kernel), us=100.0, libver=version, **fields)
            for m, (kernel, version) in enumerate(kernels, 1)
        ]
        write_rows(path, OP, rows)
        return path

    return write


def test_an_upgrade_is_found_and_its_rows_are_tuned_again(table, capsys, monkeypatch):
    """The JSON has each row with its versions and estimates; slower rows and rows that are gone are tuned."""
    tuned = []
    monkeypatch.setattr("tunedgemm.tuner.tune", lambda op, shapes, file, options: tuned.append((op, list(shapes), file, options.all)))
    path = table(("quick", "2"), ("slow", "1"), ("gone", "1"))

    assert main(["table", "check", str(path), "--remeasure", "--threshold", "90%", "--stale", "--json"]) == 1

    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"], document["faults"]) == ("tunedgemm.table.check", 1, [])
    found = document["remeasured"]
    assert found["moved"] == 1 and found["cost"]["resolved"] and found["cost"]["share"] > 3 and found["timed"] == found["of"] == 3
    rows = {row["row"]["line"]: row for row in found["rows"]}
    assert rows[3]["row"]["libver"] == "1" and rows[3]["libver"] == "2" and rows[3]["is"] == ["slower", "behind", "stale"]
    assert rows[4]["is"] == ["failed", "stale"] and rows[4]["failure"] and rows[2]["is"] == []
    assert [(op, [shape.m for shape in shapes], file, again) for op, shapes, file, again in tuned] == [("a16w16", [2, 3], path, True)]


def retimed(m: int, factor: float, ratio: float, libver: str = "1") -> Retimed:
    """Make a row of version 2 whose time is *factor* of the table's, and *ratio* of torch's."""
    shape, solution = Shape("a16w16", m, 64, 128), Solution("turbo", "k")
    row = Row(gfx="sm_90", cu_num=132, device="h", shape=shape, solution=solution, us=100.0, libver=libver, line=m + 1)
    match = Match(row, "exact", True)
    after = Served(shape, solution, us=100.0 * factor, noise=0.003, match=match)
    return Retimed(row, 1, Change(Served(shape, us=100.0), after, ratio=ratio, noise=0.01), "2")


def test_the_text_says_what_the_upgrade_costs():
    """The cost has its interval, shapes and versions; where noise covers it, it is not resolved."""
    controls = [retimed(m, 1.0, 0.9, "2") for m in range(1, 7)]
    moved = [*(retimed(m, 1.03, 0.9) for m in range(11, 19)), *(retimed(m, 1.03, 1.05) for m in range(19, 23))]
    found = Remeasured(Device("sm_90", 132), (*controls, *moved), 20, 0.9, 0.02)

    text = "\n".join(summary_lines(found, Path("t.csv")))

    assert "timed 18 of 20 rows, 90% of the time" in text
    assert "this upgrade costs 3.0% ± 0.5% on these 12 shapes (turbo 1 -> 2)" in text
    assert "12 rows now slower than the table by 2.0% or more: lines 12, " in text
    assert "4 rows now behind torch by 2.0% or more: lines 20, 21, 22, 23" in text and "0 rows now not served" in text
    assert "`tunedgemm table check t.csv --remeasure --stale` tunes 12 rows again" in text

    alone = "\n".join(summary_lines(attrs.evolve(found, rows=tuple(moved[:8])), Path("t.csv")))
    assert "this upgrade costs: not resolved (+3.00% [-7.0" in alone and "too few rows of unchanged libraries" in alone
    assert "tunes" not in alone


@pytest.mark.parametrize(
    ("flags", "what"),
    [(["--threshold", "yes"], "expected per cent"), (["--threshold", "101%"], "expected per cent"), (["--top", "0"], "above 0"),
     (["--top", "3"], "requires --remeasure"), (["--stale"], "requires --remeasure"),
     (["--threshold", "0"], "requires --remeasure")],
)  # fmt: skip
def test_bad_flags_are_named(table, capsys, flags, what):
    """A mistake ends with 2 before anything is timed."""
    assert main(["table", "check", str(table(("quick", "2"))), *flags]) == 2
    assert what in capsys.readouterr().err


def test_a_shipped_table_is_not_changed(capsys):
    """--stale refuses it, and names the command that tunes its shapes here."""
    assert main(["table", "check", "h100_bf16_tuned_gemm.csv", "--remeasure", "--stale"]) == 2
    assert "stays as it is; `tunedgemm tune -i" in capsys.readouterr().err


def test_the_workflow_runs_the_gate():
    """The command of the example for GitHub Actions parses with the real parser."""
    text = (Path(__file__).parents[2] / "examples" / "upgrade-gate" / "upgrade-gate.yml").read_text()
    words = shlex.split(re.findall(r"run: venv/bin/tunedgemm (.*) > gate.json", text)[0])
    arguments = parser(words).parse_args(words)

    assert arguments.remeasure and arguments.json and arguments.top == 50 and arguments.threshold == 0.03
