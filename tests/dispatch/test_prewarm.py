"""prewarm and unbound: binding launchers ahead of calls, and listing shapes met unbound in a
capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends import split_bias
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import FakeHooks, fake_backend, fake_registry
from tunedgemm.testing.listed import listed

Met = list[tuple[str, tuple[int, ...]]]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[Met]:
    """Record the shape and size of the first operand for each
    call of a backend that serves every shape."""
    calls: Met = []

    def call(solution, shape, *operands):
        calls.append((str(shape), tuple(operands[0].shape)))
        return torch._C._nn.linear(*operands)

    gemm = TunedGemm(fake_registry(fake_backend("turbo", heuristic="fake", call=call)), settings=Settings(untuned=("turbo",)))
    monkeypatch.setattr(tunedgemm.tgemm, "_dispatchers", gemm._dispatchers)
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))
    monkeypatch.setattr("tunedgemm.dispatch.prewarm.current_device", lambda: device_of(-1))
    yield calls


def shape(m: int, n: int, k: int, bias: bool = False) -> Shape:
    return Shape("a16w16", m, n, k, "fp32", epilogue="bias" if bias else "none")


class Model(torch.nn.Module):
    """Two linear layers of one shape, one with a bias, and a layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(32, 16)
        self.norm = torch.nn.LayerNorm(32)


def test_a_models_layers_are_bound_and_run_for_each_m(met: Met) -> None:
    """Equal layers are bound once, with and without bias; other modules are ignored."""
    assert tunedgemm.prewarm(Model(), m=(1, 4)) == 4
    wanted = [(shape(1, 32, 32), 1), (shape(4, 32, 32), 4), (shape(1, 16, 32, bias=True), 1), (shape(4, 16, 32, bias=True), 4)]
    assert met == [(str(one), (m, 32)) for one, m in wanted]


def test_one_m_needs_no_tuple(met: Met) -> None:
    """A number stands for itself."""
    assert tunedgemm.prewarm(Model(), m=7) == 2


def test_parameters_that_need_gradients_are_prewarmed(met: Met) -> None:
    """A model as it was made is bound as it runs under no_grad."""
    model = Model()
    assert all(parameter.requires_grad for parameter in model.parameters())
    tunedgemm.prewarm(model)
    assert len(met) == 2


def test_other_modules_list_their_calls(met: Met) -> None:
    """A module with `tuned_calls` lists the calls to bind."""

    class Own(torch.nn.Module):
        def tuned_calls(self, m):
            yield "a16w16", (torch.ones(m, 8), torch.ones(4, 8)), None

    assert tunedgemm.prewarm(torch.nn.Sequential(Own()), m=3) == 1
    assert met == [(str(shape(3, 4, 8)), (3, 8))]


def test_weights_of_other_types_are_left_out(met: Met) -> None:
    """Layers that routing leaves to torch are not bound: tensor subclasses, integers, strided weights."""

    class Odd(torch.Tensor):
        pass

    layers = [torch.nn.Linear(8, 4, bias=False) for _ in range(3)]
    layers[0].weight = torch.nn.Parameter(torch.ones(4, 8).as_subclass(Odd), requires_grad=False)
    layers[1].weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.int32), requires_grad=False)
    layers[2].weight = torch.nn.Parameter(torch.ones(8, 4).t(), requires_grad=False)
    assert tunedgemm.prewarm(torch.nn.ModuleList(layers)) == 0
    assert met == []


@listed("m", [0, -1, (2, True), (2.5,), ()])
def test_a_wrong_m_is_an_error(m: int | tuple[int, ...]) -> None:
    """Rows are whole numbers from 1 on."""
    with pytest.raises(UserError, match=r"prewarm: m (must be|holds)"):
        tunedgemm.prewarm(Model(), m=m)


def test_a_model_on_the_meta_device_is_an_error() -> None:
    """There is nothing to run; the message names the layer."""
    with pytest.raises(UserError, match="the weight of '0' is on the meta device"):
        tunedgemm.prewarm(torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta")))


def test_a_kernel_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Prewarming continues with the next solution, as a call would, and with the other shapes."""

    def fail(solution, shape, *operands):
        raise RuntimeError("illegal instruction")

    backend = fake_backend("turbo", heuristic="fake", call=fail)
    dispatcher = TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",))).dispatcher
    assert dispatcher.prewarm([shape(1, 8, 16), shape(2, 8, 16)], device_of(-1)) == 2
    assert caplog.text.count("illegal instruction") == 2
    assert dispatcher.explain(shape(1, 8, 16), device_of(-1)).offer.solution.libtype == "torch"


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say of calls on the CPU that they are captured, or not."""
    state = [False]
    monkeypatch.setattr("tunedgemm.dispatch.call.in_capture", lambda operand: state[0])
    return lambda now: state.__setitem__(0, now)


def test_shapes_met_first_in_a_capture_are_listed_and_served_by_torch(met: Met, capturing, caplog: pytest.LogCaptureFixture) -> None:
    """Warned once a shape, counted by call, and off the list once they are prewarmed."""
    x, weight = torch.randn(3, 32), torch.randn(16, 32)
    tunedgemm.prewarm([shape(2, 16, 32)])
    met.clear()
    capturing(True)
    with caplog.at_level(logging.WARNING, "tunedgemm"):
        for _ in range(3):
            out = tunedgemm.tgemm.of("a16w16").call(x, weight)
    assert met == []
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight))
    assert tunedgemm.unbound() == {shape(3, 16, 32): 3}
    assert caplog.text.count("first called during a graph capture") == 1

    capturing(False)
    assert tunedgemm.prewarm(tunedgemm.unbound()) == 1
    assert tunedgemm.unbound() == {}
    assert len(met) == 1
    tunedgemm.tgemm.of("a16w16").call(x, weight)
    assert len(met) == 2


