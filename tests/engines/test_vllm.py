"""The plugin of vLLM, tested on vLLM if it is installed, else on a stub with its signatures."""

from __future__ import annotations

import gc
import importlib
import types
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops.formats import quant
from tunedgemm.shape import Shape
from tunedgemm_engines import routes, rows
from tunedgemm_engines import vllm as plugin

N, K = 256, 384
FP8 = torch.float8_e4m3fn

in_every_form = pytest.mark.parametrize("vllm_form", ["0.20.2", "0.25.1", "0.33.0"], indirect=True)
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
    return dispatcher(shape.op).is_bound(shape, current_device())


def fp8_kernel(kind: str, shape: tuple[int, int] = (N, K), *, symmetric: bool = True, out: torch.dtype = torch.bfloat16) -> Any:
    """Return vLLM's kernel for an fp8 layer with a kind of scales: ``x-weight``, as ``token-channel``."""
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


@pytest.mark.parametrize("place", plugin.PLAIN, ids=lambda place: place[1])
def test_plain_weights_are_routed(vllm_captured, place) -> None:
    """16-bit weights, vLLM's parameter class included,
    are counted, and the product is unchanged."""

    for kind in (torch.nn.Parameter, Loaded):
        one, x, bias = torch.nn.Module(), torch.randn(3, K), torch.randn(N)
        one.weight = kind(torch.randn(N, K), requires_grad=False)
        expected = x @ one.weight.t() + bias
        serve = method(place)()
        serve.process_weights_after_loading(one)
        assert torch.allclose(serve.apply(one, x, bias), expected, atol=1e-4)
        assert not hasattr(one, "asked") and not hasattr(one, "cpu_linear")
    assert vllm_captured("a16w16") == {3: 2}


def test_a_weight_that_no_shape_has_is_created(vllm_captured) -> None:
    """Compiling ahead never stops an engine's start, not even for a weight without rows."""
    for place in plugin.PLAIN:
        method(place)().create_weights(made_layer(weight=torch.randn(0, K).bfloat16()))


def test_a_row_for_the_weight_decides(vllm_table) -> None:
    """A layer uses the tables at any M if they have a row of its N and K; else it stays vLLM's."""
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 64, N, K, "bf16"))
    serve, routed = method(plugin.PLAIN[0])(), []
    for n in (N, N + 64):
        one, x = made_layer(weight=torch.randn(n, K).bfloat16()), torch.randn(3, K).bfloat16()
        expected = torch.nn.functional.linear(x, one.weight)
        serve.process_weights_after_loading(one)
        torch.testing.assert_close(serve.apply(one, x), expected, rtol=0.02, atol=0.2)
        routed.append(bool(one.tunedgemm_route))
    assert routed == [True, False]
    shipped = f" for {current_device()}; the table's rows are for sm_90/132"
    assert rows.unserved_reason("a8w8", N, K, scale="row", dtype="fp8") == f"no row of a8w8 with N={N}, K={K}, scales by row{shipped}"


#: Kind of an fp8 layer -> its op, the op's word for the scales, and the variable of the op's table.
KINDS = {
    **dict.fromkeys(("static-tensor", "tensor-tensor"), ("a8w8", "tensor", "AITER_CONFIG_GEMM_A8W8")),
    **dict.fromkeys(("token-tensor", "token-channel", "static-channel", "tensor-channel"), ("a8w8", "row", "AITER_CONFIG_GEMM_A8W8")),
    "128-blocks": ("a8w8_blockscale", "block", "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE"),
}


def fp8_row(kind: str, m: int) -> Shape:
    """The shape of M rows of x times the weight of a kind."""
    return Shape(KINDS[kind][0], m, N, K, "fp8_e4m3fn", outdtype="bf16", scale=KINDS[kind][1])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_layers_are_routed(vllm_table, kind, biased) -> None:
    """vLLM takes our kernel for each kind of scales; the row's product is that of the dequantised
    operands, in any dimensions."""
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


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_a_route_keeps_no_layer(vllm_table, kind) -> None:
    """The weights of a model that the engine drops are freed."""
    shape = Shape("a8w8", 10, N, K, "int8", outdtype="bf16", scale="row") if kind == "int8" else fp8_row(kind, 10)
    vllm_table(KINDS.get(kind, KINDS["token-channel"])[2], shape)
    kernel, (one, _) = (int8_kernel(static=True), int8_layer(static=True)) if kind == "int8" else (fp8_kernel(kind), fp8_layer(kind))
    kernel.process_weights_after_loading(one)
    kernel.apply_weights(one, torch.randn(10, K).bfloat16())
    del kernel, one
    gc.collect()
    assert all(layer() is None for route in routes.routes.values() for layer in route.layers.values())


