"""The plugin of vLLM: against vLLM where it is installed, else against classes with its signatures, written anew."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm import quant
from tunedgemm.device import current_device
from tunedgemm.errors import UserError
from tunedgemm.integrations import engine_routes
from tunedgemm.integrations import vllm as plugin
from tunedgemm.shape import Shape
from tunedgemm.tuned_gemm import dispatcher

N, K = 256, 384
STUB = Path(__file__).parent / "vllm_stub"
FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


def method(place: tuple[str, str]) -> type:
    """A class of vLLM's."""
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found


class Loaded(torch.nn.Parameter):
    """A parameter that knows how to be loaded, as vLLM's do."""


def made_layer(**parameters: torch.Tensor | None) -> torch.nn.Module:
    """A layer with these parameters, as vLLM's methods leave one."""
    one = torch.nn.Module()
    for name, value in parameters.items():
        setattr(one, name, value if value is None else Loaded(value, requires_grad=False))
    one.logical_widths = [N // 2, N // 2]
    one.bias, one.params_dtype = None, torch.bfloat16
    return one


def served(shape: Shape) -> bool:
    """Whether a shape's row was bound here."""
    return dispatcher(shape.op).knows(shape, current_device())


def fp8_kernel(kind: str, shape: tuple[int, int] = (N, K), *, symmetric: bool = True, out: torch.dtype = torch.bfloat16) -> Any:
    """What vLLM chooses for an fp8 layer whose scales are of a kind: ``x-weight``, as ``token-channel``."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    said = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    groups = {"static": (-1, -1), "tensor": (-1, -1), "token": (1, -1), "channel": (-1, 1), "128": (1, 128), "blocks": (128, 128)}
    x, _, weight = kind.partition("-")

    def key(word: str, static: bool) -> Any:
        scale = said.ScaleDesc(torch.float32, static, said.GroupShape(*groups[word]))
        return said.QuantKey(FP8, scale, symmetric=symmetric)

    of_x, of_weight = key(x, x == "static"), key(weight, True)
    return linear.init_fp8_linear_kernel(of_x, of_weight, weight_shape=shape, input_dtype=torch.bfloat16, out_dtype=out)


def fp8_layer(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of a kind and its weight [N, K] in float32."""
    weight = torch.randn(N, K)
    if kind.endswith("blocks"):
        q, scale = quant.per_block_quant(weight)
        return made_layer(weight=q, weight_scale_inv=scale, input_scale=None), quant.dequant_blocks(q, scale, torch.float32, (128, 128))
    by_row = kind.endswith("channel")
    q, scale = quant.pertoken_quant(weight, quant_dtype=FP8) if by_row else quant.per_tensor_quant(weight, quant_dtype=FP8)
    static = torch.tensor(0.01) if kind.startswith("static") else None
    made = made_layer(weight=q.t(), weight_scale=scale.reshape(-1, 1) if by_row else scale.reshape(()), input_scale=static)
    return made, quant.dequant_rows(q, scale.reshape(-1, 1), torch.float32)


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
def test_plain_weights_are_routed(vllm_captured, place) -> None:
    """Weights of 16 bits, those of vLLM's parameter classes among them, are counted, and the product is that of before."""

    for kind in (torch.nn.Parameter, Loaded):
        one, x, bias = torch.nn.Module(), torch.randn(3, K), torch.randn(N)
        one.weight = kind(torch.randn(N, K), requires_grad=False)
        expected = x @ one.weight.t() + bias
        serve = method(place)()
        serve.process_weights_after_loading(one)
        assert torch.allclose(serve.apply(one, x, bias), expected, atol=1e-4)
        assert not hasattr(one, "asked") and not hasattr(one, "cpu_linear")
    assert vllm_captured("a16w16") == {3: 2}


def test_a_row_for_the_weight_decides(vllm_table) -> None:
    """A layer goes through the tables where they have a row of its N and K, at whatever M; another one stays vLLM's."""
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 64, N, K, "bf16"))
    serve, routed = method(plugin.PLAIN[0])(), []
    for n in (N, N + 64):
        one, x = made_layer(weight=torch.randn(n, K).bfloat16()), torch.randn(3, K).bfloat16()
        expected = torch.nn.functional.linear(x, one.weight)
        serve.process_weights_after_loading(one)
        torch.testing.assert_close(serve.apply(one, x), expected, rtol=0.02, atol=0.2)
        routed.append(bool(one.tunedgemm_route))
    assert routed == [True, False]
    assert plugin.left("a8w8", N, K, scale="row", dtype="fp8") == f"no row of a8w8 with N={N}, K={K}, scales by row"


