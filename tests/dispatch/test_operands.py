"""Operands that an op does not take: missing ones, and those whose memory does not hold their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

EVERY = pytest.mark.parametrize("name", sorted(ops()))
CPU = torch.device("cpu")


def smallest(op: Op) -> Shape:
    """The example that is quickest to compute, with a bias where one is as quick."""
    shapes = [shape for shape in shapes_of(op.name) if shape.m and shape.layout == "row"] or [s for s in shapes_of(op.name) if s.m]
    return min(shapes, key=lambda shape: (op.flops(shape), str(shape)))


def called(gemm: TunedGemm, shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    return gemm.call(shape.op, *operands, otype=torch_dtype(shape.outdtype), **op_named(shape.op).fields(shape))


@pytest.fixture
def gemm() -> TunedGemm:
    """Every op by a backend that computes the reference, whatever the shape."""
    turbo = fake_backend("turbo", ops=tuple(ops()), heuristic="fake", call=exact, scale_orders=("m_major", "m_major_padded", "aiter32x8"))
    return TunedGemm(fake_registry(turbo), settings=Settings(untuned=("turbo",)))


@EVERY
def test_a_missing_operand_is_named(name: str, gemm: TunedGemm) -> None:
    """Also one that is None at the end, an operand too many and an argument that the op lacks."""
    op = op_named(name)
    operands = op.make_inputs(smallest(op), CPU, 0)
    required = [operand for operand in op.operands if not operand.endswith("?")]
    for count, missing in enumerate(required):
        for given in (operands[:count], (*operands[:count], None)):
            with pytest.raises(OperandError, match=rf"^{name}: {missing} must be a tensor \(got None\); pass {required[0]}, "):
                gemm.call(name, *given)
    with pytest.raises(OperandError, match=rf"^{name}: too many operands \(got 12\)"):
        gemm.call(name, *[operands[0]] * 12)
    with pytest.raises(OperandError, match=rf"^{name}: unknown argument \(got 'colour'\); known: "):
        gemm.call(name, *operands, colour="red")
