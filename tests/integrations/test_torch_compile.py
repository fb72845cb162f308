"""torch.compile: a routed call is one op of the graph, run and counted each time; traced transforms
stay torch's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import tunedgemm
from torch.nn import functional
from tunedgemm.dispatch.settings import Settings
from tunedgemm.integrations.patching import patched
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry, with_hooks
from tunedgemm.workload.capture import recorder

OP = op_named("a16w16")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])

#: torch.export.load of torch 2.11 warns so of the buffers that it makes.
UNWRITABLE = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, tuple[int, int, int]]]]:
    """Capture is on; what it has found, (calls, N, K) by M."""
    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    tunedgemm.reload()
    torch._dynamo.reset()

    def found() -> dict[int, tuple[int, int, int]]:
        recorder(OP).flush()
        return {row.shape.m: (row.count, row.shape.n, row.shape.k) for row in read_untuned(untuned_path(OP), OP)}

    yield found
    monkeypatch.undo()
    tunedgemm.reload()


def graphs_of(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> list[str]:
    """The code of the graphs that torch.compile makes of a call under patched()."""
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module.code)
        return module.forward

    with patched():
        torch.compile(function, backend=keep)(*operands)
    return graphs


@BACKENDS
def test_routed_calls_run_and_count_at_every_call_with_any_m(backend: str, captured) -> None:
    """One graph for all M, no break; each M that ran is captured, as often as it ran."""
    layer = torch.nn.Linear(32, 16)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layer(torch.sin(x))) + 1

    with patched(), torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        outs = {m: [compiled(torch.ones(m, 32)) for _ in range(times)] for m, times in ((5, 2), (7, 3), (12, 1))}

    assert captured() == {5: (2, 16, 32), 7: (3, 16, 32), 12: (1, 16, 32)}
    with torch.no_grad():
        for m, found in outs.items():
            for out in found:
                torch.testing.assert_close(out, model(torch.ones(m, 32)))


def test_a_routed_call_is_one_node_that_knows_its_output() -> None:
    """The graph has our op for torch's with leading dimensions,
    with a bias and in inference mode."""
    layer, x = torch.nn.Linear(32, 16), torch.ones(2, 3, 32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            [code] = graphs_of(layer, x)
            assert code.count("tunedgemm.linear") == 1 and "nn.functional" not in code and "_nn.linear" not in code


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(4, 32).double(), torch.randn(16, 32).double()),
        (torch.randn(4, 32), torch.randn(32)),
        (torch.randn(32), torch.randn(16, 32)),
        (torch.randn(0, 32), torch.randn(16, 32)),
        (torch.randn(32, 4).t(), torch.randn(32, 16).t()),
        (torch.randn(5, 3, 32).transpose(0, 1), torch.randn(16, 32)),
    ],
    ids=["float64", "1-D weight", "1-D input", "no rows", "strided", "strided 3-D"],
)
def test_whatever_torch_takes_comes_out_compiled(x: torch.Tensor, weight: torch.Tensor) -> None:
    """The op takes what F.linear takes; its output has the strides that compiled code expects."""
    with patched(), torch.no_grad():
        out = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)(x, weight)

    torch.testing.assert_close(out, torch._C._nn.linear(x, weight))
    assert out.is_contiguous()


def test_operands_that_do_not_fit_are_torchs_error() -> None:
    """Operands that do not fit raise torch's error while the graph is traced."""
    with patched(), torch.no_grad(), pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        torch.compile(functional.linear, backend="aot_eager")(torch.randn(4, 31), torch.randn(16, 32))


def test_training_keeps_torchs_own() -> None:
    """Where a gradient is needed the graph has torch's F.linear, and the gradients are torch's."""
    layer, x = torch.nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    with patched():
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    ours = [x.grad.clone(), layer.weight.grad.clone()]
    x.grad = layer.weight.grad = None
    layer(x).square().sum().backward()

    torch.testing.assert_close(ours, [x.grad, layer.weight.grad])
    assert not any("tunedgemm" in code for code in graphs_of(layer, x))


def test_transforms_and_autocast_keep_their_meaning() -> None:
    """In a compiled function vmap, jvp, grad and autocast act as on torch's F.linear."""
    weight, x, t = torch.randn(16, 32), torch.randn(4, 32), torch.randn(4, 32)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.linear(x, weight)

    functions = [
        torch.vmap(lambda row: functional.linear(row, weight)),
        lambda x: torch.func.jvp(lambda x: functional.linear(x, weight), (x,), (t,))[1],
        torch.func.grad(lambda x: functional.linear(x, weight).square().sum()),
        cast,
    ]
    with torch.no_grad():
        for function in functions:
            with patched():
                out = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
            wanted = function(x)
            assert out.dtype == wanted.dtype
            torch.testing.assert_close(out, wanted)


