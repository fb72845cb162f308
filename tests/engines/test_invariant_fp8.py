"""fp8 layers of vLLM, and layers of SGLang, in batch-invariant mode."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch
import tunedgemm
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops import op_named
from tunedgemm.ops.formats import quant
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm_engines import invariant, rows
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import sglang as sglang_plugin
from tunedgemm_engines import vllm as plugin

N, K = 256, 384
C1 = "c1" * 8
FP8 = torch.float8_e4m3fn
PLAIN = Shape("a16w16", 1, N, K, "bf16")
ROWS = Shape("a8w8", 1, N, K, "fp8_e4m3fn", outdtype="bf16", scale="row")
VARIABLES = {"a16w16": "AITER_CONFIG_GEMM_BF16", "a8w8": "AITER_CONFIG_GEMM_A8W8"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


def with_class(monkeypatch: Any, tmp_path: Any, shape: Shape) -> Registry:
    """Serve a shape at every M by a class of a backend; return the backend's registry."""
    path, here = tmp_path / "tuned.csv", current_device()
    device = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "us": 1.0}
    write_rows(path, op_named(shape.op), [Row(shape=shape.with_m(0), solution=Solution("turbo", "any"), bit_class=C1, **device)])
    monkeypatch.setenv(VARIABLES[shape.op], str(path))
    tunedgemm.reload()

    def by_row(solution: Solution, of: Shape, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        scales = [rest[0].reshape(-1, 1)] if rest else []
        parts = [exact(solution, of.with_m(1), x[i : i + 1], weight, *(one[i : i + 1] for one in scales), *rest[1:]) for i in range(len(x))]
        return torch.cat(parts)

    return fake_registry(fake_backend("turbo", ops=(shape.op,), solutions=("any",), call=by_row))


def fp8_layer(x_static: bool, of_x: tuple[int, int], of_weight: tuple[int, int]) -> tuple[Any, Any]:
    """Return vLLM's kernel of fp8 with these kinds of scales, after loading, and its layer."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    said = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")

    def key(static: bool, group: tuple[int, int]) -> Any:
        return said.QuantKey(FP8, said.ScaleDesc(torch.float32, static, said.GroupShape(*group)), symmetric=True)

    kernel = linear.init_fp8_linear_kernel(
        key(x_static, of_x), key(True, of_weight), weight_shape=(N, K), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16
    )
    by_row = of_weight == (-1, 1)
    q, scale = (quant.pertoken_quant if by_row else quant.per_tensor_quant)(torch.randn(N, K), quant_dtype=FP8)
    one = torch.nn.Module()
    one.weight = torch.nn.Parameter(q.t(), requires_grad=False)
    one.weight_scale = torch.nn.Parameter(scale.reshape(-1, 1) if by_row else scale.reshape(()), requires_grad=False)
    one.input_scale = torch.nn.Parameter(torch.tensor(0.01), requires_grad=False) if x_static else None
    one.logical_widths, one.bias = [N], None
    one.quant_method = types.SimpleNamespace(fp8_linear=kernel)
    kernel.process_weights_after_loading(one)
    return one.quant_method.fp8_linear, one


@pytest.mark.parametrize("vllm_form", ["0.25.1", "0.33.0"], indirect=True)
def test_fp8_by_row_has_a_class_at_every_m(vllm, monkeypatch, tmp_path) -> None:
    """vLLM gets its kernel back, whose product its mode calls, and that product runs our class."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    registry = with_class(monkeypatch, tmp_path, ROWS)
    plugin.register()
    monkeypatch.setattr(dispatcher("a8w8"), "registry", registry)
    own, one = fp8_layer(False, (1, -1), (-1, 1))
    [route] = engine_routes.routes.values()
    importlib.import_module(plugin.LOADED[0]).process_weights_after_loading(torch.nn.Module(), None, None)

    assert type(own).__name__ == "CutlassFP8ScaledMMLinearKernel" and route.bit_class == C1
    for m in (1, 9, 600):
        own.apply_weights(one, torch.randn(m, K).bfloat16())
    assert set(route.calls.values()) == {route.ours}


def test_one_scale_of_all_rows_is_left_to_vllm(vllm, monkeypatch, tmp_path) -> None:
    """A scale of the whole batch makes bits depend on the others; a static one does not."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    shape = Shape("a8w8", 1, N, K, "fp8_e4m3fn", outdtype="bf16", scale="tensor")
    registry = with_class(monkeypatch, tmp_path, shape)
    plugin.register()
    monkeypatch.setattr(dispatcher("a8w8"), "registry", registry)
    kernel, _dynamic = fp8_layer(False, (-1, -1), (-1, -1))
    assert type(kernel).__name__ == "CutlassFP8ScaledMMLinearKernel" and not engine_routes.routes
    assert "one scale for all rows of x depends on the batch" in rows.unrouted()[0]
    _kernel, static = fp8_layer(True, (-1, -1), (-1, -1))
    assert len(engine_routes.routes) == 1 and static


@pytest.mark.parametrize(
    "option", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}], ids=lambda option: next(iter(option))
)
def test_sglang_runs_the_class_too(sglang, monkeypatch, tmp_path, caplog, option) -> None:
    """With either of SGLang's options a weight with a class runs ours at each M, and the log says so."""
    registry = with_class(monkeypatch, tmp_path, PLAIN)
    sglang_plugin.register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    unquant = importlib.import_module("sglang.srt.layers.quantization.unquant")
    model = torch.nn.Module()
    for name, n in (("one", N), ("other", N + 64)):
        part = torch.nn.Module()
        part.weight, part.quant_method = torch.nn.Parameter(torch.randn(n, K).bfloat16(), False), unquant.UnquantizedLinearMethod()
        model.add_module(name, part)
    monkeypatch.setattr("tunedgemm_engines.bit_classes.set_batch_invariant", lambda: _turned_on(monkeypatch, registry))
    caplog.set_level("INFO", "sglang.tunedgemm")
    runner = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner(model, [1, 8], **option)
    runner.load_model()
    runner.init_cuda_graphs()
    unquant.multiplied.clear()
    for m in (1, 9, 600):
        model.one.quant_method.apply(model.one, torch.randn(m, K).bfloat16())
        model.other.quant_method.apply(model.other, torch.randn(m, K).bfloat16())

    assert unquant.multiplied == [1, 9, 600]  # the other layer's
    assert "tunedgemm: batch-invariant: 1 weights in 1 bit classes, 1 layers" in caplog.text
    assert "1 layers keep SGLang's invariant kernels (as other): no class row of a16w16" in caplog.text
    assert not invariant._reasons


def _turned_on(monkeypatch: Any, registry: Registry) -> None:
    """Turn the mode on, and keep the backends of the test."""
    tunedgemm.set_batch_invariant()
    monkeypatch.setattr(dispatcher("a16w16"), "registry", registry)
