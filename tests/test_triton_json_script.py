"""benchmarks/triton_json.py: what it times, and what it makes of the times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from tunedgemm.device import device_of
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry

pytest.importorskip("tunedgemm_triton")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a list of kernels that a CPU has too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = as_module(BENCHMARKS / "triton_json.py")
    monkeypatch.setattr(module, "OURS", attrs.evolve(module.OURS, listed=lambda *_: [Solution("triton", "slow")]))
    return module


@pytest.mark.timing
def test_a_shape_is_timed_with_its_control_and_its_row(script: ModuleType) -> None:
    """A file's choice that is quicker than the first guess gains; beside a row that is as quick it loses little."""
    backend = fake_backend("triton", solutions=["slow", "quick", "own"], heuristic="quick", sleep={"slow": 0.003})
    shape = Shape("a16w16", 4, 32, 64)
    found = script.measured(shape, device_of(-1), fake_registry(backend), {shape: Solution("triton", "own")}, 9)
    assert found["choice"] == "triton:quick"
    assert set(found["samples"]) == {"choice", "guess", "again", "own", "torch"}
    assert found["gain"][0] > 1.5
    assert found["over_torch"][0] < 1
    assert found["regret"][0] < 1
    assert {"control", "choice_us"} <= set(found)
    assert [line.partition(":")[0] for line in script.summary([found])] == ["gain", "control", "over_torch", "regret"]


def test_a_shape_without_a_file_ends_it(script: ModuleType) -> None:
    """Nothing is measured under another name."""
    with pytest.raises(SystemExit, match="no JSON file answers"):
        script.measured(Shape("a16w16", 4, 32, 64), device_of(-1), fake_registry(fake_backend("triton")), {}, 5)
