"""Dispatch's slot for misses: the calls that it gets, and the use of its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.cache import LauncherCache, Served
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.listed import listed

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 4, 32, 64, "fp32")
LINEAR = torch.nn.functional.linear


def operands(m: int = 4, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, 64), torch.randn(n, 64)


def put(path: Path, shape: Shape, solution: Solution) -> None:
    """A tuned file with one row for the CPU."""
    here = device_of(-1)
    path.parent.mkdir(exist_ok=True)
    write_rows(path, OP, [Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=solution, us=1.0)])


def asking(answer: Callable[[Shape, Device], bool], registry: Registry | None = None) -> tuple[Dispatcher, list[Shape]]:
    """A dispatcher with *answer* in its slot, and the shapes that it is asked about."""
    dispatcher, asked = Dispatcher(OP, registry or fake_registry(), settings=Settings()), []

    def on_miss(shape: Shape, device: Device) -> bool:
        asked.append(shape)
        return answer(shape, device)

    dispatcher.on_miss = on_miss
    return dispatcher, asked


class Tagged(torch.Tensor):
    """A subclass that launchers do not know."""


@listed(
    "call",
    [
        lambda gemm: gemm(torch.randn(4, 64, requires_grad=True), torch.randn(32, 64)),
        lambda gemm: gemm(torch.randn(4, 64).as_subclass(Tagged), torch.randn(32, 64)),
        lambda gemm: gemm(torch.randn(0, 64), torch.randn(32, 64)),
        lambda gemm: gemm(torch.empty(4, 64, device="meta"), torch.empty(32, 64, device="meta")),
    ],
    ids=["gradient", "subclass", "empty", "meta"],
)
def test_calls_that_launchers_do_not_serve_are_not_tuned(call: Callable) -> None:
    """Calls with gradients, subclasses, empty inputs or traces are never tuned."""
    dispatcher, asked = asking(lambda shape, device: False)

    call(dispatcher.call)

    assert asked == []


@pytest.mark.parametrize("solution", [Solution("turbo", "a"), Solution("asm", "absent")], ids=["usable", "not usable here"])
@pytest.mark.parametrize("m", [4, 3], ids=["exact", "padded"])
def test_a_row_is_not_a_miss(m: int, solution: Solution, tmp_path: Path) -> None:
    """No tuning starts where a row answers, padded or overruled by the table."""
    put(tmp_path / "home" / "bf16_tuned_gemm.csv", SHAPE, solution)
    dispatcher, asked = asking(lambda shape, device: False, fake_registry(fake_backend("turbo", solutions=("a",))))
    x, weight = operands(m)

    torch.testing.assert_close(dispatcher.call(x, weight), LINEAR(x, weight))

    assert asked == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates
def test_a_compiled_call_is_tuned_when_it_runs_and_not_when_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace with fake tensors tunes nothing; the first run of the compiled function does."""
    asked: list[tuple[Shape, bool]] = []

    def on_miss(shape: Shape, device: Device) -> bool:
        asked.append((shape, torch.compiler.is_compiling()))
        return False

    monkeypatch.setattr(tunedgemm.dispatcher(), "on_miss", on_miss)
    tunedgemm.dispatcher().launchers.clear()
    torch._dynamo.reset()
    compiled = torch.compile(tunedgemm.linear, backend="aot_eager", fullgraph=True)
    x, weight = operands()

    torch.testing.assert_close(compiled(x, weight), LINEAR(x, weight))

    assert asked == [(SHAPE, False)]


@pytest.mark.gpu
def test_a_call_that_is_recorded_into_a_graph_is_not_tuned() -> None:
    """Torch serves it there; the same call outside is asked about."""
    dispatcher, asked = asking(lambda shape, device: False)
    x, weight = (one.cuda() for one in operands())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        LINEAR(x, weight)  # torch's own handles are made before the capture
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        dispatcher.call(x, weight)
    assert asked == []

    dispatcher.call(x, weight)

    assert asked == [SHAPE]


def test_a_new_row_is_loaded_and_bound_launchers_stay(tmp_path: Path) -> None:
    """After a tune the tables are read again for this call,
    and other shapes keep their launchers."""

    def tuned(shape: Shape, device: Device) -> bool:
        if shape == SHAPE:
            put(tmp_path / "home" / "bf16_tuned_gemm.csv", shape, Solution("turbo", "b"))
        return shape == SHAPE

    calls: list[str] = []

    def noting(solution: Solution, shape: Shape, *given: torch.Tensor) -> torch.Tensor:
        calls.append(solution.kernel_name)
        return LINEAR(*given)

    dispatcher, asked = asking(tuned, fake_registry(fake_backend("turbo", solutions=("a", "b"), call=noting)))
    other, here = operands(n=48), operands()
    dispatcher.prewarm([SHAPE], device_of(-1))  # bound without a row, and asked about at its first call all the same
    dispatcher.call(*other)
    before = dict(dispatcher.launchers)

    dispatcher.call(*here)
    dispatcher.call(*here)
    dispatcher.call(*other)

    assert calls == ["b", "b"]
    assert [shape.n for shape in asked] == [48, 32]
    assert len(before) == 1 and all(dispatcher.launchers[key] is call for key, call in before.items())


def test_a_given_table_gets_no_rows() -> None:
    """A dispatcher over a given table tunes nothing, because it has no table for new rows."""
    assert Dispatcher(OP, settings=Settings(online=True), table=Table(OP)).on_miss is None


def renewable(folder: Path) -> tuple[Dispatcher, Path]:
    """A dispatcher that has served a shape untuned, and the user's table, which is not there yet."""
    dispatcher = Dispatcher(OP, fake_registry(fake_backend("turbo", solutions=("a",))), settings=Settings())
    dispatcher.call(*operands())
    return dispatcher, folder / "home" / "bf16_tuned_gemm.csv"


def test_prewarm_binds_a_row_that_renew_has_read(tmp_path: Path) -> None:
    """A graph that is captured after it has the row's kernel."""
    dispatcher, table = renewable(tmp_path)
    put(table, SHAPE, Solution("turbo", "a"))
    dispatcher.renew()

    dispatcher.prewarm([SHAPE], device_of(-1))

    assert str(dispatcher.bound(SHAPE, device_of(-1)).offer.solution) == "turbo:a"


def test_a_reload_during_renew_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that were read before it are not used after it."""
    dispatcher, table = renewable(tmp_path)
    load = Table.load

    def reloaded_meanwhile(*arguments: Any, **named: Any) -> Table:
        read = load(*arguments, **named)
        put(table, SHAPE, Solution("turbo", "a"))
        dispatcher.reload()
        return read

    with monkeypatch.context() as patched:
        patched.setattr(Table, "load", reloaded_meanwhile)
        dispatcher.renew()

    assert str(dispatcher.bound(SHAPE, device_of(-1)).offer.solution) == "turbo:a"


def test_a_launcher_dropped_while_it_is_kept_serves_no_more() -> None:
    """A thread that drops between the two steps of `keep` leaves nothing that a later drop misses."""
    cache = LauncherCache()

    class Dropping(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            cache.drop(lambda served: True)
            super().__setitem__(key, value)

    cache.launchers = Dropping()
    cache.keep(("key",), Served(LINEAR, SHAPE, -1, None))
    cache.drop(lambda served: True)

    assert not cache.launchers
