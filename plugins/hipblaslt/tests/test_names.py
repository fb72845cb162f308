"""Names of solutions: what is written is read again, and nothing else is."""

from __future__ import annotations

import itertools

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_hipblaslt.names import AlgorithmIndex, KernelConfig, SolutionName, parse

NAMES = [
    (SolutionName(None), "heuristic"),
    (SolutionName(AlgorithmIndex(1234, 100200, "a1b2c3d4")), "sol1234_v100200_a1b2c3d4"),
    (SolutionName(AlgorithmIndex(0, 1, "2.0-dirty+local.1")), "sol0_v1_2.0-dirty+local.1"),
    (SolutionName(KernelConfig(66)), "id66_tile0_stages0_reduce0_swizzle0_option0_inner0_cluster0"),
    (
        SolutionName(KernelConfig(id=66, tile=20, stages=36, reduction=2, swizzle=1, option=3, inner=4, cluster=5, split_k=7)),
        "id66_tile20_stages36_reduce2_swizzle1_option3_inner4_cluster5",
    ),
]


@pytest.mark.parametrize(("name", "text"), NAMES, ids=[text for _, text in NAMES])
@pytest.mark.parametrize(("fast", "after"), itertools.product([False, True], repeat=2))
def test_there_and_back(name: SolutionName, text: str, fast: bool, after: bool) -> None:
    """A name with any endings is written as documented and read as it was; the parts of K are a column of their own."""
    full = SolutionName(name.algorithm, fast_accum=fast, bias_after=after)
    assert str(full) == text + "_fast" * fast + "_after" * after
    assert parse(str(full), getattr(name.algorithm, "split_k", 0)) == full


def test_no_parts_are_one_part() -> None:
    """Tables hold 0 where K is not split, as the column of most backends does."""
    assert parse(NAMES[3][1], 0).algorithm == KernelConfig(66, split_k=1)
    assert parse(NAMES[3][1], 1).algorithm == KernelConfig(66, split_k=1)


@pytest.mark.parametrize(
    "text",
    [
        "", "native", "heuristic_", "heuristic_slow", "heuristic_after_fast", "heuristic_after_after", "Heuristic",
        "sol", "sol12", "sol12_v1", "sol12_v1_", "sol-1_v1_a", "sol1_v1_a b", "sol1_vx_a",
        "id66", "id66_tile20", NAMES[3][1] + "_more1", NAMES[3][1].replace("id66", "id"), NAMES[3][1].replace("cluster0", "clusterx"),
        NAMES[3][1].replace("tile0_stages0", "stages0_tile0"), NAMES[3][1].replace("inner0", "inner-1"),
        " " + NAMES[3][1], NAMES[3][1] + "\n", "Cijk_Alik_Bljk_BBS_BH_MT16x16x256",
    ],
)  # fmt: skip
def test_other_names_are_refused(text: str) -> None:
    """What is no name raises an error that quotes it and says what names look like."""
    with pytest.raises(PluginError, match="not a name of an Lt library") as error:
        parse(text, 1)
    assert repr(text) in str(error.value)
