"""AITER's quantising functions: the sizes of their results, and what its kernels read."""

import pytest
import torch
import tunedgemm
from tunedgemm.errors import OperandError
from tunedgemm.testing.listed import listed
from tunedgemm_aiter_names import quant, shuffle

X = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))


def same(one, other):
    """Return whether bytes and sizes are equal."""
    one, other = (getattr(each, "plain", each).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def test_scales_of_three_dimensions_are_one_matrix():
    """per_1x32_f4_quant of [E, N, K] gives [E * N, K/32], as AITER's and its kernels' function do."""
    q, scale = tunedgemm.per_1x32_f4_quant(X)
    for function in (quant.per_1x32_f4_quant, quant.per_1x32_f4_quant_hip, quant.get_quant("per_1x32")):
        values, powers = function(X)
        assert tuple(powers.shape) == (192, 4) and same(values, q) and same(powers, scale.view(192, 4))
    assert same(quant.per_1x32_f4_quant(X, shuffle=True)[1], tunedgemm.shuffle_scale(scale.view(192, 4)))


@listed("round_mode", [0, 1, 2, 3])
def test_orders_of_quant_mxfp4_hip(round_mode):
    """Values and scales are those of the shuffles that its flags name."""
    x = X[0]
    q, scale = tunedgemm.per_1x32_f4_quant(x, round_mode=round_mode)
    assert all(map(same, quant.quant_mxfp4_hip(x, 32, round_mode), (q, scale)))
    ordered = quant.quant_mxfp4_hip(x, 32, round_mode, e8m0_shuffle=True, shuffle_weight=True)
    assert all(map(same, ordered, (tunedgemm.shuffle_weight(q), tunedgemm.shuffle_scale(scale))))
    for gate_up in (False, True):
        ordered = quant.quant_mxfp4_hip(x, 32, round_mode, a16w4_shuffle=True, gate_up=gate_up, shuffle_weight=True)
        assert same(ordered[0], shuffle.shuffle_weight_a16w4(q[None], 16, gate_up)[0])
        assert same(ordered[1], shuffle.shuffle_scale_a16w4(scale, 1, gate_up))
    with pytest.raises(OperandError, match="group_size 64"):
        quant.quant_mxfp4_hip(x, 64)


@listed("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_largest_value_may_be_given(dtype):
    """dtypeMax scales the largest magnitude to it; None is the dtype's largest."""
    limit = 127 if dtype is torch.int8 else 448
    for function, top in ((tunedgemm.pertoken_quant, X.abs().amax(-1, keepdim=True)), (tunedgemm.per_tensor_quant, X.abs().amax().view(1))):
        q, scale = function(X, quant_dtype=dtype, dtypeMax=60.0)
        torch.testing.assert_close(scale, top / 60)
        assert float(q.float().abs().max()) == 60
        torch.testing.assert_close(function(X, quant_dtype=dtype, dtypeMax=None)[1], top / limit)
