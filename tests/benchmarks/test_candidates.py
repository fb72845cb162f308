"""benchmarks/candidates.py: the solutions that a backend lists, judged by trial logs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry

ONE, TWO, THREE = (Shape("a16w16", m, 64, 64) for m in (1, 2, 3))
FAKE = ("--libtype", "fake", "--logs")


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script, with a backend that lists three kernels."""
    module = as_module(Path(__file__).parents[2] / "benchmarks" / "candidates.py")
    backend = fake_backend("fake", solutions=["first", "second", "third"])
    monkeypatch.setattr(module, "Registry", lambda: fake_registry(backend))
    return module


def test_the_loss_of_the_first_guesses(script: ModuleType, trial_log, capsys: pytest.CaptureFixture[str]) -> None:
    """One shape's best is among the first two; the other's best is 20 % faster than both."""
    log = trial_log((ONE, "first", 0, 20.0), (ONE, "second", 0, 10.0), (TWO, "second", 0, 10.0), (TWO, "found", 0, 8.0))
    command = [*FAKE, str(log), "--first", "2"]
    assert script.main([*command, "-o", str(log.parent)]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 shapes" in out
    assert "fake:found 8.00 us, of the first fake:second 10.00 us" in out
    assert [row["loss"] for row in json.loads((log.parent / "candidates.json").read_text())["rows"]] == [0, 0.25]
    assert script.main([*command, "--within", "0.3"]) == 0


def test_cover_takes_the_kernel_that_loses_least_first(script: ModuleType, trial_log, capsys: pytest.CaptureFixture[str]) -> None:
    """Each further kernel gains most; a kernel counts by its best split, and a shape without a
    kernel as lost.
    """
    of_one = (ONE, "few", 1, 30.0), (ONE, "few", 4, 10.0), (ONE, "second", 1, 12.0), (ONE, "many", 1, 40.0)
    log = trial_log(*of_one, (TWO, "many", 1, 10.0), (TWO, "second", 1, 11.0), (TWO, "few", 1, 50.0), (THREE, "second", 1, 7.0))
    assert script.main(["--only", "cover", *FAKE, str(log), "-o", str(log.parent)]) == 0
    *rows, today = json.loads((log.parent / "candidates.json").read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["second", "few", "many"]
    means = [row["mean"] for row in rows]
    assert means == pytest.approx([(1.2 * 1.1) ** (1 / 3) - 1, 1.1 ** (1 / 3) - 1, 0], abs=1e-9)
    assert [row["worst"] for row in rows] == pytest.approx([0.2, 0.1, 0], abs=1e-9)
    assert today["mean"] == pytest.approx(means[0])
    assert "3 listed today: mean loss 9.70%, worst 20.0%, over 3 shapes" in capsys.readouterr().out
    by_shape = script.losses(script.timed([log], "fake"))
    assert script.cover(by_shape, 1) == ["second"]
    assert max(script.lost(by_shape, ["few", "many"])) == pytest.approx(2.302585, abs=1e-5)


def test_a_cover_is_near_the_best_of_all(script: ModuleType) -> None:
    """Of eight kernels over six shapes, three are chosen that lose at most a tenth more than the
    best three.
    """
    faults = []
    for seed in range(8):
        chance = random.Random(seed)
        given = pd.DataFrame([{f"k{name}": chance.choice((0.0, 0.1, 0.4, 2.3)) for name in range(8)} for _ in range(6)])
        chosen = script.cover(given, 3)
        best = min(script.lost(given, few).sum() for few in itertools.combinations([f"k{name}" for name in range(8)], 3))
        if len(chosen) > 3 or script.lost(given, chosen).sum() > best + 0.1 + 1e-9:
            faults.append((seed, chosen))
    assert not faults


def test_a_log_without_the_libtype_is_an_error(script: ModuleType, trial_log, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a trial of the libtype the script fails."""
    log = trial_log((ONE, "first", 0, 20.0))
    log.write_text(log.read_text().replace('"libtype": "fake"', '"libtype": "other"'))
    with pytest.raises(SystemExit):
        script.main([*FAKE, str(log)])
    assert "no trial of fake" in capsys.readouterr().err
