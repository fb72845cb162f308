"""Trial logs: every reader of one returns valid trials, or names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import line, read_log, trials_path
from tunedgemm.tuner.store import Store

PLACE = {"node": "", "gpu": -1, "gfx": "cpu-avx2", "cu_num": 2, "device": "cpu"}


def interrupted_log(shape: Shape) -> bytes:
    """Return the log of a finished run and of an interrupted one, which a run resumes."""
    solution = Solution("torch", "native")
    trial = json.loads(Timing(shape, solution, "ok", us=5.0, noise=0.1, samples=3).to_json())
    del trial["schema"]
    outcome = {"winner": solution.to_dict(), "us": 5.0, "noise": 0.1, "samples": 3, "err_ratio": 0.0, "libver": "2"}
    outcome |= {"incumbent": None, "tied": [], "reason": "", "seconds": {"bind": 0.1}}
    texts = [line("run", "a", op=shape.op, version="1", host="h", pid=1, started="", identity={}, resumes=[]), line("end", "a")]
    texts += [line("run", "b", op=shape.op, version="1", host="h", pid=2, started="", identity={}, resumes=["a"])]
    texts += [line("trial", "b", **PLACE, **trial, libver="2"), line("shape", "b", **PLACE, shape=shape.to_dict(), **outcome)]
    return "".join(texts).encode()


@pytest.mark.parametrize("name", ["a16w16", "fmoe"])
def test_trial_logs(fuzz: Any, mutations: ModuleType, tmp_path: Path, name: str) -> None:
    """Reading, resuming and adopting a changed log keeps every line of it, or names the line."""
    op = op_named(name)
    table = tmp_path / op.columns.tuned_file
    path = trials_path(table)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        table.unlink(missing_ok=True)
        try:
            _read_all(path)
            _resume(op, table)
        except TableError as error:
            assert str(path) in str(error), error
            assert "\n" not in str(error), error
        assert path.read_bytes().startswith(content)

    fuzz([interrupted_log(op.examples[0] if op.examples else Shape(name, 4, 32, 64))], mutations.of_lines, check)


def _read_all(path: Path) -> None:
    for entry in read_log(path):
        assert entry.kind in ("run", "trial", "shape", "end")
        assert isinstance(entry.run, str)
        hash(entry.subject)
        if entry.kind == "trial":
            timing = entry.timing()
            assert timing.row_error != timing.row_error or Timing.from_json(timing.to_json()) == timing
            hash((timing.shape, timing.solution))
        if entry.kind == "shape":
            device, shape = entry.where()
            assert (Device(device.gfx, device.cu_num, device.name), Shape.from_dict(shape.to_dict())) == (device, shape)


def _resume(op: Op, table: Path) -> None:
    store = Store(op, table)
    store.open({})
    try:
        for device, shape in list(store._trials):
            store.final_timings(device, shape)
            store.done(device, shape)
            store.use(device, {"torch": "2"})
    finally:
        store.close()
