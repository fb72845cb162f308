"""The plugin of SGLang, on a stub with SGLang's signatures."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops.formats import quant
from tunedgemm.shape import Shape
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import sglang as plugin
from tunedgemm_engines import sglang_fp8

N, K = 256, 384
STUB = Path(__file__).parent / "sglang_stub"
PLAIN = "AITER_CONFIG_GEMM_BF16"


def module(name: str) -> Any:
    """Import a module of SGLang's."""
    return importlib.import_module(f"sglang.srt.{name}")


def layer(method: Any, **values: Any) -> torch.nn.Module:
    """Make a layer with a method and parameters."""
    one = torch.nn.Module()
    for name, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        setattr(one, name, torch.nn.Parameter(value, requires_grad=False) if is_tensor else value)
    one.quant_method = method
    return one


def plain_layer(n: int = N, **values: Any) -> torch.nn.Module:
    """Make a layer of 16 bits."""
    return layer(module("layers.quantization.unquant").UnquantizedLinearMethod(), weight=torch.randn(n, K).bfloat16(), **values)


def loaded(sizes: list[int] | None = None, **layers: torch.nn.Module) -> Any:
    """Load a model of these layers, capture its graphs, and return the runner."""
    model = torch.nn.Module()
    for name, one in layers.items():
        model.add_module(name, one)
    runner = module("model_executor.model_runner").ModelRunner(model, sizes)
    runner.load_model()
    runner.init_cuda_graphs()
    return runner


