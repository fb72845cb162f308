"""Routes of vLLM's layers: the kernel at each M, the log lines, and the key of the compile
cache."""

from __future__ import annotations

import importlib
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm_engines import gains as engine_gains
from tunedgemm_engines import ranks
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import rows as engine_rows
from tunedgemm_engines import timing as engine_timing
from tunedgemm_engines import vllm as plugin

N, K = 256, 384

in_every_form = pytest.mark.parametrize("vllm_form", ["0.20.2", "0.25.1", "0.33.0"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


class Loaded(torch.nn.Parameter):
    """A parameter that knows how to be loaded, as vLLM's do."""


def method(place: tuple[str, str]) -> type:
    """A class of vLLM's."""
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found


@pytest.fixture
def with_kernels(vllm_table) -> Any:
    """`vllm_table`, where vLLM has kernels for plain weights: those of the stand-in, or of a GPU."""
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        pytest.skip("vLLM packs weights for this CPU, and has no kernel for plain ones")
    return vllm_table


def bf16_layer(n: int = N, name: str = "model.layers.0.qkv_proj") -> tuple[Any, torch.nn.Module]:
    """Return vLLM's method for 16 bits and a loaded layer
    whose weight has vLLM's parameter class."""
    serve, one = method(plugin.PLAIN[0])(), torch.nn.Module()
    one.weight, one.bias, one.prefix = Loaded(torch.randn(n, K).bfloat16(), requires_grad=False), None, name
    serve.process_weights_after_loading(one)
    return serve, one


def bound(m: int, n: int = N) -> bool:
    """Whether a table's row was bound for a16w16 of M rows."""
    return dispatcher("a16w16").is_bound(Shape("a16w16", m, n, K, "bf16"), current_device())


@in_every_form
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_routed_layer_reaches_the_table(vllm_table, mode) -> None:
    """A layer with vLLM's parameter class runs its row at every M with one,
    eagerly and compiled."""
    vllm_table("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, N, K, "bf16") for m in (4, 8)))
    serve, one = bf16_layer()
    call = lambda x: serve.apply(one, x)  # noqa: E731
    if mode == "compiled":
        call = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for m in (4, 8):
            x = torch.randn(m, K).bfloat16()
            torch.testing.assert_close(call(x), torch.nn.functional.linear(x, one.weight), rtol=0.02, atol=0.2)
    assert bound(4) and bound(8)


@in_every_form
def test_an_m_without_a_row_keeps_vllms_kernel(with_kernels, monkeypatch) -> None:
    """Only rows route: at another M vLLM's own function multiplies, and no backend's heuristic is used."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    calls: list[int] = []
    theirs = route.theirs
    monkeypatch.setattr(route, "theirs", lambda x, *rest: calls.append(len(x)) or theirs(x, *rest))
    explain = dispatcher("a16w16").explain
    asked: list[int] = []
    monkeypatch.setattr(dispatcher("a16w16"), "explain", lambda shape, *rest: asked.append(shape.m) or explain(shape, *rest))
    for m in (8, 3000):
        serve.apply(one, torch.randn(m, K).bfloat16())
    assert calls == [3000] and route.calls == {8: route.ours, 3000: route.theirs}
    assert asked == [8]  # binding a heuristic for each M of a prefill took 20 ms
    assert route.reasons[3000] == "no row"


def test_a_new_m_waits_after_the_warm_up(with_kernels, monkeypatch) -> None:
    """After warm-up an M without a row is vLLM's for three steps; an M with one is ours at once.
    Before, both are ours."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, N, K, "bf16") for m in (8, 16)))
    layers = [bf16_layer(), bf16_layer(name="model.layers.1.qkv_proj")]
    [route] = engine_routes.routes.values()
    route.verdicts |= {8: 1.2, 16: 1.2}
    ran: list[str] = []
    for side in ("ours", "theirs"):
        monkeypatch.setattr(route, side, lambda x, *_, side=side: ran.append(side) or x.new_zeros(len(x), N))

    def step(m: int) -> list[str]:
        ran.clear()
        for serve, one in layers:
            serve.apply(one, torch.randn(m, K).bfloat16())
        return list(ran)

    assert step(15) == ["ours"] * 2
    engine_routes.end_warm_up(current_device())
    assert step(15) == step(16) == step(8) == ["ours"] * 2
    assert [step(13) for _ in range(5)] == [["theirs"] * 2] * 3 + [["ours"] * 2] * 2
    assert [step(3000) for _ in range(4)] == [["theirs"] * 2] * 4 and route.calls[3000] == route.theirs


def test_a_row_that_was_slower_here_keeps_vllms_kernel(with_kernels) -> None:
    """The comparison on the loaded model decides, not the table's time; the summary gives the figure."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, N, K, "bf16") for m in (1, 8)))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    route.verdicts |= {1: 1.2, 8: 0.8}
    for m in (1, 8):
        serve.apply(one, torch.randn(m, K).bfloat16())

    assert route.calls == {1: route.ours, 8: route.theirs}
    told = "\n".join(engine_routes.summary([1, 8], current_device()))
    gains = "1.20 to 1.20 times as fast as vLLM's kernels here"
    assert f"1 layers go through tables (torch, {gains}); vLLM's kernels serve some products at M = 8" in told
    assert "M=8: the row of M=8 was not faster here (0.80 times vLLM's speed)" in told


def test_rows_beyond_the_graphs_count(with_kernels) -> None:
    """A layer whose only rows are of prefill goes through tables, though no captured size has one."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 4096, N, K, "bf16"))
    bf16_layer()
    [route] = engine_routes.routes.values()
    route.verdicts[4096] = 1.03

    assert "1 layers go through tables (torch, 1.03 to 1.03" in engine_routes.summary([1, 8], current_device())[0]


def test_what_was_bound_is_not_chosen_again(with_kernels, monkeypatch) -> None:
    """The summary reads the choices of calls; binding kernels again for each graph took a second."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, N, K, "bf16") for m in (1, 8)))
    serve, one = bf16_layer()
    before = engine_routes.summary([1, 8], current_device(), stale="")
    for m in (1, 8):
        serve.apply(one, torch.randn(m, K).bfloat16())
    monkeypatch.setattr(dispatcher("a16w16"), "explain", None)
    assert engine_routes.summary([1, 8], current_device()) == before and "(torch)" in before[0]


def test_a_row_that_was_not_timed_waits(with_kernels, monkeypatch) -> None:
    """Rows are timed from the smallest M;
    an M beyond the budget stays vLLM's until the next start."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, n, K, "bf16") for m in (8, 1) for n in (N, 2 * N)))
    layers = [bf16_layer(), bf16_layer(2 * N, "model.layers.0.gate_up_proj")]  # a route holds weak references
    timed: list[int] = []

    def faster(arms: Any, _ours: Any, _theirs: Any, calls: list[Any], tolerance: float) -> float:
        arms.seconds -= 3
        timed.append(len(calls[0][0]))
        return 1.5

    monkeypatch.setattr(engine_gains, "faster", faster)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(engine_gains, "device_of", lambda _index: current_device())
    routes = list(engine_routes.routes.values())
    monkeypatch.setattr(engine_gains, "rows_of", lambda _shape, _device: [1, 8])
    for route in routes:
        route.device = torch.device("cuda", 0)
        monkeypatch.setattr(route, "inputs", lambda m: (torch.zeros(m, K),))
    known: dict[str, float] = {}
    engine_gains.compare(7.0, known)
    assert timed == [1, 1, 8]
    assert [[route.serves(m, current_device()) for m in (1, 8)] for route in routes] == [[True, True], [True, False]]
    assert "the next start times it" in routes[1].reasons[8]

    engine_gains.compare(7.0, known)
    assert timed == [1, 1, 8, 8] and routes[1].serves(8, current_device())
    engine_gains.compare(0.0, {})
    assert not any(route.compared for route in routes) and len(layers) == 2

    known.clear()
    monkeypatch.setattr(engine_gains, "faster", lambda *_: -0.2)
    engine_gains.compare(7.0, known)
    assert not known and not routes[0].serves(1, current_device())  # other outputs are compared again at the next start


@in_every_form
def test_the_compile_cache_has_another_key(vllm_table, monkeypatch, tmp_path) -> None:
    """Our graphs, tables and switches each change the cache key;
    the same setting gives the same key."""
    made = importlib.import_module("vllm.config").VllmConfig
    alone = made().compute_hash()
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    first, again = made().compute_hash(), made().compute_hash()
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    switched = made().compute_hash()
    monkeypatch.setenv("TUNEDGEMM_VLLM", "unpacked")
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "absent.csv"))
    tunedgemm.reload()
    without = made().compute_hash()

    assert first == again and len({alone, first, switched, without}) == 4
    assert len(first) == len(alone)


@in_every_form
def test_the_log_names_what_keeps_vllms_kernels(with_kernels, caplog) -> None:
    """After warm-up one line counts routed layers;
    each layer without a row or missed by a graph is named."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, n, K, "bf16") for m in (1, 8, 64) for n in (N, 2 * N)))
    caplog.set_level("INFO", "vllm.tunedgemm")
    serve, one = bf16_layer()
    bf16_layer(2 * N, "model.layers.0.gate_up_proj")
    bf16_layer(N + 64, "model.layers.0.o_proj")
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)
    config = importlib.import_module("vllm.config").VllmConfig()
    if not isinstance(config.compilation_config.cudagraph_capture_sizes, list):
        pytest.skip("vLLM's own configuration has no graph sizes without an engine")
    worker = importlib.import_module(plugin.WARM[0]).Worker(config, lambda: serve.apply(one, torch.randn(8, K).bfloat16()))
    worker.compile_or_warm_up_model()

    assert "layers go through tables (torch)" in caplog.text
    assert "1 layers keep vLLM's kernels (as model.layers.0.o_proj): no row of a16w16 with N=320, K=384" in caplog.text
    assert "never reached the tables (as model.layers.0.gate_up_proj)" in caplog.text


def test_a_row_of_a_missing_plugin_is_named(with_kernels, monkeypatch, tmp_path) -> None:
    """A row whose backend is not installed leaves its M to vLLM, and says so."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    path = tmp_path / "tuned.csv"
    path.write_text(path.read_text().replace(",torch,", ",elsewhere,"))
    tunedgemm.reload()
    serve, one = bf16_layer()
    serve.apply(one, torch.randn(8, K).bfloat16())
    [route] = engine_routes.routes.values()

    assert route.calls == {8: route.theirs}
    assert "elsewhere" in route.reasons[8] and "a row cannot be used" in route.reasons[8]


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_the_hash_keeps_its_argument(vllm_table) -> None:
    """Pass on the argument of 0.33, which asks for the key without the version, too."""
    made = importlib.import_module("vllm.config").VllmConfig
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    assert made().compute_hash() != made().compute_hash(include_version=False)


@pytest.mark.parametrize(
    ("times", "gain"),
    [((2.0, 1.0), 2.0), ((1.0, 2.0), 0.5), ((1.01, 1.0), 1.0)],
    ids=["faster", "slower", "noise"],
)
def test_a_row_must_be_faster_by_more_than_noise(monkeypatch, times, gain) -> None:
    """The median ratio of turns decides: below 2 % of gain counts as none, and more is the gain itself."""
    clock = dict(zip(("theirs", "ours"), times, strict=True))
    monkeypatch.setattr(engine_timing, "_captured", lambda _arms, function, calls: function(*calls[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(engine_timing, "_milliseconds", lambda graph, _repeats: clock[graph])
    monkeypatch.setattr(engine_timing, "difference_of", lambda *_: 0.0)
    calls = [(torch.zeros(1, 4), torch.zeros(4, 4))]
    arms = engine_timing.Arms(8.0)
    assert engine_timing.faster(arms, lambda *_: "ours", lambda *_: "theirs", calls, 0.05) == pytest.approx(gain)
    assert 7 < arms.seconds < 8


@pytest.mark.parametrize(("out", "verdict"), [(1.06, -0.06), (float("nan"), -float("inf"))], ids=["wrong", "not-finite"])
def test_a_row_with_other_outputs_is_left_to_vllm(with_kernels, out, verdict) -> None:
    """A row whose outputs differ from vLLM's kernel on the loaded weights is never timed; the
    reason has the difference."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    operands = route.operands((torch.randn(8, K).bfloat16(),), one)
    gain = engine_timing.faster(None, lambda *given: route.theirs(*given).float() * out, route.theirs, [operands], 0.05)
    assert gain == pytest.approx(verdict, rel=0.01)

    route.verdicts[8] = gain
    serve.apply(one, torch.randn(8, K).bfloat16())
    assert route.calls == {8: route.theirs}
    assert f"the row of M=8 are not those of vLLM's kernel (relative difference {-gain:.2g})" in route.reasons[8]


def test_ranks_with_different_tables_are_named(vllm_table, monkeypatch) -> None:
    """Each rank publishes its tables' fingerprint without waiting; a different one and a rank
    without the plugin are named."""
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "ranks", lambda: (store, 0, 3))
    ranks.publish(plugin.cache_factor())
    store.set("tunedgemm/1", "another")
    mine = plugin.cache_factor()

    assert ranks.differing() == [
        f"tunedgemm: ranks have different tables or backends (rank 0: {mine}, rank 1: another, rank 2: off); give all ranks the same"
    ]
    monkeypatch.setattr(ranks, "ranks", lambda: (None, 0, 1))
    assert ranks.differing() == []


def test_a_table_that_is_gone_keeps_vllms_kernels(vllm_table, monkeypatch, caplog, tmp_path) -> None:
    """An unreadable table or one of another device leaves all layers to vLLM,
    and the log names the file."""
    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    path = tmp_path / "tuned.csv"
    rows = path.read_text()
    path.write_text(rows.replace(current_device().gfx, "sm_90"))
    tunedgemm.reload()
    assert not bf16_layer()[1].tunedgemm_route
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "gone.csv"))
    tunedgemm.reload()
    assert not bf16_layer()[1].tunedgemm_route

    foreign, gone = engine_rows.unrouted()
    assert "the table's rows are for sm_90" in foreign
    assert "no row of a16w16" in gone and "gone.csv" in caplog.text


@pytest.fixture
def guessing(monkeypatch) -> Any:
    """Return a function that adds a backend, which serves a16w16 of up to 8 rows untuned.

    It takes the gain at each M, and returns the list of the M that are timed.
    """

    def install(gain_at: dict[int, float]) -> list[int]:
        op_dispatcher, here, timed = dispatcher("a16w16"), current_device(), []

        def supports(shape: Shape, device: Any) -> Unsupported | None:
            return None if shape.m <= 8 and shape.n == N else Unsupported("another weight, or too many rows")

        def faster(_arms: Any, _ours: Any, _theirs: Any, calls: list[Any], _tolerance: float) -> float:
            timed.append(len(calls[0][0]))
            return gain_at[len(calls[0][0])]

        backend = fake_backend("turbo", solutions=("guess",), heuristic="guess", supports=supports)
        monkeypatch.setattr(op_dispatcher, "registry", fake_registry(backend))
        monkeypatch.setattr(op_dispatcher, "settings", attrs.evolve(op_dispatcher.settings, untuned=("turbo",)))
        monkeypatch.setattr(engine_gains, "faster", faster)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        monkeypatch.setattr(engine_gains, "device_of", lambda _index: here)
        return timed

    return install


def test_an_untuned_kernel_serves_where_it_was_faster_here(with_kernels, guessing) -> None:
    """At an M of small graphs without a row, a backend's own choice serves if it was faster.

    It is timed after the rows, once.
    """
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 4, N, K, "bf16"))
    timed = guessing({1: 1.1, 2: 0.9, 4: 1.3, 8: 1.2})
    _serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    route.device = torch.device("cuda", 0)
    route.inputs = lambda m: (torch.zeros(m, K),)
    known: dict[str, float] = {}
    engine_gains.compare(8.0, known)

    assert route.untuned == {1, 2, 8} and timed == [4, 1, 2, 8]
    assert [route.serves(m, current_device()) for m in (1, 2, 4, 8, 64, 3000)] == [True, False, True, True, False, False]
    assert "the untuned kernel of M=2 was not faster here (0.90 times vLLM's speed)" in route.reasons[2]
    assert set(known) == {f"{route.name} M=4", *(f"{route.name} M={m} untuned" for m in (1, 2, 8))}
    assert "1 layers go through tables, 1 of them untuned at some M" in engine_routes.summary([1, 2], current_device())[0]

    engine_gains.compare(8.0, known)
    assert timed == [4, 1, 2, 8] and route.serves(8, current_device())
    engine_gains.compare(0.0, {})
    assert not route.untuned and not route.serves(8, current_device())  # never unless timed
    assert one.tunedgemm_route


def test_a_layer_without_rows_is_routed_on_a_gpu_if_a_backend_serves_it_untuned(with_kernels, guessing, monkeypatch) -> None:
    """Without a GPU, and where no libtype may serve untuned calls, only rows route."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 4, N + 64, K, "bf16"))
    guessing({})
    engine_rows._has_untuned.cache_clear()
    assert engine_rows.unserved_reason("a16w16", N, K)
    gpu = attrs.evolve(current_device(), index=0)
    monkeypatch.setattr(engine_rows, "current_device", lambda: gpu)
    monkeypatch.setattr(engine_rows, "device_of", lambda _index: gpu)
    assert engine_rows.unserved_reason("a16w16", N, K) == ""
    assert "no row of a16w16" in engine_rows.unserved_reason("a16w16", 2 * N, K)
    op_dispatcher = dispatcher("a16w16")
    monkeypatch.setattr(op_dispatcher, "settings", attrs.evolve(op_dispatcher.settings, untuned=()))
    assert "no row of a16w16" in engine_rows.unserved_reason("a16w16", N, K)


def test_layers_of_one_prefix_are_all_kept() -> None:
    """A model may name several layers alike; each stays in its route, and a loaded one is there once."""
    route = engine_routes.Route("twins", Shape("a16w16", 1, N, K), torch.device("cpu"), None, None, None, None)
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    for layer in (*layers, layers[0]):
        engine_routes.add_layer(route, layer, "adapter")
    try:
        assert {id(ref()) for ref in route.layers.values()} == {id(layer) for layer in layers}
    finally:
        del engine_routes.routes["twins"]