#: Kind of an fp8 layer -> its op, the op's word for the scales, and the variable that names the op's table.
KINDS = {
    **dict.fromkeys(("static-tensor", "tensor-tensor"), ("a8w8", "tensor", "AITER_CONFIG_GEMM_A8W8")),
    **dict.fromkeys(("token-tensor", "token-channel", "static-channel"), ("a8w8", "row", "AITER_CONFIG_GEMM_A8W8")),
    "128-blocks": ("a8w8_blockscale", "block", "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE"),
}


def fp8_row(kind: str, m: int) -> Shape:
    """The shape of M rows of x times the weight of a kind."""
    return Shape(KINDS[kind][0], m, N, K, "fp8_e4m3fn", outdtype="bf16", scale=KINDS[kind][1])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_layers_are_routed(vllm_table, kind, biased) -> None:
    """vLLM takes our kernel for each kind of scales; the row's product is that of what the operands stand for, in any dimensions."""
    shape = fp8_row(kind, 10)
    vllm_table(KINDS[kind][2], shape)
    kernel, (one, weight) = fp8_kernel(kind), fp8_layer(kind)
    assert type(kernel).__name__.startswith("TunedGemmFp8")
    kernel.process_weights_after_loading(one)
    x, bias = torch.randn(2, 5, K).bfloat16(), torch.randn(N).bfloat16() if biased else None

    found = kernel.apply_weights(one, x, bias)

    assert found.shape == (2, 5, N) and found.dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    assert (found.float() - expected).norm() < 0.04 * expected.norm()
    kept_by_vllm = kind == "128-blocks" and biased  # whose bias vLLM adds itself
    assert served(attrs.evolve(shape, epilogue="bias" if biased and not kept_by_vllm else "none"))


def test_a_weight_with_padded_rows_is_put_together(vllm_captured) -> None:
    """Rows that vLLM has padded for a kernel of its own would be copied in each call; they are put together once."""
    kernel, (one, weight) = fp8_kernel("token-channel"), fp8_layer("token-channel")
    padded = torch.nn.functional.pad(one.weight.t().view(torch.uint8), (0, 64))[:, :K].view(FP8)
    one.weight = torch.nn.Parameter(padded.t(), requires_grad=False)
    assert not one.weight.t().is_contiguous()
    kernel.process_weights_after_loading(one)
    x = torch.randn(4, K).bfloat16()

    assert one.weight.t().is_contiguous()
    expected = x.float() @ weight.t()
    assert (kernel.apply_weights(one, x).float() - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "told"),
    [("token-channel", {"out": torch.float32}), ("token-channel", {"symmetric": False}), ("token-channel", {"shape": (N + 8, K)})],
)
def test_other_fp8_layers_are_refused(vllm_table, kind, told) -> None:
    """Output in 32 bits, zero points, and a weight that no table knows are other kernels'."""
    vllm_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 64, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row"))
    ours = importlib.import_module("tunedgemm.integrations.vllm_kernels").TunedGemmFp8Kernel
    config = fp8_kernel(kind).config
    assert ours.can_implement(config) == (True, None)
    changed = {"out": "out_dtype", "shape": "weight_shape"}
    for name, value in told.items():
        if name == "symmetric":
            said = type(config.activation_quant_key)
            config.activation_quant_key = said(FP8, config.activation_quant_key.scale, symmetric=value)
        else:
            setattr(config, changed[name], value)

    able, reason = ours.can_implement(config)

    assert not able and reason


