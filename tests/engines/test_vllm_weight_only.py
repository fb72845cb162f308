"""vllm_weight_only: int4, nvfp4, mxfp8 and mxfp4 layers of vLLM, on a stub with its signatures."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops.formats.weight_only import quantise
from tunedgemm.shape import Shape
from tunedgemm_engines import gains as engine_gains
from tunedgemm_engines import routes, rows

N, K = 64, 256
VARIABLE = "AITER_CONFIG_GEMM_A16WN"
#: Kind of a checkpoint -> scheme of vLLM, format, group, and the layer's attributes of the operands.
INTEGERS = ("qweight", "scales", "qzeros", "g_idx", "")
PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "", "")
FLOATS = ("weight", "weight_scale", "", "", "weight_global_scale")
KINDS: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "gptq": ("mixed_precision", "gptq_int4", 128, INTEGERS),
    "gptq_row": ("mixed_precision", "gptq_int4", 0, INTEGERS),
    "gptq_order": ("mixed_precision", "gptq_int4_order", 64, INTEGERS),
    "awq": ("mixed_precision", "awq_int4", 128, INTEGERS),
    "ct": ("mixed_precision", "ct_int4", 32, PACKED),
    "ct_zp": ("mixed_precision", "ct_int4_zp", 128, PACKED),
    "nvfp4": ("nvfp4", "nvfp4", 16, FLOATS),
    "mxfp8": ("mxfp8", "mxfp8", 32, FLOATS),
    "mxfp4": ("mxfp4", "mxfp4", 32, FLOATS),
}
in_every_form = pytest.mark.parametrize("vllm_form", ["0.25.1", "0.33.0"], indirect=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses much that torch deprecates
    pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="an installed vLLM repacks on a GPU alone"),
]


def row(kind: str, m: int, n: int = N, **fields: Any) -> Shape:
    """The shape of a kind's row."""
    _, w_format, group, _ = KINDS[kind]
    return Shape("a16wn", m, n, K, "bf16", scale="block", extra={"w_format": w_format, "w_group": group} | fields)


def linear() -> Any:
    """vLLM's module of linear kernels."""
    return importlib.import_module("vllm.model_executor.kernels.linear")


def kernel_of(kind: str, n: int = N, k: int = K, full_k: int = K, **changed: Any) -> Any:
    """The kernel that vLLM chooses for a layer of a kind."""
    scheme, w_format, group, names = KINDS[kind]
    if scheme == "nvfp4":
        return linear().init_nvfp4_linear_kernel()
    if scheme == "mxfp8":
        return linear().init_mxfp8_linear_kernel(weight_shape=(n, k))
    if scheme == "mxfp4":
        return linear().init_mxfp4_linear_kernel()
    zeros = kind in ("awq", "ct_zp")
    fields: dict[str, Any] = {"weight_type": "uint4" if zeros else "uint4b8", "act_type": torch.bfloat16}
    fields |= {"has_g_idx": True} if w_format.endswith("order") else {}
    config = linear().MPLinearLayerConfig((full_k, n), (k, n), group_size=group or -1, zero_points=zeros, **fields | changed)
    return linear().choose_mp_linear_kernel(config)(config, *names[:3], "g_idx")


