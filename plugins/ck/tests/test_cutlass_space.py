"""Check which instances CUTLASS lists for a shape, in which order, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm_ck.cutlass.cost import cost_of, tiles_of
from tunedgemm_ck.cutlass.kernels import KERNELS, SM80, SM90, SM100, SM120
from tunedgemm_ck.cutlass.limits import OPS, unfit, unsupported
from tunedgemm_ck.cutlass.names import CutlassInstance, parse_name
from tunedgemm_ck.cutlass.space import enumerate_instances, enumerate_neighbours, listed_instances

HOPPER, AMPERE = Device("sm_90", 132), Device("sm_80", 108)
B200, B300, RTX, GB10 = Device("sm_100", 148), Device("sm_103", 148), Device("sm_120", 188), Device("sm_121", 48)
BLACKWELL = (B200, B300, RTX, GB10, Device("sm_110", 20))


def _shape(op: str, m: int, n: int, k: int, **fields: Any) -> Shape:
    fields.setdefault("dtype", OPS[op][0][0])
    fields.setdefault("scale", OPS[op][1][0])
    fields.setdefault("outdtype", "bf16")
    fields.setdefault("extra", {"B": 3} if op.startswith("batched_") else {})
    return Shape(op, m, n, k, **fields)


SHAPES = st.builds(
    lambda op, m, n, k: _shape(op, m, 16 * n, 16 * k),
    st.sampled_from(sorted(OPS)),
    st.integers(1, 5000),
    st.integers(1, 600),
    st.integers(1, 1200),
)


def test_an_op_has_24_instances_at_most() -> None:
    """All shapes of an op together need at most 24 instances."""
    for dtype in ["bf16", "fp16", "int8", "fp8_e4m3fn"]:
        for op in sorted(OPS):
            if dtype not in OPS[op][0]:
                with_other = unsupported(_shape(op, 16, 128, 128, dtype=dtype), HOPPER)
                assert "must be" in with_other
                return
            listed = set()
            for m, n, k in itertools.product((1, 16, 64, 200, 1024, 8192), (256, 1280, 8192), (512, 4096, 18432)):
                listed |= {instance for instance, _ in enumerate_instances(_shape(op, m, n, k, dtype=dtype), HOPPER, False)}
            assert 16 <= len(listed) <= 24


@given(SHAPES, st.sampled_from((HOPPER, AMPERE, *BLACKWELL)), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_listed_instance_fits_and_is_listed_once(shape: Shape, device: Device, full: bool) -> None:
    """Listed instances are unique, fit, and have rising costs; a supported shape has some."""
    assume(not unsupported(shape, device))
    listed = list(enumerate_instances(shape, device, full))
    assert len(set(listed)) == len(listed)
    assert not [chosen for chosen in listed if unfit(*chosen, shape, device)]
    costs = [cost_of(*chosen, shape, device) for chosen in listed]
    assert costs == sorted(costs)
    assert listed


@pytest.mark.parametrize("gfx", sorted(KERNELS))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8", "fp8_e4m3fn"])
def test_an_architecture_gets_kernels_that_it_has(gfx: str, dtype: str) -> None:
    """Kernels have the tensor core instructions of the architecture; others run those of sm_80."""
    fp8 = dtype == "fp8_e4m3fn"
    wanted = {"sm_90": SM90, "sm_100": SM100, "sm_110": SM100, "sm_103": SM80 if dtype == "int8" else SM100}.get(gfx, SM80)
    if fp8 and gfx in ("sm_120", "sm_121"):
        wanted = SM120
    assert KERNELS[gfx].get(dtype) == (None if fp8 and wanted == SM80 else wanted)
    if dtype in KERNELS[gfx]:
        every, listed = (set(listed_instances(gfx, dtype, False, full)) for full in (True, False))
        assert {each.schedule for each in every} == set(wanted.schedules)
        assert {each.cluster for each in every} == set(wanted.clusters)
        assert not [each for each in every | listed if wanted.lack(each)]
        assert 6 <= len(listed) <= 24


def test_two_blocks_multiply_one_tile_in_a_cluster() -> None:
    """Instances of two blocks are clusters of two; B200 gets them first for many rows."""
    for op in sorted(OPS):
        listed = list(enumerate_instances(_shape(op, 8192, 8192, 8192), B200, False))
        assert listed[0][0].schedule == "2sm"
        assert all((each.schedule != "2sm" or each.cluster == (2, 1)) and not each.fast for each, _ in listed)


@pytest.mark.parametrize("device", [HOPPER, B200, B300, RTX, GB10])
def test_few_rows_get_swapped_operands_first(device: Device) -> None:
    """Few rows get swapped operands first: a tile of 128 rows would be mostly empty."""
    for op in sorted(OPS):
        shape = _shape(op, 8, 4096, 4096, dtype=OPS[op][0][-1])
        if KERNELS[device.gfx][shape.dtype] != SM80:
            first, _ = next(iter(enumerate_instances(shape, device, False)))
            assert first.swap
            assert first.tile_n == (16 if device in (HOPPER, B200, B300) else 32)


@pytest.mark.parametrize("device", [HOPPER, *BLACKWELL])
def test_many_rows_get_large_tiles_first(device: Device) -> None:
    """Many rows get tiles of at least 128 x 128 first, which the tensor cores bound."""
    for op in sorted(OPS):
        first, split = next(iter(enumerate_instances(_shape(op, 8192, 8192, 8192), device, False)))
        assert first.tile_m * first.tile_n >= 128 * 128
        assert split == 0


def test_idle_multiprocessors_bring_splits() -> None:
    """Splits of K are listed only where a grid leaves multiprocessors idle."""
    short = list(enumerate_instances(_shape("a16w16", 64, 1280, 16384), HOPPER, False))
    assert {split for _, split in short} > {0}
    assert all(tiles_of(instance, _shape("a16w16", 64, 1280, 16384)) * max(split, 1) <= HOPPER.cu_num for instance, split in short if split)
    assert {split for _, split in enumerate_instances(_shape("a16w16", 8192, 8192, 8192), HOPPER, False)} == {0}


def test_a_full_wave_costs_no_more_than_one_tile_beyond_it() -> None:
    """One tile beyond a full wave costs a second wave."""
    instance = CutlassInstance(128, 128, 64)
    full, beyond = _shape("a16w16", 128 * 12, 128 * 11, 8192), _shape("a16w16", 128 * 12 + 1, 128 * 11, 8192)
    assert tiles_of(instance, full) == HOPPER.cu_num
    assert cost_of(instance, 0, beyond, HOPPER) > 1.7 * cost_of(instance, 0, full, HOPPER)


def test_neighbours_change_each_parameter() -> None:
    """From the middle of all ladders, neighbours step along each of them."""
    shape = _shape("a16w16", 2048, 2048, 8192)
    instance = CutlassInstance(128, 128, 64, (2, 1), "cooperative", "streamk")
    found = list(enumerate_neighbours(instance, 2, shape, HOPPER))
    for field in ("tile_m", "tile_n", "tile_k", "cluster", "schedule", "scheduler", "swap"):
        assert any(getattr(each, field) != getattr(instance, field) for each, _ in found), field
    assert {split for each, split in found if each == instance} == {0, 3}


def test_refusals_have_reasons() -> None:
    """A refused shape has a reason."""
    cases = [
        (_shape("a16w16", 16, 256, 100), "sm_90", "K of 8 (got K=100)"),
        (_shape("a8w8", 16, 256, 72), "sm_90", "K of 16 (got K=72)"),
        (_shape("a16w16", 16, 130, 64), "sm_90", "N of 8 (got N=130)"),
        (_shape("a16w16", 16, 130, 64, outdtype="fp32"), "sm_90", "N of 4 (got N=130)"),
        (_shape("a16w16", 16, 256, 64, dtype="fp32"), "sm_90", "must be bf16 or fp16 (got fp32)"),
        (_shape("a16w16", 16, 256, 64, scale="tensor"), "sm_90", "scales of a16w16 must be none"),
        (_shape("a16w16", 16, 256, 64, layout="aiter16x16"), "sm_90", "(got layout aiter16x16)"),
        (_shape("a16w16", 16, 256, 64, outdtype="fp64"), "sm_90", "the output must be"),
        (_shape("a8w8", 16, 256, 64, dtype="fp8_e4m3fnuz"), "sm_90", "must be int8 or fp8_e4m3fn"),
        (_shape("a8w8", 16, 256, 64, dtype="fp8_e4m3fn"), "sm_89", "must be bf16, fp16, int8 (got fp8_e4m3fn)"),
        (_shape("a8w8_blockscale", 16, 256, 256), "sm_80", "must be bf16, fp16, int8 (got fp8_e4m3fn)"),
        (_shape("a8w8_blockscale", 16, 256, 256), "sm_86", "must be bf16, fp16, int8 (got fp8_e4m3fn)"),
        (_shape("a8w8_blockscale", 16, 256, 320), "sm_120", "need N and K of 128 (got N=256, K=320)"),
        (_shape("a8w8_blockscale", 16, 192, 256), "sm_121", "need N and K of 128 (got N=192, K=256)"),
        (_shape("a16w16", 16, 256, 64), "sm_75", "(got sm_75)"),
        (_shape("a16w16", 16, 256, 64), "gfx942", "(got gfx942)"),
        (_shape("a16w16", (1 << 31) - 1, 64, 1024), "sm_90", "an operand may have"),
        (_shape("batched_bf16", 8, 64, 64, extra={"B": 70000}), "sm_90", "65535 products"),
    ]
    for shape, gfx, reason in cases:
        assert reason in unsupported(shape, Device(gfx, 100))


def test_unfit_instances_have_reasons() -> None:
    """An instance that does not fit a supported shape has a reason."""
    cases = [
        (CutlassInstance(128, 128, 32), 0, "tile_k must be 64 or 128 for bf16"),
        (CutlassInstance(128, 128, 64), 2, "splitK needs scheduler streamk"),
        (CutlassInstance(128, 128, 64, scheduler="streamk"), 33, "splitK must be in 0..32"),
        (CutlassInstance(128, 128, 64, scheduler="streamk"), 32, "fewer than 4 steps"),
        (CutlassInstance(128, 256, 128), 0, "of shared memory"),
        (
            CutlassInstance(64, 64, 32, schedule="multistage", scheduler="single", warps=(2, 2), stages=3),
            0,
            "does not have schedule multistage on sm_90",
        ),
    ]
    for instance, split, reason in cases:
        shape = _shape("a16w16", 256, 256, 4096)
        assert unsupported(shape, HOPPER) is None
        assert reason in unfit(instance, split, shape, HOPPER)


def test_a_grid_has_its_limits() -> None:
    """The grid's second axis limits blocks of one tile each, but not persistent blocks."""
    shape, plain = _shape("a16w16", 2_000_000, 256, 256), CutlassInstance(64, 16, 128, schedule="plain", scheduler="single", swap=True)
    assert "65535 tiles" in unfit(plain, 0, shape, HOPPER)
    assert unfit(CutlassInstance(64, 16, 128, schedule="pingpong", swap=True), 0, shape, HOPPER) is None


