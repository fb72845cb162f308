"""The plugin of vLLM, against classes with the signatures of vLLM's, written anew; vLLM itself is not installed here."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import tunedgemm
from tunedgemm.csvfile import read_untuned
from tunedgemm.folders import untuned_path
from tunedgemm.integrations import vllm as plugin
from tunedgemm.ops import op_named

N, K = 256, 384
STUB = Path(__file__).parent / "vllm_stub"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes can be imported, and nothing is registered; all is as before afterwards."""
    before = torch.nn.functional.linear
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    yield
    if torch.nn.functional.linear is not before:
        tunedgemm.unpatch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def captured(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capture is on."""
    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    tunedgemm.reload()
    yield
    monkeypatch.delenv("AITER_TUNE_GEMM")
    tunedgemm.reload()


def method(place: tuple[str, str]) -> type:
    """A class of vLLM's."""
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found


def calls(op: str) -> dict[int, int]:
    """Captured calls by M."""
    for one in tunedgemm.tuned_gemm.tgemm.dispatchers:
        if one._capture is not None:
            one._capture.flush()
    path = untuned_path(op_named(op))
    return {row.shape.m: row.calls for row in read_untuned(path, op_named(op))} if path.exists() else {}


def layer(kind: str) -> torch.nn.Module:
    """A layer with an fp8 weight [N, K] as it is loaded, with scales of a kind."""
    made = torch.nn.Module()
    weight = torch.randn(N, K)
    if kind == "block":
        q, made.weight_scale_inv = tunedgemm.per_block_quant(weight)
    elif kind == "row":
        q, made.weight_scale = tunedgemm.pertoken_quant(weight, quant_dtype=torch.float8_e4m3fn)
    else:
        q, made.weight_scale = tunedgemm.per_tensor_quant(weight, quant_dtype=torch.float8_e4m3fn)
    made.weight = torch.nn.Parameter(q, requires_grad=False)
    made.input_scale = torch.tensor([0.01]) if kind == "static" else None
    made.orig_dtype = torch.bfloat16
    return made


def test_the_entry_point_is_ours() -> None:
    """vLLM finds the plugin by its group."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [(name, value)] = re.findall(r'^\[project\.entry-points\."vllm\.general_plugins"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)

    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.register


def test_it_is_off_unless_asked_for(child) -> None:
    """Without the variable nothing is imported of vLLM, nothing is replaced, and no module that routes is loaded."""
    source = (
        "import sys, torch\nbefore = torch.nn.functional.linear\nfrom tunedgemm.integrations.vllm import register\nregister()\n"
        "print(torch.nn.functional.linear is before, [name for name in sys.modules if name.startswith('vllm') or 'patching' in name])"
    )
    assert child(source, STUB) == "True []"


@pytest.mark.parametrize("place", plugin.PLAIN, ids=lambda place: place[1])
def test_plain_weights_are_routed(captured, place) -> None:
    """Weights of 16 bits, those of vLLM's parameter classes among them, are counted, and the product is that of before."""

    class Loaded(torch.nn.Parameter):
        """A parameter that knows how to be loaded, as vLLM's do."""

    for kind in (torch.nn.Parameter, Loaded):
        one, x, bias = torch.nn.Module(), torch.randn(3, K), torch.randn(N)
        one.weight = kind(torch.randn(N, K), requires_grad=False)
        expected = x @ one.weight.t() + bias
        plugin.register()
        assert torch.allclose(method(place)().apply(one, x, bias), expected, atol=1e-4)
        assert not hasattr(one, "asked")
    assert calls("a16w16") == {3: 2}


def test_packed_weights_of_a_cpu_stay_theirs(vllm) -> None:
    """A layer that has a function of its own for CPUs is multiplied by vLLM."""
    plugin.register()
    one = torch.nn.Module()
    one.weight, one.cpu_linear = torch.nn.Parameter(torch.randn(N, K), requires_grad=False), object()
    method(plugin.PLAIN[0])().apply(one, torch.randn(3, K))

    assert one.asked == 1


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kind", "op"), [("static", "a8w8"), ("tensor", "a8w8"), ("row", "a8w8"), ("block", "a8w8_blockscale")])
def test_fp8_layers_are_routed(captured, kind, op, biased) -> None:
    """The product of each kind of scales is vLLM's to rounding, of inputs of any dimensions; looking at a layer counts no call."""
    plugin.register()
    serve, one = method(plugin.FP8)(), layer(kind)
    serve.process_weights_after_loading(one)
    assert one.asked == 1  # to compare with
    x, bias = torch.randn(2, 5, K).bfloat16(), torch.randn(N).bfloat16() if biased else None

    found = serve.apply(one, x, bias)

    assert one.asked == 1
    assert found.shape == (2, 5, N) and found.dtype == torch.bfloat16
    expected = type(serve).apply.__wrapped__(serve, one, x, bias)
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert calls(op) == {10: 1}


@pytest.mark.parametrize("kind", ["row", "block"])
def test_a_weight_in_another_order_stays_theirs(vllm, kind, caplog) -> None:
    """Where vLLM's kernel has moved the rows of a weight, which no shape tells, its product stays vLLM's, and is right."""
    plugin.register()
    serve, one = method(plugin.FP8)(moved=True), layer(kind)
    serve.process_weights_after_loading(one)
    x = torch.randn(5, K).bfloat16()
    serve.apply(one, x)

    assert one.asked == 2
    assert "in an order of vLLM's own" in caplog.text


def test_weights_that_are_no_fp8_stay_theirs(vllm) -> None:
    """Bytes packed for another kernel are not looked at."""
    plugin.register()
    one = layer("row")
    one.weight = torch.nn.Parameter(one.weight.data.view(torch.uint8), requires_grad=False)
    method(plugin.FP8)().process_weights_after_loading(one)

    assert one.tunedgemm_kind == "" and not hasattr(one, "asked")


@pytest.mark.parametrize(("kind", "op"), [("static", "a8w8"), ("row", "a8w8"), ("block", "a8w8_blockscale")])
def test_compiled_graphs_hold_the_product_as_one_op(vllm, kind, op) -> None:
    """In a graph without a break, whatever M, the product is one op, and the result that of eager mode."""
    plugin.register()
    serve, one = method(plugin.FP8)(), layer(kind)
    serve.process_weights_after_loading(one)
    ops = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "tunedgemm" in str(node.target))
        return graph.forward

    compiled = torch.compile(lambda x: serve.apply(one, x), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 7):
        x = torch.randn(rows, K).bfloat16()
        assert torch.equal(compiled(x), serve.apply(one, x))
    assert ops == [f"tunedgemm.{op}.default"]


def test_registering_twice_is_registering_once(vllm) -> None:
    """vLLM may call it several times in a process: methods are wrapped once, and F.linear is put back by one unpatch."""
    before = torch.nn.functional.linear
    plugin.register()
    wrapped = method(plugin.FP8).apply
    plugin.register()

    assert method(plugin.FP8).apply is wrapped
    assert torch.nn.functional.linear is not before
    tunedgemm.unpatch()
    assert torch.nn.functional.linear is before


def test_a_vllm_of_another_form_is_named(vllm, monkeypatch, caplog) -> None:
    """A class that is gone is a warning; the others are replaced all the same."""
    monkeypatch.delattr(importlib.import_module(plugin.FP8[0]), plugin.FP8[1])
    plugin.register()

    assert "Fp8LinearMethod is not as it is known here" in caplog.text
    assert hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__")
