"""Layers of experts, tested on vLLM if it is installed, else on a stub with its signatures."""

from __future__ import annotations

import importlib
import inspect
import logging
import types
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import rows as engine_rows
from tunedgemm_engines import vllm as plugin

LAYERS = "vllm.model_executor.layers"
VARIABLE = "AITER_CONFIG_FMOE"
OP = op_named("fmoe")

#: Kind -> the words for the scales of activations and weights, the op's word, and the dtype of
#: both.
KINDS = {
    "16 bits": ("", "", "No", "bf16"),
    "fp8, static": ("static", "tensor", "per_Tensor", "fp8_e4m3fn"),
    "fp8 of tensors": ("tensor", "tensor", "per_Tensor", "fp8_e4m3fn"),
    "fp8 of rows": ("token", "channel", "per_Token", "fp8_e4m3fn"),
    "fp8 of blocks": ("128", "blocks", "per_1x128", "fp8_e4m3fn"),
}
GROUPS = {"static": (-1, -1), "tensor": (-1, -1), "token": (1, -1), "channel": (-1, 1), "128": (1, 128), "blocks": (128, 128)}

in_every_form = pytest.mark.parametrize("vllm_form", ["0.20.2", "0.25.1", "0.33.0"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture
def on_gpu(vllm: None) -> None:
    """vLLM has kernels for plain weights: those of the stand-in, or of a GPU."""
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        pytest.skip("vLLM packs weights for this CPU, and has no kernel for plain ones")


@pytest.fixture(autouse=True)
def platform(vllm: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs on a CPU, where it has no kernel for plain weights, unless a test asks for a GPU."""
    if "on_gpu" not in request.fixturenames:
        monkeypatch.setattr(type(importlib.import_module("vllm.platforms").current_platform), "is_cpu", lambda self: True)


def shape_of(kind: str, tokens: int = 5, topk: int = 2, act: str = "silu") -> Shape:
    """A layer of 8 experts."""
    _, _, q_type, q_dtype = KINDS[kind]
    fields = {"expert": 8, "topk": topk, "act": act, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": q_type}
    return Shape("fmoe", tokens, 256, 128, "bf16", extra={**fields, "g1u1": True, "doweight_stage1": False})  # type: ignore[arg-type]


def module(name: str) -> Any:
    """A module of vLLM's experts."""
    return importlib.import_module(f"{LAYERS}.fused_moe.{name}")


def config_of(shape: Shape, **changed: Any) -> Any:
    """vLLM's description of a layer."""
    said, experts = module("config"), int(shape["expert"])
    told = {
        "num_experts": experts, "num_local_experts": experts, "num_logical_experts": experts, "experts_per_token": int(shape["topk"]),
        "hidden_dim": shape.n, "activation": activation(str(shape["act"])),
        "device": "cpu", "in_dtype": torch.bfloat16, "routing_method": said.RoutingMethodType.Renormalize,
        "moe_parallel_config": said.FusedMoEParallelConfig.make_no_parallel(),
    }  # fmt: skip
    older = "intermediate_size" not in inspect.signature(said.FusedMoEConfig).parameters  # as 0.20
    told["intermediate_size_per_partition" if older else "intermediate_size"] = shape.k
    return said.FusedMoEConfig(**{**told, **changed})


def keys(kind: str) -> dict[str, Any]:
    """Return the keys by which vLLM's methods describe a kind's operands."""
    said = importlib.import_module(f"{LAYERS}.quantization.utils.quant_utils")
    of_x, of_weight, _, q_dtype = KINDS[kind]
    if not of_x:
        return {}
    dtype = torch_dtype(q_dtype)
    made = [
        said.QuantKey(dtype, said.ScaleDesc(torch.float32, static, said.GroupShape(*GROUPS[word])), symmetric=True)
        for word, static in ((of_weight, True), (of_x, of_x == "static"))
    ]
    return dict(zip(("weight_key", "activation_key"), made, strict=True))


def chosen(kind: str, config: Any) -> tuple[Any, type]:
    """The backend and the class of experts that vLLM chooses for a layer."""
    family = "unquantized" if kind == "16 bits" else "fp8"
    select = getattr(module(f"oracle.{family}"), f"select_{family}_moe_backend")
    backend, experts = select(config, **keys(kind))
    return backend, experts


def is_ours(kind: str, config: Any) -> bool:
    """Return whether vLLM chooses our experts; on this platform it may have no kernel."""
    return getattr(chosen(kind, config)[1], "__name__", "") == "TunedGemmExperts"


def kernel_of(kind: str, shape: Shape, scales: tuple[torch.Tensor | None, ...]) -> Any:
    """vLLM's kernel of a layer with scales of w1, w2 and both activations."""
    config = config_of(shape)
    backend, experts = chosen(kind, config)
    assert backend.name == "TRITON"
    of_x, _, q_type, q_dtype = KINDS[kind]
    said = module("config").FusedMoEQuantConfig
    if kind == "16 bits":
        return module("oracle.unquantized").make_unquantized_moe_kernel(said.make(), config, backend, experts)
    named = dict(zip(("w1_scale", "w2_scale", "a1_scale", "a2_scale"), scales, strict=True))
    blocks = [128, 128] if q_type == "per_1x128" else None
    quantised = said.make(torch_dtype(q_dtype), per_act_token_quant=of_x == "token", block_shape=blocks, **named)
    return module("oracle.fp8").make_fp8_moe_kernel(quantised, config, experts, backend)


class Loaded(torch.nn.Parameter):
    """A parameter that knows how to be loaded, as vLLM's do."""


def layer(kind: str, shape: Shape) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return a kernel and the operands of one call, without and with known activation scales."""
    hidden, w1, w2, weights, ids, *scales = OP.make_inputs(shape, torch.device("cpu"), 0)
    ahead = (torch.tensor([0.01]), torch.tensor([0.05])) if KINDS[kind][0] == "static" else (None, None)
    told = [*(scales or (None, None)), *ahead]
    kernel = kernel_of(kind, shape, tuple(one if one is None else Loaded(one, requires_grad=False) for one in told))
    loaded = (Loaded(one, requires_grad=False) for one in (w1, w2))
    return kernel, (hidden, *loaded, weights, ids), (hidden, w1, w2, weights, ids, *told)


def activation(word: str = "silu") -> Any:
    """A member of vLLM's enumeration."""
    return module("activation").MoEActivation(word)


def call(kernel: Any, operands: tuple[Any, ...], act: Any, *, on_input: bool = False) -> torch.Tensor:
    """The layer's output, as vLLM's methods ask for it."""
    hidden, w1, w2, weights, ids = operands[:5]
    found: torch.Tensor = kernel.apply(
        hidden_states=hidden, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=act,
        global_num_experts=8, expert_map=None, apply_router_weight_on_input=on_input,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_routed(vllm_captured, kind, act) -> None:
    """vLLM takes our experts for each kind of scales; they match the op's reference, and calls
    count."""
    shape = shape_of(kind, act=act)
    kernel, operands, told = layer(kind, shape)
    with torch.inference_mode():
        found = call(kernel, operands, activation(act))

    expected = OP.reference(shape, told).float()
    assert type(kernel.fused_experts).__name__ == "TunedGemmExperts" and found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.02 * expected.norm()
    assert vllm_captured("fmoe") == {5: 1}
    assert dispatcher("fmoe").is_bound(shape, current_device())  # tables serve no subclasses of torch's parameters


@in_every_form
def test_experts_are_routed_in_every_form(vllm_captured) -> None:
    """The class implements all abstract methods of vLLM's experts in each version."""
    test_experts_are_routed(vllm_captured, "fp8 of rows", "silu")


def test_the_method_of_16_bits_asks_us(vllm_captured) -> None:
    """A method that imported vLLM's function before registration calls ours."""
    made = module("unquantized_fused_moe_method").UnquantizedFusedMoEMethod(config_of(shape_of("16 bits")))

    assert made.experts_cls.__name__ == "TunedGemmExperts"


@pytest.mark.parametrize("kind", ["16 bits", "fp8 of rows"])
def test_rows_for_every_number_of_tokens_decide(vllm_table, kind, caplog) -> None:
    """Experts are routed only if rows serve every number of tokens that vLLM may batch."""
    current = importlib.import_module("vllm.config").get_current_vllm_config()
    current.scheduler_config.max_num_batched_tokens = 6
    shape = shape_of(kind)
    vllm_table(VARIABLE, *(shape.with_m(tokens) for tokens in (1, 2, 4, 8)), kernel="sorted")
    assert is_ours(kind, config_of(shape))
    assert not is_ours(kind, config_of(shape, intermediate_size=256))
    assert not is_ours(kind, config_of(shape, experts_per_token=3))

    current.scheduler_config.max_num_batched_tokens = 9
    telling = logging.getLogger("vllm.tunedgemm")
    telling.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "vllm.tunedgemm"):
        assert not is_ours(kind, config_of(shape))
    telling.removeHandler(caplog.handler)
    assert "no tuned row of fmoe serves token=16, model_dim=256, inter_dim=128, expert=8" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"has_bias": True}, {"is_lora_enabled": True}, {"swiglu_limit": 7.0}, {"moe_backend": "triton"}, {"in_dtype": torch.float32},
        {"activation": "gelu_tanh"}, {"parallel": {"ep_size": 2}}, {"parallel": {"dp_size": 2}}, {"parallel": {"enable_eplb": True}},
    ],
    ids=lambda changed: "-".join(f"{name}" for name in changed.get("parallel", changed)),
)  # fmt: skip
def test_experts_that_the_op_cannot_compute_stay_vllms(vllm_captured, changed) -> None:
    """A bias, LoRA, clamps, other activations or dtypes,
    distributed experts and a named backend stay vLLM's."""
    ours = importlib.import_module("tunedgemm_engines.vllm_cpu_experts")
    config = config_of(shape_of("16 bits"))
    assert ours.unserved_reason(config, None, None) == ""
    if "activation" in changed:
        config.activation = activation(changed["activation"])
    for name, value in changed.get("parallel", {}).items():
        setattr(config.moe_parallel_config, name, value)
    for name, value in changed.items():
        if name not in ("activation", "parallel"):
            setattr(config, name, value)

    assert ours.unserved_reason(config, None, None)


