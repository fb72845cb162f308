"""Autocast: it changes neither the dtype nor the values of an op, whatever serves the call."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends.builtin.hooks import enumerate_solutions
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.integrations.linear import linear
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

NARROW = (torch.bfloat16, torch.float16)


def shapes(name: str) -> list[Shape]:
    """The two shapes of an op that are quickest to compute, in the widest output that it gives."""
    small = sorted((shape for shape in shapes_of(name) if shape.m), key=lambda shape: op_named(name).flops(shape))[:2]
    return small if name == "fmoe" else [attrs.evolve(shape, outdtype="fp32") for shape in small]


@pytest.mark.parametrize("name", sorted(ops()))
def test_autocast_changes_no_op_with_any_row(name: str, tmp_path: Path) -> None:
    """Without a row, with a row of each of torch's routes and with a plugin's, in each context."""
    op, here = op_named(name), device_of(-1)
    for number, shape in enumerate(shapes(name)):
        operands = op.make_inputs(shape, torch.device("cpu"), 0)
        for row in (None, *enumerate_solutions(shape, here), Solution("turbo", "fake")):
            gemm = TunedGemm(fake_registry(fake_backend("turbo", ops=(name,))), settings=Settings())
            if row is not None:
                path = tmp_path / f"{number}.csv"
                placed = Row(shape=shape, gfx=here.gfx, cu_num=here.cu_num, device="", solution=row, us=1.0)
                write_rows(path, op, [placed])
                gemm.load_config(path, name)
            given = {"otype": torch_dtype(shape.outdtype), **op.fields(shape)}
            plain = gemm.call(name, *operands, **given)
            for dtype in NARROW:
                with torch.autocast("cpu", dtype):
                    out = gemm.call(name, *operands, **given)
                assert out.dtype == torch_dtype(shape.outdtype)
                assert torch.equal(out, plain), f"{shape} {row} {dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(ops()))
def test_autocast_changes_no_op_on_a_gpu(name: str, device: str) -> None:
    """No installed backend follows autocast, neither that of the GPU nor that of the CPU."""
    op, gemm = op_named(name), TunedGemm()
    for shape in shapes(name):
        operands = op.make_inputs(shape, torch.device("cuda"), 0)
        given = {"otype": torch_dtype(shape.outdtype), **op.fields(shape)}
        plain = gemm.call(name, *operands, **given)
        for dtype in NARROW:
            with torch.autocast(device, dtype):
                out = gemm.call(name, *operands, **given)
            assert out.dtype == torch_dtype(shape.outdtype)
            torch.testing.assert_close(out, plain)


@pytest.mark.parametrize(("dtype", "grad"), [(torch.bfloat16, False), (torch.float16, True)])
def test_autocast_changes_no_compiled_call_or_gradient(dtype: torch.dtype, grad: bool) -> None:
    """gemm_a16w16 in float32, eager, compiled and batched by vmap; F.linear alone follows autocast."""
    x, weight = torch.randn(4, 32, requires_grad=grad), torch.randn(16, 32)

    def product(x: torch.Tensor) -> torch.Tensor:
        return tunedgemm.gemm_a16w16(x, weight, otype=torch.float32)

    ways = [product, torch.compile(product, backend="aot_eager", fullgraph=True), torch.vmap(product)]
    plain = torch.nn.functional.linear(x, weight)
    for way in ways:
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                out = way(x if way is not ways[2] else x.unsqueeze(1)).view(4, 16)
                followed = linear(x, weight)
            assert out.dtype is torch.float32 and out.requires_grad == grad and followed.dtype is dtype
            torch.testing.assert_close(out, plain)
