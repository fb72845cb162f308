"""int4: two's complement values, two in a byte, in plain order and in AITER's."""

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats import int4

VALUES = torch.arange(-8, 8, dtype=torch.int8).repeat(12)[torch.randperm(192, generator=torch.Generator().manual_seed(1))].view(2, 3, 32)


def test_packed_values_come_back():
    """Every value of 4 bits survives."""
    packed = int4.pack_int8_to_packed_int4(VALUES)
    assert torch.equal(int4.unpack_shuffled_int4(packed.view(2, 3, 16)), VALUES)


def test_aiters_packing_has_the_first_four_values_in_the_low_halves():
    """Eight values v0..v7 are the bytes v4v0, v5v1, v6v2, v7v3."""
    packed = int4.pack_int8_to_packed_int4(torch.arange(-4, 4, dtype=torch.int8))
    assert packed.view(torch.uint8).tolist() == [0x0C, 0x1D, 0x2E, 0x3F]


def test_quantising():
    """32 elements of a row share amax / 7, groups first; no value is off by more than half a step."""
    w = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, scale = int4.per_1x32_i4_quant(w)
    assert (q.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.bfloat16, (2, 2, 5))
    steps = (w.view(2, 5, 2, 32).abs().amax(-1) / 7).repeat_interleave(32, -1)
    assert float(((q * steps - w).abs() / steps).max()) <= 0.5 + 1e-5
    assert int(q.abs().max()) == 7
    for wrong in ({"group_size": 64}, {"weight": w[..., :48]}):
        with pytest.raises(OperandError, match="int4 has one scale for 32 elements"):
            int4.per_1x32_i4_quant(**{"weight": w, **wrong})


def test_scales_of_aiters_kernels():
    """In bf16 two groups of a row are adjacent; float32 scales keep their order."""
    scale = torch.arange(24.0).view(1, 4, 6)
    assert torch.equal(int4.shuffle_scale_for_int4(scale), scale)
    shuffled = int4.shuffle_scale_for_int4(scale.bfloat16())
    assert tuple(shuffled.shape) == (1, 2, 6, 2)
    assert shuffled[0, 0, :2].tolist() == [[0.0, 6.0], [1.0, 7.0]]
    with pytest.raises(OperandError, match="group_size=64"):
        int4.shuffle_scale_for_int4(scale, 64)
