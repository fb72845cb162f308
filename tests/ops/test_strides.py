"""Strides: every op is right for any memory order of its operands, even if only torch serves
them."""

import pytest
import torch
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.shuffle import ShuffledWeight
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_registry

#: Shapes of the op that states no examples.
FLOATS = (Shape("a16w16", 64, 256, 512), Shape("a16w16", 64, 256, 512, "fp8_e4m3fn", "bf16", scale="tensor"))
SHAPES = [shape for op in ops().values() for shape in (op.examples or FLOATS) if 0 < shape.m < 100 and op.name == shape.op]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def misaligned(plain: torch.Tensor) -> torch.Tensor:
    return torch.empty(plain.numel() + 1, dtype=plain.dtype, device=plain.device)[1:].view(plain.shape).copy_(plain)


def flipped(plain: torch.Tensor) -> torch.Tensor:
    return plain.transpose(-1, -2).contiguous().transpose(-1, -2)


def apart(plain: torch.Tensor) -> torch.Tensor:
    return torch.cat((plain, plain), -1)[..., : plain.shape[-1]]


def lying(operand: torch.Tensor, form) -> torch.Tensor:
    """The same values in another form; a shuffled weight has one form alone."""
    if isinstance(operand, ShuffledWeight):
        return operand
    return form(operand) if operand.element_size() > 1 else form(operand.view(torch.uint8)).view(operand.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted({shape.op for shape in SHAPES}))
def test_operands_may_have_any_strides(name, device):
    """Activations and weights that are misaligned, transposed or have gaps, one by one and together."""
    op, gemm, faults = op_named(name), TunedGemm(fake_registry(), settings=Settings()), []
    for shape in (shape for shape in SHAPES if shape.op == name):
        operands = op.make_inputs(shape, torch.device(device), 0)
        reference, fields = op.reference(shape, operands), op.fields(shape)
        for changed in ((0,), (1,), (0, 1, 2) if name == "fmoe" else (0, 1)):
            for form in (misaligned, flipped, apart):
                given = [lying(operand, form) if index in changed else operand for index, operand in enumerate(operands)]
                out = gemm.call(name, *given, otype=torch_dtype(shape.outdtype), **fields)
                if not worst_row_error(out, reference) <= op.tolerance(shape).row_error:
                    faults.append((shape, changed, form.__name__))
    assert not faults
