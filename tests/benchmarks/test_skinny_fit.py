"""benchmarks/skinny_fit.py: input files, and the shipped weights as a fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
from tunedgemm.device import Device, device_of_text
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing

pytest.importorskip("tunedgemm_skinny")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "skinny_fit.py"
SHAPE = Shape("a16w16", 1, 1280, 8192)
NAME = "rows_r1_n1w2x4u2"


@pytest.fixture(scope="module")
def fitting(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/skinny_fit.py."""
    return as_module(SCRIPT)


@pytest.fixture(scope="module")
def h200(fitting: ModuleType) -> Device:
    """Return the measured device."""
    return device_of_text(fitting.H200)


@pytest.fixture(scope="module")
def trials(fitting: ModuleType, h200: Device) -> Any:
    """Read the committed timings."""
    return fitting.read([fitting.TRIALS], h200)


@pytest.fixture(scope="module")
def fitted(fitting: ModuleType, h200: Device, trials: Any) -> Any:
    """Fit the weights to the committed timings, once."""
    return fitting.fit(trials.kernels, h200)


def test_the_shipped_weights_fit_the_committed_timings(fitting: ModuleType, h200: Device, trials: Any, fitted: Any) -> None:
    """The plugin's weights and a new fit predict the same times, within a hundredth."""
    refitted = json.loads(fitting.written(fitted, trials, h200))["weights"]
    shipped = json.loads(fitting.FITTED.read_text())["weights"]
    assert refitted.keys() == shipped.keys()
    for shape, times in trials.kernels.items():
        for at in list(times)[::20]:
            features = fitting.cost.features(*at, shape, h200)
            family, names = at[0].family, fitting.cost.FEATURES
            here, there = (np.dot([weights[family][name] for name in names], features) for weights in (refitted, shipped))
            assert here == pytest.approx(there, abs=0.01), "run python benchmarks/skinny_fit.py --out"


def test_a_shape_left_out_of_the_fit_is_predicted_well(fitting: ModuleType, h200: Device, trials: Any, fitted: Any) -> None:
    """In bf16 the first 12 predictions have one within 5 % of the best, and ranks agree.

    Ranks agree less than for random kernels: an earlier fit had listed most of the timed ones.
    """
    predictions = fitting.guesses(fitted, trials.kernels, h200)
    bf16 = [fitting.quality(predictions[shape], times) for shape, times in trials.kernels.items() if shape.dtype == "bf16"]
    assert len(bf16) >= 150
    assert np.mean([rank for rank, *_ in bf16]) > 0.5
    assert np.mean([twelve < 1.05 for _, _, _, twelve, _ in bf16]) > 0.9


def test_a_shape_does_not_predict_itself(fitting: ModuleType, h200: Device, trials: Any) -> None:
    """The weights without a shape do not change with its timings."""
    few = dict(list(trials.kernels.items())[:4])
    other = {**few, SHAPE: {at: 2 * us**2 for at, us in few[SHAPE].items()}}
    one, two = (fitting.Fit("rows", times, h200) for times in (few, other))
    assert one.weights(SHAPE) == pytest.approx(two.weights(SHAPE))
    assert one.weights() != pytest.approx(two.weights())


def test_input_files(fitting: ModuleType, h200: Device, tmp_path: Path) -> None:
    """Trial logs and its own table are read.

    The last duplicate wins; other devices, failures and names are skipped.
    """
    solution, other = Solution("skinny", NAME), Solution("skinny", NAME, 2)
    here = {"gfx": h200.gfx, "cu_num": h200.cu_num, "device": h200.name, "kind": "trial", "run": "1"}
    timings = [
        ({}, Timing(SHAPE, solution, "screened", us=2.0)),
        ({}, Timing(SHAPE, solution, "ok", us=7.0)),
        ({}, Timing(SHAPE, solution, "screened", us=8.0)),
        ({}, Timing(SHAPE, other, "screened", us=5.0)),
        ({}, Timing(attrs.evolve(SHAPE, outdtype="fp16"), Solution("torch", "native"), "ok", us=11.0)),
        ({}, Timing(SHAPE, solution, "wrong", us=1.0)),
        ({}, Timing(SHAPE, Solution("triton", "x"), "ok", us=1.0)),
        ({"cu_num": 114}, Timing(SHAPE, solution, "ok", us=1.0)),
        ({"kind": "end"}, Timing(SHAPE, solution, "ok", us=1.0)),
    ]
    log = tmp_path / "t.trials.jsonl"
    log.write_text("".join(json.dumps({**json.loads(timing.to_json()), **here, **differing}) + "\n" for differing, timing in timings))
    trials = fitting.read([log], h200)
    kernel = fitting.parse_name(NAME)
    assert trials.kernels == {SHAPE: {(kernel, 1): 7.0, (kernel, 2): 5.0}}
    assert trials.torch == {SHAPE: 11.0}
    assert trials.passed == 3
    table = tmp_path / "all.csv"
    fitting.compact(trials, table, h200)
    again = fitting.read([table], h200)
    assert (again.kernels, again.torch) == (trials.kernels, trials.torch)


@pytest.mark.nightly
def test_the_script_writes_and_reports(fitting: ModuleType, tmp_path: Path) -> None:
    """Equal input gives equal files, and the report has a row for each family and for all."""
    command = [sys.executable, str(SCRIPT), "--out"]
    runs = [
        subprocess.run([*command, tmp_path / name, *more], capture_output=True, text=True)
        for name, more in (("a", ["--report"]), ("b", []))
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert [line.split("|")[1].strip() for line in runs[0].stdout.splitlines()[3:7]] == ["rows", "tiles", "wgmma", "all"]
    assert "| 16 | 128 |" in runs[0].stdout
    nothing = tmp_path / "none.csv"
    nothing.write_text(",".join(fitting.FIELDS) + "\n")
    empty = subprocess.run([*command, tmp_path / "c", nothing], capture_output=True, text=True)
    assert empty.returncode == 2 and "no timing of a kernel of skinny on sm_90" in empty.stderr
