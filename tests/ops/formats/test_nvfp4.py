"""nvfp4: e2m1 values, an e4m3 scale for each 16 of K, and one float32 global scale."""

import math
import re

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.nvfp4 import per_1x16_f4_quant
from tunedgemm.ops.formats.weight_only import Weight, decode, quantise
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.testing.listed import listed

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def back(q, scale, factor):
    """The values that a quantised tensor stands for, in float64."""
    rows = q.shape[:-1].numel()
    values = decode(FORMATS["nvfp4"], Weight(q.reshape(rows, -1), scale.reshape(rows, -1)), torch.float64)
    return (values * factor.double()).view(*q.shape[:-1], -1)


def snr(found, wanted):
    """The ratio of signal to noise in dB."""
    return 20 * math.log10(float(wanted.norm() / (found - wanted).norm()))


@listed("size", [1.0, 1e-6, 1e6])
def test_against_the_definition(size):
    """Scales are e4m3 of amax / 6 over the global scale; each value has the nearest code."""
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0)) * size
    q, scale, factor = per_1x16_f4_quant(x)
    assert (q.shape, q.dtype, scale.shape, scale.dtype) == ((3, 5, 24), torch.float4_e2m1fn_x2, (3, 5, 3), torch.float8_e4m3fn)
    torch.testing.assert_close(factor, x.abs().amax() / 2688)
    groups = x.double().view(15, 3, 16)
    wanted = (groups.abs().amax(-1) / 6 / factor.double()).clamp(max=448).float().to(torch.float8_e4m3fn)
    assert torch.equal(scale.view(15, 3).float(), wanted.float())
    step = scale.double().view(15, 3, 1) * factor.double()
    nearest = ((groups.abs() / step)[..., None] - CODES).abs().argmin(-1)
    torch.testing.assert_close(back(q, scale, factor).view(15, 3, 16), CODES[nearest].double() * step * groups.sign())
    assert snr(back(q, scale, factor), x.double()) > 18


def test_ties_and_nibbles():
    """Ties go to the even code, and the even element is the low nibble."""
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    q, _, _ = per_1x16_f4_quant(torch.cat((halves[:8], -halves[8:]))[None], torch.ones(1))
    assert q.view(torch.uint8)[0].tolist() == [0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE]


def test_the_global_scale_of_a_call_is_kept():
    """A checkpoint's global scale is used as given; a smaller one saturates, not wraps."""
    x = torch.full((1, 16), 12.0)
    q, scale, factor = per_1x16_f4_quant(x, torch.tensor([2.0**-8]))
    assert torch.equal(back(q, scale, factor), torch.full((1, 16), 448 * 6 * 2.0**-8).double())
    assert torch.equal(back(*per_1x16_f4_quant(x, torch.ones(()))), x.double())  # one level: the scale is 2


def test_the_same_values_as_the_weight_only_format():
    """a16wn's quantiser and this one stand for equal values, so a weight needs no other copy."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    other = quantise("nvfp4", weight)
    assert torch.equal(back(*per_1x16_f4_quant(weight)), back(other.weight, other.w_scale, other.w_global_scale))


def test_groups_without_finite_values():
    """Zeros read back as zero; with a given global scale a NaN or infinity spoils its group alone."""
    assert not back(*per_1x16_f4_quant(torch.zeros(2, 32))).any()
    assert per_1x16_f4_quant(torch.zeros(0, 32))[1].shape == (0, 2)
    x = torch.full((1, 64), 6.0)
    x[0, :16], x[0, 20], x[0, 40] = 0.0, math.inf, math.nan
    values = back(*per_1x16_f4_quant(x, torch.ones(())))
    assert not values[0, :16].any() and values[0, 16:48].isnan().all() and torch.equal(values[0, 48:], x[0, 48:].double())
    assert back(*per_1x16_f4_quant(x)).isnan().all()


@listed(
    ("sizes", "factor", "message"),
    [
        ((2, 24), None, "K must be a multiple of 16 (got K=24); pad"),
        ((2, 16), torch.ones(2), "global_scale must be one float32 (got (2,) torch.float32)"),
        ((2, 16), torch.ones(1).half(), "global_scale must be one float32 (got (1,) torch.float16)"),
    ],
)
def test_what_is_refused(sizes, factor, message):
    """The message has the value that was given, and what would do."""
    with pytest.raises(OperandError, match=re.escape(message)):
        per_1x16_f4_quant(torch.ones(sizes), factor)
