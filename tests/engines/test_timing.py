"""Errors of kernels, plugins and engines while an engine starts: each costs our kernel at most."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.errors import LaunchError, OperandError, OutOfResources, PluginError
from tunedgemm.shape import Shape
from tunedgemm_engines import gains as engine_gains
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import rows as engine_rows
from tunedgemm_engines import timing as engine_timing
from tunedgemm_engines import vllm as plugin

N, K = 256, 384
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture
def with_kernels(vllm_table) -> Any:
    """`vllm_table`, where vLLM has kernels for plain weights: those of the stand-in, or of a GPU."""
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        pytest.skip("vLLM packs weights for this CPU, and has no kernel for plain ones")
    return vllm_table


def bf16_layer() -> tuple[Any, torch.nn.Module]:
    """Return vLLM's method for 16 bits and a loaded layer."""
    module, owner = plugin.PLAIN[0]
    serve, one = getattr(importlib.import_module(module), owner)(), torch.nn.Module()
    one.weight, one.bias = torch.nn.Parameter(torch.randn(N, K).bfloat16(), requires_grad=False), None
    serve.process_weights_after_loading(one)
    return serve, one


#: What kernels, plugins and engines raise.
ERRORS = [RuntimeError, OperandError, LaunchError, PluginError, AssertionError, TypeError, KeyError, OSError, MemoryError, OutOfResources]


@pytest.mark.parametrize("rows", [1, 64, 65, 4096])
def test_outputs_are_compared_from_the_first_to_the_last_tile(rows) -> None:
    """A product whose last rows are wrong differs, and one of more columns does not."""
    out = torch.ones(rows, 8)
    assert engine_timing.difference_of(lambda: torch.cat([out, out], 1), lambda: out, ()) == 0
    wrong = torch.cat([out[: -(rows // 8) - 1], 2 * out[-(rows // 8) - 1 :]])
    assert engine_timing.difference_of(lambda: wrong, lambda: out, ()) > 0.3


@pytest.mark.parametrize("side", ["ours", "theirs", "inputs", "operands"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_while_timing_costs_the_layer_our_kernel(with_kernels, monkeypatch, caplog, error, side) -> None:
    """Whatever a kernel of ours or of vLLM's raises, start-up goes on with vLLM's at that M,
    and says so once; other M are timed."""
    with_kernels("AITER_CONFIG_GEMM_BF16", *(Shape("a16w16", m, N, K, "bf16") for m in (4, 8)))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    sound = {name: getattr(route, name) for name in ("ours", "theirs", "inputs", "operands")}

    def failing(*given: Any) -> Any:
        m = given[0] if side == "inputs" else len(given[0][0] if side == "operands" else given[0])
        if m == 4:
            raise error("no kernel for this")
        return sound[side](*given)

    monkeypatch.setattr(route, side, failing)
    monkeypatch.setattr(route, "device", torch.device("cuda", 0))
    monkeypatch.setattr(engine_gains, "device_of", lambda _index: current_device())
    monkeypatch.setattr(engine_timing, "_captured", lambda _arms, function, calls: function(*calls[0]))
    monkeypatch.setattr(engine_timing, "_milliseconds", lambda graph, _repeats: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    gains: dict[str, float] = {}
    for _ in range(2):
        engine_gains.compare(8.0, gains)
    assert set(route.verdicts) == {8} and len(gains) == 1
    assert not route.serves(4, current_device()) and "the row of M=4 failed here" in route.reasons[4]
    assert caplog.text.count("vLLM's kernel serves M=4, because a kernel failed there") == 2  # once a start
    monkeypatch.setattr(route, side, sound[side])
    serve.apply(one, torch.randn(4, K).bfloat16())
    assert route.calls[4] not in (None, route.ours)


def test_a_first_call_that_fails_is_vllms(with_kernels, caplog) -> None:
    """An M that was not timed, as on CPUs, goes to vLLM's kernel for good where ours raises."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    failures: list[int] = []

    def failing(x: torch.Tensor, *_: Any) -> torch.Tensor:
        failures.append(len(x))
        raise LaunchError("the kernel is gone")

    route.ours, x = failing, torch.randn(8, K).bfloat16()
    for _ in range(2):
        torch.testing.assert_close(serve.apply(one, x), torch.nn.functional.linear(x, one.weight), rtol=0.02, atol=0.2)
    assert failures == [8] and route.calls == {8: route.theirs}
    assert "the row of M=8 failed here (LaunchError: the kernel is gone)" in "".join(engine_routes.summary([8], current_device()))
    assert caplog.text.count("the kernel is gone") == 1


def test_a_failure_in_one_thread_counts_for_all(with_kernels) -> None:
    """Of two first calls at once, one of which fails, vLLM's kernel is kept, whichever ends first."""
    with_kernels("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    serve, one = bf16_layer()
    [route] = engine_routes.routes.values()
    x, sound = torch.randn(8, K).bfloat16(), route.ours

    def overtaken(*operands: Any) -> Any:
        route.ours = lambda *_: 1 / 0
        serve.apply(one, x)  # as another thread does meanwhile
        return sound(*operands)

    route.ours = overtaken
    serve.apply(one, x)
    assert route.calls == {8: route.theirs}


@pytest.mark.parametrize("place", ["table", "routes", "gains", "ops", "names"])
def test_nothing_of_ours_ends_the_start_up(vllm_table, monkeypatch, caplog, place) -> None:
    """A damaged table, plugin or cache leaves vLLM's kernels to each layer, and the log has the reason."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a plugin of tests")

    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, N, K, "bf16"))
    targets = {"table": (engine_rows, "_weights"), "routes": (engine_routes, "add_layer"), "gains": (engine_gains, "artifact")}
    targets |= {"ops": (engine_rows, "dispatcher"), "names": (plugin, "other_names")}
    monkeypatch.setattr(*targets[place], broken)
    caplog.set_level("INFO", "vllm.tunedgemm")
    _, one = bf16_layer()
    importlib.import_module("vllm.model_executor.model_loader.utils").process_weights_after_loading(one, None, torch.device("cpu"))
    importlib.import_module(plugin.WARM[0]).Worker(importlib.import_module("vllm.config").VllmConfig()).compile_or_warm_up_model()
    assert bool(one.tunedgemm_route) is (place in ("gains", "names"))
    assert "ZeroDivisionError: a plugin of tests" in caplog.text
    assert "layers go through tables" in caplog.text or place == "ops"