def call(one: torch.nn.Module, m: int, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer on M rows; return the rows and the product."""
    x = torch.randn(m, K).bfloat16()
    return x, one.quant_method.apply(one, x, bias)


def test_it_is_off_unless_asked_for(child) -> None:
    """Without the variable nothing of SGLang is imported, and no module that routes is loaded."""
    source = (
        "import sys\nfrom tunedgemm_engines.sglang import register\nregister()\n"
        "print([name for name in sys.modules if name.startswith('sglang') or 'routes' in name or 'layers' in name])"
    )
    assert child(source, STUB) == "[]"


def test_a_layer_with_a_row_is_routed(sglang_table) -> None:
    """Rows run at their M; other M and layers without a row keep SGLang's kernel,
    and no heuristic runs."""
    sglang_table(PLAIN, *(Shape("a16w16", m, N, K, "bf16") for m in (4, 8)))
    one, other = plain_layer(), plain_layer(N + 64)
    loaded(one=one, other=other)
    own = module("layers.quantization.unquant").multiplied
    for m in (4, 8, 3000):
        for called in (one, other):
            x, found = call(called, m)
            torch.testing.assert_close(found, torch.nn.functional.linear(x, called.weight), rtol=0.02, atol=0.2)

    assert own == [4, 8, 3000, 3000]  # all of the other layer, and the last of the first
    assert [bool(each.tunedgemm_route) for each in (one, other)] == [True, False]
    assert all(dispatcher("a16w16").is_bound(Shape("a16w16", m, N, K, "bf16"), current_device()) for m in (4, 8))


@pytest.mark.parametrize("skipped", [False, True])
def test_a_bias_is_added_once(sglang_table, skipped) -> None:
    """A layer that adds its bias is a shape with bias; one that returns it is a plain shape."""
    sglang_table(PLAIN, Shape("a16w16", 8, N, K, "bf16", epilogue="none" if skipped else "bias"))
    bias = torch.randn(N).bfloat16()
    one = plain_layer(bias=bias, skip_bias_add=skipped)
    loaded(one=one)
    x, found = call(one, 8, None if skipped else one.bias)

    [route] = engine_routes.routes.values()
    assert route.calls == {8: route.ours} and route.shape.epilogue == ("none" if skipped else "bias")
    torch.testing.assert_close(found, torch.nn.functional.linear(x, one.weight, None if skipped else bias), rtol=0.02, atol=0.2)


def test_the_lm_head_is_routed(sglang_table) -> None:
    """Logits use the tables, with tied weights too;
    other embeddings and float32 logits stay SGLang's."""
    sglang_table(PLAIN, Shape("a16w16", 8, N, K, "bf16"))
    method = module("layers.quantization.unquant").UnquantizedEmbeddingMethod()
    head, embedding = (layer(method, weight=torch.randn(N, K).bfloat16()) for _ in range(2))
    loaded(lm_head=head, embed_tokens=embedding)
    logits, x = module("layers.logits_processor"), torch.randn(8, K).bfloat16()
    processor = logits.LogitsProcessor()
    torch.testing.assert_close(processor._compute_lm_head(x, head), x @ head.weight.t(), rtol=0.02, atol=0.2)
    torch.testing.assert_close(processor.get_logits(x, head), x @ head.weight.t(), rtol=0.02, atol=0.2)
    assert logits.multiplied == [] and head.tunedgemm_route and not embedding.tunedgemm_route

    for option, value in (("use_fp32_lm_head", True), ("use_fp32_lm_head_output", True), ("rl_on_policy_target", "fsdp")):
        setattr(processor, option, value)
        processor.get_logits(x, head)
        delattr(processor, option)
    processor.get_logits(torch.randn(3, K), head)
    assert logits.multiplied == [8, 8, 8]
    [route] = engine_routes.routes.values()
    assert route.calls == {8: route.ours}


def fp8_layer(kind: str, **values: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Make a layer of a kind; return it and its weight in float32."""
    methods, weight = module("layers.quantization.fp8"), torch.randn(N, K)
    if kind in CHANNELS:
        q, scale = quant.pertoken_quant(weight, quant_dtype=torch.float8_e4m3fn)
        scale, method = scale.reshape(-1, 1), methods.ChannelMethod(native=kind != "static-repeated")
        values |= {"input_scale": torch.full((1,) if kind == "static-1d" else (), 0.01)} if kind != "channel" else {}
        return layer(method, weight=q.t(), weight_scale=scale, **values), quant.dequant_rows(q, scale, torch.float32)
    q, scale = quant.per_block_quant(weight)
    one = layer(methods.BlockMethod(kind == "deepgemm"), weight=q, weight_scale_inv=scale, **values)
    return one, quant.dequant_blocks(q, scale, torch.float32, (128, 128))


#: Scales of channels with scales of tokens, or with one that is static: as SGLang's kernels
#: broadcast it, in either form, and repeated for each row.
CHANNELS = ("channel", "static", "static-1d", "static-repeated")
#: Kind of an fp8 layer to the variable of its table, and the op and scales of its rows.
FP8 = {
    **dict.fromkeys(CHANNELS, ("AITER_CONFIG_GEMM_A8W8", "a8w8", "row")),
    **dict.fromkeys(("deepgemm", "triton"), ("AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", "a8w8_blockscale", "block")),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", FP8)
def test_fp8_layers_are_routed(sglang_table, kind, biased) -> None:
    """A row runs on SGLang's quantised operands;
    at another M SGLang's product runs with its own operands."""
    variable, op, scale = FP8[kind]
    epilogue = "bias" if biased and kind in CHANNELS else "none"
    sglang_table(variable, Shape(op, 6, N, K, "fp8_e4m3fn", outdtype="bf16", scale=scale, epilogue=epilogue))
    bias = torch.randn(N).bfloat16() if biased else None
    one, weight = fp8_layer(kind, bias=bias)
    loaded(one=one)
    [route] = engine_routes.routes.values()
    own = module("layers.quantization.fp8_utils").multiplied
    own.clear()  # the call that the product was read off
    for m in (6, 3000):
        x, found = call(one, m, one.bias)
        expected = x.float() @ weight.t() + (0 if bias is None else bias)
        assert found.shape == (m, N) and (found.float() - expected).norm() < 0.05 * expected.norm()

    assert own == [("fp8_scaled_mm" if kind in CHANNELS else kind, 3000)]
    assert route.calls == {6: route.ours} and route.shape.epilogue == epilogue
    assert dict(route.shape.extra) == ({"scale_order": "m_major_padded"} if kind == "deepgemm" else {})
    inputs = route.inputs(5)
    both = [function(*route.operands(inputs, one)).float() for function in (route.ours, route.theirs)]
    assert (both[0] - both[1]).norm() < 0.01 * both[1].norm()


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("kind", FP8)
def test_scales_are_right_at_every_m(sglang_table, kind, m) -> None:
    """Our product equals SGLang's on SGLang's own operands, whatever the number of rows and of scales."""
    variable, op, scale = FP8[kind]
    sglang_table(variable, Shape(op, m, N, K, "fp8_e4m3fn", outdtype="bf16", scale=scale))
    one, _ = fp8_layer(kind, bias=None)
    loaded(one=one)
    [route] = engine_routes.routes.values()
    operands = route.operands(route.inputs(m), one)
    ours, theirs = (function(*operands).float() for function in (route.ours, route.theirs))
    assert ours.shape == (m, N) and (ours - theirs).norm() < 0.01 * theirs.norm()
    x = torch.randn(m, K).bfloat16()
    compiled = torch.compile(lambda x: one.quant_method.apply(one, x, None), backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        assert torch.equal(compiled(x), one.quant_method.apply(one, x, None))
    assert route.calls[m] is route.ours and not route.failures


@pytest.mark.parametrize("kind", FP8)
def test_updated_weights_reach_the_next_call(sglang_table, kind) -> None:
    """A routed layer keeps no copy: other scales and weights, in place or replaced, are multiplied."""
    variable, op, scale = FP8[kind]
    sglang_table(variable, Shape(op, 6, N, K, "fp8_e4m3fn", outdtype="bf16", scale=scale))
    one, _ = fp8_layer(kind, bias=None)
    loaded(one=one)
    name, x = "weight_scale" if kind in CHANNELS else "weight_scale_inv", torch.randn(6, K).bfloat16()
    first = one.quant_method.apply(one, x, None)
    getattr(one, name).data.mul_(-2)
    assert torch.equal(one.quant_method.apply(one, x, None), first * -2)
    setattr(one, name, torch.nn.Parameter(getattr(one, name) * 2, requires_grad=False))
    assert torch.equal(one.quant_method.apply(one, x, None), first * -4)
    one.weight.data.copy_(torch.zeros_like(one.weight))
    assert not one.quant_method.apply(one, x, None).any()


def test_a_layer_of_the_same_sizes_with_one_scale_stays(sglang_table) -> None:
    """A weight with a single scale keeps SGLang's product, though another of its sizes is routed."""
    sglang_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 6, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row"))
    one, _ = fp8_layer("channel", bias=None)
    single, _ = fp8_layer("channel", bias=None)
    single.weight_scale = torch.nn.Parameter(torch.full((1,), 0.01), requires_grad=False)
    loaded(one=one, single=single)
    call(one, 6)
    x, found = call(single, 6)
    expected = x.float() @ (single.weight.float() * 0.01)
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_fp8_layers_that_are_not_understood_stay(sglang_table, caplog) -> None:
    """A layer that fails, runs another product or has other
    scales keeps SGLang's kernel, with the reason."""
    sglang_table("AITER_CONFIG_GEMM_A8W8", Shape("a8w8", 8, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row"))
    caplog.set_level("INFO", "sglang.tunedgemm")

    class Another:
        def apply(self, _layer: Any, x: torch.Tensor, _bias: None = None) -> torch.Tensor:
            return x

    class Failing:
        def apply(self, *_: Any) -> torch.Tensor:
            raise RuntimeError("no kernel for this GPU")

    failing, other, narrow = (fp8_layer("channel")[0] for _ in range(3))
    failing.quant_method, other.quant_method = Failing(), Another()
    narrow.weight_scale = torch.nn.Parameter(narrow.weight_scale.half(), requires_grad=False)
    loaded(failing=failing, other=other, narrow=narrow)

    assert not engine_routes.routes and not sglang_fp8._routes
    told = {
        "failing": "a call of the layer failed: no kernel for this GPU",
        "other": "a kernel that is not routed",
        "narrow": "no such kind of scales",
    }
    for name, reason in told.items():
        assert re.search(rf"1 layers keep SGLang's kernels \(as {name}\): .*{reason}", caplog.text)


def test_the_log_sums_up(sglang_table, caplog) -> None:
    """After capture one line counts routed layers and names SGLang's batch sizes;
    each other layer has its reason."""
    sglang_table(PLAIN, *(Shape("a16w16", m, N, K, "bf16") for m in (1, 8)))
    caplog.set_level("INFO", "sglang.tunedgemm")
    loaded([64, 8, 1], one=plain_layer(), two=plain_layer(), other=plain_layer(N + 64))

    assert "tunedgemm: 2 layers go through tables (torch); SGLang's kernels serve some products at M = 64" in caplog.text
    assert "keep SGLang's kernel at some M: M=64: no row" in caplog.text
    assert f"1 layers keep SGLang's kernels (as other): no row of a16w16 with N={N + 64}, K={K}" in caplog.text
    assert "vLLM" not in caplog.text and "never reached" not in caplog.text


def test_hooks_reach_functions_that_were_imported_by_name(sglang_table) -> None:
    """Targets that SGLang's methods import by name are wrapped once,
    however often the plugin is called."""
    methods = module("layers.quantization.fp8")
    before = methods.fp8_scaled_mm
    sglang_table(PLAIN, Shape("a16w16", 8, N, K, "bf16"))
    plugin.register()
    module("plugins.hook_registry").HookRegistry.apply_hooks()

    assert methods.fp8_scaled_mm is module("layers.quantization.fp8_utils").fp8_scaled_mm is not before
    assert methods.fp8_scaled_mm.__wrapped__ is before and sglang_fp8.original_of(sglang_fp8.CHANNEL) is before


@pytest.mark.parametrize(
    ("version", "routed"), [("0.5.14", True), ("0.5.23.post1", True), ("0.5.13", False), ("0.6.0", False), ("dev", False)]
)
def test_an_unknown_sglang_keeps_its_kernels(sglang, monkeypatch, caplog, version, routed) -> None:
    """A version that was not checked is named in one warning, and nothing is hooked."""
    monkeypatch.setattr(importlib.import_module("sglang"), "__version__", version)
    plugin.register()

    assert bool(module("plugins.hook_registry").HookRegistry.hooks) is routed
    assert len(caplog.records) == (0 if routed else 1)
    assert routed or f"unknown version of SGLang (got {version}); known are 0.5.14 to 0.5.23" in caplog.text


def test_a_missing_function_is_named(sglang, monkeypatch, caplog) -> None:
    """A function that this SGLang lacks is named in a warning, and the others are hooked."""
    monkeypatch.delattr(module("layers.quantization.fp8_utils"), "w8a8_block_fp8_matmul_triton")
    plugin.register()

    assert "this SGLang has no sglang.srt.layers.quantization.fp8_utils.w8a8_block_fp8_matmul_triton" in caplog.text
    assert len(module("plugins.hook_registry").HookRegistry.hooks) == 20


@pytest.mark.parametrize(
    "option", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}], ids=lambda option: next(iter(option))
)
def test_deterministic_inference_stays(sglang_table, monkeypatch, caplog, option) -> None:
    """If our mode is switched off, nothing is routed, and one warning says so."""
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "0")
    sglang_table(PLAIN, Shape("a16w16", 8, N, K, "bf16"))
    one = plain_layer()
    module("model_executor.model_runner").ModelRunner(one, **option).load_model()
    call(one, 8)

    assert f"tunedgemm is off: --{next(iter(option)).replace('_', '-')} is set" in caplog.text
    assert module("layers.quantization.unquant").multiplied == [8] and not engine_routes.routes
