"""Batch-invariant mode of engines: which layers run our kernels, at which M, and the log."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import FakeHooks, exact, fake_backend, fake_registry
from tunedgemm_engines import bit_classes, invariant, ranks, vllm_warmup
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import rows as engine_rows
from tunedgemm_engines import vllm as plugin

N, K = 256, 384
#: Names of bit classes.
C1, C2 = "c1" * 8, "c2" * 8
PLAIN = Shape("a16w16", 1, N, K, "bf16")

in_every_form = pytest.mark.parametrize("vllm_form", ["0.20.2", "0.25.1", "0.33.0"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates

#: Serve a table of rows (M, kernel, class) of one shape.
Serve = Callable[..., None]


def method(place: tuple[str, str] = plugin.PLAIN[0]) -> type:
    """Return a class of vLLM's."""
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found


def by_row(solution: Solution, shape: Shape, *operands: Any) -> torch.Tensor:
    """Multiply each row alone, so that bits do not depend on M."""
    x, *rest = operands
    return torch.cat([exact(solution, shape.with_m(1), row[None], *rest) for row in x.reshape(-1, x.shape[-1])])


def by_m(solution: Solution, shape: Shape, *operands: Any) -> torch.Tensor:
    """Multiply with other bits at M below nine."""
    return by_row(solution, shape, *operands) * (1.0 if shape.m < 9 else 1.01)


@pytest.fixture
def in_mode(vllm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Register the plugin in vLLM's mode, with a table and a backend, whose products are exact."""

    def serve(*listed: tuple[int, str, str], call: Any = by_row, shape: Shape = PLAIN, libtype: str = "turbo") -> None:
        path, here = tmp_path / "tuned.csv", current_device()
        device = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "us": 1.0}
        made = [Row(shape=shape.with_m(m), solution=Solution(libtype, kernel), bit_class=name, **device) for m, kernel, name in listed]
        write_rows(path, op_named(shape.op), made)
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16" if shape.op == "a16w16" else "AITER_CONFIG_GEMM_A8W8", str(path))
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        tunedgemm.reload()
        plugin.register()
        registry = fake_registry(fake_backend("turbo", solutions=("small", "any", "lost"), call=call))
        monkeypatch.setattr(dispatcher(shape.op), "registry", registry)

    return serve


def layer(n: int = N, name: str = "model.layers.0.qkv_proj", bias: bool = False) -> tuple[Any, torch.nn.Module]:
    """Return vLLM's method for 16 bits and a loaded layer."""
    serve, one = method()(), torch.nn.Module()
    one.weight, one.prefix = torch.nn.Parameter(torch.randn(n, K).bfloat16(), requires_grad=False), name
    one.bias = torch.nn.Parameter(torch.randn(n).bfloat16(), requires_grad=False) if bias else None
    serve.process_weights_after_loading(one)
    return serve, one


def route_of() -> Any:
    """Return the only route."""
    [route] = engine_routes.routes.values()
    return route


def asked(serve: Any, one: torch.nn.Module, *sizes: int) -> int:
    """Multiply at some M, and return how often vLLM's own method was asked."""
    made: list[int] = []
    [route] = engine_routes.routes.values()
    theirs = route.theirs
    assert theirs is not None
    route.theirs = lambda x, *rest: made.append(len(x)) or theirs(x, *rest)
    for m in sizes:
        x = torch.randn(m, K).bfloat16()
        torch.testing.assert_close(serve.apply(one, x), torch.nn.functional.linear(x, one.weight, one.bias), rtol=0.02, atol=0.2)
    return len(made)


@in_every_form
def test_a_class_serves_every_m(in_mode) -> None:
    """In vLLM's mode a weight with class rows runs ours at each M, with a row or without, untimed."""
    in_mode((0, "any", C1), (8, "small", C1))
    serve, one = layer()
    [route] = engine_routes.routes.values()

    assert dispatcher("a16w16").settings.batch_invariant and route.bit_class == C1
    engine_routes.end_warm_up(current_device())
    assert asked(serve, one, 1, 8, 13, 700, 13) == 0
    assert set(route.calls.values()) == {route.ours} and not route.failures