def test_blackwell_s_grids_have_a_block_for_each_tile() -> None:
    """Persistent blocks of Blackwell are limited as blocks of one tile are, and so are parts."""
    shape, batch = _shape("a16w16", 2_000_000, 256, 256), _shape("batched_bf16", 64, 256, 4096, extra={"B": 40000})
    assert "65535 tiles" in unfit(CutlassInstance(64, 16, 64, schedule="1sm", swap=True), 0, shape, B200)
    assert "parts of the batch" in unfit(CutlassInstance(128, 64, 64, schedule="1sm", scheduler="streamk"), 2, batch, B200)
    assert "parts" not in str(unfit(CutlassInstance(128, 64, 64, scheduler="streamk"), 2, batch, HOPPER))


def test_instances_of_blackwell_have_its_limits() -> None:
    """Fast sums, clusters, tiles and schedules that Blackwell lacks have a reason."""
    fp8 = _shape("a8w8", 256, 4096, 4096, dtype="fp8_e4m3fn")
    cases = [
        (CutlassInstance(128, 128, 128, fast=True), RTX, "fast sums need fp8 on sm_90"),
        (CutlassInstance(128, 128, 128, (2, 1)), GB10, "CUTLASS does not have clusters on sm_121 for fp8_e4m3fn"),
        (CutlassInstance(128, 80, 128), RTX, "does not have a tile of 128 x 80 on sm_120"),
        (CutlassInstance(128, 128, 128), B300, "does not have schedule cooperative on sm_103 for fp8_e4m3fn"),
        (CutlassInstance(128, 128, 128, schedule="1sm"), RTX, "does not have schedule 1sm on sm_120"),
        (CutlassInstance(128, 256, 256, schedule="1sm"), B200, "of shared memory"),
    ]
    for instance, device, reason in cases:
        assert reason in unfit(instance, 0, fp8, device)
    scaled = _shape("a8w8_blockscale", 256, 4096, 4096)
    assert "sums fit registers" in unfit(CutlassInstance(128, 256, 128, schedule="1sm", swap=True), 0, scaled, B200)