def test_importing_the_package_defines_no_op(child) -> None:
    """The op is defined when routing is requested;
    the package loads no torch, and routing no compiler."""
    printed = child(
        "import sys, tunedgemm\n"
        "print('torch' in sys.modules)\n"
        "tunedgemm.patched\n"
        "import torch\n"
        "print('torch._dynamo' in sys.modules, torch.ops.tunedgemm.linear.default)"
    )
    assert printed.splitlines() == ["False", "False tunedgemm.linear.default"]


@needs_compiler
def test_the_operations_after_an_op_are_one_kernel() -> None:
    """Inductor fuses around the op as it does around torch's own product."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    with fresh_cache(), torch.no_grad(), patched():
        out, [code] = run_and_get_code(torch.compile(lambda x: torch.relu(functional.linear(x, weight)) * 2 + 1, fullgraph=True), x)

    torch.testing.assert_close(out, torch.relu(x @ weight.t()) * 2 + 1)
    calls = code[code.index("def call(") :]
    assert calls.count("torch.ops.tunedgemm.linear_straight(") == 1
    assert calls.count("cpp_fused_") == 1


class Scaled(torch.nn.Module):
    """A layer of int8 operands with scales."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.register_buffer("weight", torch.randint(-9, 9, (32, 64), generator=draw, dtype=torch.int8))
        self.register_buffer("scale", torch.rand(32, 1, generator=draw))

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        """[..., 32] in bf16."""
        return tunedgemm.gemm_a8w8(x, self.weight, x_scale, self.scale)


@UNWRITABLE
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_op_is_saved_and_loaded(strict: bool, tmp_path: Path) -> None:
    """An exported program with our op is saved, and runs in a process that imports the package."""
    operands = (torch.randint(-9, 9, (4, 64), dtype=torch.int8), torch.rand(4, 1))
    with torch.no_grad():
        program = torch.export.export(Scaled(), operands, strict=strict)
        assert "tunedgemm.a8w8" in str(program)
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        assert torch.equal(loaded(*operands), Scaled()(*operands))


class Twice(torch.nn.Module):
    """A layer that is routed, and the product by our own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 16]."""
        weight = self.layer.weight
        return self.layer(x) + tunedgemm.gemm_a16w16(x, weight) + tunedgemm.call("a16w16", x, weight)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_routed_model_is_saved_and_runs_without_the_package(strict: bool, tmp_path: Path, child) -> None:
    """An exported routed model, or gemm_a16w16,
    contains torch's product and loads without the package."""
    x, model = torch.ones(4, 32), Twice()
    with patched(), torch.no_grad():
        torch.export.save(torch.export.export(model, (x,), strict=strict), tmp_path / "program.pt2")
        wanted = model(x).sum().item()
    printed = child(
        "import sys, torch, warnings\nwarnings.filterwarnings('ignore', 'The given buffer is not writable')\n"
        f"out = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()(torch.ones(4, 32))\n"
        "print(out.sum().item(), 'tunedgemm' in sys.modules)"
    ).split()
    assert float(printed[0]) == pytest.approx(wanted, rel=1e-4, abs=1e-4) and printed[1] == "False"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Turn batch-invariant mode on, with a backend whose class serves every M; list M of each launch."""
    calls: list[int] = []

    def call(solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
        calls.append(shape.m)
        return exact(solution, shape, *operands)

    backend = with_hooks(
        fake_backend("turbo", solutions=("k",), call=call), invariant_fallback=lambda shape: Solution("turbo", "k", sum_order="exact")
    )
    dispatcher = tunedgemm.tgemm.dispatcher
    monkeypatch.setattr(dispatcher, "_configured", (fake_registry(backend), Settings(untuned=("turbo",), batch_invariant=True), None))
    dispatcher.reload()
    yield calls
    monkeypatch.undo()
    dispatcher.reload()


@pytest.mark.parametrize("bias", [False, True])
@BACKENDS
def test_a_compiled_training_step_has_the_forward_bits_of_the_class(backend: str, bias: bool, launched: list[int]) -> None:
    """One graph for all M; its gradients are torch's."""
    layer = torch.nn.Linear(32, 16, bias=bias)

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.relu(x), layer.weight, layer.bias)

    with patched():
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        for m in (5, 7):
            x = torch.randn(2, m, 32, requires_grad=True)
            out = compiled(x)
            with torch.no_grad():
                served = step(x)
            assert torch.equal(out, served)
            gradient, inputs = torch.randn_like(out), (x, *layer.parameters())
            found, wanted = torch.autograd.grad(out, inputs, gradient), torch.autograd.grad(torch_step(x, layer), inputs, gradient)
            for mine, torchs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, torchs)

    assert launched == [10, 10, 14, 14]


def torch_step(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    return torch._C._nn.linear(torch.relu(x), layer.weight, layer.bias)


def test_outside_the_mode_a_traced_gradient_is_torchs() -> None:
    """The graph has torch's own product."""
    layer = torch.nn.Linear(32, 16)
    [code] = graphs_of(layer, torch.ones(2, 32, requires_grad=True))
    assert "tunedgemm.linear" not in code