def int8_kernel(*, static: bool, channelwise: bool = True, symmetric: bool = True) -> Any:
    """What vLLM chooses for an int8 layer."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    return linear.init_int8_linear_kernel(channelwise, static, symmetric, "test")


def int8_layer(*, static: bool, channelwise: bool = True) -> tuple[torch.nn.Module, torch.Tensor]:
    """An int8 layer and its weight in float32."""
    weight = torch.randn(N, K)
    q, scale = quant.pertoken_quant(weight, quant_dtype=torch.int8)
    if not channelwise:
        scale = torch.tensor([0.02, 0.03])  # of two layers that vLLM has made one
        wide = scale.repeat_interleave(N // 2).reshape(-1, 1)
        q = (weight / wide).round().clamp(-128, 127).to(torch.int8)
    wide = scale.reshape(-1, 1) if channelwise else scale.repeat_interleave(N // 2).reshape(-1, 1)
    x_scale = torch.tensor([0.03]) if static else None
    return made_layer(weight=q, weight_scale=scale, input_scale=x_scale, input_zero_point=None, azp_adj=None), q.float() * wide


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("channelwise", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_int8_layers_are_routed(vllm_table, static, channelwise, biased) -> None:
    """Scales of rows or of fused layers, static and dynamic: a row's product is that of what the operands stand for, and so is vLLM's."""
    shape = Shape("a8w8", 10, N, K, "int8", outdtype="bf16", scale="row")
    vllm_table("AITER_CONFIG_GEMM_A8W8", shape)
    kernel, (one, weight) = int8_kernel(static=static, channelwise=channelwise), int8_layer(static=static, channelwise=channelwise)
    assert type(kernel).__name__ == "TunedGemmInt8Kernel"
    kernel.process_weights_after_loading(one)
    bias = torch.randn(N).bfloat16() if biased else None
    for rows in (10, 6):
        x = torch.randn(2, rows // 2, K).bfloat16()
        found = kernel.apply_weights(one, x, bias)

        assert found.shape == (2, rows // 2, N) and found.dtype == torch.bfloat16
        expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        assert (found.float() - expected).norm() < 0.03 * expected.norm()
    assert served(attrs.evolve(shape, epilogue="bias" if biased else "none"))
    for route in engine_routes.routes.values():  # none where vLLM has no kernel for plain weights
        assert route.calls == {10: route.ours, 6: route.theirs}
    assert {type(parameter) for parameter in one.parameters()} == {torch.nn.Parameter}


def test_an_int8_weight_that_no_table_knows_stays_theirs(vllm_table) -> None:
    """vLLM's own kernel multiplies it, as it would have without us; a layer with zero points is not even asked for."""
    vllm_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 64, N + 8, K, "int8", outdtype="bf16", scale="row"))
    kernel, (one, weight) = int8_kernel(static=False), int8_layer(static=False)
    kernel.process_weights_after_loading(one)
    x = torch.randn(5, K).bfloat16()
    expected = x.float() @ weight.t()

    assert (kernel.apply_weights(one, x).float() - expected).norm() < 0.03 * expected.norm()
    assert kernel._theirs is not None and not type(kernel._theirs).__name__.startswith("TunedGemm")
    assert type(kernel).can_implement(type(kernel.config)(False, True, False))[0] is False


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_graphs_hold_the_product_as_one_op(vllm_table, kind) -> None:
    """In a graph without a break, whatever M, the product is one op, and the result that of eager mode."""
    vllm_table(KINDS[kind][2], fp8_row(kind, 3))
    kernel, (one, _) = fp8_kernel(kind), fp8_layer(kind)
    kernel.process_weights_after_loading(one)
    ops: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "tunedgemm" in str(node.target))
        return graph.forward

    compiled = torch.compile(lambda x: kernel.apply_weights(one, x), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 7):
        x = torch.randn(rows, K).bfloat16()
        found, eager = compiled(x), kernel.apply_weights(one, x)
        assert (found.float() - eager.float()).norm() <= 0.01 * eager.float().norm()
    assert ops == ["tunedgemm.vllm_linear.default"]
    assert served(fp8_row(kind, 3))


