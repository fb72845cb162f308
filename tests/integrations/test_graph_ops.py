"""Ops in compiled graphs: a call is one node without a graph break, and runs the eager kernel."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tunedgemm
from torch.nn import functional
from tunedgemm.dispatch.tuned_gemm import TunedGemm, tgemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.integrations.graph_ops import graph_op
from tunedgemm.ops import functions, op_named, ops
from tunedgemm.ops.scale_order import scale_order
from tunedgemm.shape import Shape
from tunedgemm.testing.shapes import shapes_of

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet; no gradients, as when a model serves."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def kept(function: Callable[..., Any], *operands: Any) -> list[str]:
    """The code of the graphs that torch.compile makes of a call."""
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module.code)
        return module.forward

    torch.compile(function, backend=keep, fullgraph=True, dynamic=True)(*operands)
    return graphs


def shapes(name: str) -> list[Shape]:
    """The quickest example of an op for each layout, order of scales and bias."""
    op = op_named(name)
    found: dict[tuple[str, str, bool], Shape] = {}
    for shape in sorted(shapes_of(name), key=op.flops):
        if shape.m and shape.bias_dtype in ("", shape.dtype) and op.weight_dtype(shape) != "int4":  # torch's compilers know no int4
            found.setdefault((shape.layout, scale_order(shape), shape.bias), shape)
    return list(found.values())


def arguments(name: str, shape: Shape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands and keywords of `tunedgemm.call`."""
    op = op_named(name)
    return op.make_inputs(shape, torch.device("cpu"), 3), {"otype": torch_dtype(shape.outdtype), **op.fields(shape)}


EVERY = [pytest.param(name, shape, id=f"{name}-{shape}") for name in sorted(ops()) for shape in shapes(name)]


@pytest.mark.parametrize(("name", "shape"), EVERY)
def test_a_call_of_any_op_is_one_node_with_the_same_result(name: str, shape: Shape) -> None:
    """`tunedgemm.call` compiles whole, shuffled weights and fields of the op included."""
    operands, keywords = arguments(name, shape)
    expected = tunedgemm.call(name, *operands, **keywords)

    def model(*operands: torch.Tensor) -> torch.Tensor:
        return tunedgemm.call(name, *operands, **keywords)

    [code] = kept(model, *operands)
    assert code.count(f"tunedgemm.{name}") == 1
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(*operands)
    assert torch.equal(out, expected)


def public_call(name: str) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """A public function of an op, and operands that it takes."""
    op = functions()[name]
    shape = next(shape for shape in sorted(shapes_of(op.name), key=op.flops) if shape.m and not shape.bias)
    operands, keywords = arguments(op.name, shape)
    function = getattr(tunedgemm, name)
    parameters = inspect.signature(function).parameters
    given = {} if "bpreshuffle" not in parameters else {"bpreshuffle": shape.layout != "row"}
    given |= {"w_format": shape["w_format"]} if "w_format" in parameters else {}
    if op.name == "fmoe":
        scales = dict(zip(("w1_scale", "w2_scale", "a1_scale", "a2_scale"), operands[5:], strict=False))
        fields = {
            "activation": keywords["activation"],
            "quant_type": keywords["quant_type"],
            "doweight_stage1": keywords["doweight_stage1"],
        }
        return (lambda *first: function(*first, **fields, **scales)), operands[:5]
    return (lambda *given_operands: function(*given_operands, **given)), operands


@pytest.mark.parametrize("name", sorted(functions()))
def test_every_public_function_compiles_whole(name: str) -> None:
    """AITER's functions trace to their op without a graph break and give the eager value."""
    function, operands = public_call(name)
    expected = function(*operands)

    [code] = kept(function, *operands)
    assert code.count("torch.ops.tunedgemm.") == 1
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*operands), expected)


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "vmap": lambda product: torch.vmap(product)(torch.linspace(-1, 1, 384).view(3, 4, 32)),
    "vmap of strided": lambda product: torch.vmap(lambda x: product(x.t()))(torch.linspace(-1, 1, 384).view(3, 32, 4)),
    "grad": lambda product: torch.func.grad(lambda x: product(x).square().sum())(torch.linspace(-1, 1, 128).view(4, 32)),
    "jvp": lambda product: torch.func.jvp(product, (torch.ones(4, 32),), (torch.linspace(-1, 1, 128).view(4, 32),))[1],
}


