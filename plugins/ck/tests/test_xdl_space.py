"""Check spaces and limits of Composable Kernel's instances."""

from __future__ import annotations

import re

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.tile import FAMILY as TILE
from tunedgemm_ck.xdl import FAMILY
from tunedgemm_ck.xdl.names import FORMS, parse_name
from tunedgemm_ck.xdl.space import listed_instances

MI300X, MI355X, MI250X = Device("gfx942", 304), Device("gfx950", 256), Device("gfx90a", 104)


def shape_of(op: str, m: int, n: int, k: int, gfx: str = "gfx942") -> Shape:
    """Return a shape of AITER's row of *op*, in the fp8 of an architecture."""
    row = {"M": str(m), "N": str(n), "K": str(k), "B": "4", "q_dtype_w": "fp8_e4m3fnuz", "bpreshuffle": "False"}
    shape = op_named(op).columns.parse(row)
    fp8 = "fp8_e4m3fn" if gfx == "gfx950" else "fp8_e4m3fnuz"
    return attrs.evolve(shape, dtype=fp8 if shape.dtype.startswith("fp8") else shape.dtype)


def test_listed_instances_fit_and_are_unique() -> None:
    """Listed instances fit, are unique, and are at most 24 by default."""
    for op in sorted(FORMS):
        for m in [1, 17, 4096]:
            for full in [False, True]:
                device = MI355X if op == "a4w4_blockscale" else MI300X
                shape = shape_of(op, m, 7168 if op != "a4w4_blockscale" else 3072, 4096, device.gfx)
                assert FAMILY.unsupported(shape, device) is None
                offered = list(FAMILY.enumerate_instances(shape, device, full))
                assert offered
                assert len(set(offered)) == len(offered)
                assert len({instance for instance, _ in offered}) <= (len(listed_instances(op)) if full else 24)
                assert all(FAMILY.unfit(instance, split, shape, device) is None for instance, split in offered)
                assert set(FAMILY.enumerate_instances(shape, device, False)) <= set(FAMILY.enumerate_instances(shape, device, True))


def test_few_rows_get_low_tiles_and_splits_first() -> None:
    """Few rows get low tiles first, many get large ones, and only idle units bring splits."""
    few, many = (list(FAMILY.enumerate_instances(shape_of("a8w8", m, 4096, 8192), MI300X, False)) for m in (1, 8192))
    assert few[0][0].m <= 32
    assert many[0][0].m * many[0][0].n >= 128 * 128
    assert any(split for _, split in few)
    assert not any(split for _, split in many)


def test_refused_shapes_have_reasons() -> None:
    """A refused shape has a reason."""
    cases = [
        ("a16w16", Device("gfx1100", 96), {}, "gfx90a, gfx942, gfx950"),
        ("a16w16", MI300X, {"dtype": "fp32"}, "operands in bf16, fp16"),
        ("a16w16", MI300X, {"outdtype": "fp32"}, "output in bf16 or fp16"),
        ("a16w16", MI300X, {"layout": "aiter16x16"}, "layout row"),
        ("a16w16", MI300X, {"k": 4095}, "K must be a multiple of 8"),
        ("a16w16", MI300X, {"n": 7167}, "N must be a multiple of"),
        ("a16w16", MI300X, {"m": 1 << 20, "k": 1 << 12}, "2147483648 bytes"),
        ("a8w8", MI250X, {"dtype": "fp8_e4m3fnuz"}, "on gfx90a"),
        ("a8w8", MI300X, {"dtype": "fp8_e4m3fn"}, "on gfx942"),
        ("a8w8", MI300X, {"scale": "tensor"}, "scales of kind row"),
        ("a8w8_bpreshuffle", MI300X, {"layout": "row"}, "layout aiter16x16"),
        ("a8w8_bpreshuffle", MI300X, {"n": 7172}, "N must be a multiple of|not padded"),
        ("a8w8_blockscale", MI300X, {"k": 4112}, "multiple of 128"),
        ("a4w4_blockscale", MI300X, {}, "on gfx942"),
    ]
    for op, device, fields, reason in cases:
        base = {"dtype": "int8"} if op == "a8w8" else {}
        shape = attrs.evolve(shape_of(op, 64, 7168, 4096, device.gfx), **{**base, **fields})
        assert re.search(reason, FAMILY.unsupported(shape, device))


