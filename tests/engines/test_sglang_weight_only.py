"""sglang_weight_only: int4 layers of SGLang, on a stub with its signatures."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.ops.formats.weight_only import quantise
from tunedgemm.shape import Shape
from tunedgemm_engines import gains as engine_gains
from tunedgemm_engines import routes, rows
from tunedgemm_engines.sglang_weight_only import SCHEMES

N, K = 64, 256
INTEGERS, PACKED = ("qweight", "scales", "qzeros", "g_idx"), ("weight_packed", "weight_scale", "weight_zero_point")
#: Kind -> format and group.
KINDS = {
    "gptq": ("gptq_int4", 128), "gptq_row": ("gptq_int4", 0), "gptq_order": ("gptq_int4_order", 64),
    "awq": ("awq_int4", 128), "ct": ("ct_int4", 32), "ct_zp": ("ct_int4_zp", 64),
}  # fmt: skip


#: Kind of floats -> format, module and class, and whether the class is the layer's method itself.
_CT = "compressed_tensors.schemes.compressed_tensors_w4a16"
FLOATS = {
    "nvfp4": ("nvfp4", 16, f"{_CT}_nvfp4.CompressedTensorsW4A16Fp4", False),
    "mxfp4": ("mxfp4", 32, f"{_CT}_mxfp4.CompressedTensorsW4A16Mxfp4", False),
    "modelopt": ("nvfp4", 16, "modelopt_quant.ModelOptFp4LinearMethod", True),
    "modelopt_a16": ("nvfp4", 16, "modelopt_quant.ModelOptNvFp4A16LinearMethod", True),
}


def float_layer(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of a kind of floats, as SGLang's loader leaves it, and its decoded weight."""
    w_format, group, name, is_method = FLOATS[kind]
    stored, one = quantise(w_format, torch.randn(N, K), group), torch.nn.Module()
    values = {"weight" if is_method else "weight_packed": stored.weight.view(torch.uint8)}
    values["weight_scale"] = stored.w_scale if w_format == "nvfp4" else stored.w_scale.view(torch.uint8)
    if stored.w_global_scale is not None:  # of two fused layers
        scale = stored.w_global_scale.expand(2).clone()
        values["weight_scale_2" if is_method else "weight_global_scale"] = scale if is_method else 1 / scale
    for key, value in values.items():
        one.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    own = importlib.import_module(f"sglang.srt.layers.quantization.{name.rpartition('.')[0]}")
    made = getattr(own, name.rpartition(".")[2])()
    one.bias, one.params_dtype, one.quant_method = None, torch.bfloat16, made if is_method else weights_alone().Method()
    one.scheme = made
    return one, made.decoded(one)


def float_row(kind: str, m: int) -> Shape:
    """The shape of a kind's row."""
    return Shape("a16wn", m, N, K, "bf16", scale="block", extra={"w_format": FLOATS[kind][0], "w_group": FLOATS[kind][1]})


def scheme_of(kind: str, **changed: Any) -> Any:
    """SGLang's scheme of a kind."""
    group = KINDS[kind][1] or -1
    config = SimpleNamespace(**{"group_size": group, "desc_act": kind == "gptq_order", "pack_factor": 8, "zero_point": True} | changed)
    place, _, name = next(target for target in SCHEMES if f".{kind.partition('_')[0]}" in target.replace("compressed", "ct")).rpartition(
        "."
    )
    made = getattr(importlib.import_module(place), name)
    return made(4, group, kind == "ct", **changed) if kind.startswith("ct") else made(config)


def layer_of(kind: str, **changed: Any) -> torch.nn.Module:
    """A layer of a kind, as SGLang's loader leaves it."""
    w_format, group = KINDS[kind]
    index = torch.arange(K, dtype=torch.int32)[torch.randperm(K)] // group if kind == "gptq_order" else None
    stored, one = quantise(w_format, torch.randn(N, K), group, index=index), torch.nn.Module()
    for name, value in zip(
        PACKED if kind.startswith("ct") else INTEGERS, (stored.weight, stored.w_scale, stored.w_zeros, stored.w_index), strict=False
    ):
        if value is not None:
            one.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    one.bias, one.scheme, one.quant_method = None, scheme_of(kind, **changed), weights_alone().Method()
    return one


def weights_alone() -> Any:
    """The stub's module of all schemes."""
    return importlib.import_module("sglang.weights_alone")


def row(kind: str, m: int) -> Shape:
    """The shape of a kind's row."""
    w_format, group = KINDS[kind]
    return Shape("a16wn", m, N, K, "bf16", scale="block", extra={"w_format": w_format, "w_group": group})


def loaded(*layers: torch.nn.Module, **options: Any) -> None:
    """Load a model of these layers."""
    model = torch.nn.ModuleList(layers)
    importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner(model, [1], **options).load_model()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two products differ by rounding alone."""
    return bool((found.float() - wanted).norm() < 0.01 * wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_row_is_ours(sglang_table, kind) -> None:
    """Our product of the loaded layout is that of SGLang's decoded weight, and nothing is repacked."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", row(kind, 3))
    layer = layer_of(kind)
    weight = layer.scheme.decoded(layer)
    loaded(layer)
    for m in (3, 10):
        x = torch.randn(m, K).bfloat16()
        assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t())
    assert not weights_alone().multiplied and not hasattr(layer, "workspace") and rows.unrouted("SGLang") == []


