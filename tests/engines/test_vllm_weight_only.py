"""vllm_weight_only: int4, nvfp4, mxfp8 and mxfp4 layers of vLLM, on a stub with its signatures."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.weight_only import quantise
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm_engines import gains as engine_gains
from tunedgemm_engines import routes, rows, vllm_backend, weight_only
from tunedgemm_engines import vllm as plugin

N, K = 64, 256
VARIABLE = "AITER_CONFIG_GEMM_A16WN"
#: Kind of a checkpoint -> scheme of vLLM, format, group, and the layer's operands by attribute.
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
            is_bytes = value.dtype is torch.float8_e8m0fnu or (name == "weight" and w_format != "mxfp8")
            one.register_parameter(name, parameters.PackedvLLMParameter(value.view(torch.uint8) if is_bytes else value, **dims, **of))
    if kind == "awq":
        importlib.import_module(f"{linear().__name__}.weights_alone").converted_awq(one, parameters.PackedvLLMParameter)
    one.bias = torch.nn.Parameter(torch.randn(n).to(dtype), requires_grad=False) if bias else None
    one.params_dtype, one.logical_widths, one.prefix = dtype, [n // 2, n // 2], "model.layers.0.mlp.down_proj"
    return one


def copied(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer with the same parameters, to be changed apart."""
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


def timed(
    monkeypatch: pytest.MonkeyPatch, gain_at: Callable[[int], float], known: dict[str, float] | None = None, spent: bool = False
) -> list[tuple[int, int]]:
    """Settle all routes, as if each M had a gain on a GPU; return M and layers of each measurement."""
    measured = []

    def faster(_arms: Any, ours: Any, theirs: Any, calls: list[Any], _tolerance: float) -> float:
        m = len(calls[0][0])
        measured.append((m, len(calls)))
        assert all(close(ours(*call), theirs(*call)) for call in calls)
        return gain_at(m)

    monkeypatch.setattr(engine_gains, "faster", faster)
    monkeypatch.setattr(engine_gains, "Arms", lambda _: SimpleNamespace(spent=spent))
    monkeypatch.setattr(engine_gains, "_CHECKED", (5,))
    monkeypatch.setattr(engine_gains, "device_of", lambda _: current_device())
    for route in routes.routes.values():
        monkeypatch.setattr(route, "device", SimpleNamespace(type="cuda", index=0))
    engine_gains.compare(8.0, {} if known is None else known)
    return measured


@in_every_form
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_row_is_ours(vllm_table, vllm_form, kind) -> None:
    """Our product of the loaded layout is that of vLLM's kernel at every M,
    before the layer is ours alone, and after."""
    if kind == "gptq_order" and vllm_form == "0.33.0":
        pytest.skip("0.33 has no act-order")
    vllm_table(VARIABLE, row(kind, 3))
    bias = vllm_form == "0.33.0"
    kernel, layer = kernel_of(kind), layer_of(kind, bias=bias)
    assert type(kernel).__name__.startswith("TunedGemm")
    inputs = [torch.randn(m, K).bfloat16() for m in (3, 10)]
    wanted = [expected(kind, layer, x, layer.bias) for x in inputs]
    kernel.process_weights_after_loading(layer)
    for _ in ("before", "after"):
        for x, out in zip(inputs, wanted, strict=True):
            found = kernel.apply_weights(layer=layer, x=x[None], bias=layer.bias)
            assert found.shape == (1, len(x), N) and found.dtype == torch.bfloat16 and close(found[0], out)
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


