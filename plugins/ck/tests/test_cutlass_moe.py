"""Check fmoe by CUTLASS: limits, pairs of instances and their order, sources of both stages."""

from __future__ import annotations

import itertools
import re
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm_ck.cutlass import FAMILY
from tunedgemm_ck.cutlass.moe import limits, space
from tunedgemm_ck.cutlass.names import CutlassInstance
from tunedgemm_ck.names import Stages
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.stages import split_stages

HOPPER = Device("sm_90", 132)
#: Factors of each kind.
FACTORS = [(kind, q_dtype) for kind, q_dtypes in limits._DTYPES.items() for q_dtype in q_dtypes]


def _shape(m: int, n: int, k: int, experts: int = 8, topk: int = 2, kind: str = "No", q_dtype: str = "bf16", **fields: Any) -> Shape:
    extra = {"expert": experts, "topk": topk, "act": "silu", "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": kind}
    dtype = q_dtype if kind == "No" else "bf16"
    return Shape("fmoe", m, n, k, dtype, dtype, extra={**extra, "g1u1": True, "doweight_stage1": False}, **fields)


SHAPES = st.builds(
    lambda m, n, k, experts, topk, factors: _shape(m, 16 * n, 16 * k, experts, min(topk, experts), *factors),
    st.integers(1, 10000),
    st.integers(1, 500),
    st.integers(1, 500),
    st.integers(1, 300),
    st.integers(1, 10),
    st.sampled_from(FACTORS),
)


def test_both_stages_share_24_instances_at_most() -> None:
    """All shapes together need at most 24 instances, and each shape has 4 to 16 pairs."""
    for factors in FACTORS:
        listed = set()
        for m, (n, k), (experts, topk) in itertools.product((1, 16, 300, 8192), ((7168, 256), (2048, 768)), ((8, 2), (256, 8))):
            pairs = list(space.enumerate_instances(_shape(m, n, k, experts, topk, *factors), HOPPER, False))
            assert 4 <= len(pairs) <= 16
            listed |= {stage for stages, _ in pairs for stage in (stages.first, stages.second)}
        assert 6 <= len(listed) <= 24
        assert listed <= set(space.listed_instances(*factors, False))


@given(SHAPES)
@settings(max_examples=60, deadline=None)
def test_every_listed_pair_fits_and_is_listed_once(shape: Shape) -> None:
    """Listed pairs are unique, fit, have rising costs, and are rebuilt from their names."""
    listed = list(FAMILY.enumerate_instances(shape, HOPPER, False))
    assert bool(listed) == (FAMILY.unsupported(shape, HOPPER) is None)
    assert len(set(listed)) == len(listed)
    assert not [chosen for chosen in listed if FAMILY.unfit(*chosen, shape, HOPPER)]
    costs = [space.cost_of_stages(stages, shape, HOPPER) for stages, _ in listed]  # type: ignore[arg-type]
    assert costs == sorted(costs)
    assert [FAMILY.parse(stages.name, "fmoe") for stages, _ in listed] == [stages for stages, _ in listed]


def test_few_rows_an_expert_get_swapped_operands_first_and_many_get_large_tiles() -> None:
    """Few rows per expert get swapped operands first, and many get large tiles."""
    for factors in FACTORS:
        few, _ = next(iter(space.enumerate_instances(_shape(4, 7168, 2048, 256, 8, *factors), HOPPER, False)))
        assert all(stage.swap and stage.tile_n == 16 for stage in (few.first, few.second))  # type: ignore[attr-defined]
        many, _ = next(iter(space.enumerate_instances(_shape(16384, 4096, 4096, 8, 2, *factors), HOPPER, False)))
        large = 64 * 128 if factors in {("per_Tensor", "fp8_e4m3fn"), ("per_Token", "fp8_e4m3fn")} else 128 * 128
        assert all(stage.tile_m * stage.tile_n >= large for stage in (many.first, many.second))  # type: ignore[attr-defined]


def test_a_stage_is_predicted_for_the_experts_that_are_hit() -> None:
    """One token hits topk experts with a row each; many tokens hit all."""
    one = limits.stage_of(_shape(1, 7168, 256, 256, 8), 1)
    assert (one["B"], one.m, one.n, one.k) == (8, 1, 512, 7168)
    all_ = limits.stage_of(_shape(4096, 7168, 256, 256, 8), 2)
    assert (all_["B"], all_.m, all_.n, all_.k) == (256, 128, 7168, 256)


def test_the_full_space_has_each_instance_in_a_pair() -> None:
    """The full space pairs each instance of both stages with the best of the other."""
    shape = _shape(64, 2048, 768)
    pairs = [stages for stages, _ in space.enumerate_instances(shape, HOPPER, True)]
    fitting = {each for each in space.listed_instances("No", "bf16", True) if not limits.unfit_stage(each, limits.stage_of(shape, 1))}
    assert {stages.first for stages in pairs} == {stages.second for stages in pairs} == fitting
    assert len(fitting) > 50


