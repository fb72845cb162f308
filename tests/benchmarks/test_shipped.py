"""benchmarks/shipped.py: which shipped rows go, on devices that are only described."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.published import Provenance, checked_body, provenance_of, published_text
from tunedgemm.table.row import Row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "shipped.py"
OP, H200 = op_named("a16w16"), Device("sm_90", 132, "nvidia-h200")
GUESS, OTHER = Solution("asm", "guess", 1), Solution("triton", "other")


@pytest.fixture
def shipped(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script, with one kernel as the guess of every shape."""
    script = as_module(SCRIPT)
    monkeypatch.setattr(script, "guess", lambda shape, device: GUESS)
    return script


def row(m: int, solution: Solution = OTHER) -> Row:
    return Row(Shape("a16w16", m, 1280, 512), "sm_90", 132, H200.name, solution, 5.0)


@pytest.mark.parametrize(
    ("m", "solution", "others", "us", "expected"),
    [
        (8, GUESS, {}, {}, True),  # nothing changes
        (8, OTHER, {}, {}, False),  # of which nothing is known
        (8, OTHER, {}, {"triton:other:0": 5.0, "asm:guess:1": 5.05}, True),
        (8, OTHER, {}, {"triton:other:0": 5.0, "asm:guess:1": 5.2}, False),
        (8, GUESS, {16: OTHER}, {}, False),  # the row of 16 would serve it
        (8, OTHER, {16: OTHER}, {}, True),
        (512, GUESS, {}, {}, False),  # engines have rows alone there
        (512, Solution("torch", "native"), {}, {"torch:native:0": 5.0, "asm:guess:1": 5.0}, True),
    ],
)
def test_a_row_goes_if_what_then_serves_is_as_fast(shipped, m, solution, others, us, expected):
    """It stays where the times are unknown, or an engine would lose its kernel."""
    own = row(m, solution)
    rows = [own, *(row(rows, kernel) for rows, kernel in others.items())]
    logs = {(H200.name, shipped.text_of(own.shape)): [us]}
    assert shipped.may_go(OP, own, rows, [H200], 0.02, logs) is expected


def test_a_table_is_rewritten_without_the_rows(shipped, tmp_path):
    """The other lines and the facts remain, and the checksum fits."""
    path, lines = tmp_path / "x.csv", ["M,N", "1,2", "3,4", "5,6"]
    path.write_text(published_text(Provenance("a16w16", {"rows": "3", "tuned": "2026-11-26"}), "\n".join(lines) + "\n"))
    first = path.read_text().splitlines().index("1,2") + 1
    rows = [attrs.evolve(row(1), source=path, line=first + index) for index in range(3)]
    shipped.rewrite(path, OP, rows, {first, first + 2}, 0.02)
    assert checked_body(path, path.read_bytes()).split() == [b"M,N", b"1,2", b"5,6"]
    facts = provenance_of(path).facts
    assert facts["rows"] == "2" and facts["tuned"] == "2026-11-26" and "2 %" in facts["dropped"]


def test_logs_are_read_by_device_and_shape(shipped, tmp_path):
    """A torn line of a run that was stopped is skipped."""
    shape = Shape("a16w16", 1, 64, 64)
    record = {"kind": shipped.KIND, "device": H200.name, "shape": shape.to_dict(), "us": {"asm:guess:1": 2.0}}
    (tmp_path / "h200-1.jsonl").write_text(json.dumps(record) + '\n{"kind"')
    assert shipped.logged(tmp_path, []) == {(H200.name, shipped.text_of(shape)): [{"asm:guess:1": 2.0}]}
