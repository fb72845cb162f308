"""Engines' scales of x: passed on in their order, captured, or copied for a row that needs it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tunedgemm.device import current_device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.quant import per_1x128_quant, per_block_quant
from tunedgemm.ops.scale_order import scale_order, with_order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.lookup import Table
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.listed import listed
from tunedgemm_engines import routes as engine_routes
from tunedgemm_engines import rows as engine_rows
from tunedgemm_engines import scales as engine_scales
from tunedgemm_engines.scales import at_m, known_order, scales_for_rows

N, K, VARIABLE = 256, 384, "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE"
OP = op_named("a8w8_blockscale")


def shape_of(m: int, order: str = "row") -> Shape:
    return with_order(Shape("a8w8_blockscale", m, N, K, "fp8_e4m3fn", outdtype="bf16", scale="block"), order)


def scales(m: int, order: str) -> torch.Tensor:
    return per_1x128_quant(torch.randn(m, K), scale_order=order)[1]


@listed("order", ["row", "m_major", "m_major_padded"])
def test_five_rows_tell_the_orders_apart(order: str) -> None:
    """Strides that are no order count as row-major, into which such scales are copied."""
    assert known_order(scales(engine_scales.TELLING_ROWS, order)) == order
    assert known_order(scales(10, order)[::2]) == known_order(torch.ones(5, 3, 1)) == "row"


def test_a_routes_shape_names_the_order_at_each_m() -> None:
    """A padded route is M-major where no column is padded; one M-major row is row-major."""
    padded, major = shape_of(1, "m_major_padded"), shape_of(1, "m_major")
    assert [scale_order(at_m(padded, m)) for m in (1, 3, 64)] == ["m_major_padded", "m_major_padded", "m_major"]
    assert [at_m(major, m) for m in (1, 64)] == [shape_of(1), shape_of(64, "m_major")]
    plain = Shape("a16w16", 1, N, K)
    assert at_m(plain, 7) == plain.with_m(7)


@pytest.mark.parametrize("orders", [(), ("m_major",)])
def test_scales_are_copied_for_a_row_that_does_not_read_their_order(monkeypatch: pytest.MonkeyPatch, orders: tuple[str, ...]) -> None:
    """A row of a kernel for row-major scales keeps serving, and scales of other M stay in their order."""
    here = current_device()
    backend = fake_backend("fake", ops=(OP.name,), solutions=("only",), scale_orders=orders)
    rows = [Row(shape_of(8), here.gfx, here.cu_num, "", Solution("fake", "only"), 1.0)]
    dispatch = Dispatcher(OP, fake_registry(backend), settings=Settings(), table=Table(OP, [rows]))
    monkeypatch.setattr(engine_scales, "dispatcher", lambda op: dispatch)
    monkeypatch.setattr(engine_routes, "dispatcher", lambda op: dispatch)
    monkeypatch.setattr(engine_rows, "dispatcher", lambda op: dispatch)
    explained: list[int] = []
    explain = engine_scales.explain_row
    monkeypatch.setattr(engine_scales, "explain_row", lambda of, shape, on: explained.append(shape.m) or explain(of, shape, on))
    prepare = scales_for_rows(shape_of(1, "m_major"))
    served, other, strange = scales(8, "m_major"), scales(300, "m_major"), scales(8, "row")[:4:2]
    assert prepare(served).is_contiguous() is not bool(orders) and torch.equal(prepare(served), served)
    assert prepare(other) is other and prepare(strange).is_contiguous()
    assert explained == [8]  # new M of prefill must not wait for it
    route = engine_routes.Route("r", shape_of(1, "m_major"), torch.device("cpu"), print, print, print, print)
    assert route.row_of(8, here) == (8, "")
    assert engine_rows.rows_of(route.shape, here) == [8]


@listed("tabled", ["m_major", "row", ""])
def test_row_major_scales_are_explained_where_they_have_a_row(tabled: str) -> None:
    """Without one, a guess for copies would take as long as that for the engine's scales."""
    here, asked = current_device(), list[str]()
    rows = [Row(shape_of(8, tabled), here.gfx, here.cu_num, "", Solution("fake", "only"), 1.0)] if tabled else []
    backend = fake_backend("fake", ops=(OP.name,), solutions=("only",), scale_orders=("m_major",) * (tabled == "m_major"))
    dispatch = Dispatcher(OP, fake_registry(backend), settings=Settings(), table=Table(OP, [rows]))
    dispatch.explain, explain = lambda shape, on: asked.append(scale_order(shape)) or explain(shape, on), dispatch.explain  # type: ignore[method-assign]
    shape = shape_of(8, "m_major")
    explanation = engine_scales.explain_row(dispatch, shape, here)
    assert asked == ["m_major"] + ["row"] * (tabled == "row")
    assert explanation.shape == (shape_of(8) if tabled == "row" else shape) and engine_scales.is_served(explanation) == bool(tabled)


