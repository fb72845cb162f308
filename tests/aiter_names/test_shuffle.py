"""AITER's names of shuffles: the permutations, as AITER's own source has them."""

import pytest
import torch
import tunedgemm
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.shuffle import unshuffle_weight
from tunedgemm.testing.listed import listed
from tunedgemm_aiter_names import shuffle


def random_bytes(*sizes):
    return torch.randint(0, 255, sizes, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@listed("gate_up", [False, True])
def test_weights_of_experts(gate_up):
    """shuffle_weight_a16w4 and moe_shuffle_weight have blocks of gate and up in turn where asked."""
    x = random_bytes(3, 64, 128)
    halves = x.view(3, 2, 2, 16, 128).transpose(1, 2).reshape(x.shape) if gate_up else x
    wanted = halves.view(3, 4, 16, 8, 16).transpose(2, 3).reshape(x.shape)
    for w in (shuffle.shuffle_weight_a16w4(x, 16, gate_up), shuffle.moe_shuffle_weight(x, 3, True, gate_up)):
        assert torch.equal(w.plain, wanted)
        assert torch.equal(unshuffle_weight(w), halves)
    assert torch.equal(shuffle.moe_shuffle_weight(x), tunedgemm.shuffle_weight(x))


@listed(
    ("instruction", "layout"),
    [((16, 64), "aiter16x16"), ((16, 32), "aiter16x16p8"), ((32, 64), "aiter32x16p32"), ((32, 16), "aiter32x8p8")],
)
def test_weights_of_an_instruction(instruction, layout):
    """A pack of shuffle_weight_NK is what one of 64 lanes holds of inst_K elements."""
    rows, k = instruction
    x, lanes = random_bytes(3, 64, 128), 64 // rows
    w = shuffle.shuffle_weight_NK(x, rows, k)
    assert w.layout_name == layout
    assert torch.equal(w.plain, x.view(3, 64 // rows, rows, 128 // k, lanes, k // lanes).permute(0, 1, 3, 4, 2, 5).reshape(x.shape))
    assert torch.equal(unshuffle_weight(w), x)


@listed("gate_up", [False, True])
def test_scales_of_experts(gate_up):
    """shuffle_scale_a16w4 pads K/32 to a multiple of 8, no rows, and follows the turns of the weight's."""
    scale = random_bytes(3 * 64, 12)
    full = torch.nn.functional.pad(scale, (0, 4), value=127)
    order = (
        full.view(3, 2, 2, 16, 2, 2, 4).permute(0, 2, 4, 6, 3, 5, 1)
        if gate_up
        else full.view(3, 2, 2, 16, 2, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)
    )
    for shuffled in (shuffle.shuffle_scale_a16w4(scale, 3, gate_up), shuffle.moe_shuffle_scale(scale, 3, True, gate_up)):
        assert torch.equal(shuffled.plain, order.reshape(full.shape))


def test_scales_without_an_order():
    """None and float32 scales pass through; e8m0 ones have AITER's order."""
    scale = random_bytes(32, 8)
    assert shuffle.shuffle_scale(None) is None and shuffle.moe_shuffle_scale(None) is None
    assert shuffle.shuffle_scale(scale.float()).dtype is torch.float32
    assert torch.equal(shuffle.shuffle_scale(scale).plain, tunedgemm.shuffle_scale(scale).plain)


@listed(
    ("call", "match"),
    [
        (lambda x: shuffle.shuffle_weight_NK(x, 16, 64, use_int4=True), "no int4"),
        (lambda x: shuffle.shuffle_weight_NK(x, 24, 64), "64 lanes that divide"),
        (lambda x: shuffle.shuffle_weight_NK(x, 16, 96), r"K must be divisible by 96 .got 128."),
        (lambda x: shuffle.shuffle_scale(x[0], None, True), "experts_cnt=None"),
        (lambda x: shuffle.shuffle_scale(x[0], 4, True), "a multiple of 32"),
    ],
)
def test_sizes_that_do_not_fit(call, match):
    """The error names what was given."""
    with pytest.raises(OperandError, match=match):
        call(random_bytes(3, 64, 128))