@in_every_form
def test_one_graph_runs_several_m(in_mode) -> None:
    """A compiled layer reads M when it runs, so that one graph serves all of them by the class."""
    in_mode((0, "any", C1))
    serve, one = layer()
    [route] = engine_routes.routes.values()
    call = torch.compile(lambda x: serve.apply(one, x), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        whole = torch.randn(40, K).bfloat16()
        outs = {m: call(whole[:m]) for m in (40, 4, 9)}
    assert all(torch.equal(out, outs[40][:m]) for m, out in outs.items())
    assert set(route.calls) == {40, 4, 9}


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ([(8, "small", "")], "no class"),
        ([(8, "small", C1)], "no class ("),
        ([(0, "gone", C1)], "a kernel of the class cannot be used: turbo"),
    ],
    ids=["rows without a class", "no row of any M", "kernel vanished"],
)
def test_a_weight_without_a_class_keeps_vllms_kernel(in_mode, listed, reason) -> None:
    """Without a class for every M nothing is routed, and the log has the reason."""
    in_mode(*listed)
    _serve, one = layer()
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)

    assert not any(route.bit_class for route in engine_routes.routes.values())
    lines = "\n".join((*engine_rows.unrouted("vLLM", "invariant kernels"), *invariant.summary([1, 8], "vLLM", "")))
    assert "keep vLLM's invariant kernels" in lines and reason in lines
    assert "0 weights in 0 bit classes, 0 layers" in lines
    assert not one.tunedgemm_route or one.tunedgemm_route in engine_routes.routes


def test_torchs_kernels_are_no_class(in_mode) -> None:
    """A class row that names torch is not used, as vLLM's mode replaces torch's products."""
    in_mode((0, "native", C1), libtype="torch")
    _serve, one = layer()
    assert not one.tunedgemm_route and "its class row names torch" in engine_rows.unrouted()[0]


def test_a_bias_belongs_to_the_class(in_mode) -> None:
    """A weight with a bias is served by the rows of its unbiased shape, at every M in one way."""
    in_mode((0, "any", C1))
    serve, one = layer(bias=True)
    [route] = engine_routes.routes.values()
    assert route.bit_class == f"{C1}+add"
    x = torch.randn(9, K).bfloat16()
    torch.testing.assert_close(serve.apply(one, x, one.bias), torch.nn.functional.linear(x, one.weight, one.bias), rtol=0.02, atol=0.2)
    assert route.calls == {9: route.ours}


def test_classes_are_checked_on_the_models_weights(in_mode, caplog) -> None:
    """Kernels whose rows have other bits at another M leave all M to vLLM, whatever the table says."""
    in_mode((0, "any", C1), call=by_m)
    serve, one = layer()
    [route] = engine_routes.routes.values()
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)

    assert route.bit_class == "" and asked(serve, one, 1, 100) == 2
    assert "rows of M=1 and M=512 have different bits" in "\n".join(invariant.summary([1], "vLLM", ""))


def test_checked_classes_are_kept(in_mode, monkeypatch) -> None:
    """Kernels that pass stay, and are not checked again when vLLM loads weights again.

    The choices of calls are read, not made again: that binds kernels.
    """
    in_mode((0, "any", C1))
    layer_kept = layer()
    [route] = engine_routes.routes.values()
    explained, explain = list[int](), dispatcher("a16w16").explain
    monkeypatch.setattr(dispatcher("a16w16"), "explain", lambda shape, on: explained.append(shape.m) or explain(shape, on))
    loaded = importlib.import_module(plugin.LOADED[0]).process_weights_after_loading
    loaded(torch.nn.Module(), None, None)
    assert explained == [4096]
    assert route.bit_class == C1 and route.trusted_to == engine_routes.EVERY_M
    route.inputs = lambda m: pytest.fail(f"checked again at M={m}")
    loaded(torch.nn.Module(), None, None)
    assert route.bit_class == C1 and layer_kept


