"""Check that CUTLASS's sources are reproducible, complete and distinct."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import attrs
from tunedgemm_ck import toolchain
from tunedgemm_ck.cutlass import FAMILY
from tunedgemm_ck.cutlass.names import CutlassInstance, parse_name
from tunedgemm_ck.cutlass.space import listed_instances
from tunedgemm_ck.cutlass.template import render
from tunedgemm_ck.problem import Problem

#: The folder of headers in the environment; "" for those of the wheel.
INCLUDE = os.environ.get(toolchain.CUTLASS_INCLUDE, "")
PLAIN = Problem("a16w16", "sm_90", "bf16", "bf16")
SCALED = Problem("a8w8", "sm_90", "fp8_e4m3fn", "fp16", "fp32", "row")
BLOCKS = Problem("a8w8_blockscale", "sm_90", "fp8_e4m3fn", "bf16", scale="block")
WIDE = CutlassInstance(128, 256, 64, (2, 1))


def test_sources_are_the_same_in_another_process() -> None:
    """Another process renders the same text, which is the cache key."""
    code = (
        "from tunedgemm_ck.cutlass.names import parse_name; from tunedgemm_ck.cutlass.template import render; "
        "from tunedgemm_ck.problem import Problem; "
        f"print(render(parse_name({WIDE.name!r}, 'a16w16'), Problem('a16w16', 'sm_90', 'bf16', 'bf16')), end='')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout == render(WIDE, PLAIN)


def test_sources_are_whole() -> None:
    """Sources include only call.h, CUTLASS and C++ headers, and have both functions."""
    for instance in [*listed_instances("sm_90", "bf16", False, False), *listed_instances("sm_80", "bf16", False, False)]:
        problem = Problem("a16w16", "sm_80" if instance.warps[0] else "sm_90", "bf16", "bf16")
        text = FAMILY.render(instance, problem)
        included = re.findall(r'#include ["<]([^">]+)[">]', text)
        assert included[0] == "call.h"
        assert all(name.startswith(("cutlass/", "cute/")) or "/" not in name for name in included[1:])
        assert {name for name in included[1:] if "/" not in name} <= {"array", "atomic", "cstdint", "cstring", "new", "type_traits"}
        assert text.count("TUNED_GEMM_EXPORT int64_t tunedgemm_workspace") == 1
        assert text.count("TUNED_GEMM_EXPORT int tunedgemm_launch") == 1


def test_sources_are_distinct() -> None:
    """No two pairs of instance and problem share a source."""
    problems = [PLAIN, Problem("a16w16", "sm_90", "fp16", "bf16"), Problem("a16w16", "sm_90", "bf16", "fp32"), SCALED, BLOCKS]
    problems += [attrs.evolve(BLOCKS, m_major=True)]
    problems += [Problem("a16w16", "sm_90", "bf16", "bf16", "fp32"), Problem("batched_bf16", "sm_90", "bf16", "bf16")]
    texts = {render(instance, problem) for instance in listed_instances("sm_90", "bf16", False, True) for problem in problems}
    assert len(texts) == len(listed_instances("sm_90", "bf16", False, True)) * len(problems)


def test_sources_state_the_problem_and_the_instance() -> None:
    """Types, scales, tile and schedule are in the source."""
    text = render(parse_name("128x64x128_1x1_cooperative_streamk_swap_r1", "a8w8"), SCALED)
    for said in (
        "using Input = cutlass::float_e4m3_t;",
        "using Output = cutlass::half_t;",
        "using Bias = float;",
        "scale = Scale::row;",
        "Shape<cute::Int<128>, cute::Int<64>, cute::Int<128>>",
        "cutlass::gemm::KernelTmaWarpSpecializedCooperative;",
        "cutlass::gemm::StreamKScheduler;",
        "swap = true;",
    ):
        assert said in text
    assert "using Bias = void;" in render(WIDE, PLAIN)
    assert "KernelTmaWarpSpecializedPingpongFP8BlockScaledAccum;" in render(
        parse_name("128x16x128_1x1_pingpong_persistent_swap_r1", ""), BLOCKS
    )


def test_blackwell_has_the_same_sources_with_its_architecture() -> None:
    """Sources of Blackwell name its architecture and the tile of a pair; those of Hopper do not."""
    pair, one = CutlassInstance(128, 64, 128, (2, 1), "2sm"), CutlassInstance(128, 64, 128)
    cases = [
        (pair, "sm_100", "row", "cutlass::arch::Sm100;", "KernelTmaWarpSpecialized2SmSm100;", 256),
        (pair, "sm_103", "block", "cutlass::arch::Sm100;", "KernelTmaWarpSpecializedBlockwise2SmSm100;", 256),
        (one, "sm_120", "row", "cutlass::arch::Sm120;", "KernelTmaWarpSpecializedCooperative;", 128),
        (one, "sm_121", "block", "cutlass::arch::Sm120;", "KernelTmaWarpSpecializedBlockwiseCooperativeSm120;", 128),
    ]
    for instance, gfx, scale, *said, rows in cases:
        text = render(instance, attrs.evolve(SCALED, gfx=gfx, scale=scale, m_major=scale == "block"))
        assert all(f" = {each}" in text for each in (said[0], f"cutlass::gemm::{said[1]}"))
        assert f"MmaTile = cute::Shape<cute::Int<{rows}>, cute::Int<64>" in text
        assert "Tile = cute::Shape<cute::Int<128>, cute::Int<64>" in text
        assert "cutlass::arch::Sm90" not in text
    hopper = render(one, SCALED)
    assert hopper.count("cutlass::arch::Sm90") == 2
    assert "instance::Arch" not in hopper
    assert "MmaTile" not in hopper


def test_tiles_of_further_columns_are_compiled_with_their_instructions() -> None:
    """Only tiles that need extended shapes are compiled with them."""
    for columns, further in [(128, False), (160, True), (192, False), (224, True), (80, True)]:
        assert ("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED" in FAMILY.flags(CutlassInstance(128, columns, 64), PLAIN)) == further


def test_fast_accumulation_is_that_of_fast_instances() -> None:
    """Only fast instances use fast accumulation."""
    every = listed_instances("sm_90", "fp8_e4m3fn", False, True, True)
    assert all(("FP8FastAccum;" in render(instance, SCALED)) == instance.fast for instance in every)
    assert {instance.schedule for instance in every if instance.fast} == {"cooperative", "pingpong", "plain"}
