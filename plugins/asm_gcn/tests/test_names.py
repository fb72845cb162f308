"""Test configurations of generated kernels, their registers and predicted costs."""

import itertools

import attrs
import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_asm_gcn.frame import frame_of
from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.registers import MOST, Reg, Registers
from tunedgemm_asm_gcn.resources import TARGETS
from tunedgemm_asm_gcn.space import CONFIGS, enumerate_configs

GOOD = KernelConfig("gfx942", 64, 128, 2, 2)


def test_names_are_distinct_and_complete():
    """Each name identifies one kernel of an architecture."""
    assert GOOD.name == "tunedgemm_bf16_64x128_pf2"
    assert attrs.evolve(GOOD, shuffled=True, waves_m=1, split=True).name == "tunedgemm_bf16_64x128_bshuffle_pf2_splitk"
    for gfx in TARGETS:
        names = [config.name for config in enumerate_configs(gfx)]
        assert len(set(names)) == len(names) > 30


def test_tiles_reach_from_small_to_large(failing):
    """Both kinds of weight have tiles from 32x64 to 256x256, small ones also with split-K."""

    def check(gfx):
        for shuffled in (False, True):
            tiles = {
                (config.tile_m, config.tile_n) for config in enumerate_configs(gfx) if config.shuffled == shuffled and not config.split
            }
            assert {(32, 64), (64, 64), (128, 128), (256, 256)} <= tiles
            split = {(config.tile_m, config.tile_n) for config in enumerate_configs(gfx) if config.shuffled == shuffled and config.split}
            assert {(32, 64), (64, 64), (128, 128)} <= split < tiles

    assert not failing(check, itertools.product(TARGETS))


def test_impossible_kernels_are_refused(failing):
    """Impossible configurations raise with the reason."""

    def check(change, word):
        with pytest.raises(PluginError, match=word):
            attrs.evolve(GOOD, **change)

    assert not failing(
        check,
        [
            ({"gfx": "gfx90a"}, "gfx90a"),
            ({"tile_m": 80, "waves_m": 1}, "the 32 rows"),
            ({"tile_n": 80}, "share the tile"),
            ({"tile_m": 48}, "share the tile"),
            ({"waves_m": 3}, "share the tile"),
            ({"prefetch": 0}, "prefetch must be at least 1"),
            ({"tile_m": 512, "tile_n": 256}, "98304 bytes of LDS"),
        ],
    )


def test_registers_run_out():
    """A configuration that needs too many registers raises."""
    with pytest.raises(PluginError, match="file v: "):
        frame_of(KernelConfig("gfx942", 256, 128, 1, 8, shuffled=True))
    given = Registers()
    with pytest.raises(PluginError, match="exceed 102"):
        given("s", MOST["s"] + 1)


def test_groups_of_registers_are_aligned():
    """Vector groups start at even registers, buffer descriptors at multiples of four."""
    given = Registers()
    assert given("v") == Reg("v", 0)
    assert given("v", 4) == Reg("v", 2, 4)
    assert given("s", 3) == Reg("s", 0, 3)
    assert given("s", 4) == Reg("s", 4, 4)
    assert str(Reg("v", 2, 4)[1:3]) == "v[3:4]"
    assert str(Reg("a", 2, 4)[3]) == "a5"


def test_a_kernel_fits(failing):
    """A kernel fits registers and LDS, and its parts do not overlap."""

    def check(config):
        f = frame_of(config)
        parts = [f.offset_a, f.offset_b, *f.staged, *f.blocks_a, *f.blocks_b, *f.read_a, *f.read_b, f.lane, f.accumulators, f.arguments]
        parts += [f.from_a, f.from_b, f.spare, f.write, f.steps, f.tile, f.part, f.at_m, f.at_n, f.wave_m, f.wave_n, f.kernarg]
        units = [unit for part in parts for unit in part.units]
        assert len(set(units)) == len(units)
        assert config.lds_bytes <= config.target.lds_bytes
        assert f.given.taken["v"] <= 256
        assert f.accumulators.count == 4 * config.blocks <= 256

    assert not failing(check, itertools.product(CONFIGS))
