"""The default instance over backends of the tests' making, and ways to write to a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tunedgemm
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.siblings import module_at

SHAPE = Shape("a16w16", 4, 16, 32, "fp32")

writes = module_at(Path(__file__).with_name("writes"))


@pytest.fixture
def routed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Route one shape of the default instance to a fake backend,
    and list the calls that reach it."""
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
        monkeypatch.setattr(tgemm.dispatcher, "_configured", (registry, None, None))
        tunedgemm.reload()
        return calls

    yield use
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """Use default tables and a backend with kernels for every layout;
    list M and layout of each call."""
    calls: list[tuple[int, str]] = []

    def call(solution, shape, *operands):
        calls.append((shape.m, shape.layout))
        return exact(solution, shape, *operands)

    dispatcher = tunedgemm.tgemm.dispatcher
    backend = fake_backend("turbo", heuristic="fake", call=call)
    monkeypatch.setattr(dispatcher, "_configured", (fake_registry(backend), Settings(untuned=("turbo",)), None))
    dispatcher.reload()
    yield calls
    monkeypatch.undo()
    dispatcher.reload()


@pytest.fixture
def numpys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Give the default instance a backend that takes every shape and hides its product from torch;
    list the sizes of x."""
    calls: list[tuple[int, ...]] = []

    def product(solution: Solution, shape: Shape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(tuple(x.shape))
        out = x.detach().numpy() @ weight.detach().numpy().T
        return torch.from_numpy(out if bias is None else out + bias.detach().numpy())

    registry = fake_registry(fake_backend("turbo", call=product, heuristic="fake"))
    monkeypatch.setattr(tgemm.dispatcher, "_configured", (registry, Settings(untuned=("turbo",)), None))
    tunedgemm.reload()
    yield calls
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.fixture(name="writes")
def _writes() -> ModuleType:
    """Return the ways to write to a weight."""
    return writes


@pytest.fixture(params=[name for name in writes.WRITES if not writes.is_unseen(name)])
def write(request: pytest.FixtureRequest) -> str:
    """Return the name of a way to write to a weight that the next call follows."""
    return request.param


@pytest.fixture(params=[name for name in writes.WRITES if writes.is_unseen(name)])
def unseen(request: pytest.FixtureRequest) -> str:
    """Return the name of a way that no call sees."""
    return request.param


@pytest.fixture
def change(write: str) -> Callable[[torch.nn.Linear, torch.Tensor], object]:
    """Return a way to change a layer's weight."""
    return writes.WRITES[write]


@pytest.fixture(params=[name for name in writes.WRITES if name not in writes.ON_CPU and writes.answers().get(name) == "a new copy"])
def gpu_change(request: pytest.FixtureRequest) -> Callable[[torch.nn.Linear, torch.Tensor], object]:
    """Return a way to change a layer's weight on a GPU; skip what this torch has no kernel for."""

    def changed(layer: torch.nn.Linear, other: torch.Tensor) -> object:
        try:
            return writes.WRITES[request.param](layer, other)
        except RuntimeError as error:
            if "supported devices" in str(error):  # fused Adagrad on CUDA, before torch 2.13
                pytest.skip(str(error))
            raise

    return changed