def test_a_failure_is_an_error_in_the_log(in_mode, caplog) -> None:
    """A kernel that fails at an M leaves all M to vLLM from then on, and the log says what this costs."""

    def failing(solution: Solution, shape: Shape, *operands: Any) -> torch.Tensor:
        if shape.m == 9:
            raise RuntimeError("no resources")
        return by_row(solution, shape, *operands)

    in_mode((0, "any", C1), call=failing)
    serve, one = layer()
    [route] = engine_routes.routes.values()
    assert asked(serve, one, 8, 9, 9, 8) == 3

    assert set(route.failures) == {9} and "no resources" in route.failures[9]
    assert [record.levelname for record in caplog.records if "may now depend on M" in record.getMessage()] == ["ERROR"]
    assert "a kernel failed at M=9; bits of these layers may depend on M" in "\n".join(invariant.summary([8], "vLLM", ""))


def test_a_kernel_of_another_class_does_not_serve(in_mode, monkeypatch, caplog) -> None:
    """At each new M the kernel that would run must be of the route's class; else vLLM's runs."""
    in_mode((0, "any", C1))
    serve, one = layer()
    monkeypatch.setattr(bit_classes, "class_at", lambda _shape, _device, m: (C1 if m != 9 else C2, ""))
    assert asked(serve, one, 8, 9) == 1 and not route_of().bit_class
    assert f"its kernel is of class {C2}" in caplog.text


