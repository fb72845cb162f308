"""Gradients: kept by torch's call, zero for an empty batch, and an error where they would be lost."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch.autograd import forward_ad
from tunedgemm.dispatch.gradients import with_gradient
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of

EVERY = pytest.mark.parametrize("name", sorted(ops()))


@pytest.fixture
def gemm() -> TunedGemm:
    """Every op by a backend that takes every shape and has no gradients."""
    turbo = fake_backend("turbo", ops=tuple(ops()), heuristic="fake")
    return TunedGemm(fake_registry(turbo), settings=Settings(untuned=("turbo",)))


def operands_of(shape: Shape) -> list[Any]:
    return list(op_named(shape.op).make_inputs(shape, torch.device("cpu"), 0))


def called(gemm: TunedGemm, shape: Shape, operands: list[Any]) -> torch.Tensor:
    return gemm.call(shape.op, *operands, otype=torch_dtype(shape.outdtype), **op_named(shape.op).fields(shape))


def trainable(operands: list[Any]) -> list[int]:
    """The places of operands of 16 bits or more that may require a gradient."""
    return [at for at, each in enumerate(operands) if each is not None and each.is_floating_point() and each.element_size() > 1]


@EVERY
def test_an_empty_batch_gives_zero_gradients(name: str, gemm: TunedGemm) -> None:
    """Each operand that requires a gradient gets zeros, as from torch; a tangent is kept, too."""
    shape = next((shape for shape in shapes_of(name) if shape.m == 0), None) or attrs.evolve(shapes_of(name)[0], m=0)
    places = [at for at in trainable(operands_of(shape)) if type(operands_of(shape)[at]) is torch.Tensor]
    for place in places:
        for _ in range(2):
            operands = operands_of(shape)
            called(gemm, shape, operands)  # a launcher for operands without gradients is bound
            operands[place].requires_grad_()
            out = called(gemm, shape, operands)
            assert out.requires_grad and out.numel() == 0
            out.sum().backward()
            assert torch.equal(operands[place].grad, torch.zeros_like(operands[place]))
        with forward_ad.dual_level():
            operands[place] = forward_ad.make_dual(operands[place].detach(), torch.ones_like(operands[place]))
            assert forward_ad.unpack_dual(called(gemm, shape, operands)).tangent is not None
    with torch.no_grad():
        assert not called(gemm, shape, operands_of(shape)).requires_grad


@pytest.mark.parametrize("name", [name for name in sorted(ops()) if any("scale" in operand for operand in op_named(name).operands)])
def test_the_gradient_of_a_scale_is_right_or_an_error(name: str, gemm: TunedGemm) -> None:
    """By the difference that a small change of the scale makes; an op without one says so at the call."""
    small = sorted((shape for shape in shapes_of(name) if shape.m), key=lambda shape: op_named(name).flops(shape))[:3]
    for shape in small if name == "fmoe" else [attrs.evolve(each, outdtype="fp32") for each in small]:
        scales = [at for at, operand in enumerate(op_named(name).operands) if "scale" in operand]
        for place in [at for at in scales if at < len(operands_of(shape)) and operands_of(shape)[at] is not None]:
            operands = operands_of(shape)
            if operands[place].dtype is not torch.float32:
                continue
            step = torch.randn_like(operands[place]) * operands[place].abs().mean() / 8
            ends = [called(gemm, shape, [*operands[:place], operands[place] + sign * step, *operands[place + 1 :]]) for sign in (1, -1)]
            operands[place].requires_grad_()
            try:
                out = called(gemm, shape, operands)
            except OperandError as error:
                assert "requires a gradient, which this op does not compute" in str(error)
                continue
            out.double().sum().backward()
            change = (ends[0].double() - ends[1].double()).sum() / 2
            bound = 1e-3 * out.detach().double().abs().sum()
            assert abs((operands[place].grad.double() * step).sum() - change) <= bound


def test_a_gradient_that_torch_lacks_is_an_error_of_the_call() -> None:
    """Torch's fp8 product raises at the backward pass, far from the call."""
    ones, row = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.full((16, 1), 2.0, requires_grad=True)

    def product(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, weight.t(), x_scale, torch.ones(1, 16), out_dtype=torch.float32) * 2

    try:
        product(ones, ones, row.detach())
    except (RuntimeError, NotImplementedError):
        pytest.skip("this torch has no fp8 product on a CPU")
    with pytest.raises(OperandError, match="a8w8: an operand requires a gradient, which this op does not compute"):
        with_gradient("a8w8", product)(ones, ones, row)
    before = row * 1  # what is before an operand is the caller's
    assert with_gradient("a8w8", lambda x, weight, x_scale: x.float() * x_scale)(ones, ones, before).requires_grad


def test_a_bias_that_requires_a_gradient_keeps_it(gemm: TunedGemm) -> None:
    """The bias of each op keeps its gradient, whatever the tables choose without one."""
    for name in ("a16w16", "a8w8", "batched_bf16"):
        shape = next(shape for shape in shapes_of(name) if shape.m and shape.bias)
        operands = operands_of(shape)
        operands[-1].requires_grad_()
        called(gemm, shape, operands).float().sum().backward()
        assert operands[-1].grad is not None and operands[-1].grad.any(), name
