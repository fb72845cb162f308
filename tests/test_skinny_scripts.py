"""benchmarks/skinny_sanitize.py and skinny_registers.py: cases, commands, output."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tunedgemm_skinny")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: A tool that reports two hazards if the case with place 3 is in its list; it runs nothing.
TOOL = """#!/bin/sh
for argument in "$@"; do last=$argument; done
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
    """Write a fake compute-sanitizer, in the folder layout of a toolkit."""
    file = tmp_path / "bin" / "compute-sanitizer"
    file.parent.mkdir()
    file.write_text(TOOL)
    file.chmod(0o755)
    return file


@pytest.mark.sweep
def test_the_chosen_cases_have_every_family_split_ring_and_tail(sanitize: ModuleType) -> None:
    """A short list of cases has every pair of properties of a family that the plugin lists."""
    cases = sanitize.chosen(sanitize.skinny.OPS, sanitize.H200, 40)
    assert [case.place for case in cases] == list(range(len(cases)))
    assert all(sanitize.exists(case.shape) for case in cases)
    having = set().union(*map(sanitize.properties, cases))
    for op in sanitize.skinny.OPS:
        shapes = list(sanitize.tiny_shapes(op, sanitize.H200))
        listed = [sanitize.Case(shape, solution) for shape in shapes[:3] for solution in sanitize.listed(shape, sanitize.H200)]
        assert listed and set().union(*map(sanitize.properties, listed)) <= having
        assert len([case for case in cases if case.shape.op == op]) < 40


def test_a_fault_is_traced_to_its_case(sanitize: ModuleType, tool: Path, tmp_path: Path) -> None:
    """One faulty case of a list is found, and no other."""
    shape = next(iter(sanitize.tiny_shapes("a16w16", sanitize.H200)))
    solutions = list(sanitize.skinny.enumerate_solutions(shape, sanitize.H200))[:6]
    cases = [sanitize.Case(shape, solution, place) for place, solution in enumerate(solutions)]
    under = sanitize.Child(str(tool), "racecheck", tmp_path / "cases")
    faults = dict(sanitize.halved(cases, under.fault))
    assert [case.place for case, fault in faults.items() if fault] == [3]
    assert faults[cases[3]].startswith("2 found: Error: Race reported between Write access")


def test_the_command_of_a_child(sanitize: ModuleType) -> None:
    """The tool gets its options, then Python, the script and the cases.

    It checks the plugin's kernels only.
    """
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
def test_the_fault_of_a_run(sanitize: ModuleType, output: str, status: int, fault: str) -> None:
    """A run passes with status 0 and a summary of no errors; else a line gives the reason."""
    assert sanitize.fault_of(output, status) == fault


def test_where_the_tool_is_found(sanitize: ModuleType, tool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tool is found on PATH, else below CUDA_HOME."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.sanitizer() == str(tool)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.delenv("CUDA_HOME")
    assert sanitize.sanitizer() == str(tool)


def test_the_control_compiles(sanitize: ModuleType) -> None:
    """The faulty control kernel compiles."""
    beside = sanitize.rtc.beside(sanitize.rtc.NVRTC) or pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    compiler = sanitize.rtc.bind_functions(sanitize.rtc.NVRTC, beside[0])  # not a compiler that the plugin's tests have loaded
    assert compiler.compile(sanitize.PLANTED % sanitize.ENTRY, "control.cpp", ["--gpu-architecture=sm_90"]).startswith(b"\x7fELF")


@pytest.mark.slow
def test_registers_of_a_few_kernels(tmp_path: Path) -> None:
    """Each distinct compile has a row, with registers and shared memory within the limits."""
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