@pytest.mark.parametrize("whose", ["function", "call", "instance"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_direct_calls_match_torchs(name: str, whose: str, numpys: list[tuple[int, ...]]) -> None:
    """vmap, grad and jvp work as on torch's op;
    no kernel gets operands without memory or is blamed for it."""
    weight = torch.linspace(-1, 1, 512).view(16, 32)
    own = TunedGemm(*tgemm.dispatcher._configured[:1], settings=tgemm.dispatcher.settings)
    products = {
        "function": lambda x: tunedgemm.gemm_a16w16(x, weight),
        "call": lambda x: tunedgemm.call("a16w16", x, weight),
        "instance": lambda x: own.gemm_a16w16(x, weight),
    }
    for x in (torch.ones(4, 32), torch.ones(32, 4).t()):  # kernels are bound, also for strided operands
        products[whose](x)
    numpys.clear()
    found = TRANSFORMS[name](products[whose])
    torch.testing.assert_close(found, TRANSFORMS[name](lambda x: functional.linear(x, weight)))
    assert numpys == [] and not own.dispatcher._vetoes and not tgemm.dispatcher._vetoes


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.15 says that it runs once per element
def test_vmap_batches_an_op_without_a_rule() -> None:
    """vmap runs an op that torch has no product for once per element of the batch."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-9, 9, sizes, generator=draw, dtype=torch.int8) for sizes in ((3, 4, 64), (32, 64)))
    x_scale, w_scale = torch.rand(3, 4, 1, generator=draw), torch.rand(32, 1, generator=draw)
    found = torch.vmap(lambda x, scale: tunedgemm.gemm_a8w8(x, weight, scale, w_scale))(x, x_scale)
    assert torch.equal(found, torch.stack([tunedgemm.gemm_a8w8(x[at], weight, x_scale[at], w_scale) for at in range(3)]))


@BACKENDS
def test_one_graph_serves_every_m(backend: str, numpys: list[tuple[int, ...]]) -> None:
    """M is dynamic: the tables are looked up at each call, not when the graph is made."""
    weight = torch.randn(16, 32)
    compiled = torch.compile(
        lambda x: tunedgemm.gemm_a16w16(torch.sin(x), weight).relu() + 1, backend=backend, fullgraph=True, dynamic=True
    )
    torch._dynamo.utils.counters.clear()
    for m in (5, 7, 7, 12):
        torch.testing.assert_close(compiled(torch.ones(m, 32)), functional.linear(torch.ones(m, 32).sin(), weight).relu() + 1)

    assert [sizes[0] for sizes in numpys] == [5, 7, 7, 12]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("first", ["", "tunedgemm.gemm_a16w16; tunedgemm.tgemm.mm; tunedgemm.call"], ids=["unused", "used"])
def test_functions_are_known_whenever_they_are_used_first(first: str, child) -> None:
    """In a process that has called nothing yet, too; by the menu's name and by AITER's."""
    printed = child(
        f"import torch, tunedgemm\n{first}\n"
        "weight, x = torch.randn(16, 32), torch.randn(4, 32)\n"
        "tgemm = tunedgemm.tgemm\n"
        "with torch.no_grad():\n"
        "    for function in (lambda x: tunedgemm.gemm_a16w16(x, weight), lambda x: tgemm.mm(x, weight),\n"
        "                     lambda x: tunedgemm.call('a16w16', x, weight)):\n"
        "        out = torch.compile(function, backend='aot_eager', fullgraph=True)(x)\n"
        "        print(torch.equal(out, torch.nn.functional.linear(x, weight)))\n"
    )
    assert printed.splitlines() == ["True"] * 3


@BACKENDS
def test_a_module_with_a_shuffled_weight_compiles_whole(backend: str) -> None:
    """Routed or called directly, the graph has the shuffled bytes and the layout's name, without an
    earlier eager call."""
    layer, x = torch.nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False), torch.randn(4, 64, dtype=torch.bfloat16)
    expected = layer(x)
    layer.weight = torch.nn.Parameter(tunedgemm.shuffle_weight(layer.weight.data), requires_grad=False)
    with tunedgemm.patched():
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        for rows in (4, 7):
            torch.testing.assert_close(compiled(x.repeat(2, 1)[:rows]), expected.repeat(2, 1)[:rows])
    direct = torch.compile(lambda x: tunedgemm.gemm_a16w16(x, layer.weight, layer.bias), backend=backend, fullgraph=True)
    torch.testing.assert_close(direct(x), expected)


@BACKENDS
def test_a_graph_reads_the_present_shuffled_weight(backend: str) -> None:
    """A compiled layer multiplies a square weight that is copied, assigned, replaced or swapped."""
    layer, x = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False), torch.randn(4, 64, dtype=torch.bfloat16)
    drawn = [torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(5)]
    first, *others = map(tunedgemm.shuffle_weight, drawn)
    layer.weight = torch.nn.Parameter(first, requires_grad=False)
    graph = torch.compile(lambda x: tunedgemm.gemm_a16w16(x, layer.weight), backend=backend, fullgraph=True)
    changes = (
        lambda other: None,
        lambda other: layer.load_state_dict({"weight": other}),
        lambda other: setattr(layer.weight, "data", other),
        lambda other: setattr(layer, "weight", torch.nn.Parameter(other, requires_grad=False)),
        lambda other: torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(other, requires_grad=False)),
    )
    for change, other, plain in zip(changes, [first, *others], drawn, strict=True):
        change(other)
        torch.testing.assert_close(graph(x), torch.nn.functional.linear(x, plain))


def test_scales_quantised_in_the_graph_are_shuffled() -> None:
    """A graph has no type for them: sizes or the argument say so."""
    weight, w_scale = tunedgemm.per_1x32_f4_quant(torch.randn(256, 256), shuffle=True)

    def layer(x: torch.Tensor, order: str | None) -> torch.Tensor:
        quantised, scale = tunedgemm.per_1x32_f4_quant(x, shuffle=True)
        return tunedgemm.gemm_a4w4(quantised, weight, scale, w_scale, bpreshuffle=False, scale_order=order)

    for rows, order in ((4, None), (256, "aiter32x8")):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, order), layer(x, None))


def test_operands_that_do_not_fit_are_an_operand_error() -> None:
    """It is raised at the call, in the op's words."""
    compiled = torch.compile(tunedgemm.gemm_a16w16, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="the last dimension of x must equal"):
        compiled(torch.randn(4, 31), torch.randn(16, 32))


def test_another_ops_gradient_breaks_the_graph_and_matches_eager_mode() -> None:
    """An op without gradients is an error with the remedy, compiled or not."""
    operands, _ = arguments("a8w8", shapes("a8w8")[0])
    x, weight, x_scale, w_scale = operands[:4]

    def outcome(function: Callable[..., Any], scale: torch.Tensor) -> Any:
        try:
            return function(x, weight, scale, w_scale).requires_grad
        except OperandError as error:
            return str(error)

    with torch.enable_grad():
        scale = x_scale.clone().requires_grad_()
        found = [outcome(torch.compile(tunedgemm.gemm_a8w8, backend="aot_eager"), scale), outcome(tunedgemm.gemm_a8w8, scale)]

    assert found[0] == found[1]
    assert found[0] is True or "under torch.no_grad()" in found[0]


def test_a_wrong_weight_is_refused_in_a_graph() -> None:
    """A marked weight and a transposed square one raise in a graph that served a plain one."""
    x, weight = torch.randn(4, 32), torch.randn(32, 32)
    compiled = torch.compile(tunedgemm.gemm_a16w16, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), functional.linear(x, weight))
    marked = weight.clone()
    marked.is_shuffled = True  # type: ignore[attr-defined]
    with pytest.raises(OperandError, match="is_shuffled; pass as_shuffled"):
        compiled(x, marked)
    with pytest.raises(OperandError, match="the square weight is a transposed view"):
        compiled(x, weight.t())


def test_the_op_itself_can_be_called() -> None:
    """``torch.ops.tunedgemm`` has every op, which runs like the function of its name."""
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    assert torch.equal(graph_op("a16w16")(x, weight), tunedgemm.gemm_a16w16(x, weight))
    assert torch.ops.tunedgemm.a16w16.default is graph_op("a16w16")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_functions_of_a_private_instance_run_between_graphs() -> None:
    """A private instance has other tables than the op, so its functions run between graphs."""
    mine, weight = tunedgemm.TunedGemm(), torch.randn(16, 32)
    compiled = torch.compile(lambda x: mine.gemm_a16w16(x.sin(), weight).relu(), backend="aot_eager")
    torch.testing.assert_close(compiled(torch.ones(4, 32)), functional.linear(torch.ones(4, 32).sin(), weight).relu())
    assert mine.dispatcher.launchers and mine.dispatcher is not tgemm.dispatcher