class Capturable(FakeHooks):
    """Its launchers may be captured."""

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """As `FakeHooks` do it."""
        found = super().bind(solution, shape, device)
        return attrs.evolve(found, graph_safe=True) if isinstance(found, Launcher) else found


@pytest.mark.parametrize("own", [True, False], ids=["row with +add", "row without a bias"])
def test_a_split_bias_is_bound_with_its_product(own: bool, capturing, tmp_path: Path) -> None:
    """A kernel with an add for its bias is prewarmed by table or shape,
    and a capture then runs it bound."""
    met = []

    def call(solution, shape, x, weight):
        met.append((str(solution), shape.bias))
        return torch._C._nn.linear(x, weight)

    biased, here = shape(3, 16, 32, bias=True), device_of(-1)
    plain = Solution("turbo", "k")
    tuned, solution = (biased, split_bias.with_add(plain)) if own else (shape(3, 16, 32), plain)
    row = Row(shape=tuned, gfx=here.gfx, cu_num=here.cu_num, device="", solution=solution, us=1.0)
    write_rows(tmp_path / "t.csv", op_named("a16w16"), [row])
    no_bias = Capturable("turbo", solutions=("k",), call=call, supports=lambda asked, _: Unsupported("no bias") if asked.bias else None)
    gemm = TunedGemm(fake_registry(fake_backend("turbo", hooks=no_bias)))
    gemm.load_config(tmp_path / "t.csv")
    assert gemm.dispatcher.prewarm(None if own else [biased], here) == 1
    assert met == [("turbo:k", False)]

    capturing(True)
    x, weight, bias = torch.randn(3, 32), torch.randn(16, 32), torch.randn(16)
    torch.testing.assert_close(gemm.dispatcher.call(x, weight, bias), torch._C._nn.linear(x, weight, bias))
    assert met == [("turbo:k", False)] * 2 and not gemm.dispatcher.unbound


def test_reload_forgets_unbound_shapes(met: Met, capturing) -> None:
    """The list is of the tables in use."""
    dispatcher = tunedgemm.tgemm.of("a16w16")
    capturing(True)
    dispatcher.call(torch.randn(3, 32), torch.randn(16, 32))
    assert dispatcher.unbound
    dispatcher.reload()
    assert not tunedgemm.unbound()


def test_a_shape_of_another_op_runs_on_random_operands() -> None:
    """Its operands, fields and dtypes are the op's own."""
    here = Shape("a8w8", 4, 32, 64, "fp8_e4m3fn", "bf16", scale="row")
    assert tunedgemm.prewarm([here], device=device_of(-1)) == 1


def test_a_shape_that_cannot_run_costs_itself_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that no call asks for, and operands without memory, are named; the others are warmed."""
    good, large = shape(2, 8, 16), Shape("a16w16", 2, 1 << 20, 1 << 20)
    wrong = [attrs.evolve(good, dtype="fp4x2"), attrs.evolve(good, layout="unknown"), attrs.evolve(good, scale="row")]
    wrong += [Shape("a16w16", *[(1 << 31) - 1] * 3)]
    monkeypatch.setattr("tunedgemm.dispatch.warming._memory", lambda: 1 << 40)
    dispatcher = Dispatcher(op_named("a16w16"))
    assert dispatcher.prewarm([*wrong, large, good], device_of(-1)) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert [f"{each} is not prewarmed: ShapeError: a16w16: no call asks" in text for each, text in zip(wrong, messages, strict=False)] == [
        True
    ] * 4
    assert messages[4] == f"{large} is bound but was not run: its operands cannot be made: MemoryError: they are larger than the memory"


def test_operands_that_cannot_be_made_blame_no_solution(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails before a kernel runs does not exclude the kernel from the next call."""
    op = op_named("a16w16")

    def failing(*_: object) -> None:
        raise RuntimeError("no generator here")

    dispatcher = Dispatcher(attrs.evolve(op, make_inputs=failing))
    assert dispatcher.prewarm([shape(2, 8, 16)], device_of(-1)) == 0
    assert "its operands cannot be made: RuntimeError: no generator here" in caplog.text
    assert "will not be used" not in caplog.text