def test_fp8_has_half_the_accumulators() -> None:
    """fp8 tiles have half the accumulators of int8 tiles."""
    wide = CutlassInstance(128, 256, 128)
    assert unfit(wide, 0, _shape("a8w8", 256, 4096, 4096, dtype="int8"), HOPPER) is None
    assert "exceed 64" in unfit(wide, 0, _shape("a8w8", 256, 4096, 4096, dtype="fp8_e4m3fn"), HOPPER)
    assert max(each.accumulators for each in listed_instances("sm_90", "fp8_e4m3fn", False, True)) == 64


def test_fast_sums_are_for_fp8_and_bf16() -> None:
    """Fast sums have all accumulators, and need fp8 with a bf16 output and no block scales."""
    fast, product = CutlassInstance(128, 256, 128, fast=True), _shape("a8w8", 4096, 4096, 4096, dtype="fp8_e4m3fn")
    assert unfit(fast, 0, product, HOPPER) is None
    assert {each.fast for each, _ in enumerate_instances(product, HOPPER, False)} == {False, True}
    assert len(listed_instances("sm_90", "fp8_e4m3fn", False, False, True)) == 24
    exact = [attrs.evolve(product, outdtype="fp32"), attrs.evolve(product, dtype="int8"), _shape("a8w8_blockscale", 4096, 4096, 4096)]
    for shape in exact:
        assert "fast sums need fp8" in unfit(fast, 0, shape, HOPPER)
        assert not any(each.fast for each, _ in enumerate_instances(shape, HOPPER, True))
    with pytest.raises(PluginError, match="does not support clusters, swapped operands or fast sums"):
        parse_name("128x128x32_1x1_multistage_single_w2x2_s3_fast_r1", "a8w8")