@pytest.mark.parametrize("kind", [("128", "channel"), ("token", "tensor"), ("tensor", "")])
def test_experts_with_other_scales_stay_vllms(vllm_captured, kind, monkeypatch) -> None:
    """Scales that the op cannot combine and weight-only quantisation stay vLLM's."""
    ours = importlib.import_module("tunedgemm_engines.vllm_cpu_experts")
    monkeypatch.setitem(KINDS, "other", (kind[0], kind[1] or "tensor", "", "fp8_e4m3fn"))
    said = keys("other") | ({} if kind[1] else {"activation_key": None})

    assert "quantization scheme" in ours.unserved_reason(config_of(shape_of("16 bits")), said["weight_key"], said["activation_key"])


def test_router_weights_on_the_input_count_once(vllm_captured) -> None:
    """vLLM multiplies the hidden states by them; the experts do not again."""
    shape = shape_of("16 bits", topk=1)
    kernel, operands, _ = layer("16 bits", shape)
    weights = torch.rand(5, 1)
    with torch.inference_mode():
        found = call(kernel, (*operands[:3], weights, operands[4]), activation(), on_input=True)

    scaled = operands[0] * weights.to(torch.bfloat16)
    expected = OP.reference(shape, (scaled, *operands[1:3], torch.ones(5, 1), operands[4])).float()
    assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_a_map_of_experts_is_refused(vllm_captured) -> None:
    """Experts that are on other ranks would be computed as if they were here: an error, not a wrong sum."""
    shape = shape_of("16 bits")
    kernel, operands, _ = layer("16 bits", shape)
    hidden, w1, w2, weights, ids = operands
    with pytest.raises(OperandError, match="map of experts"):
        kernel.fused_experts.apply(torch.empty_like(hidden), hidden, w1, w2, weights, ids, None, expert_map=torch.arange(8))


