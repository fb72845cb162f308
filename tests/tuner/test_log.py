"""Trial logs: a line with one impossible value is an error that names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import read_log
from tunedgemm.tuner.store import Missing, Store

SHAPE, SOLUTION = Shape("a16w16", 4, 32, 64), Solution("torch", "native")
PLACE = {"gfx": "cpu-avx2", "cu_num": 2, "device": "cpu"}
RUN, ENDED, TRIAL, OUTCOME = 1, 2, 4, 5


def lines() -> list[dict[str, Any]]:
    """Return a finished run and an interrupted one."""
    trial = json.loads(Timing(SHAPE, SOLUTION, "ok", us=5.0).to_json())
    outcome = {"winner": SOLUTION.to_dict(), "us": 5.0, "noise": 0.1, "samples": 3, "err_ratio": 0.0, "libver": "2", "incumbent": None}
    entries = [("run", "a", {"op": "a16w16", "identity": {}, "resumes": []}), ("end", "a", {})]
    entries += [("run", "b", {"op": "a16w16", "identity": {}, "resumes": ["a"]}), ("trial", "b", trial | PLACE)]
    entries += [("shape", "b", {"shape": SHAPE.to_dict(), **PLACE, **outcome})]
    return [{"schema": 2, **fields, "kind": kind, "run": run} for kind, run, fields in entries]


def test_the_log_itself_is_resumed(tmp_path: Path) -> None:
    """Reading finds the outcome of the interrupted run."""
    assert _resumed(tmp_path, lines())


CHANGES = [
    *((RUN, "run", value) for value in (None, 1, ["a"])), *((RUN, "kind", value) for value in ("ran", None, ["run"], {})),
    *((RUN, "resumes", value) for value in (None, 1.5, "a", [["a"]], {})), (RUN, "identity", [1]), (RUN, "op", None), (ENDED, "run", {}),
    *((TRIAL, "shape", value) for value in (None, "x", {}, {**SHAPE.to_dict(), "y": 1}, {**SHAPE.to_dict(), "extra": {"B": [1]}})),
    *((TRIAL, "shape", {**SHAPE.to_dict(), name: value}) for name, value in [("m", "4"), ("m", 2**31), ("dtype", [1]), ("layout", 3)]),
    *((TRIAL, "shape", {**SHAPE.to_dict(), name: value}) for name, value in [("op", None), ("extra", {"B": 1}), ("scale", "rows")]),
    *((TRIAL, "solution", value) for value in (None, {}, [], {**SOLUTION.to_dict(), "extra": 1}, {**SOLUTION.to_dict(), "libtype": 2})),
    *((TRIAL, "solution", {**SOLUTION.to_dict(), name: value}) for name, value in [("split_k", {}), ("kernel_name", None), ("z\n", 1)]),
    *((TRIAL, "us", value) for value in ("fast", -1, float("nan"), 1e300, True, None)),
    *((TRIAL, name, value) for name, value in [("status", []), ("status", "great"), ("samples", "3"), ("detail", 1), ("throttled", None)]),
    *((TRIAL, name, value) for name, value in [("row_error", {}), ("deterministic", "yes"), ("clock_mhz", -1), ("err_ratio", "0")]),
    *((OUTCOME, name, value) for name, value in [("gfx", None), ("gfx", "A\n"), ("cu_num", "2"), ("cu_num", -2), ("device", ["cpu"])]),
    *((OUTCOME, name, value) for name, value in [("device", "a\nb"), ("winner", 1), ("winner", {}), ("us", None), ("noise", "")]),
    (OUTCOME, "us", 0.0),
    *((OUTCOME, name, value) for name, value in [("libver", 2), ("libver", "1\n2"), ("libver", "\ud800"), ("err_ratio", "none")]),
]  # fmt: skip


@pytest.mark.parametrize(("number", "name", "value"), CHANGES)
def test_one_changed_value(tmp_path: Path, number: int, name: str, value: object) -> None:
    """Each changed value ends in an error that names the line, before anything is reused."""
    entries = lines()
    entries[number - 1][name] = value

    with pytest.raises(TableError, match=rf"^\S+\.trials\.jsonl:[{number}{OUTCOME}]: .+ move the file away"):
        _resumed(tmp_path, entries)


@pytest.mark.parametrize("number", [RUN, ENDED, TRIAL, OUTCOME])
def test_one_missing_value(tmp_path: Path, number: int) -> None:
    """A line without a field that its kind needs is an error that names it, or is read without it."""
    for name in list(lines()[number - 1]):
        entries = lines()
        del entries[number - 1][name]
        try:
            _resumed(tmp_path, entries)
        except TableError as error:
            assert f".trials.jsonl:{number}: " in str(error)


def _resumed(folder: Path, entries: list[dict[str, Any]]) -> Timing | Missing | None:
    path = folder / "t.trials.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    for entry in read_log(path):
        if entry.kind == "trial":
            entry.timing(), entry.where()
    store = Store(op_named("a16w16"), folder / "t.csv")
    store.open({})
    try:
        device, shape = entry.where()
        return store.done(device, shape)
    finally:
        store.close()
