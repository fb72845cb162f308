"""Faults of a real GPU: an illegal address ends a context, a spinning kernel never ends.

One solution is lost each time.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_trials
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options, tune

SHAPES = [Shape("a16w16", 16, 512, 512), Shape("a16w16", 64, 512, 1024)]
KERNEL_TIMEOUT = 5.0

#: A kernel that spins delays those of other tests until their deadline.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timing]


def finals(table: Path, libtype: str) -> dict[tuple[int, str], Timing]:
    trials = [trial for trial in read_trials(table.with_suffix(".trials.jsonl")) if trial.solution.libtype == libtype]
    assert len({(trial.shape, trial.solution) for trial in trials}) == len(trials), "a solution has two final trials"
    return {(trial.shape.m, trial.solution.kernel_name): trial for trial in trials}


def unexpected(found: dict[tuple[int, str], Timing], wanted: dict[tuple[int, str], tuple[str, ...]]) -> dict[tuple[int, str], str]:
    """Return the status and the reason of each trial that ended otherwise."""
    wrong = {place: found.get(place) for place, words in wanted.items() if place not in found or found[place].status not in words}
    return {place: f"{trial.status}: {trial.detail}" if trial else "no trial" for place, trial in wrong.items()}


def test_faulting_and_spinning_kernels_cost_one_solution(faulty_plugin: Path, tmp_path: Path) -> None:
    """Two shapes, each with an illegal address at once, one in the middle of the timing, a trap and
    a kernel that spins 120 s.
    """
    from faulty_backend.gpu import EXPECTED, SPIN_SECONDS

    table, started = tmp_path / "t.csv", time.monotonic()
    options = Options(libtype="faulty_gpu", mp=1, kernel_timeout=KERNEL_TIMEOUT)

    report = tune(shapes=SHAPES, output=table, options=options)

    wanted = {(shape.m, name): words for shape in SHAPES for name, words in EXPECTED.items()}
    assert unexpected(finals(table, "faulty_gpu"), wanted) == {}
    assert [str(row.solution) for row in read_rows(table, op_named("a16w16"))[0]] == ["faulty_gpu:good"] * 2
    assert report.failed == []
    assert time.monotonic() - started < len(SHAPES) * SPIN_SECONDS, "spinning kernels are killed, not waited for"


def test_a_faulting_backend_beside_the_others_leaves_their_rows(faulty_plugin: Path, tmp_path: Path) -> None:
    """torch's own routes are tuned with a backend that breaks the context over and over.

    Every shape has its row.
    """
    table = tmp_path / "t.csv"

    report = tune(shapes=SHAPES, output=table, options=Options(libtype="torch,faulty_gpu", mp=1, kernel_timeout=KERNEL_TIMEOUT, iters=21))

    assert report.failed == []
    assert len(read_rows(table, op_named("a16w16"))[0]) == len(SHAPES)
    assert {trial.status for trial in finals(table, "torch").values()} <= {"ok", "screened", "unsupported"}


def test_faults_of_the_host_are_survived_on_a_gpu(faulty_plugin: Path, tmp_path: Path) -> None:
    """The backend of the CPU tests on GPU tensors: segfaults, hangs, wrong results, leaks.

    The good one wins.
    """
    from faulty_backend import EXPECTED

    table = tmp_path / "t.csv"

    tune(shapes=[SHAPES[0]], output=table, options=Options(libtype="faulty", mp=1, iters=11, timeout=10, kernel_timeout=KERNEL_TIMEOUT))

    wanted = {(SHAPES[0].m, name): words for name, words in EXPECTED.items()}
    assert unexpected(finals(table, "faulty"), wanted) == {}
    assert [str(row.solution) for row in read_rows(table, op_named("a16w16"))[0]] == ["faulty:good"]
