"""Files of small runs, as the tuner writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import line

H200 = Device("sm_90", 132, "nvidia-h200")
TORCH, FAST, TIED, BAD = Solution("torch", "native"), Solution("asm", "fast", 2), Solution("triton", "tied"), Solution("triton", "bad")
WIDE, TALL = Shape("a16w16", 64, 2048, 4096), Shape("a16w16", 4096, 4096, 4096)
#: Shape to its trials: torch, two candidates that tie, and a refused one; torch wins the other
#: shape.
TRIALS: Mapping[Shape, tuple[Timing, ...]] = {
    WIDE: (
        Timing(WIDE, TORCH, "ok", us=12.0, noise=0.002, samples=51),
        Timing(WIDE, FAST, "ok", us=8.0, noise=0.001, samples=51),
        Timing(WIDE, TIED, "ok", us=8.01, noise=0.002, samples=51),
        Timing(WIDE, BAD, "unsupported", detail="K must be a multiple of 96"),
    ),
    TALL: (Timing(TALL, TORCH, "ok", us=200.0, noise=0.001), Timing(TALL, FAST, "screened", us=260.0)),
}
WINNERS = {WIDE: FAST, TALL: TORCH}


def trial_line(timing: Timing, device: Device = H200) -> str:
    """Return the line of a trial as a run writes it."""
    fields = json.loads(timing.to_json())
    del fields["schema"]
    return line("trial", "r", node="n", gpu=0, gfx=device.gfx, cu_num=device.cu_num, device=device.name, **fields)


def outcome_line(shape: Shape, winner: Timing | None, device: Device = H200, **more: Any) -> str:
    """Return the line of a shape's outcome."""
    fields: dict[str, Any] = {"winner": None, "us": 0.0}
    if winner is not None:
        fields = {"winner": winner.solution.to_dict(), "us": winner.us, "noise": winner.noise}
    place = {"gfx": device.gfx, "cu_num": device.cu_num, "device": device.name}
    return line("shape", "r", **place, shape=shape.to_dict(), **{**fields, "tied": 1, "reason": "", "seconds": {"compile": 1.5}, **more})


def log_lines(trials: Mapping[Shape, Iterable[Timing]] = TRIALS, device: Device = H200) -> list[str]:
    """Return the lines of a whole run."""
    lines = [line("run", "r", op="a16w16", version="0.1.0", started="2026-11-23T10:00:00+00:00", identity={"torch": "2.11.0"})]
    for shape, timings in trials.items():
        lines += [trial_line(timing, device) for timing in timings]
        winner = next((timing for timing in timings if timing.solution == WINNERS.get(shape)), None)
        lines.append(outcome_line(shape, winner, device))
    return [*lines, line("end", "r")]


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., Path]:
    """Write a trial log of these lines; by default those of `TRIALS`."""

    def write(lines: Iterable[str] | None = None, name: str = "bf16_tuned_gemm.trials.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(log_lines() if lines is None else lines))
        return path

    return write


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write a table of the winners, with their times scaled."""

    def write(name: str = "bf16_tuned_gemm.csv", scale: float = 1.0, device: Device = H200, **solutions: Solution) -> Path:
        path = tmp_path / name
        rows = []
        for shape, timings in TRIALS.items():
            winner = next(timing for timing in timings if timing.solution == WINNERS[shape])
            solution = solutions.get(f"m{shape.m}", winner.solution)
            rows.append(Row(shape, device.gfx, device.cu_num, device.name, solution, winner.us * scale, libver="9.1"))
        write_rows(path, op_named("a16w16"), rows)
        return path

    return write


def with_name(timing: Timing, name: str) -> Timing:
    """Return a timing of a kernel with another name."""
    return attrs.evolve(timing, solution=attrs.evolve(timing.solution, kernel_name=name))
