"""The way of a new shape with a row: few calls, and few functions that a reader follows."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.dispatch.call import Call
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row

#: Python calls of a miss; functions that get its operands, and returns to a file left before.
CALLS, FUNCTIONS, RETURNS = 250, 20, 10
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., torch.Tensor]:
    """A dispatcher's call that has served other shapes of its table."""
    op, device = op_named("a16w16"), current_device()
    shapes = [Shape("a16w16", m, 32, 64, "fp32", "fp32") for m in (3, 5, 9)]
    rows = [Row(shape, device.gfx, device.cu_num, device.name, Solution("torch", "native"), 5.0) for shape in shapes]
    write_rows(tmp_path / "tuned.csv", op, rows)
    dispatcher = Dispatcher(op, above=(tmp_path / "tuned.csv",))
    for shape in shapes[:2]:
        dispatcher.call(*op.make_inputs(shape, torch.device("cpu"), 0))
    assert dispatcher.explain(shapes[2]).tuned
    return dispatcher.call


def holds(value: Any, operands: tuple[torch.Tensor, ...]) -> bool:
    """Check whether an argument is a call, or has one of its operands."""
    if isinstance(value, tuple):
        return any(holds(part, operands) for part in value)
    return isinstance(value, Call) or any(value is operand for operand in operands)


def test_a_miss_is_short(call: Callable[..., torch.Tensor]) -> None:
    """The limits hold for a first call whose shape has a row, and the page lists its functions."""
    operands, calls, passed = (torch.randn(9, 64), torch.randn(32, 64)), 0, list[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event != "call":
            return
        calls += 1
        if any(holds(value, operands) for value in list(frame.f_locals.values())):
            passed.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call(*operands)
    finally:
        sys.setprofile(None)
    files = [file for file, _ in passed]
    returns = sum(file != before and file in files[:place] for place, (before, file) in enumerate(itertools.pairwise(files), 1))
    assert calls <= CALLS and len(set(passed)) <= FUNCTIONS and returns <= RETURNS, (calls, len(set(passed)), returns)
    core = Path(tunedgemm.__file__).parent
    ours = [f"{Path(file).relative_to(core)} {name}" for file, name in passed if Path(file).is_relative_to(core)]
    listed = PAGE.read_text().partition("## The way of a call")[2].split("```")[1].strip().splitlines()
    assert [" ".join(line.split()[:2]) for line in listed] == list(dict.fromkeys(ours))
