"""Check names of Composable Kernel's instances in both directions."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_ck.xdl.moe.names import EXAMPLE, parse_moe
from tunedgemm_ck.xdl.names import parse_name

ROWWISE = "a8w8_rowwise_256x128x64x128_32x32_2x1_8x32x1_8x32x1_1x32x1x8_8x8x1_1x1_intrawave_v3"
SHUFFLED = "a8w8_bpreshuffle_256x128x128x128_16x16_16x16_8x32x1_8x32x1_1x32x1x8_8x8x1_2x1_intrawave_v3"
BLOCKSCALE = "a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1"


def test_a_name_determines_its_instance() -> None:
    """What a name omits follows from the rest."""
    rowwise, shuffled = parse_name(ROWWISE, "a8w8"), parse_name(SHUFFLED, "a8w8_bpreshuffle")
    assert (rowwise.a_k1, rowwise.b_k1, rowwise.per_wave, rowwise.waves) == (16, 16, (2, 1), (2, 2))
    assert (shuffled.per_wave, shuffled.waves) == ((8, 2), (1, 4))
    assert parse_name(BLOCKSCALE, "a8w8_blockscale").scale == (1, 128, 128)


def test_a_bad_name_is_refused_by_the_part_that_is_wrong() -> None:
    """An invalid name raises PluginError that names the part."""
    cases = [
        ("a8w8", "", "names look like a8w8_rowwise_"),
        ("a8w8", SHUFFLED, "names look like a8w8_rowwise_"),
        ("a8w8", ROWWISE.removesuffix("_v3"), "names look like"),
        ("a8w8", ROWWISE.replace("_v3", "_v6"), "pipeline"),
        ("a8w8", ROWWISE.replace("_v3", "_w3"), "names look like"),
        ("a8w8", ROWWISE.replace("intrawave", "outrawave"), "scheduler"),
        ("a8w8", ROWWISE.replace("32x32_", "32x16_"), "xdl"),
        ("a8w8", ROWWISE.replace("256x128x64x128", "256x0x64x128"), "tile"),
        ("a8w8", ROWWISE.replace("256x128x64x128", "256x120x64x128"), "tile"),
        ("a8w8", ROWWISE.replace("256x128x64x128", "256x128x64"), "names look like"),
        ("a8w8", ROWWISE.replace("_8x32x1_8x32x1", "_8x32x1_8x48x1"), "b_cluster"),
        ("a8w8", ROWWISE.replace("1x32x1x8", "1x48x1x8"), "c_cluster"),
        ("a8w8", ROWWISE.replace("_1x1_intrawave", "_3x1_intrawave"), "shuffle"),
        ("a8w8_bpreshuffle", SHUFFLED.replace("_2x1_", "_16x1_"), "tile"),
        ("a8w8_blockscale", BLOCKSCALE.replace("1x128x128", "1x128x96"), "scale"),
        ("a8w8_blockscale", BLOCKSCALE + "_v1", "names look like"),
        ("fmoe", ROWWISE, "no instances of op 'fmoe'"),
    ]
    for op, name, part in cases:
        with pytest.raises(PluginError, match=part):
            parse_name(name, op)


def test_an_instance_of_a_block_that_cannot_be_is_refused() -> None:
    """An instance checks itself, however it is constructed."""
    with pytest.raises(PluginError, match="tile"):
        attrs.evolve(parse_name(ROWWISE, "a8w8"), m=96)


def test_stages_of_a_mixture_of_experts_are_read_strictly() -> None:
    """A stage's name is written back as read; a changed word is refused by its part."""
    cases = [
        ("gemm1", "gemm3", "no kernel"),
        ("silu", "relu", "activation"),
        ("MulABScale", "Add", "epilogue"),
        ("1x4", "1x2", "waves"),
        ("256x32x64x128", "256x32x64x0", "tile"),
        ("B16", "B8", "dtypes"),
    ]
    for text, changed, part in cases:
        assert parse_moe(EXAMPLE).name == EXAMPLE
        with pytest.raises(PluginError, match=part):
            parse_moe(EXAMPLE.replace(text, changed))