def test_registering_twice_is_registering_once(vllm_captured) -> None:
    """vLLM may call it several times in a process: methods are wrapped and kernels listed once, and F.linear stays torch's."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    wrapped, listed = (
        method(plugin.PLAIN[0]).apply,
        {name: dict(one) for name, one in vars(linear).items() if name.startswith("_POSSIBLE_")},
    )
    plugin.register()

    assert method(plugin.PLAIN[0]).apply is wrapped
    assert {name: dict(one) for name, one in vars(linear).items() if name.startswith("_POSSIBLE_")} == listed
    assert torch.nn.functional.linear.__module__ != "tunedgemm.integrations.linear"


def test_a_vllm_of_another_form_is_named(vllm, monkeypatch, caplog) -> None:
    """A class or a list that is gone is a warning; the rest is routed all the same."""
    monkeypatch.delattr(importlib.import_module("vllm.model_executor.kernels.linear"), "_POSSIBLE_FP8_KERNELS")
    monkeypatch.delattr(importlib.import_module(plugin.PLAIN[1][0]), plugin.PLAIN[1][1])
    plugin.register()

    assert "this vLLM has no vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod" in caplog.text
    assert "fp8 and int8 layers keep vLLM's kernels" in caplog.text
    assert hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__")


@pytest.mark.parametrize(
    ("variables", "told"),
    [({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT is set"), ({"TUNEDGEMM_VLLM": "1"}, "TUNEDGEMM_VLLM=unpacked routes them")],
    ids=["batch-invariant", "cpu"],
)
def test_what_vllm_promises_stays(vllm, monkeypatch, caplog, variables, told) -> None:
    """Where outputs must not depend on the batch, and on a CPU whose kernels want packed weights, nothing is replaced, and it says so."""
    platform = importlib.import_module("vllm.platforms").current_platform
    monkeypatch.setattr(type(platform), "is_cpu", lambda self: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.nn.functional.linear
    plugin.register()

    assert told in caplog.text
    assert torch.nn.functional.linear is before
    assert not hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__")


def test_fp8_keeps_vllms_kernel_where_no_row_answers(vllm_table) -> None:
    """An fp8 layer is loaded and quantised by vLLM's own kernel, which multiplies at an M without a row."""
    vllm_table(
        "AITER_CONFIG_GEMM_A8W8",
        Shape("a8w8", 8, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row"),
    )
    kernel, (one, weight) = fp8_kernel("token-channel"), fp8_layer("token-channel")
    if kernel._theirs is None:
        pytest.skip("vLLM has no kernel for plain weights on this CPU")
    kernel.process_weights_after_loading(one)
    x = torch.randn(3000, K).bfloat16()

    found = kernel.apply_weights(one, x)

    expected = x.float() @ weight.t()
    assert (found.float() - expected).norm() < 0.04 * expected.norm()
    [route] = engine_routes.routes.values()
    assert route.calls == {3000: route.theirs}


@pytest.mark.parametrize(("version", "routed"), [("0.20.2", True), ("0.33.0", True), ("0.19.1", False), ("1.0", False), ("dev", False)])
def test_an_unknown_vllm_keeps_its_kernels(vllm, monkeypatch, caplog, version, routed) -> None:
    """A version that was not checked is named in one warning, and nothing is replaced."""
    monkeypatch.setattr(importlib.import_module("vllm"), "__version__", version)
    plugin.register()

    assert hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__") is routed
    assert ("not one of the versions known here" in caplog.text) is not routed


def test_a_mistyped_switch_is_an_error(vllm, monkeypatch) -> None:
    """A value that means nothing stops the start and says which do."""
    monkeypatch.setenv("TUNEDGEMM_VLLM", "yess")
    with pytest.raises(UserError, match=r"TUNEDGEMM_VLLM: unknown value \(got 'yess'\); use 1, 0 or unpacked"):
        plugin.register()