@in_every_form
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_right_at_every_m(vllm_table, kind) -> None:
    """Our product equals that of the dequantised operands at each M, with any number of scales."""
    sizes = (1, 2, 5, 16, 65)
    vllm_table(KINDS[kind][2], *(fp8_row(kind, m) for m in sizes))
    kernel, (one, weight) = fp8_kernel(kind), fp8_layer(kind)
    kernel.process_weights_after_loading(one)
    [route] = routes.routes.values()
    for m in sizes:
        x = torch.randn(m, K).bfloat16()
        found, expected = kernel.apply_weights(one, x).float(), x.float() @ weight.t()
        assert found.shape == (m, N) and (found - expected).norm() < 0.05 * expected.norm()
        assert route.calls[m] is route.ours and not route.failures
        if kind.endswith("channel"):  # the number of scales decides, in any of its forms
            q, _, scale, w_scale, _ = route.operands(route.inputs(m), one)
            forms = [scale.reshape(-1, 1)] if scale.numel() != 1 else [scale.reshape(form) for form in ((), (1,), (1, 1))]
            forms += [scale.reshape(-1).expand(m).contiguous()]
            products = [route.ours(q, one.weight.t(), form, w_scale, None) for form in forms]
            assert all(torch.equal(product, products[0]) for product in products)


@pytest.mark.parametrize("kind", KINDS)
def test_updated_weights_reach_the_next_call(vllm_table, kind) -> None:
    """A routed layer keeps no copy: other scales and weights, in place or replaced, are multiplied."""
    vllm_table(KINDS[kind][2], fp8_row(kind, 10))
    kernel, (one, _) = fp8_kernel(kind), fp8_layer(kind)
    kernel.process_weights_after_loading(one)
    name, x = "weight_scale_inv" if kind == "128-blocks" else "weight_scale", torch.randn(10, K).bfloat16()
    first = kernel.apply_weights(one, x)
    getattr(one, name).data.mul_(-2)
    assert torch.equal(kernel.apply_weights(one, x), first * -2)
    setattr(one, name, torch.nn.Parameter(getattr(one, name) * 2, requires_grad=False))
    assert torch.equal(kernel.apply_weights(one, x), first * -4)
    one.weight.data.copy_(torch.zeros_like(one.weight))
    assert not kernel.apply_weights(one, x).any()


def test_a_weight_with_padded_rows_is_put_together(vllm_captured) -> None:
    """Rows that vLLM padded for its kernel are made contiguous once, not copied in each call."""
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
    ("kind", "fields"),
    [("token-channel", {"out": torch.float32}), ("token-channel", {"symmetric": False}), ("token-channel", {"shape": (N + 8, K)})],
)
def test_other_fp8_layers_are_refused(vllm_table, kind, fields) -> None:
    """Output in 32 bits, zero points and an unknown weight are left to other kernels."""
    vllm_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 64, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row"))
    ours = importlib.import_module("tunedgemm_engines.vllm_fp8").TunedGemmFp8Kernel
    config = fp8_kernel(kind).config
    assert ours.can_implement(config) == (True, None)
    changed = {"out": "out_dtype", "shape": "weight_shape"}
    for name, value in fields.items():
        if name == "symmetric":
            said = type(config.activation_quant_key)
            config.activation_quant_key = said(FP8, config.activation_quant_key.scale, symmetric=value)
        else:
            setattr(config, changed[name], value)

    able, reason = ours.can_implement(config)

    assert not able and reason


def int8_kernel(*, static: bool, channelwise: bool = True, symmetric: bool = True) -> Any:
    """Return vLLM's kernel for an int8 layer."""
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
    """With row scales or fused layers', static or dynamic, the row and vLLM give the product of the
    dequantised operands."""
    shape = Shape("a8w8", 10, N, K, "int8", outdtype="bf16", scale="row")
    vllm_table("AITER_CONFIG_GEMM_A8W8", shape)
    kernel, (one, weight) = int8_kernel(static=static, channelwise=channelwise), int8_layer(static=static, channelwise=channelwise)
    assert type(kernel).__name__ == "TunedGemmInt8Kernel"
    kernel.process_weights_after_loading(one)
    bias = torch.randn(N).bfloat16() if biased else None
    for m in (10, 6):
        x = torch.randn(2, m // 2, K).bfloat16()
        found = kernel.apply_weights(one, x, bias)

        assert found.shape == (2, m // 2, N) and found.dtype == torch.bfloat16
        expected = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        assert (found.float() - expected).norm() < 0.03 * expected.norm()
    assert served(attrs.evolve(shape, epilogue="bias" if biased else "none"))
    for route in routes.routes.values():  # none where vLLM has no kernel for plain weights
        assert route.calls == {10: route.ours, 6: route.theirs}
    assert {type(parameter) for parameter in one.parameters()} == {torch.nn.Parameter}


@in_every_form
def test_int8_layers_are_routed_in_every_form(vllm_table) -> None:
    """The layer is routed by the kernel's interface of each version."""
    test_int8_layers_are_routed(vllm_table, static=False, channelwise=False, biased=True)


def test_an_int8_weight_without_a_row_stays_vllms(vllm_table) -> None:
    """An int8 weight without a row keeps vLLM's kernel;
    a layer with zero points is not considered."""
    vllm_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 64, N + 8, K, "int8", outdtype="bf16", scale="row"))
    kernel, (one, weight) = int8_kernel(static=False), int8_layer(static=False)
    kernel.process_weights_after_loading(one)
    x = torch.randn(5, K).bfloat16()
    expected = x.float() @ weight.t()

    assert (kernel.apply_weights(one, x).float() - expected).norm() < 0.03 * expected.norm()
    assert kernel._theirs is not None and not type(kernel._theirs).__name__.startswith("TunedGemm")
    assert type(kernel).can_implement(type(kernel.config)(False, True, False))[0] is False