def test_nothing_is_bound_in_a_capture(in_mode, monkeypatch) -> None:
    """An M whose first call a graph captures runs vLLM's kernel, since a dispatcher would run torch."""
    in_mode((0, "any", C1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = attrs.evolve(current_device(), index=0)
    assert bit_classes.is_unbound_in_capture(PLAIN, gpu, 8)
    monkeypatch.setattr(type(dispatcher("a16w16")), "is_bound", lambda *_: True)
    assert not bit_classes.is_unbound_in_capture(PLAIN, gpu, 8)
    bit_classes.require_class(C2, PLAIN, gpu, (8,))  # binds nothing


class Declaring(FakeHooks):
    """Hooks of a backend that declares an order of sums."""

    def __init__(self, orders: dict[int, str]) -> None:
        super().__init__("turbo", solutions=("guess",))
        self._orders = orders

    @hookimpl
    def heuristic_fallback(self, shape: Shape) -> Solution:
        """Return a kernel whose order depends on M where the test says so."""
        return Solution("turbo", "guess", sum_order=self._orders.get(shape.m, "k64"))

    @hookimpl
    def bind(self) -> Launcher:
        """Launch nothing."""
        return Launcher(lambda *_: None, graph_safe=False)

    @hookimpl
    def invariant_fallback(self, shape: Shape) -> Solution:
        """Return the same."""
        return self.heuristic_fallback(shape)


@pytest.mark.parametrize(
    ("orders", "found"),
    [({}, ("k64", "")), ({4096: "k128"}, ("", "M=4096")), ({32: ""}, ("", "M=32"))],
    ids=["one order", "two orders", "no order"],
)
def test_an_untuned_weight_has_the_order_of_its_sums(in_mode, monkeypatch, orders, found) -> None:
    """Without class rows a backend's declared order is the class, if all M have it."""
    in_mode((8, "small", C1), shape=attrs.evolve(PLAIN, n=2 * N))
    op_dispatcher = dispatcher("a16w16")
    backend = fake_backend("turbo", solutions=("guess",))
    monkeypatch.setattr(op_dispatcher, "registry", fake_registry(attrs.evolve(backend, hooks=Declaring(orders))))
    monkeypatch.setattr(op_dispatcher, "settings", attrs.evolve(op_dispatcher.settings, untuned=("turbo",)))

    name, reason = bit_classes.class_of(PLAIN, bit_classes.unbound(current_device()))
    assert name == found[0] and found[1] in reason


def test_the_log_says_which_layers_have_which_class(in_mode, caplog) -> None:
    """The first line counts weights, classes and layers; experts and other layers are named."""
    in_mode((0, "any", C1))
    kept = [layer(), layer(name="model.layers.1.qkv_proj"), layer(N + 64, "model.layers.0.o_proj")]
    caplog.set_level("INFO", "vllm.tunedgemm")
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)
    config = importlib.import_module("vllm.config").VllmConfig()
    if not isinstance(config.compilation_config.cudagraph_capture_sizes, list):
        pytest.skip("vLLM's own configuration has no graph sizes without an engine")
    serve, one = kept[0]
    importlib.import_module(plugin.WARM[0]).Worker(
        config, lambda: serve.apply(one, torch.randn(8, K).bfloat16())
    ).compile_or_warm_up_model()

    assert "tunedgemm: batch-invariant: 1 weights in 1 bit classes, 2 layers" in caplog.text
    assert f"2 layers with {PLAIN}: class {C1} (turbo)" in caplog.text
    assert "1 layers keep vLLM's invariant kernels (as model.layers.0.o_proj): no class row" in caplog.text
    assert "may depend" not in caplog.text


def test_our_mode_without_vllms_is_named(in_mode, monkeypatch) -> None:
    """With our variable alone, the log says that all else may depend on the batch."""
    in_mode((0, "any", C1))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert plugin._summary([1])[-1].endswith("VLLM_BATCH_INVARIANT is off: attention, norms and all other layers may depend on the batch")


def test_ranks_with_other_classes_switch_all_off(in_mode, monkeypatch, caplog) -> None:
    """If ranks differ in a weight's class, all of them leave all layers to vLLM before graphs exist."""
    in_mode((0, "any", C1))
    serve, one = layer()
    monkeypatch.setattr(invariant, "disagreement", lambda classes, _digest: f"ranks differ in {next(iter(classes))}")
    config = importlib.import_module("vllm.config").VllmConfig()
    worker = importlib.import_module(plugin.WARM[0]).Worker(config, lambda: serve.apply(one, torch.randn(8, K).bfloat16()))
    worker.compile_or_warm_up_model()

    [route] = engine_routes.routes.values()
    assert route.bit_class == "" and route.calls == {8: route.theirs}
    assert f"all layers keep the engine's kernels: ranks differ in {PLAIN}" in caplog.text


@in_every_form
def test_the_mode_changes_the_compile_caches_key(in_mode, monkeypatch) -> None:
    """Graphs of the mode are not used outside of it."""
    in_mode((0, "any", C1))
    within = plugin.cache_factor()
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "0")
    tunedgemm.reload()
    assert plugin.cache_factor() != within
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "1")


def test_stores_of_ranks(monkeypatch) -> None:
    """Rank 0 decides for all; a weight that only some ranks have may have any class."""
    store = torch.distributed.HashStore()

    def decided(*published: dict[str, str]) -> list[str]:
        for rank, classes in reversed(list(enumerate(published))):
            monkeypatch.setattr(ranks, "ranks", lambda rank=rank: (store, rank, len(published)))
            if rank:
                store.set(f"tunedgemm/classes/{rank}", ranks.json.dumps(["same", classes]))
        first = ranks.disagreement(published[0], "same")
        monkeypatch.setattr(ranks, "ranks", lambda: (store, 1, len(published)))
        return [first, ranks.disagreement(published[1], "same")]

    assert decided({"w": "c1"}, {"w": "c1", "v": "c3"}) == ["", ""]
    [reason] = set(decided({"w": "c1"}, {"w": ""}))
    assert reason == "ranks differ in w (rank 0: c1, rank 1: no class)"
    monkeypatch.setattr(ranks, "_WAIT", 0.1)
    monkeypatch.setattr(ranks, "ranks", lambda: (torch.distributed.HashStore(), 0, 2))
    assert "some ranks did not publish" in ranks.disagreement({}, "same")


