"""Captured calls of rows that keep a dequantised weight: they read its memory, or the next kernel's."""

from __future__ import annotations

import gc

import pytest
import torch
import tunedgemm
from tunedgemm.backends.kept_weights import LIMIT, used
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.weight_only import Weight, decode, quantise
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.folders import user_table
from tunedgemm.table.row import Row

pytestmark = pytest.mark.gpu
N, K, M = 512, 1024, 256


def drawn(seed: int) -> Weight:
    return quantise("mxfp8", torch.randn(N, K, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))


def called(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return tunedgemm.gemm_a16wn(x, weight.weight, weight.w_scale, w_format="mxfp8")


def is_right(out: torch.Tensor, x: torch.Tensor, weight: Weight) -> bool:
    exact = x.double() @ decode(FORMATS["mxfp8"], weight).double().t()
    return bool((out.double() - exact).norm() < 2.0**-7 * exact.norm())


def test_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight called before is read by the graph, also renewed; one that was not is decoded in it."""
    device, op = current_device(), op_named("a16wn")
    shape = Shape("a16wn", M, N, K, scale="block", extra={"w_format": "mxfp8", "w_group": 32})
    path = user_table(op)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, op, [Row(shape, device.gfx, device.cu_num, "", Solution("torch", "dequantised"), 5.0)])
    monkeypatch.setenv(LIMIT, "1GiB")
    tunedgemm.reload()
    x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
    warm, late, other = drawn(1), drawn(2), drawn(3)
    assert is_right(called(x, warm), x, warm) and used() == N * K * 2
    assert tgemm.of("a16wn").bound(shape, device).offer.solution.kernel_name == "dequantised"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = called(x, warm), called(x, late)
    assert used() == N * K * 2, "a capture keeps no weight"
    for _ in range(2):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(is_right(out, x, weight) for out, weight in zip(outs, (warm, late), strict=True))
        for name in ("weight", "w_scale"):
            getattr(warm, name).view(torch.uint8).copy_(getattr(other, name).view(torch.uint8))
        called(x, warm)  # renews the kept weight in the memory that the graph reads
    del warm, graph, outs
    gc.collect()
    assert used() == 0
