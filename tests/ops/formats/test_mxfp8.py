"""mxfp8: fp8 values with one power of two for each 32 elements."""

import math

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.mxfp8 import dequant_1x32, per_1x32_f8_quant
from tunedgemm.testing.listed import listed

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@listed("dtype", FP8)
def test_against_the_definition(dtype):
    """The scale is amax / largest value rounded up to a power of two; values are rounded once and fit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 96, generator=generator) * 2.0 ** torch.randint(-20, 20, (3, 5, 1), generator=generator)
    q, scale = per_1x32_f8_quant(x, dtype)
    limit, groups = torch.finfo(dtype).max, x.view(3, 5, 3, 32)
    for group, values, power in zip(groups.flatten(0, 2), q.view(torch.uint8).view(-1, 32), scale.flatten().float(), strict=True):
        wanted = 2.0 ** math.ceil(math.log2(float(group.abs().max()) / limit))
        assert float(power) == wanted
        assert torch.equal(values.view(dtype).float(), (group / wanted).to(dtype).float())
    back = dequant_1x32(q, scale, torch.float64)
    assert float((back - x).norm() / x.norm()) < 2.0**-4.5
    assert torch.equal(back, dequant_1x32(q, scale.view(torch.uint8), torch.float64))


@listed(("top", "wanted"), [(448.0, 1.0), (448.0001, 2.0), (224.0, 0.5), (1.75, 2.0**-8), (1.7500002, 2.0**-7)])
def test_scales_at_the_borders(top, wanted):
    """A largest magnitude of the format's largest value has the scale 1, the next one 2."""
    assert float(per_1x32_f8_quant(torch.full((1, 32), top))[1].float()) == wanted


def test_groups_without_finite_values():
    """A zero group reads back as zero, one with an infinity or a NaN as NaN."""
    x = torch.ones(1, 128)
    x[0, :32], x[0, 40], x[0, 70] = 0.0, math.inf, math.nan
    back = dequant_1x32(*per_1x32_f8_quant(x))
    assert not back[0, :32].any()
    assert back[0, 32:96].isnan().all()
    assert torch.equal(back[0, 96:], torch.ones(32))


def test_what_is_refused():
    """A K that 32 does not divide, and another dtype, are named."""
    with pytest.raises(OperandError, match=r"mxfp8 is .*K a multiple of 32 \(got torch.float8_e4m3fn, K=33\)"):
        per_1x32_f8_quant(torch.ones(2, 33))
    with pytest.raises(OperandError, match=r"got torch\.int8, K=32"):
        per_1x32_f8_quant(torch.ones(2, 32), torch.int8)
    with pytest.raises(OperandError, match=r"rule must be rceil or floor or vllm \(got 'even'\)"):
        per_1x32_f8_quant(torch.ones(2, 32), rule="even")


@listed(
    ("rule", "top", "scale", "value"),
    [
        ("rceil", 448.0, 1.0, 448.0), ("floor", 448.0, 1.0, 448.0), ("vllm", 448.0, 256.0, 448.0),
        ("rceil", 500.0, 2.0, 512.0), ("floor", 500.0, 1.0, 448.0), ("vllm", 500.0, 256.0, 512.0),
        ("rceil", 256.0, 1.0, 256.0), ("floor", 256.0, 1.0, 256.0), ("vllm", 256.0, 256.0, 256.0),
        ("rceil", 2.0**127, 2.0**119, 2.0**127), ("floor", 2.0**127, 2.0**119, 2.0**127), ("vllm", 2.0**127, 2.0**127, 2.0**127),
        ("floor", 2.0**-130, 2.0**-127, 2.0**-130), ("vllm", 2.0**-130, 2.0**-127, 2.0**-130),
    ],
)  # fmt: skip
def test_the_three_rules(rule, top, scale, value):
    """Only floor saturates, above 448 of 2^8; only vllm leaves the large values of fp8 unused."""
    q, found = per_1x32_f8_quant(torch.full((1, 32), top), rule=rule)
    assert float(found.float()) == scale
    assert dequant_1x32(q, found, torch.float64).unique().tolist() == [value]


def test_the_rules_agree_on_what_values_stand_for():
    """Their bytes differ, and their errors are alike: so weights are compared dequantised."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = {rule: per_1x32_f8_quant(x, rule=rule) for rule in ("rceil", "floor", "vllm")}
    for q, scale in found.values():
        assert 0.02 < float((dequant_1x32(q, scale) - x).norm() / x.norm()) < 0.035
    assert not any(torch.equal(found[rule][0].view(torch.uint8), found["rceil"][0].view(torch.uint8)) for rule in ("floor", "vllm"))