def timed(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """Let each M of a row have a gain, as on a GPU."""
    monkeypatch.setattr(
        engine_gains, "faster", lambda _arms, ours, theirs, calls, _: gain if close(ours(*calls[0]), theirs(*calls[0])) else -1
    )
    monkeypatch.setattr(engine_gains, "Arms", lambda _: SimpleNamespace(spent=False))
    monkeypatch.setattr(engine_gains, "_CHECKED", (5,))
    for route in routes.routes.values():
        monkeypatch.setattr(route, "device", SimpleNamespace(type="cuda", index=0))
    monkeypatch.setattr(engine_gains, "device_of", lambda _: current_device())


@pytest.mark.parametrize("gain", [1.4, 0.7])
@pytest.mark.parametrize("kind", ["gptq_order", "awq", "ct_zp"])
def test_a_layer_goes_whole_to_the_faster_side(sglang_table, monkeypatch, kind, gain) -> None:
    """SGLang repacks a layer, once, only if its kernel was faster in the mean."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", row(kind, 1))
    layer, x = layer_of(kind), torch.randn(6, K).bfloat16()
    weight = layer.scheme.decoded(layer)
    with monkeypatch.context() as patched:
        patched.setattr("tunedgemm_engines.gains.compare_remembered", lambda *_: None)
        loaded(layer)
    timed(monkeypatch, gain)
    engine_gains.compare(8.0, {})
    weights_alone().multiplied.clear()
    assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t())
    assert hasattr(layer, "workspace") is bool(weights_alone().multiplied) is (gain < 1)
    assert gain > 1 or "ours would be 0.70 times as fast as SGLang's kernel in the mean of M=1, 5" in rows.unrouted("SGLang")[-1]


@pytest.mark.parametrize("gain", [1.4, 0.7])
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_go_whole_to_the_faster_side(sglang_table, monkeypatch, kind, gain) -> None:
    """Our product is that of the decoded weight before and after; SGLang repacks if its kernel wins."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", float_row(kind, 1))
    (layer, weight), x = float_layer(kind), torch.randn(6, K).bfloat16()
    with monkeypatch.context() as patched:
        patched.setattr("tunedgemm_engines.gains.compare_remembered", lambda *_: None)
        loaded(layer)
    assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t()) and not weights_alone().multiplied
    timed(monkeypatch, gain)
    engine_gains.compare(8.0, {})
    weights_alone().multiplied.clear()
    assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t())
    assert hasattr(layer, "workspace") is bool(weights_alone().multiplied) is (gain < 1)
    assert gain > 1 or "tunedgemm_global_scale" not in layer.state_dict()


def test_new_floats_get_their_own_scale(sglang_table) -> None:
    """Weights that are loaded again bring their global scale with them."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", float_row("modelopt_a16", 1))
    (layer, _), (other, weight), x = float_layer("modelopt_a16"), float_layer("modelopt_a16"), torch.randn(2, K).bfloat16()
    loaded(layer)
    other.weight_scale_2.data *= 0.5
    for name in ("weight", "weight_scale", "weight_scale_2"):
        setattr(layer, name, getattr(other, name))
    layer.quant_method.process_weights_after_loading(layer)
    assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t() * 0.5) and not weights_alone().multiplied


def test_activations_in_nvfp4_stay_sglangs(sglang_table, monkeypatch) -> None:
    """Another kernel than Marlin quantises them, and the log says so."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", float_row("modelopt", 1))
    utils = importlib.import_module("sglang.srt.layers.quantization.fp4_utils")
    monkeypatch.setattr(utils, "chosen", ["cutlass"])
    layer, _ = float_layer("modelopt")
    loaded(layer)
    assert hasattr(layer, "workspace") and not routes.routes
    assert "SGLang quantises its activations to nvfp4" in rows.unrouted("SGLang")[-1]


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("gptq_order", {"group_size": 128}, "act-order with sharded K"),
        ("awq", {"zero_point": False}, "AWQ weights without zero points"),
        ("awq", {"pack_factor": 4}, "weights of 8 bits"),
        ("ct", {"has_g_idx": True}, "act-order of compressed-tensors"),
    ],
)
def test_other_integers_stay_sglangs(sglang_table, kind, changed, reason) -> None:
    """A layer without a format is repacked by SGLang as ever, and the log says why."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", row(kind, 1))
    layer, x = layer_of(kind, **changed), torch.randn(2, K).bfloat16()
    weight = layer.scheme.decoded(layer)
    loaded(layer)
    assert close(layer.quant_method.apply(layer, x), x.float() @ weight.t()) and hasattr(layer, "workspace")
    assert reason in rows.unrouted("SGLang")[-1]


def test_a_refused_mode_leaves_all_to_sglang(sglang_table, monkeypatch) -> None:
    """With deterministic inference that is refused for us, SGLang repacks its layers after all."""
    sglang_table("AITER_CONFIG_GEMM_A16WN", row("ct", 1))
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "0")
    layer = layer_of("ct")
    loaded(layer, enable_deterministic_inference=True)
    layer.quant_method.apply(layer, torch.randn(2, K).bfloat16())
    assert weights_alone().multiplied == [2] and not routes.routes
