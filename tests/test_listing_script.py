"""benchmarks/listing.py: what a backend lists first against all that a tuning timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry

SHAPES = [Shape("a16w16", 1, 64, 64), Shape("a16w16", 2, 64, 64)]


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a backend that lists three kernels."""
    module = as_module(Path(__file__).parents[1] / "benchmarks" / "listing.py")
    backend = fake_backend("fake", solutions=["first", "second", "third"])
    monkeypatch.setattr(module, "Registry", lambda: fake_registry(backend))
    return module


@pytest.fixture
def log(trial_log: Callable[..., Path]) -> Path:
    """A trial log: the second of the list is the best for one shape, what a refinement found for the other."""
    one, two = SHAPES
    return trial_log((one, "first", 0, 20.0), (one, "second", 0, 10.0), (two, "second", 0, 10.0), (two, "found", 0, 8.0))


def test_a_loss_is_what_the_first_of_the_list_miss(script: ModuleType, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One shape's best is among the first two, the other's best is 20 % faster than both."""
    page = log.with_name("listing.json")
    assert script.main([str(log), "--libtype", "fake", "--first", "2", "--json", str(page)]) == 1
    told = capsys.readouterr().out
    assert "1 of 2 shapes" in told
    assert "fake:found 8.00 us, of the first fake:second 10.00 us" in told
    assert [row["loss"] for row in json.loads(page.read_text())["shapes"]] == [0, 0.25]
    assert script.main([str(log), "--libtype", "fake", "--first", "2", "--within", "0.3"]) == 0


def test_a_log_without_the_libtype_is_told(script: ModuleType, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is counted as kept where nothing was timed."""
    text = log.read_text().replace('"libtype": "fake"', '"libtype": "other"')
    log.write_text(text)
    with pytest.raises(SystemExit):
        script.main([str(log), "--libtype", "fake"])
    assert "no trial of fake" in capsys.readouterr().err