@pytest.mark.parametrize("vllm_form", ["0.25.1", "0.33.0"], indirect=True)
def test_vllms_side_is_its_invariant_kernel(in_mode) -> None:
    """The engine's side of a route is vLLM's method, which has the mode, not the function within."""
    in_mode((0, "any", C1))
    _serve, one = layer()
    linear = importlib.import_module(plugin.PLAIN[0][0])
    linear.invariant_calls.clear()
    route_of().theirs(torch.randn(7, K).bfloat16(), one.weight, None, None, None)
    assert linear.invariant_calls == [7]


def test_experts_keep_vllms_kernels(in_mode) -> None:
    """Experts have no bit classes, so nothing of them is replaced, and the log says so."""
    in_mode((0, "any", C1))
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    experts = importlib.import_module("tunedgemm_engines.vllm_experts")
    kernel = type("TritonExperts", (), {"moe_config": None})()
    assert not hasattr(oracle.select_unquantized_moe_backend, "__wrapped__")
    assert experts._route(None, SimpleNamespace(fused_experts=kernel), "experts") == "tables have no bit classes of experts"


def test_kernels_of_the_class_compile_ahead(in_mode, monkeypatch, tmp_path) -> None:
    """While weights load, the class's kernels begin to compile for the sizes of graphs and larger M."""
    in_mode((0, "any", C1), (64, "small", C1))
    gpu = attrs.evolve(current_device(), index=0)
    monkeypatch.setattr(engine_routes, "unbound", lambda _device: current_device())
    tasks = {(shape.m, solution.kernel_name) for _, shape, solution in engine_routes._tasks(PLAIN, gpu, ())}
    assert {m for m, _ in tasks} >= {1, 8, 64, 128, 512, 4096} and {name for _, name in tasks} <= {"any", "small"}


def test_deepgemm_is_not_warmed_up_for_a_class(monkeypatch) -> None:
    """A class serves every M, so the whole warm-up of its weight is left out, and the log says so."""
    layer_of = torch.nn.Module()
    route = engine_routes.Route(
        "route", Shape("a8w8_blockscale", 1, N, K, "fp8", outdtype="bf16", scale="block"), torch.device("cuda", 0),
        by_row, by_row, lambda _m: (), lambda inputs, _module: inputs, trusted_to=engine_routes.EVERY_M, bit_class=C1,
    )  # fmt: skip
    route.layers["layer"] = weakref.ref(layer_of)
    monkeypatch.setattr(vllm_warmup, "routes", {"route": route})
    monkeypatch.setattr(vllm_warmup, "skips", lambda: True)
    monkeypatch.setattr(vllm_warmup, "_needed", set())
    assert vllm_warmup.served_to((N, K)) > 1 << 20
    assert vllm_warmup.left_out()[0].startswith("tunedgemm: DeepGEMM is not warmed up for 1 layers, which our kernels serve;")


def test_shapes_without_a_class_are_captured(in_mode, monkeypatch) -> None:
    """While shapes are captured, layers without a class are routed, and vLLM's kernel computes them."""
    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    in_mode((8, "small", ""))
    serve, one = layer()
    assert one.tunedgemm_route and not route_of().bit_class
    assert asked(serve, one, 5) == 1
    recorder = dispatcher("a16w16")._capture
    assert recorder is not None
    recorder.flush()
    assert {row.shape.m for row in read_untuned(untuned_path(op_named("a16w16")), op_named("a16w16"))} == {5}
    monkeypatch.delenv("AITER_TUNE_GEMM")