@in_every_form
def test_a_compiled_graph_runs_the_rows_of_8_bit_layers(vllm_table, monkeypatch) -> None:
    """Run each layer's row in one graph, once a call, at the M that has one, and vLLM's kernel at another."""
    shapes = [attrs.evolve(fp8_row("token-channel", 4), n=K), Shape("a8w8", 4, N, K, "int8", outdtype="bf16", scale="row")]
    vllm_table("AITER_CONFIG_GEMM_A8W8", *shapes)
    q, scale = quant.pertoken_quant(torch.randn(K, K), quant_dtype=FP8)
    layers = [made_layer(weight=q.t(), weight_scale=scale.reshape(-1, 1), input_scale=None), int8_layer(static=False)[0]]
    kernels = [fp8_kernel("token-channel", (K, K)), int8_kernel(static=False)]
    for kernel, one in zip(kernels, layers, strict=True):
        kernel.process_weights_after_loading(one)
    calls: list[tuple[str, str, int]] = []

    def counted(side: str, function: Any, route: Any) -> Any:
        return lambda x, *rest: calls.append((side, route.shape.dtype, len(x))) or function(x, *rest)

    for route in routes.routes.values():
        for side in ("ours", "theirs"):
            if getattr(route, side) is not None:  # vLLM has kernels for plain weights
                monkeypatch.setattr(route, side, counted(side, getattr(route, side), route))

    def model(x: torch.Tensor) -> torch.Tensor:
        for kernel, one in zip(kernels, layers, strict=True):
            x = kernel.apply_weights(one, x)
        return x

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for m in (4, 4, 6):
            compiled(torch.randn(m, K).bfloat16())

    assert [call for call in calls if call[2] == 4] == [("ours", "fp8_e4m3fn", 4), ("ours", "int8", 4)] * 2
    assert {call[0] for call in calls if call[2] == 6} == {"ours" if kernels[0]._theirs is None else "theirs"}
    assert all(served(shape) for shape in shapes)


