"""DeepGEMM's warm-up in vLLM, without what our kernels serve."""

import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.plugin import Shape
from tunedgemm_engines import gains, routes, vllm_warmup

N, K, M = 256, 512, [1, 8, 64, 128, 136, 4096, 32768]


class Layer(torch.nn.Module):
    """A layer that DeepGEMM would warm."""

    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, K), requires_grad=False)


@pytest.fixture
def warmup(monkeypatch) -> Any:
    """Stand in for vLLM's module, with the functions of 0.33 that the plugin uses."""
    module: Any = ModuleType(vllm_warmup._MODULE)
    module._deep_gemm_linear_data = lambda layer: (layer.weight, None) if isinstance(layer, Layer) else None
    module._get_fp8_gemm_nt_m_values = lambda w, max_tokens: [m for m in M if m <= max_tokens and w.dim() == 2]
    monkeypatch.setitem(sys.modules, vllm_warmup._MODULE, module)
    monkeypatch.setattr(routes, "routes", {})
    for user in (vllm_warmup, gains):
        monkeypatch.setattr(user, "routes", routes.routes)
    monkeypatch.setattr(vllm_warmup, "_needed", set())
    monkeypatch.delenv(vllm_warmup.SWITCH, raising=False)
    return module


def routed(layer: Layer, error: float = 0.0, of: int = 0) -> routes.Route:
    """Route a layer whose reference is torch's product; ours has an error at M = *of*, or at all."""

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return x @ weight.t()

    route = routes.Route(
        f"route of {layer.weight.shape[0]}", Shape("a8w8_blockscale", 1, layer.weight.shape[0], K, "fp8", outdtype="bf16", scale="block"),
        torch.device("cuda", 0), lambda *operands: product(*operands) * (1 + error * (len(operands[0]) == of or not of)), product,
        lambda m: (torch.randn(m, K),), lambda inputs, module: (*inputs, module.weight, None, None, None),
        reference=lambda *operands: product(*operands)[:, :128],
    )  # fmt: skip
    routes.routes[route.name] = route
    route.layers["layer"] = weakref.ref(layer)
    return route


def compared(monkeypatch, known: dict[str, float], **libtypes: str) -> list[int]:
    """Compare all routes as on a GPU that serves every M untuned; return the M that are timed."""
    timed: list[int] = []
    monkeypatch.setattr(gains, "rows_of", lambda _shape, _device: [4096])
    monkeypatch.setattr(gains, "untuned_sizes", lambda _shape, _device: list(gains.UNTUNED_M))
    monkeypatch.setattr(
        gains, "explain_row", lambda _dispatcher, shape, _device: SimpleNamespace(libtype=libtypes.get(f"m{shape.m}", "asm"))
    )
    monkeypatch.setattr(gains, "device_of", lambda _index: current_device())
    monkeypatch.setattr(gains, "Arms", lambda seconds: type("Arms", (), {"spent": seconds <= 0})())
    monkeypatch.setattr(gains, "faster", lambda _arms, _ours, _theirs, calls, _tolerance: timed.append(len(calls[0][0])) or 1.5)
    gains.compare(8.0, known)
    return timed


def test_what_ours_serves_is_not_warmed(warmup, monkeypatch) -> None:
    """Outputs are checked, nothing is timed, and DeepGEMM warms only M without an untuned kernel."""
    layer, known, checked = Layer(), dict[str, float](), list[int]()
    route = routed(layer)
    ours = route.ours
    monkeypatch.setattr(route, "ours", lambda *operands: checked.append(len(operands[0])) or ours(*operands))
    assert compared(monkeypatch, known) == []
    assert checked == [*gains.UNTUNED_M, 256, 1024, 4096]
    assert route.trusted_to == 16384 and all(route.serves(m, current_device()) for m in (1, 37, 1000, 16384))
    route.waiting = {}
    assert not route._is_rare(37) and not route._is_rare(16383) and route._is_rare(16385)

    model = torch.nn.ModuleList([layer])
    vllm_warmup.skip_served(model)
    vllm_warmup.skip_served(model)
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight, 32768) == [32768]
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight, 16384) == []
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight[:8], 32768) == M
    [line] = vllm_warmup.left_out()
    assert "not warmed up to M=16384 for 1 layers" in line

    monkeypatch.setattr(route, "ours", None)
    assert compared(monkeypatch, known) == [] and route.trusted_to == 16384  # remembered by the next start


