"""mxfp4: the powers of two of AITER's modes, and packing along the first dimension."""

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.mxfp4 import dequant_fp4, per_1x32_f4_quant
from tunedgemm.testing.listed import listed

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
TOP = X.view(64, 3, 32).abs().amax(-1).double()
#: mode -> the power of two of each group, by its formula.
POWERS = {
    0: TOP.log2().floor() - 2,
    1: (TOP / 6).log2().ceil(),
    2: torch.where(TOP / 2 ** TOP.log2().floor() >= 1.75, TOP.log2().floor() - 1, TOP.log2().floor() - 2),
    3: TOP.log2().ceil() - 2,
}


@listed("mode", POWERS)
def test_the_power_of_each_mode(mode):
    """Scales are AITER's for each number, and the values are right to half a step of the largest."""
    q, scale = per_1x32_f4_quant(X, round_mode=mode)
    assert torch.equal(scale.view(torch.uint8).double() - 127, POWERS[mode])
    saturated = X.view(64, 3, 32).clamp(-6 * 2 ** POWERS[mode][..., None], 6 * 2 ** POWERS[mode][..., None])
    error = (dequant_fp4(q, scale).view(64, 3, 32) - saturated).abs() / 2 ** POWERS[mode][..., None]
    assert float(error.max()) <= 1


@listed("mode", POWERS)
def test_groups_without_finite_values(mode):
    """A group of zeros has byte 0, one with an infinity or NaN has 255, in every mode."""
    groups = torch.zeros(3, 32)
    groups[1, 3], groups[2, 5] = torch.inf, torch.nan
    q, scale = per_1x32_f4_quant(groups, round_mode=mode)
    assert scale.view(torch.uint8).flatten().tolist() == [0, 255, 255]
    assert not q.view(torch.uint8)[0].any()


def test_the_first_dimension():
    """pack_dim=0 of [K, N] is the transpose of what [N, K] gives."""
    q, scale = per_1x32_f4_quant(X, pack_dim=-1)
    across, powers = per_1x32_f4_quant(X.t().contiguous(), pack_dim=0)
    assert torch.equal(across.view(torch.uint8), q.view(torch.uint8).t())
    assert torch.equal(powers.view(torch.uint8), scale.view(torch.uint8).t())


@listed("wrong", [{"pack_dim": 1}, {"pack_dim": 0, "shuffle": True}, {"round_mode": 4}])
def test_arguments_of_no_meaning(wrong):
    """The error names what there is."""
    with pytest.raises(OperandError, match=r"pack_dim is -1, or 0 of \[K, N\] without shuffle, and round_mode 0, 1, 2, 3"):
        per_1x32_f4_quant(X, **wrong)