@in_every_form
@pytest.mark.parametrize(("kind", "own"), [("token-channel", "Cutlass"), ("128-blocks", "Triton"), ("128-blocks", "FlashInfer")])
def test_fp8_keeps_vllms_kernel_where_no_row_answers(vllm_table, monkeypatch, kind, own) -> None:
    """vLLM's kernel loads, quantises and multiplies at an M without a row;
    FlashInfer's quantises by itself."""
    if own == "FlashInfer":
        only(monkeypatch, "_POSSIBLE_FP8_BLOCK_KERNELS", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
    vllm_table(KINDS[kind][2], fp8_row(kind, 8))
    kernel, (one, weight) = fp8_kernel(kind), fp8_layer(kind)
    if kernel._theirs is None:
        pytest.skip("vLLM has no kernel for plain weights on this CPU")
    assert own in type(kernel._theirs).__name__
    kernel.process_weights_after_loading(one)
    for m in (8, 3000):
        x = torch.randn(m, K).bfloat16()
        found = kernel.apply_weights(one, x)

        expected = x.float() @ weight.t()
        assert (found.float() - expected).norm() < 0.04 * expected.norm()
    [route] = routes.routes.values()
    assert route.calls == {8: route.ours, 3000: route.theirs} and served(fp8_row(kind, 8))
    assert rows.unrouted() == []


def only(monkeypatch: pytest.MonkeyPatch, listed: str, name: str) -> None:
    """Let vLLM have only one of its kernels for fp8."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    monkeypatch.setattr(getattr(linear, name), "supported", True, raising=False)
    monkeypatch.setattr(linear, listed, {"any": [getattr(linear, name)]})


@in_every_form
@pytest.mark.parametrize("kind", ["token-channel", "128-blocks"])
@pytest.mark.parametrize("name", ["MarlinFP8ScaledMMLinearKernel", "AiterHipbMMPerTokenFp8ScaledMMLinearKernel"])
def test_kernels_that_reorder_weights_keep_their_layers(vllm_table, monkeypatch, kind, name) -> None:
    """A layer whose vLLM kernel reorders the weight keeps it, at any shape, and is logged."""
    only(monkeypatch, "_POSSIBLE_FP8_KERNELS", name)
    only(monkeypatch, "_POSSIBLE_FP8_BLOCK_KERNELS", name)
    vllm_table(KINDS[kind][2], fp8_row(kind, 8))

    assert type(fp8_kernel(kind)).__name__ == name and not routes.routes
    assert f"layers keep vLLM's kernels (as one): vLLM computes fp8 by {name}" in "".join(rows.unrouted())


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_a_shuffled_block_weight_stays_vllms(vllm_table) -> None:
    """Leave a layer to vLLM that 0.33 has marked as shuffled for AITER, and name it."""
    vllm_table(KINDS["128-blocks"][2], fp8_row("128-blocks", 8))
    kernel, (one, _) = fp8_kernel("128-blocks"), fp8_layer("128-blocks")
    one.aiter_bpreshuffled, one.prefix = True, "model.layers.0.qkv_proj"
    kernel.process_weights_after_loading(one)

    assert not kernel._route
    assert "(as model.layers.0.qkv_proj): vLLM's kernel has padded, packed or shuffled" in rows.unrouted()[0]


@pytest.mark.parametrize("vllm_form", ["0.25.1"], indirect=True)
def test_padded_activations_give_only_the_real_tokens(vllm_table, monkeypatch) -> None:
    """The output has the real tokens, by row and by vLLM's kernel, when torch's kernels get 17."""
    only(monkeypatch, "_POSSIBLE_FP8_KERNELS", "PerTensorTorchFP8ScaledMMLinearKernel")
    vllm_table(KINDS["tensor-tensor"][2], fp8_row("tensor-tensor", 17))
    kernel, (one, weight) = fp8_kernel("tensor-tensor"), fp8_layer("tensor-tensor")
    kernel.process_weights_after_loading(one)
    for m in (5, 20):
        x = torch.randn(m, K).bfloat16()
        found = kernel.apply_weights(one, x)

        expected = x.float() @ weight.t()
        assert found.shape == (m, N) and (found.float() - expected).norm() < 0.04 * expected.norm()
    [route] = routes.routes.values()
    assert route.calls == {17: route.ours, 20: route.theirs}


@pytest.mark.parametrize("vllm_form", ["0.25.1"], indirect=True)
@pytest.mark.parametrize("kind", ["token-channel", "128-blocks"])
def test_a_layer_has_vllms_kernel_again_after_loading(vllm_table, kind) -> None:
    """Give vLLM its own kernel, which it warms up by its class, and route that kernel's products."""
    vllm_table(KINDS[kind][2], fp8_row(kind, 8))
    kernel, (one, _) = fp8_kernel(kind), fp8_layer(kind)
    one.quant_method = types.SimpleNamespace(fp8_linear=kernel)
    kernel.process_weights_after_loading(one)
    own = one.quant_method.fp8_linear
    own.apply_weights(one, torch.randn(8, K).bfloat16())

    assert own is kernel._theirs and served(fp8_row(kind, 8))


@pytest.mark.parametrize("vllm_form", ["0.20.2"], indirect=True)
def test_a_kernel_without_access_to_weights_is_named(vllm_table) -> None:
    """A layer whose weights vLLM withholds, as some methods of 0.20 do, keeps its kernel and is logged."""
    vllm_table(KINDS["tensor-tensor"][2], fp8_row("tensor-tensor", 8))
    kernel, (one, weight) = fp8_kernel("tensor-tensor"), fp8_layer("tensor-tensor")
    x = torch.randn(8, K).bfloat16()
    expected = x.float() @ weight.t()

    assert (kernel.apply_weights(one, x).float() - expected).norm() < 0.04 * expected.norm()
    assert "1 layers keep vLLM's kernels (as one): vLLM does not hand their weights" in rows.unrouted()[0]


def test_the_reference_is_the_product_of_the_first_columns(vllm) -> None:
    """A layer of blocks is checked by torch against this, in float32, with scales in any order."""
    first_columns = importlib.import_module("tunedgemm_engines.vllm_fp8")._first_columns
    n, k, m = 256, 384, 5
    x, weight = (torch.randn(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    xs, ws = torch.rand(k // 128, m).t(), torch.rand(n // 128, k // 128)
    expected = tunedgemm.gemm_a8w8_blockscale(x, weight, xs.contiguous(), ws, torch.bfloat16)[:, :128].float()
    out = first_columns(x, weight, xs, ws, None)
    assert out.shape == (m, 128) and float((out - expected).norm() / expected.norm()) < 0.01