@pytest.mark.parametrize(
    ("libtypes", "wrong", "most", "warmed"),
    [({"m4096": "torch"}, 0, 4032, [4096, 32768]), ({"m200": "torch"}, 0, 192, [4096, 32768]), ({}, 1024, 128, [136, 4096, 32768])],
    ids=["torch", "few", "wrong"],
)
def test_some_m_are_trusted(warmup, monkeypatch, libtypes, wrong, most, warmed) -> None:
    """DeepGEMM warms all M from the first that torch serves, or all of prefill if an output differs."""
    layer, known = Layer(), dict[str, float]()
    route = routed(layer, error=0.2 * (wrong > 0), of=wrong)
    assert compared(monkeypatch, known, **libtypes) == [4096]
    assert route.trusted_to == most and (f"{route.name} trusted" in known) == (not wrong)
    vllm_warmup.skip_served(torch.nn.ModuleList([layer]))
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight, 32768) == warmed

    other = Layer(2 * N)
    routed(other)
    routes.routes["route of 512"].trusted_to = 16384
    [line] = vllm_warmup.left_out()
    assert f"not warmed up to M={most} for 1 layers and to M=16384 for 1 layers" in line


def test_a_layer_without_a_route_keeps_its_warm_up(warmup, monkeypatch) -> None:
    """DeepGEMM's kernels are by size: one layer that needs them keeps them for all of its size."""
    layer, other = Layer(), Layer()
    routed(layer)
    compared(monkeypatch, {})
    vllm_warmup.skip_served(torch.nn.ModuleList([layer, other]))
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight, 32768) == M and not vllm_warmup.left_out()


def test_other_outputs_are_timed_and_warmed(warmup, monkeypatch) -> None:
    """Nothing is trusted where outputs differ, or where ours raises."""
    layer = Layer()
    route = routed(layer, error=0.2)
    assert compared(monkeypatch, {}) == [4096, *gains.UNTUNED_M] and route.trusted_to == 0
    monkeypatch.setattr(route, "ours", None)
    assert len(compared(monkeypatch, {})) > 1 and route.trusted_to == 0
    vllm_warmup.skip_served(torch.nn.ModuleList([layer]))
    assert warmup._get_fp8_gemm_nt_m_values(layer.weight, 32768) == M


def test_torch_is_timed(warmup, monkeypatch) -> None:
    """A row that names torch, which DeepGEMM may beat, is timed against it."""
    layer = Layer()
    route = routed(layer)
    assert compared(monkeypatch, {}, m8="torch") == [4096, *gains.UNTUNED_M] and route.trusted_to == 0


def test_a_failure_returns_to_the_engine(warmup, monkeypatch) -> None:
    """An M at which ours raised later is DeepGEMM's, which compiles then."""
    layer = Layer()
    route = routed(layer)
    compared(monkeypatch, {})
    route.fail(8, ValueError("no memory"))
    assert not route.serves(8, current_device()) and route.serves(16, current_device())


@pytest.mark.parametrize(("value", "skipped"), [("", True), ("relax", True), ("skip", True), ("full", False), ("FULL", False)])
def test_the_users_switch_counts(warmup, monkeypatch, value, skipped) -> None:
    """vLLM's own switch asks for all of the warm-up."""
    monkeypatch.setenv(vllm_warmup.SWITCH, value)
    assert vllm_warmup.skips() == skipped


def test_another_vllm_is_left_alone(monkeypatch) -> None:
    """A vLLM without these functions warms all."""
    monkeypatch.setitem(sys.modules, vllm_warmup._MODULE, ModuleType("other"))
    assert not vllm_warmup.skips()
