"""Check of the tuner on one shape, with the roofline and the order of lists against the times."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.ops import op_named
from tunedgemm.testing.bring_up.bench import LAUNCH_S, TUNE_S, Bench, Verdict, fault_of, verdict_over
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options
from tunedgemm.tuner import tune as tune_shapes
from tunedgemm.tuner.roofline import floor_us, guess_us
from tunedgemm.tuner.trial import Outcome

#: Share of the roofline's time below which a time is wrong: its launch is an estimate.
_BELOW = 0.8


def tune(bench: Bench) -> Verdict:
    """Tune a shape; compare its time with the roofline, and each list's order with its times."""
    assert bench.shape is not None
    op, index = op_named(bench.shape.op), bench.device.index
    bench.announce("tune", str(bench.shape), TUNE_S)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            libtype=bench.libtypes, candidates=4, iters=25, seconds=0.5, timeout=60.0, kernel_timeout=LAUNCH_S,
            device=str(index) if index >= 0 else "cpu", resume=False,
        )  # fmt: skip
        report = tune_shapes(op.name, {bench.shape: 1}, Path(folder, op.columns.tuned_file), options)
    if not report.outcomes:
        return Verdict("failed", "the tuner lost its device before the shape ended")
    return verdict_of_tuning(bench, report.outcomes[0])


def verdict_of_tuning(bench: Bench, outcome: Outcome) -> Verdict:
    """Return the verdict of a tuned shape: faulty solutions, a time below the roofline, no winner."""
    shape, winner = outcome.task.shape, outcome.winner
    statuses = Counter(timing.status for timing in outcome.timings)
    op = op_named(shape.op)
    measures: dict[str, Any] = {"statuses": dict(statuses), "lists": _lists(outcome.timings)}
    floor, guess = floor_us(op, shape, bench.device), guess_us(op, shape, bench.device)
    measures |= {"floor_us": round(floor, 3), "guess_us": round(guess, 3)}
    if winner is not None:
        baseline = outcome.baseline.us if outcome.baseline is not None else 0.0
        measures |= {
            "us": round(winner.us, 3),
            "torch_us": round(baseline, 3),
            "gain": round(outcome.gain, 4),
            "err_ratio": winner.err_ratio,
        }
    faulty = [(str(timing.solution), fault) for timing in outcome.timings if (fault := fault_of(timing))]
    if faulty:
        found = verdict_over(statuses["ok"], faulty, [], "")
        return attrs.evolve(found, measures=found.measures | measures)
    if winner is None:
        return Verdict("failed", outcome.reason or "no solution passed", "", measures)
    below = winner.us < _BELOW * floor
    detail = f"{winner.us:.2f} us, below the roofline's {floor:.2f} us" if below else ""
    return Verdict("wrong" if below else "ok", detail, str(winner.solution), measures)


def _lists(timings: Sequence[Timing]) -> dict[str, dict[str, float]]:
    """Return for each libtype the place of its fastest solution in its list, and what the first costs."""
    by_libtype: dict[str, list[float]] = {}
    for timing in timings:
        if timing.us:
            by_libtype.setdefault(timing.solution.libtype, []).append(timing.us)
    return {
        libtype: {
            "timed": len(us),
            "best_us": round(min(us), 3),
            "best_at": us.index(min(us)),
            "first_over_best": round(us[0] / min(us), 4),
        }
        for libtype, us in by_libtype.items()
    }
