"""A backend made by `TunedKernel`, tuned by the command in worker processes, with wrong and
crashing kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.plugin import Device, Shape, Solution, Unsupported, UserError
from tunedgemm_triton.author import TunedKernel
from tunedgemm_triton.jsonfiles import files

MODULE = """
import os, time
import torch
from tunedgemm.plugin import OutOfResources, Unsupported
from tunedgemm_triton.author import TunedKernel

def launch(values, x, weight, bias=None):
    if values["KIND"] == "dies":
        os._exit(3)
    if values["KIND"] == "greedy":
        raise OutOfResources("needs 300 KiB of shared memory")
    if values["KIND"] != "quick":
        time.sleep(0.002)
    return torch.nn.functional.linear(x, weight, bias) * (2 if values["KIND"] == "wrong" else 1)

backend = TunedKernel(
    libtype="plainly",
    op="a16w16",
    space={"KIND": ("slow", "quick", "wrong", "dies", "greedy"), "BLOCK": (1,)},
    launch=launch,
    takes=lambda shape, device: None if (shape.outdtype, shape.layout) == (shape.dtype, "row") else Unsupported("plain"),
    fits=lambda values, shape, device: "" if values["BLOCK"] <= shape.m else "BLOCK is at most M",
    graph_safe=False,
).backend
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Install the module above; return its folder."""
    (tmp_path / "plainly.py").write_text(MODULE)
    info = tmp_path / "plainly-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plainly\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nplainly = plainly:backend\n")
    return tmp_path


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "TUNEDGEMM_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "tunedgemm", "triton", "tune", "--libtype", "plainly", "--op", "a16w16", "--device", "cpu", *words]
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _run(folder: Path, *words: str) -> tuple[int, str]:
    process = _start(folder, *words)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


WORDS = ("--n", "64,96", "--k", "128", "--m", "16", "--num-iters", "2", "--seconds", "0.05", "--cache", "hot")


@pytest.mark.nightly
def test_failing_configurations_are_counted(package: Path) -> None:
    """Wrong, crashing and oversized configurations lose only themselves; the quick one wins
    everywhere.
    """
    code, output = _run(package, *WORDS)
    assert code == 0, output
    for path in sorted((package / "home" / "triton" / "gemm").glob("*-N=*.json")):
        assert {entry["KIND"] for entry in files.read(path).values()} == {"quick"}
    assert "Search space size: 5 configurations" in output
    assert "2 wrong" in output
    assert "2 out_of_resources" in output
    assert "2 crashed" in output


@pytest.mark.slow
def test_a_space_of_which_nothing_fits_is_an_error(package: Path) -> None:
    """The exit code is 2, and the error has the reason."""
    (package / "space.json").write_text('{"KIND": ["quick"], "BLOCK": [32, 64]}')
    code, output = _run(package, *WORDS, "--search-space", "space.json")
    assert code == 2
    assert "none of its 2 configurations can run" in output
    assert "BLOCK is at most M" in output


def _kernel(**changes: object) -> TunedKernel:
    given = {
        "libtype": "mine",
        "op": "a16w16",
        "space": {"BLOCK": (16, 32), "FAST": (True, False), "MODE": ("a", "b")},
        "launch": lambda *_: None,
        "takes": lambda shape, device: None if shape.m > 1 else Unsupported("one row"),
    }
    return TunedKernel(**{**given, **changes})  # type: ignore[arg-type]


SHAPE, CPU = Shape("a16w16", 4, 64, 64), Device("cpu-avx2", 1)


def test_names_have_every_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each solution has a unique name, from which its parameters come back with their types."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
    kernel = _kernel()
    listed = kernel.backend.solutions(SHAPE, CPU)
    assert len(listed) == len({solution.kernel_name for solution in listed}) == 8
    assert [kernel._values_of(solution) for solution in listed][:2] == [
        {"BLOCK": 16, "FAST": True, "MODE": "a"}, {"BLOCK": 16, "FAST": True, "MODE": "b"},
    ]  # fmt: skip
    own = kernel._solution({"BLOCK": 64, "FAST": False, "MODE": "c"})
    assert kernel._values_of(own) == {"BLOCK": 64, "FAST": False, "MODE": "c"}
    assert kernel.backend.solutions(Shape("a16w16", 1, 64, 64), CPU) == []


def test_other_revisions_are_refused() -> None:
    """A row of an earlier revision or of another kernel is not launched."""
    kernel = _kernel(revision=2)
    for name in ("mine_r1;BLOCK=16;FAST=True;MODE=a", "other_r2;BLOCK=16", "auto"):
        answer = kernel.backend.bind(Solution("mine", name), SHAPE, CPU)
        assert isinstance(answer, Unsupported)
        assert "in revision 2" in str(answer)
    assert (
        str(kernel.backend.bind(kernel._solution({"BLOCK": 16, "FAST": True, "MODE": "a"}), Shape("a16w16", 1, 64, 64), CPU)) == "one row"
    )


WRONG = [
    ({"BLOCK": 16, "FAST": True}, "MODE is missing"),
    ({"BLOCK": 16, "FAST": True, "MODE": "a", "SPEED": 1}, "no parameter 'SPEED'"),
    ({"BLOCK": "16", "FAST": True, "MODE": "a"}, "BLOCK must be like 16"),
    ({"BLOCK": True, "FAST": True, "MODE": "a"}, "BLOCK must be like 16"),
]


def test_entries_are_checked() -> None:
    """An entry has exactly the kernel's parameters, with values of their types."""
    for entry, message in WRONG:
        with pytest.raises(UserError, match=message):
            _kernel().dialect.solution_of(entry, SHAPE, CPU)