@pytest.mark.parametrize("kind", ["gptq", "awq", "ct_zp", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("second", [1.3, 0.6])
def test_a_layer_goes_whole_to_the_faster_side(vllm_table, monkeypatch, kind, second) -> None:
    """The mean of the gains decides for all M; one layout stays, and the log says it by layers."""
    vllm_table(VARIABLE, row(kind, 1), row(kind, 4))
    pairs, weight = [(kernel_of(kind), layer_of(kind, bias=True)) for _ in range(3)], KINDS[kind][3][0]
    x, known = torch.randn(2, K).bfloat16(), dict[str, float]()
    wanted = [expected(kind, layer, x, layer.bias) for _, layer in pairs]
    for place, (kernel, layer) in enumerate(pairs):
        layer.prefix = f"model.layers.{place}"
        kernel.process_weights_after_loading(layer)
    addresses = [getattr(layer, weight).data_ptr() for _, layer in pairs]

    measured = timed(monkeypatch, {1: 1.2, 4: second, 5: 1.0}.__getitem__, known)

    assert measured == [(1, 3), (4, 3), (5, 3)] and len(known) == 3
    lines = [*routes.summary([1, 4], current_device()), *rows.unrouted()]
    told = f"{(1.2 * second) ** (1 / 3):.2f} times as fast as vLLM's kernel in the mean of M=1, 4, 5, {min(1.0, second):.2f} at worst"
    if second > 1:
        [route] = routes.routes.values()
        assert f"tunedgemm: 3 layers with {route.shape} are ours at every M: {told}" in lines and route.name in weight_only.settled()
        assert "3 layers go through tables" in lines[0] and "never reached" not in "".join(lines)
    else:
        assert f"tunedgemm: 3 layers keep vLLM's kernels (as model.layers.0): ours would be {told}" in lines
        assert not routes.routes and not weight_only.settled() and all(layer.loaded_on for _, layer in pairs)
    for (kernel, layer), out, address in zip(pairs, wanted, addresses, strict=True):
        assert close(kernel.apply_weights(layer, x, layer.bias), out)
        is_loaded_layout = second > 1 and kind != "awq"
        assert (getattr(layer, weight).data_ptr() == address) is is_loaded_layout
    assert timed(monkeypatch, lambda _: 9.0, known) == []  # for a further model of the engine


@pytest.mark.parametrize(
    ("gain", "spent", "reason"),
    [
        (lambda _: -0.3, False, "our outputs are not those of vLLM's kernel (relative difference 0.3)"),
        (lambda _: 1 / 0, False, "a kernel failed at M=1 (ZeroDivisionError"),
        (lambda _: 2.0, True, "2 of 2 M were not timed against vLLM's kernel yet; the next start times them"),
    ],
    ids=["outputs", "error", "budget"],
)
def test_what_cannot_be_compared_stays_vllms(vllm_table, monkeypatch, gain, spent, reason) -> None:
    """Other outputs, a kernel that fails, or too little time leave the layers to vLLM, with the reason."""
    vllm_table(VARIABLE, row("gptq", 1))
    kernel, layer, x = kernel_of("gptq"), layer_of("gptq"), torch.randn(2, K).bfloat16()
    wanted = expected("gptq", layer, x)
    kernel.process_weights_after_loading(layer)
    timed(monkeypatch, gain, spent=spent)
    assert reason in rows.unrouted()[-1] and not routes.routes
    assert close(kernel.apply_weights(layer, x), wanted)


@pytest.mark.parametrize(("kind", "is_ours"), [("ct", True), ("ct", False), ("awq", True)])
def test_weights_that_are_loaded_again_go_to_the_same_side(vllm_table, monkeypatch, kind, is_ours) -> None:
    """New weights of a layer keep its side, which graphs call."""
    vllm_table(VARIABLE, row(kind, 1))
    kernel, layer, x = kernel_of(kind), layer_of(kind), torch.randn(2, K).bfloat16()
    kernel.process_weights_after_loading(layer)
    timed(monkeypatch, lambda _: 1.5 if is_ours else 0.5)
    again = layer_of(kind)
    wanted = expected(kind, again, x)
    for name in [name for name in KINDS[kind][3] if getattr(again, name, None) is not None]:
        setattr(layer, name, getattr(again, name))
    kernel.process_weights_after_loading(layer)
    assert (kernel._whole.stored is not None) is is_ours
    assert close(kernel.apply_weights(layer, x), wanted)


def test_a_settled_layer_is_one_graph(vllm_table) -> None:
    """A compiled graph calls our op on the layer's parameters at any M."""
    vllm_table(VARIABLE, row("ct", 4))
    kernel, layer = kernel_of("ct"), layer_of("ct")
    inputs = [torch.randn(m, K).bfloat16() for m in (4, 6)]
    wanted = [expected("ct", layer, x) for x in inputs]
    kernel.process_weights_after_loading(layer)
    engine_gains.compare(0.0, {})
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        assert all(close(compiled(x), out) for x, out in zip(inputs, wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("gptq_order", {"full_k": 2 * K}, "act-order with sharded K"),
        ("gptq", {"weight_type": "uint8b128"}, "no format for weights of uint8b128"),
        ("gptq", {"act_type": torch.float8_e4m3fn}, "activations of float8_e4m3fn"),
        ("gptq", {"n": N + 8}, f"no row of a16wn with N={N + 8}, K={K}, w_format=gptq_int4, w_group=128 or w_format=ct_int4"),
    ],
)
def test_other_integers_stay_vllms(vllm_table, kind, changed, reason) -> None:
    """vLLM chooses its own kernel at once for a layer that no row can serve, and the log says why."""
    vllm_table(VARIABLE, row(kind, 1))
    assert not type(kernel_of(kind, **changed)).__name__.startswith("TunedGemm")
    assert reason in rows.unrouted()[-1]


def test_activations_of_8_bits_for_marlin_stay_vllms(vllm_table, monkeypatch) -> None:
    """vLLM's variable makes Marlin's product another one."""
    vllm_table(VARIABLE, row("ct", 1))
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert type(kernel_of("ct")).__name__ == "MarlinLinearKernel"
    assert "VLLM_MARLIN_INPUT_DTYPE asks for activations of 8 bits" in rows.unrouted()[-1]


@pytest.mark.parametrize("is_humming", [True, False])
def test_activations_that_humming_quantises_stay_vllms(vllm_table, monkeypatch, is_humming) -> None:
    """Of the same layer Marlin multiplies activations of 16 bits, which ours does too."""
    own = type("HummingLinearKernel", (linear().MarlinLinearKernel,), {}) if is_humming else linear().MarlinLinearKernel
    monkeypatch.setitem(linear()._POSSIBLE_KERNELS, "any", [own])
    vllm_table(VARIABLE, row("ct", 1))
    kernel, layer = kernel_of("ct"), layer_of("ct")
    layer._humming_input_quant_config = {"num_bits": 8, "type": "int", "strategy": "token"}
    kernel.process_weights_after_loading(layer)
    assert (kernel._whole.stored is None) is is_humming
    assert not is_humming or "vLLM computes it by HummingLinearKernel, which quantises the activations" in rows.unrouted()[-1]


def test_an_unknown_layout_stays_vllms(vllm_table) -> None:
    """Zero points in GPTQ's order are not taken for those of AWQ: nothing else could tell them apart."""
    vllm_table(VARIABLE, row("awq", 1))
    kernel, layer = kernel_of("awq"), layer_of("awq")
    layer.qzeros.dims |= {"packed_dim": 1}
    with pytest.raises(AssertionError):  # vLLM's kernel takes them neither
        kernel.process_weights_after_loading(layer)
    assert "another layout than those of GPTQ, AWQ and compressed-tensors" in rows.unrouted()[-1]


def test_a_global_scale_that_divides_is_refused(vllm_table) -> None:
    """The convention is checked when the layer is loaded: the reciprocal leaves it to vLLM."""
    vllm_table(VARIABLE, row("nvfp4", 1))
    kernel, layer = kernel_of("nvfp4"), layer_of("nvfp4")
    layer.weight_global_scale.data = 1 / layer.weight_global_scale.data
    kernel.process_weights_after_loading(layer)
    assert "pass the reciprocal of a scale that divides" in rows.unrouted()[-1] and kernel._whole.stored is None


def test_products_of_quantised_activations_stay_vllms(vllm_table, monkeypatch) -> None:
    """nvfp4 whose activations vLLM's kernel quantises is another product."""
    vllm_table(VARIABLE, row("nvfp4", 1))
    monkeypatch.setattr(linear().CutlassNvFp4LinearKernel, "supported", True)
    assert type(kernel_of("nvfp4")).__name__ == "CutlassNvFp4LinearKernel"
    assert "vLLM computes nvfp4 by CutlassNvFp4LinearKernel" in rows.unrouted()[-1]


@in_every_form
@pytest.mark.parametrize("is_daemon", [False, True], ids=["engine", "daemon"])
@pytest.mark.parametrize("kind", ["ct", "nvfp4", "nvfp4_a16", "mxfp8", "mxfp4"])
def test_layers_of_the_weight_cache_stay_vllms(vllm_table, monkeypatch, kind, is_daemon) -> None:
    """An engine that loads from vLLM's daemon, and the daemon itself, keep vLLM's kernels: the
    cached weights are repacked for those."""
    vllm_table(VARIABLE, row(kind.partition("_")[0], 1))
    config = importlib.import_module("vllm.config")
    made = config.VllmConfig()
    if is_daemon:
        monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.weight_cache.daemon", SimpleNamespace())
    else:
        made.load_config.load_format = "ipc_cache"
    with config.set_current_vllm_config(made):
        kernel = linear().init_nvfp4_linear_kernel(use_a16=True) if kind == "nvfp4_a16" else kernel_of(kind)
    assert type(kernel).__name__.startswith("Marlin")
    assert "vLLM's weight cache holds their weights repacked" in rows.unrouted()[-1]


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_weights_that_arrive_repacked_are_vllms(vllm_table, kind) -> None:
    """Our kernel neither reads nor repacks them, although their sizes are those of loaded ones;
    weights that are loaded later are repacked."""
    vllm_table(VARIABLE, row(kind, 3))
    kernel, layer, x = kernel_of(kind), layer_of(kind), torch.randn(3, K).bfloat16()
    wanted, cached = expected(kind, layer, x), copied(layer)
    copy.copy(kernel._whole.theirs).process_weights_after_loading(cached)
    with importlib.import_module("vllm.model_executor.utils").weights_already_processed():
        kernel.process_weights_after_loading(cached)
    assert close(kernel.apply_weights(cached, x), wanted) and not routes.routes
    assert "as model.layers.0.mlp.down_proj): vLLM's weight cache holds" in rows.unrouted()[-1]
    kernel.process_weights_after_loading(layer)
    assert close(kernel.apply_weights(layer, x), wanted)


@pytest.mark.parametrize("backend", ["auto", "marlin"])
def test_nvfp4_with_16_bit_activations_passes_by_the_list(vllm_table, backend) -> None:
    """vLLM names Marlin's kernel for such a checkpoint; ours holds it, unless the user names a backend."""
    vllm_table(VARIABLE, row("nvfp4", 1))
    config = importlib.import_module("vllm.config")
    made = config.VllmConfig()
    made.kernel_config.linear_backend = backend
    with config.set_current_vllm_config(made):
        kernel = linear().init_nvfp4_linear_kernel(use_a16=True)
    own = kernel._whole.theirs if backend == "auto" else kernel
    assert type(own).__name__ == "MarlinNvFp4LinearKernel"


def test_capture_keeps_layers_for_their_calls(vllm_captured, monkeypatch) -> None:
    """While shapes are captured a layer is ours without a row, untimed, and its calls are counted."""
    kernel, layer = kernel_of("gptq"), layer_of("gptq")
    kernel.process_weights_after_loading(layer)
    assert timed(monkeypatch, lambda _: 0.5) == []
    kernel.apply_weights(layer, torch.randn(7, K).bfloat16())
    assert vllm_captured("a16wn") == {7: 1} and kernel._whole.is_settled


def test_a_dropped_model_is_freed(vllm_table, monkeypatch) -> None:
    """Neither a route nor its copies for the timing keep a layer."""
    vllm_table(VARIABLE, row("mxfp8", 1))
    kernel, layer = kernel_of("mxfp8"), layer_of("mxfp8")
    kernel.process_weights_after_loading(layer)
    timed(monkeypatch, lambda _: 1.5)
    del kernel, layer
    gc.collect()
    assert all(ref() is None for route in routes.routes.values() for ref in route.layers.values())


def test_the_sides_are_part_of_the_key_of_graphs(vllm_table) -> None:
    """A graph that calls vLLM's kernel is not run for layers that are ours."""
    vllm_table(VARIABLE, row("ct", 1))
    config = importlib.import_module("vllm.config").VllmConfig()
    before, kernel = config.compute_hash(), kernel_of("ct")
    kernel.process_weights_after_loading(layer_of("ct"))
    assert config.compute_hash() == before
    engine_gains.compare(0.0, {})
    assert config.compute_hash() != before


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_class_of_bits_serves_every_m(vllm, monkeypatch, tmp_path, same_bits) -> None:
    """In vLLM's mode a layer with a class is ours untimed, and vLLM's again where its bits differ
    or ranks disagree."""
    path, here, shape = tmp_path / "tuned.csv", current_device(), row("ct", 0)
    device = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "us": 1.0}
    write_rows(path, op_named("a16wn"), [Row(shape=shape, solution=Solution("turbo", "any"), bit_class="c1" * 8, **device)])
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    tunedgemm.reload()
    plugin.register()

    def by_row(solution: Solution, of: Shape, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = torch.cat([exact(solution, of.with_m(1), one[None], *rest) for one in x.reshape(-1, K)])
        return out if same_bits or len(x) < 9 else out * 1.01

    registry = fake_registry(fake_backend("turbo", ops=("a16wn",), solutions=("any",), call=by_row))
    monkeypatch.setattr(dispatcher("a16wn"), "registry", registry)
    kernel, layer, x = kernel_of("ct"), layer_of("ct"), torch.randn(12, K).bfloat16()
    wanted = expected("ct", layer, x)
    kernel.process_weights_after_loading(layer)
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)
    assert kernel._whole.is_settled is same_bits and close(kernel.apply_weights(layer, x), wanted)
    if same_bits:
        routes.leave_class(next(iter(routes.routes.values())).shape)
        assert close(kernel.apply_weights(layer, x), wanted)
    assert not routes.routes and kernel._whole.is_theirs and "its bit class does not hold here" in rows.unrouted()[-1]


@pytest.mark.parametrize("scheme", ["nvfp4", "mixed_precision"])
def test_an_older_vllm_keeps_its_kernels(vllm, monkeypatch, caplog, scheme) -> None:
    """A scheme without a list of kernels is named in a warning, and the others are routed."""
    monkeypatch.delattr(linear(), vllm_backend.SCHEMES[scheme])
    plugin.register()
    assert f"this vLLM has another interface (no list of kernels for {scheme})" in caplog.text
    assert linear()._POSSIBLE_MXFP8_KERNELS["any"][0].__name__.startswith("TunedGemm")