def test_block_scales_need_their_tiles() -> None:
    """Block scales need one block of the weight's rows per tile, and no plain schedule."""
    shape = _shape("a8w8_blockscale", 256, 4096, 4096)
    assert "128 rows of the weight" in unfit(CutlassInstance(128, 64, 128), 0, shape, HOPPER)
    assert "128 rows of the weight" in unfit(CutlassInstance(64, 128, 128, schedule="pingpong", swap=True), 0, shape, HOPPER)
    assert "cooperative or pingpong" in unfit(CutlassInstance(64, 128, 128, schedule="plain", scheduler="single"), 0, shape, HOPPER)
    assert unfit(CutlassInstance(128, 64, 128, swap=True), 0, shape, HOPPER) is None
    assert all(instance.tile_k == 128 for instance in listed_instances("sm_90", "fp8_e4m3fn", True, False))


def test_m_major_scales_need_whole_columns() -> None:
    """M-major scales of x are taken where TMA can load their columns: padded, or of M % 4 = 0."""
    answers = {}
    for m, order in ((62, "m_major"), (64, "m_major"), (61, "m_major_padded"), (1, "m_major_padded"), (1, "m_major")):
        answers[m, order] = unsupported(_shape("a8w8_blockscale", m, 256, 512, extra={"scale_order": order}), HOPPER)
    assert "M % 4 = 0, or padding (got M=62)" in str(answers.pop((62, "m_major")))
    assert set(answers.values()) == {None}