@given(SHAPES)
@settings(max_examples=20, deadline=None)
def test_neighbours_change_one_stage(shape: Shape) -> None:
    """Each neighbour fits, differs, and shares one stage."""
    for stages, split in list(FAMILY.enumerate_instances(shape, HOPPER, False))[:2]:
        found = [near for near, _ in FAMILY.enumerate_neighbours(stages, split, shape, HOPPER)]
        assert len(set(found)) == len(found) > 1
        assert stages not in found
        assert not [near for near in found if FAMILY.unfit(near, 0, shape, HOPPER)]
        assert all((near.first == stages.first) != (near.second == stages.second) for near in found)  # type: ignore[attr-defined]


def test_refusals_have_reasons() -> None:
    """A refused shape has a reason."""
    cases = [
        (_shape(4, 128, 64), "sm_80", "fmoe needs sm_90 (got sm_80)"),
        (_shape(4, 128, 64), "gfx942", "fmoe needs sm_90 (got gfx942)"),
        (_shape(4, 128, 64, kind="per_1x32", q_dtype="fp4x2"), "sm_90", "(got per_1x32); sm_90 has no fp4"),
        (_shape(4, 128, 64, kind="per_Token", q_dtype="fp8_e4m3fnuz"), "sm_90", "must be fp8_e4m3fn or int8 (got fp8_e4m3fnuz)"),
        (_shape(4, 128, 64, layout="aiter16x16"), "sm_90", "(got layout aiter16x16)"),
        (_shape(4, 132, 64), "sm_90", "multiples of 8 with factors of 2 bytes (got 132 and 64)"),
        (_shape(4, 128, 72, kind="per_Token", q_dtype="int8"), "sm_90", "multiples of 16 with factors of 1 bytes (got 128 and 72)"),
        (_shape((1 << 31) - 8, 128, 64), "sm_90", "tokens * topk"),
        (_shape(4, 1 << 19, 1 << 19), "sm_90", "an operand or an intermediate may have"),
    ]
    for shape, gfx, reason in cases:
        assert reason in FAMILY.unsupported(shape, Device(gfx, 100))


def test_the_reason_names_the_unfit_stage() -> None:
    """The reason for a pair that does not fit names the stage."""
    cases = [
        ({"scheduler": "streamk", "schedule": "cooperative"}, 0, "(got cooperative with streamk)"),
        ({"scheduler": "single", "schedule": "plain"}, 0, "(got plain with single)"),
        ({"tile_k": 32}, 0, "tile_k must be 64 or 128 for bf16"),
        ({}, 2, "splitK of fmoe must be 0 or 1"),
    ]
    for changed, split, reason in cases:
        shape, good = _shape(64, 2048, 768), CutlassInstance(128, 128, 64)
        bad = attrs.evolve(good, **changed)
        for place, stages in enumerate((Stages(bad, good), Stages(good, bad)), start=1):
            answer = FAMILY.unfit(stages, split, shape, HOPPER)
            assert reason in answer
            assert split or answer.startswith(f"stage {place}: ")


def test_block_scales_need_their_tiles() -> None:
    """Block scales need 128 rows of the weight along either side of the tile."""
    shape, good = _shape(64, 2048, 768, kind="per_1x128", q_dtype="fp8_e4m3fn"), CutlassInstance(128, 16, 128, swap=True)
    assert FAMILY.unfit(Stages(good, good), 0, shape, HOPPER) is None
    assert "128 rows of the weight" in FAMILY.unfit(Stages(good, attrs.evolve(good, swap=False)), 0, shape, HOPPER)


def test_names_of_other_kernels_are_refused() -> None:
    """A name of one stage or with an unknown stage is refused."""
    good = CutlassInstance(128, 128, 64).name
    for name, reason in ((good, "names of two stages"), (f"{good}+other", "no kernel 'other' for fmoe")):
        with pytest.raises(PluginError, match=reason):
            FAMILY.parse(name, "fmoe")


def test_sources_are_complete_and_distinct() -> None:
    """Both sources of each listed instance are complete and distinct."""
    for factors in FACTORS:
        texts, listed = set(), space.listed_instances(*factors, False)
        for instance in listed:
            for stage, problem in split_stages(Stages(instance, instance), problem_of(_shape(4, 128, 64, 8, 2, *factors), "sm_90")):
                text = FAMILY.render(stage, problem)
                included = re.findall(r'#include ["<]([^">]+)[">]', text)
                assert included[:3] == ["moe_call.h", "moe.h", "moe_kernels.h"]
                assert all(name.startswith(("cutlass/", "cute/")) or "/" not in name for name in included[3:])
                assert (
                    text.count("TUNED_GEMM_EXPORT int64_t tunedgemm_workspace") == text.count("TUNED_GEMM_EXPORT int tunedgemm_launch") == 1
                )
                assert f"int stage = {problem.stage};" in text
                assert ("FP8BlockScaledAccum;" in text) == (factors[0] == "per_1x128")
                assert "FastAccum" not in text
                texts.add(text)
        assert len(texts) == 2 * len(listed)