def test_a_bias_is_not_added_by_each_part_of_k() -> None:
    """A split of K with a bias does not fit."""
    instance = listed_instances("a16w16")[0]
    shape = shape_of("a16w16", 16, 4096, 8192)
    biased = attrs.evolve(shape, epilogue="bias", bias_dtype="bf16")
    assert FAMILY.unfit(instance, 1, shape, MI300X) is None
    assert FAMILY.unfit(instance, 0, biased, MI300X) is None
    assert "bias" in FAMILY.unfit(instance, 1, biased, MI300X)
    assert "atomic" in FAMILY.unfit(instance, 1, shape, MI250X)
    assert "logarithm" in FAMILY.unfit(instance, 9, shape, MI300X)
    assert (FAMILY.deterministic(instance, 0), FAMILY.deterministic(instance, 1)) == (True, False)


def test_a_pipeline_needs_more_tiles_than_are_in_flight() -> None:
    """K, and each part of it, needs more tiles than the pipeline has in flight."""
    cases = [
        ("a8w8", "a8w8_rowwise_256x16x64x512_16x16_1x1_32x8x1_32x8x1_1x16x1x16_4x4x1_1x1_intrawave_v3", 2),
        ("a8w8", "a8w8_rowwise_64x16x16x64_16x16_1x1_4x16x1_4x16x1_1x16x1x4_4x4x1_1x1_interwave_v2", 4),
        ("a8w8_bpreshuffle", "a8w8_bpreshuffle_128x16x32x512_16x16_16x16_32x4x1_32x4x1_1x16x1x8_4x4x1_1x1_intrawave_v2", 3),
    ]
    for op, name, most in cases:
        instance = parse_name(name, op)
        short, enough = (shape_of(op, 16, 4096, tiles * instance.k) for tiles in (most, most + 1))
        assert f"more than {most} tiles" in FAMILY.unfit(instance, 0, short, MI300X)
        assert FAMILY.unfit(instance, 0, enough, MI300X) is None
        assert "tiles" in FAMILY.unfit(instance, 1, enough, MI300X)


def test_a_device_op_without_parts_takes_any_split() -> None:
    """blockscale_bpreshuffle ignores splitK, which therefore fits and changes no bits."""
    instance = listed_instances("a8w8_blockscale_bpreshuffle")[0]
    shape = shape_of("a8w8_blockscale_bpreshuffle", 16, 4096, 8192)
    assert FAMILY.unfit(instance, 3, shape, MI300X) is None
    assert FAMILY.deterministic(instance, 3)
    assert {split for _, split in FAMILY.enumerate_instances(shape, MI300X, True)} == {0}


def test_neighbours_fit_and_differ() -> None:
    """Neighbours fit and differ from the instance, and some are not listed."""
    for op in sorted(FORMS):
        device = MI355X if op == "a4w4_blockscale" else MI300X
        shape = shape_of(op, 256, 3072, 4096, device.gfx)
        fresh = False
        for instance, split in FAMILY.enumerate_instances(shape, device, True):
            neighbours = list(FAMILY.enumerate_neighbours(instance, split, shape, device))
            assert (instance, split) not in neighbours
            assert len(set(neighbours)) == len(neighbours) > 0
            assert all(FAMILY.unfit(other, parts, shape, device) is None for other, parts in neighbours)
            assert all(parse_name(other.name, op) == other for other, _ in neighbours)
            fresh = fresh or any(other not in listed_instances(op) for other, _ in neighbours)
        assert fresh or op == "a4w4_blockscale"


def test_scales_of_x_are_row_major() -> None:
    """Composable Kernel's and CK Tile's instances refuse M-major scales, with the reason."""
    shape = attrs.evolve(shape_of("a8w8_blockscale", 61, 256, 512), extra={"scale_order": "m_major"})
    for family in (FAMILY, TILE):
        assert "accepts scales of x that are row-major (got m_major)" in str(family.unsupported(shape, MI300X))