def test_an_output_in_shared_memory_is_filled(vllm_captured) -> None:
    """vLLM may hand a part of its workspace as the output: it is written there."""
    shape = shape_of("16 bits")
    kernel, operands, told = layer("16 bits", shape)
    hidden, w1, w2, weights, ids = operands
    with torch.inference_mode():
        workspace = torch.zeros(2, 5, 256, dtype=torch.bfloat16)
        kernel.fused_experts.apply(workspace[1], hidden, w1, w2, weights, ids, activation())

    expected = OP.reference(shape, told).float()
    assert (workspace[1].float() - expected).norm() < 0.02 * expected.norm() and not workspace[0].any()


@pytest.mark.parametrize("kind", ["16 bits", "fp8 of blocks"])
def test_compiled_graphs_hold_the_experts_as_one_op(vllm_captured, kind) -> None:
    """At any number of tokens experts are one op of an unbroken graph, with the eager output."""
    shape = shape_of(kind)
    kernel, operands, _ = layer(kind, shape)
    ops: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "tunedgemm" in str(node.target))
        return graph.forward

    act = activation()
    compiled = torch.compile(lambda *given: call(kernel, given, act), fullgraph=True, dynamic=True, backend=backend)
    with torch.inference_mode():
        for tokens in (5, 3):
            given = tuple(one[:tokens].clone() if place in (0, 3, 4) else one for place, one in enumerate(operands[:5]))
            found, eager = compiled(*given), call(kernel, given, act)
            assert (found.float() - eager.float()).norm() <= 0.01 * eager.float().norm()
    assert ops == ["tunedgemm.fmoe.default"]


