"""Reports: changed files become a document of finite values, or an error names the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.store import Store
from tunedgemm.tuner.trial import Outcome, Place, Task
from tunedgemm_report.document import document

NAMES = {"log": "bf16_tuned_gemm.trials.jsonl", "profile": "profile.csv", "table": "bf16_tuned_gemm.csv"}


def files_of_a_run(folder: Path) -> dict[str, bytes]:
    """Write the files of a run of two shapes, and return their contents."""
    store = Store(op_named("a16w16"), folder / NAMES["table"], profile=folder / NAMES["profile"])
    store.open({"torch": "2.11.0"})
    place = Place(Device("sm_90", 132, "nvidia-h200"))
    for shape in (Shape("a16w16", 4, 32, 64), Shape("a16w16", 64, 32, 64, epilogue="bias")):
        torch, other = Solution("torch", "native"), Solution("triton", "gemm", 2)
        timings = (
            Timing(shape, torch, "ok", us=9.0, noise=0.01, samples=5),
            Timing(shape, other, "ok", us=5.0, noise=0.01, samples=5),
            Timing(shape, Solution("asm", "x"), "failed", detail='it said "no",\nthen ended'),
        )
        store.record(Outcome(Task(shape), timings[1], timings[0], timings, tied=0, place=place, seconds=(("time", 1.0),)))
    store.finish()
    return {kind: (folder / name).read_bytes() for kind, name in NAMES.items()}


@pytest.mark.parametrize("kind", NAMES)
def test_reports(fuzz: Any, mutations: ModuleType, tmp_path: Path, kind: str) -> None:
    """Every line of a changed file is used, or counted as damaged, or the error names the file."""
    (tmp_path / "seed").mkdir()
    seed = files_of_a_run(tmp_path / "seed")[kind]
    path = tmp_path / NAMES[kind]

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            findings = read_findings([path], op="" if kind == "log" else "a16w16")
        except UserError as error:
            assert str(path) in str(error), error
            assert "\n" not in str(error), error
            return
        made = document(findings)
        assert json.loads(json.dumps(made, allow_nan=False)) == made
        for entry in findings.entries.values():
            assert math.isfinite(entry.gain) and entry.gain >= 0.0
            assert all(0.0 <= trial.us < math.inf for trial in entry.trials.values())

    fuzz([seed], mutations.of_lines, check)
