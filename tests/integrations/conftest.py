"""The default instance over backends of the tests' making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import tunedgemm
from tunedgemm.csvfile import Row, write_rows
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.settings import Settings
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuned_gemm import tgemm

SHAPE = Shape("a16w16", 4, 16, 32, "fp32")


@pytest.fixture
def routed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """The default instance over a table that sends one shape to a fake backend; a list of the calls that reach it."""
    calls: list[str] = []

    def use(call: Callable[..., torch.Tensor], shape: Shape = SHAPE) -> list[str]:
        def counted(solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
            calls.append(solution.kernel_name)
            return call(*operands)

        registry = fake_registry(fake_backend("turbo", call=counted))
        here = device_of(-1)
        path = tmp_path / "t.csv"
        row = Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device="", solution=Solution("turbo", "fake"), us=1.0)
        write_rows(path, op_named("a16w16"), [row])
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(path))
        monkeypatch.setattr(tgemm.dispatcher, "_given", (registry, None, None))
        tunedgemm.reload()
        return calls

    yield use
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.fixture
def numpys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The default instance over a backend that takes every shape and hides its product from torch; the sizes of x of each call."""
    calls: list[tuple[int, ...]] = []

    def product(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(tuple(x.shape))
        out = x.detach().numpy() @ weight.detach().numpy().T
        return torch.from_numpy(out if bias is None else out + bias.detach().numpy())

    registry = fake_registry(fake_backend("turbo", call=product, heuristic="fake"))
    monkeypatch.setattr(tgemm.dispatcher, "_given", (registry, Settings(untuned=("turbo",)), None))
    tunedgemm.reload()
    yield calls
    monkeypatch.undo()
    tunedgemm.reload()