def loaded(kind: str, shape: Shape, **changed: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return vLLM's kernel in a freshly loaded model,
    a call's operands, and those of the op's reference."""
    kernel, operands, told = layer(kind, shape)
    for name, value in changed.items():
        holder = kernel.fused_experts.moe_config
        setattr(holder.moe_parallel_config if hasattr(holder.moe_parallel_config, name) else holder, name, value)
    load(kernel, operands)
    return kernel, operands, told


def load(kernel: Any, operands: tuple[Any, ...]) -> None:
    """Have vLLM load a model with a kernel's layer."""
    one = torch.nn.Module()
    one.w13_weight, one.w2_weight = operands[1:3]
    one.quant_method = types.SimpleNamespace(moe_kernel=kernel, process_weights_after_loading=lambda layer: None)
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.ModuleDict({"experts": one}), None, None)
    kernel.layer = one  # a model keeps its layers


def own_calls() -> list[int]:
    """The numbers of tokens of the calls that the stand-in of vLLM's experts computed."""
    found: list[int] = module("oracle.unquantized").TritonExperts.calls
    found.clear()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_routes_its_number_of_tokens(on_gpu, vllm_table, kind) -> None:
    """At a number of tokens with a row the op runs, else vLLM's kernel;
    both give the reference's output."""
    shape = shape_of(kind, tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, operands, told = loaded(kind, shape)
    calls = own_calls()
    with torch.inference_mode():
        for tokens in (4, 1):
            given = tuple(one[:tokens] if place in (0, 3, 4) else one for place, one in enumerate(operands))
            reference = tuple(one[:tokens] if place in (0, 3, 4) else one for place, one in enumerate(told))
            found = call(kernel, given, activation())
            expected = OP.reference(shape.with_m(tokens), reference).float()
            assert (found.float() - expected).norm() < 0.08 * expected.norm()

    [route] = engine_routes.routes.values()
    assert route.calls == {4: route.ours, 1: route.theirs} and calls == [1]
    assert dispatcher("fmoe").is_bound(shape, current_device()) and route.reasons[1] == "no row"
    assert "1 layers go through tables (torch)" in "".join(engine_routes.summary([4], current_device()))


@in_every_form
@pytest.mark.parametrize("kind", ["16 bits", "fp8 of blocks"])
def test_a_row_routes_its_number_of_tokens_in_every_form(on_gpu, vllm_table, kind) -> None:
    """Route by the kernel's interface of each version."""
    test_a_row_routes_its_number_of_tokens(None, vllm_table, kind)


@pytest.mark.parametrize(("vllm_form", "word"), [("0.20.2", "computes shared experts"), ("0.33.0", "sums up")], indirect=["vllm_form"])
def test_kernels_with_further_work_keep_their_experts(on_gpu, vllm_table, vllm_form, word) -> None:
    """Leave layers to kernels with shared experts (0.20) or a hook for the outputs (0.33), and log why."""
    shape = shape_of("16 bits", tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, operands, _ = layer("16 bits", shape)
    if vllm_form == "0.20.2":
        kernel.impl.shared_experts = torch.nn.Identity()
    else:
        kernel.fused_experts.post_gemm2_hook = print
    load(kernel, operands)

    assert "apply" not in vars(kernel) and not engine_routes.routes
    assert word in engine_rows.unrouted()[0]


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_padded_tokens_without_an_expert_harm_no_other(on_gpu, vllm_table) -> None:
    """Keep the other tokens' outputs where vLLM 0.33 marks padded tokens by an expert of -1."""
    shape = shape_of("16 bits", tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, operands, told = loaded("16 bits", shape)
    ids = operands[4].clone()
    ids[2:] = -1
    with torch.inference_mode():
        found = call(kernel, (*operands[:4], ids), activation())

    [route] = engine_routes.routes.values()
    expected = OP.reference(shape, told)[:2].float()
    assert route.calls == {4: route.ours} and (found[:2].float() - expected).norm() < 0.02 * expected.norm()


def test_a_slower_row_keeps_vllms_experts(on_gpu, vllm_table) -> None:
    """The comparison on the loaded weights decides, number of tokens by number of tokens."""
    shape = shape_of("16 bits", tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, operands, _ = loaded("16 bits", shape)
    [route] = engine_routes.routes.values()
    route.verdicts[4] = 0.9
    calls = own_calls()
    call(kernel, operands, activation())

    assert calls == [4] and "not faster here" in route.reasons[4]


def test_router_weights_on_the_input_of_a_row_count_once(on_gpu, vllm_table) -> None:
    """Where vLLM multiplies the hidden states by them, the op does so, and does not weight the outputs."""
    shape = shape_of("16 bits", tokens=4, topk=1)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, operands, _ = loaded("16 bits", shape)
    weights = torch.rand(4, 1)
    with torch.inference_mode():
        found = call(kernel, (*operands[:3], weights, operands[4]), activation(), on_input=True)

    scaled = operands[0] * weights.to(torch.bfloat16)
    expected = OP.reference(shape, (scaled, *operands[1:3], torch.ones(4, 1), operands[4])).float()
    assert (found.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"has_bias": True}, "LoRA or a bias"), ({"is_lora_enabled": True}, "LoRA or a bias"),
        ({"moe_backend": "triton"}, "moe_backend is"), ({"swiglu_limit": 7.0}, "parameters"),
        ({"ep_size": 2}, "split among ranks"), ({"enable_eplb": True}, "split among ranks"),
        ({"intermediate_size": 256}, "scales that the op does not take"), ({"experts_per_token": 3}, "no row of fmoe"),
    ],
    ids=str,
)  # fmt: skip
def test_other_layers_keep_vllms_experts(on_gpu, vllm_table, changed, told) -> None:
    """Layers that the op cannot compute,
    of another weight format or without a row are left alone and logged."""
    shape = shape_of("16 bits", tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    kernel, *_ = loaded("16 bits", shape, **changed)

    assert "apply" not in vars(kernel) and not engine_routes.routes
    [line] = engine_rows.unrouted()
    assert told in line and "as experts" in line


def test_experts_of_an_unknown_class_stay_vllms(on_gpu, vllm_table, monkeypatch) -> None:
    """A kernel that may have reordered its weights is not routed, and is named."""
    monkeypatch.setattr(importlib.import_module("tunedgemm_engines.vllm_experts"), "_AS_LOADED", ("CutlassExpertsFp8",))
    shape = shape_of("16 bits", tokens=4)
    vllm_table(VARIABLE, shape, kernel="sorted")
    loaded("16 bits", shape)

    assert "TritonExperts, whose weights have another order" in engine_rows.unrouted()[0]


def test_capture_counts_vllms_own_calls(on_gpu, vllm_captured) -> None:
    """Without a row, capture notes the shape and leaves the layer to vLLM's kernel."""
    shape = shape_of("16 bits", tokens=4)
    kernel, operands, _ = loaded("16 bits", shape)
    calls = own_calls()
    for _ in range(2):
        call(kernel, operands, activation())

    assert calls == [4, 4] and vllm_captured("fmoe") == {4: 2}
    assert any("the shapes of 1 layers are captured" in line for line in engine_routes.summary([4], current_device()))