def layer_of(kind: str, n: int = N, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A loaded layer of a kind, as vLLM hands it to its kernel."""
    parameters: Any = importlib.import_module("vllm.model_executor.parameter")
    _, w_format, group, names = KINDS[kind]
    index = torch.arange(K, dtype=torch.int32)[torch.randperm(K)] // group if w_format.endswith("order") else None
    stored, one = quantise(w_format, torch.randn(n, K), group, dtype=dtype, index=index), torch.nn.Module()
    by_k, along_n = names is INTEGERS, kind == "awq"
    dims = {"input_dim": 0 if by_k else 1, "output_dim": 1 if by_k else 0}
    packed = {"packed_dim": dims["output_dim" if along_n else "input_dim"]}
    for name, value in zip(names, (stored.weight, stored.w_scale, stored.w_zeros, stored.w_index, stored.w_global_scale), strict=True):
        if value is not None:
            of = {"packed_dim": dims["output_dim"]} if name == names[2] else packed
            if name == "weight" and w_format != "mxfp8":
                value = value.view(torch.uint8)
            value = value.view(torch.uint8) if value.dtype is torch.float8_e8m0fnu else value
            one.register_parameter(name, parameters.PackedvLLMParameter(value, **dims, **of))
    if kind == "awq":
        importlib.import_module(f"{linear().__name__}.weights_alone").converted_awq(one, parameters.PackedvLLMParameter)
    one.bias = torch.nn.Parameter(torch.randn(n).to(dtype), requires_grad=False) if bias else None
    one.params_dtype, one.logical_widths, one.prefix = dtype, [n // 2, n // 2], "model.layers.0.mlp.down_proj"
    return one


def copied(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer of its own parameters."""
    twin = copy.copy(layer)
    twin.__dict__["_parameters"] = dict(layer._parameters)
    return twin


def expected(kind: str, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """vLLM's own product of a loaded layer, by its kernel's repacking and decoding."""
    ours = kernel_of(kind)
    own, twin = (copy.copy(ours._whole.theirs) if hasattr(ours, "_whole") else ours), copied(layer)
    own.process_weights_after_loading(twin)
    return own.apply_weights(twin, x, bias).float()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two products differ by rounding alone."""
    return bool((found.float() - wanted).norm() < 0.01 * wanted.norm())


def settle_all(monkeypatch: pytest.MonkeyPatch, gains: dict[int, float]) -> None:
    """Settle all routes, as if each M had a gain on a GPU."""
    monkeypatch.setattr(engine_gains, "faster", lambda _arms, _ours, _theirs, calls, _tolerance: gains[calls[0][0].shape[0]])
    monkeypatch.setattr(engine_gains, "Arms", lambda _: SimpleNamespace(spent=False))
    monkeypatch.setattr(engine_gains, "rows_of", lambda *_: sorted(gains))
    monkeypatch.setattr(engine_gains, "untuned_sizes", lambda *_: [])
    monkeypatch.setattr(engine_gains, "_CHECKED", ())
    monkeypatch.setattr(engine_gains, "device_of", lambda _: current_device())
    for route in routes.routes.values():
        route.device = SimpleNamespace(type="cuda", index=0)
    engine_gains.compare(8.0, {})


@in_every_form
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_row_is_ours(vllm_table, vllm_form, kind, bias) -> None:
    """Our product of the loaded layout is that of vLLM's kernel, at every M, before and after the layer is ours alone."""
    if kind == "gptq_order" and vllm_form == "0.33.0":
        pytest.skip("0.33 has no act-order")
    vllm_table(VARIABLE, row(kind, 3))
    kernel, layer = kernel_of(kind), layer_of(kind, bias=bias)
    assert type(kernel).__name__.startswith("TunedGemm")
    wanted, x = {}, {m: torch.randn(m, K).bfloat16() for m in (3, 10)}
    for m in x:
        wanted[m] = expected(kind, layer, x[m], layer.bias)
    kernel.process_weights_after_loading(layer)
    for _ in ("before", "after"):
        for m in x:
            found = kernel.apply_weights(layer=layer, x=x[m].view(1, m, K), bias=layer.bias)
            assert found.shape == (1, m, N) and found.dtype == torch.bfloat16 and close(found[0], wanted[m])
        engine_gains.compare(0.0, {})
    assert {type(parameter) for parameter in layer.parameters()} == {torch.nn.Parameter} or KINDS[kind][3] is INTEGERS
    assert dispatcher("a16wn").is_bound(row(kind, 3) if not bias else routes.routes.popitem()[1].shape.with_m(3), current_device())
    assert rows.unrouted() == []


@in_every_form
@pytest.mark.parametrize("kind", ["gptq", "awq", "ct_zp", "nvfp4", "mxfp8", "mxfp4"])
def test_a_layer_without_a_row_stays_vllms(vllm_table, kind) -> None:
    """vLLM's kernel repacks and computes a weight whose N, format or group has no row; the log says why."""
    other = "ct" if kind != "ct_zp" else "awq"
    vllm_table(VARIABLE, row(kind, 3, N + 8), row(other, 3))
    kernel, layer, x = kernel_of(kind), layer_of(kind), torch.randn(3, K).bfloat16()
    wanted = expected(kind, layer, x)
    kernel.process_weights_after_loading(layer)
    assert close(kernel.apply_weights(layer, x), wanted) and not routes.routes
    assert f"no row of a16wn with N={N}, K={K}, " in rows.unrouted()[-1] and KINDS[kind][1] in rows.unrouted()[-1]