def vllm_layer(order: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, torch.nn.Module, list[torch.Tensor]]:
    """Return a kernel and its layer, whose activations vLLM quantises into an order, and the scales."""
    quantisation = importlib.import_module("vllm.model_executor.layers.quantization.input_quant_fp8")
    made: list[torch.Tensor] = []

    def quantise(self: Any, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = per_1x128_quant(x, scale_order=order)
        made.append(scale)
        return q, scale

    monkeypatch.setattr(quantisation.QuantFP8, "__call__", quantise)
    monkeypatch.setattr(quantisation.QuantFP8, "forward_cuda", quantise, raising=False)
    tests = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    linear = importlib.import_module("vllm.model_executor.kernels.linear")

    def key(group: tuple[int, int], static: bool) -> Any:
        scale = tests.ScaleDesc(torch.float32, static, tests.GroupShape(*group))
        return tests.QuantKey(torch.float8_e4m3fn, scale, symmetric=True)

    kernel = linear.init_fp8_linear_kernel(
        key((1, 128), False), key((128, 128), True), weight_shape=(N, K), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16
    )
    q, scale = per_block_quant(torch.randn(N, K))
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale_inv = torch.nn.Parameter(q, False), torch.nn.Parameter(scale, False)
    layer.input_scale, layer.bias, layer.logical_widths, layer.params_dtype = None, None, [N], torch.bfloat16
    kernel.process_weights_after_loading(layer)
    return kernel, layer, made


@pytest.mark.parametrize("order", ["row", "m_major", "m_major_padded"])
def test_vllms_scales_reach_the_op_as_they_are(vllm_table: Any, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """A row, of any order, runs on the tensor that vLLM quantised into; the route knows its order."""
    vllm_table(VARIABLE, shape_of(10))
    seen: list[torch.Tensor] = []
    vllm_fp8 = importlib.import_module("tunedgemm_engines.vllm_fp8")
    op = vllm_fp8.gemm_a8w8_blockscale
    monkeypatch.setattr(vllm_fp8, "gemm_a8w8_blockscale", lambda *operands: seen.append(operands[2]) or op(*operands))
    first, _, tried = vllm_layer(order, monkeypatch)
    if first._theirs is None:
        pytest.skip("vLLM has no kernel for plain weights on this CPU")
    kernel, layer, made = vllm_layer(order, monkeypatch)
    assert kernel._route == first._route and len(tried) == 1 and not made  # the order is known by then
    x = torch.randn(10, K).bfloat16()
    kernel.apply_weights(layer, x)
    [route] = engine_routes.routes.values()
    assert scale_order(at_m(route.shape, 5)) == order
    assert seen[-1] is made[-1]
    assert dispatcher(OP.name).is_bound(shape_of(10, order), current_device())


@pytest.mark.parametrize("order", ["row", "m_major", "m_major_padded"])
def test_capture_records_the_engines_order(vllm_captured: Any, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """The untuned file lists the shapes in the order that the engine's calls have."""
    kernel, layer, _ = vllm_layer(order, monkeypatch)
    for m in (1, 10, 12):
        kernel.apply_weights(layer, torch.randn(m, K).bfloat16())
    assert vllm_captured(OP.name) == {1: 1, 10: 1, 12: 1}
    found = {line.shape.m: scale_order(line.shape) for line in read_untuned(untuned_path(OP), OP)}
    wanted = {"row": ("row", "row", "row"), "m_major": ("row", "m_major", "m_major")}
    assert tuple(found.values()) == wanted.get(order, ("m_major_padded", "m_major_padded", "m_major"))
