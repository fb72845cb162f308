"""benchmarks/cover.py: the few kernels that serve the shapes of a trial log best."""

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

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ONE, TWO, THREE = (Shape("a16w16", m, 64, 64) for m in (1, 2, 3))


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a backend that lists one kernel."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = as_module(BENCHMARKS / "cover.py")
    monkeypatch.setattr(module, "Registry", lambda: fake_registry(fake_backend("fake", solutions=["middling"])))
    return module


@pytest.fixture
def log(trial_log: Callable[..., Path]) -> Path:
    """Each of two shapes has a kernel of its own that is best, in one split; one kernel is good for both, and alone right for a third."""
    of_one = (ONE, "few", 1, 30.0), (ONE, "few", 4, 10.0), (ONE, "middling", 1, 12.0), (ONE, "many", 1, 40.0)
    return trial_log(*of_one, (TWO, "many", 1, 10.0), (TWO, "middling", 1, 11.0), (TWO, "few", 1, 50.0), (THREE, "middling", 1, 7.0))


def test_the_kernel_that_loses_least_is_first(script: ModuleType, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then those of which each gains most; and what is listed today is judged beside them."""
    page = log.with_name("cover.json")
    assert script.main([str(log), "--libtype", "fake", "--json", str(page)]) == 0
    found = json.loads(page.read_text())
    assert [each["kernel"] for each in found["kernels"]] == ["middling", "few", "many"]
    means = [each["mean"] for each in found["kernels"]]
    assert means == pytest.approx([(1.2 * 1.1) ** (1 / 3) - 1, 1.1 ** (1 / 3) - 1, 0], abs=1e-9)
    assert [each["worst"] for each in found["kernels"]] == pytest.approx([0.2, 0.1, 0], abs=1e-9)
    assert found["listed"]["kernels"] == 1 and found["listed"]["mean"] == pytest.approx(means[0])
    assert "1 listed today: mean loss 9.70%, worst 20.0%, over 3 shapes" in capsys.readouterr().out


def test_a_shape_without_a_kernel_counts_as_lost(script: ModuleType, log: Path) -> None:
    """The best for two of three shapes are not taken where the third would have none."""
    times = script.timed([log], "fake")
    assert script.cover(script.losses(times), 1) == ["middling"]
    assert max(script.lost(script.losses(times), ["few", "many"])) == pytest.approx(2.302585, abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_is_near_the_best_of_all(script: ModuleType, seed: int) -> None:
    """Of all sets of three of eight kernels over six shapes."""
    chance = random.Random(seed)
    given = pd.DataFrame([{f"k{name}": chance.choice((0.0, 0.1, 0.4, 2.3)) for name in range(8)} for _ in range(6)])
    chosen = script.cover(given, 3)
    best = min(script.lost(given, few).sum() for few in itertools.combinations([f"k{name}" for name in range(8)], 3))
    assert len(chosen) <= 3
    assert script.lost(given, chosen).sum() <= best + 0.1 + 1e-9


def test_a_log_without_the_libtype_is_told(script: ModuleType, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is chosen where nothing was timed."""
    log.write_text(log.read_text().replace('"libtype": "fake"', '"libtype": "other"'))
    with pytest.raises(SystemExit):
        script.main([str(log), "--libtype", "fake"])
    assert "no trial of fake" in capsys.readouterr().err
