"""The scripts that look at the kernels of the plugin skinny from outside: what they choose, ask and make of the answers."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tunedgemm_skinny")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: A tool that finds two hazards wherever the case with place 3 is among those of the process, which it does not run.
TOOL = """#!/bin/sh
for told in "$@"; do last=$told; done
case ",$last," in
  *,3,*) echo "========= COMPUTE-SANITIZER"
    echo "========= Error: Race reported between Write access at skinny+0x140 and Read access at skinny+0x1a0 [64 hazards]"
    echo "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"; exit 99;;
  *) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
esac
"""
CLEAN, OUT_OF_BOUNDS = (
    "========= ERROR SUMMARY: 0 errors\n",
    "========= Invalid __global__ write of size 4 bytes\n=========     at skinny+0x90\n",
)


@pytest.fixture(scope="module")
def sanitize(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """benchmarks/skinny_sanitize.py."""
    return as_module(BENCHMARKS / "skinny_sanitize.py")


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """What stands for compute-sanitizer, in a folder as a toolkit has it."""
    file = tmp_path / "bin" / "compute-sanitizer"
    file.parent.mkdir()
    file.write_text(TOOL)
    file.chmod(0o755)
    return file


def test_the_chosen_cases_have_every_family_split_ring_and_tail(sanitize: ModuleType) -> None:
    """No two properties of a family that the plugin's list has together are left out, and the list is short."""
    cases = sanitize.chosen(sanitize.skinny.OPS, sanitize.H200, 40)
    assert [case.place for case in cases] == list(range(len(cases)))
    assert all(sanitize.exists(case.shape) for case in cases)
    having = set().union(*map(sanitize.properties, cases))
    for op in sanitize.skinny.OPS:
        shapes = list(sanitize.tiny_shapes(op, sanitize.H200))
        found = [sanitize.Case(shape, each) for shape in shapes[:3] for each in sanitize.listed(shape, sanitize.H200)]
        assert found and set().union(*map(sanitize.properties, found)) <= having
        assert len([case for case in cases if case.shape.op == op]) < 40


def test_a_fault_is_told_of_the_case_that_has_it(sanitize: ModuleType, tool: Path, tmp_path: Path) -> None:
    """Of a list in one process, of which one case is at fault, that one is found, and no other."""
    cases = sanitize.chosen(("a16w16",), sanitize.H200, 6)
    under = sanitize.Child(str(tool), "racecheck", tmp_path / "cases")
    told = dict(sanitize.halved(cases, under.fault))
    assert [case.place for case, fault in told.items() if fault] == [3]
    assert told[cases[3]].startswith("2 found: Error: Race reported between Write access")


def test_a_child_is_told_what_to_run(sanitize: ModuleType) -> None:
    """The tool gets its options, then this Python, this script and the cases; it looks at the plugin's kernels alone."""
    command = sanitize.Child("/x/compute-sanitizer", "memcheck", Path("/x/cases")).command("2,5")
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"]
    assert command[-5:] == [sys.executable, str(BENCHMARKS / "skinny_sanitize.py"), "--child", "/x/cases", "2,5"]
    assert f"kns={sanitize.ENTRY}" in command


@pytest.mark.parametrize(
    ("output", "status", "fault"),
    [
        (CLEAN, 0, ""),
        (OUT_OF_BOUNDS + "========= ERROR SUMMARY: 64 errors\n", 99, "64 found: Invalid __global__ write of size 4 bytes"),
        ("a16w16 M=3: error ratio 0.5\n" + CLEAN, 3, "status 3: a16w16 M=3: error ratio 0.5"),
        (CLEAN, -11, "status -11: it says nothing"),
        ("Segmentation fault\n", 139, "no summary, status 139: Segmentation fault"),
    ],
)
def test_what_a_run_says(sanitize: ModuleType, output: str, status: int, fault: str) -> None:
    """A run is clean with a summary of no errors and with status 0 alone; else a line says why it is not."""
    assert sanitize.fault_of(output, status) == fault


def test_where_the_tool_is_found(sanitize: ModuleType, tool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On PATH, else below CUDA_HOME; without both the script says where it looked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.sanitizer() == str(tool)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.delenv("CUDA_HOME")
    assert sanitize.sanitizer() == str(tool)


def test_the_control_compiles(sanitize: ModuleType) -> None:
    """The kernel that is wrong on purpose is one that a GPU would run."""
    beside = sanitize.rtc.beside(sanitize.rtc.NVRTC) or pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    compiler = sanitize.rtc.bind_functions(sanitize.rtc.NVRTC, beside[0])  # not one that tests of the plugin have loaded
    assert compiler.compile(sanitize.PLANTED % sanitize.ENTRY, "control.cpp", ["--gpu-architecture=sm_90"]).startswith(b"\x7fELF")


@pytest.mark.slow
def test_registers_of_a_few_kernels(tmp_path: Path) -> None:
    """Each distinct compile of a small choice has a row with registers that a thread can have."""
    from tunedgemm_skinny import rtc

    if not rtc.beside(rtc.NVRTC):
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    output = tmp_path / "registers.csv"
    options = ["--subset", "llama70b-tp8", "--m", "1", "16", "--count", "1", "--processes", "2", "--csv", output]
    done = subprocess.run([sys.executable, BENCHMARKS / "skinny_registers.py", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    about, *lines = output.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    assert about.startswith("# sm_90, 132 SMs")
    assert {m for row in rows for m in row["M"].split()} == {"1", "16"}
    assert len({(row["kernelName"], row["M"]) for row in rows}) == len(rows)
    assert all(16 <= int(row["registers"]) <= 255 and int(row["shared"]) <= 227 << 10 for row in rows)
    assert f"{len(rows)} compiles for 10 shapes" in done.stdout
