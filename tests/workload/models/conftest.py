"""Tiny models with the ratios of real ones, and the products that a forward pass of them really has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: name of a model -> its config.json, all widths divided by about 16
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "configs.json").read_text())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave out transformers' advice, which goes to the log."""
    logging = pytest.importorskip("transformers").utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@pytest.fixture(scope="session")
def configs() -> dict[str, dict[str, Any]]:
    """The config.json of each tiny model."""
    return CONFIGS


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model's config.json, or any text, to a new folder; `...` drops a field."""

    def write(model: str | dict[str, Any], **changes: Any) -> Path:
        raw = {**(CONFIGS[model] if isinstance(model, str) else model), **changes}
        place = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
        return place

    return write


@pytest.fixture(scope="session")
def real(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """benchmarks/model_shapes.py, which watches forward passes."""
    return as_module(Path(__file__).parents[3] / "benchmarks" / "model_shapes.py")


@pytest.fixture
def one_line() -> Callable[[Callable[[], object]], str]:
    """Call what must refuse; returns what it says, which is one line."""
    from tunedgemm.errors import UserError

    def refused(call: Callable[[], object]) -> str:
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused
