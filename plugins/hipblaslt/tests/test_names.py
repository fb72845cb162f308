"""Solution names are read as written, and the sizes behind cuBLASLt's tile and cluster numbers."""

from __future__ import annotations

import itertools
import re

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_hipblaslt.names import AlgorithmIndex, KernelConfig, SolutionName, clusters, parse_name, tiles

NAMES = [
    (SolutionName(None), "heuristic"),
    (SolutionName(AlgorithmIndex(1234, 100200, "a1b2c3d4")), "sol1234_v100200_a1b2c3d4"),
    (SolutionName(AlgorithmIndex(0, 1, "2.0-dirty+local.1")), "sol0_v1_2.0-dirty+local.1"),
    (SolutionName("Cijk_Alik_Bljk_BBS_BH_MT16x16x256"), "Cijk_Alik_Bljk_BBS_BH_MT16x16x256"),
    (SolutionName("Custom_Cijk_Alik_Bljk_B"), "Custom_Cijk_Alik_Bljk_B"),
    (SolutionName(KernelConfig(66)), "id66_tile0_stages0_reduce0_swizzle0_option0_inner0_cluster0"),
    (
        SolutionName(KernelConfig(id=66, tile=20, stages=36, reduction=2, swizzle=1, option=3, inner=4, cluster=5, split_k=7)),
        "id66_tile20_stages36_reduce2_swizzle1_option3_inner4_cluster5",
    ),
]


CONFIG = NAMES[5][1]
FOREIGN = [
    "", "native", "heuristic_", "heuristic_slow", "heuristic_after_fast", "heuristic_after_after", "Heuristic",
    "sol", "sol12", "sol12_v1", "sol12_v1_", "sol-1_v1_a", "sol1_v1_a b", "sol1_vx_a",
    "id66", "id66_tile20", CONFIG + "_more1", CONFIG.replace("id66", "id"), CONFIG.replace("cluster0", "clusterx"),
    CONFIG.replace("tile0_stages0", "stages0_tile0"), CONFIG.replace("inner0", "inner-1"),
    " " + CONFIG, CONFIG + "\n", "Cijk_", "Cijk Alik", "Cijk_Alik-1",
]  # fmt: skip


def test_names_are_read_as_written() -> None:
    """A name with any suffixes is written as documented and parsed to the same value."""
    for (name, text), fast, after in itertools.product(NAMES, (False, True), (False, True)):
        full = SolutionName(name.algorithm, fast_accum=fast, bias_after=after)
        assert str(full) == text + "_fast" * fast + "_after" * after
        assert parse_name(str(full), getattr(name.algorithm, "split_k", 0)) == full


def test_no_split_is_one_part() -> None:
    """splitK 0, as most backends write it, is a split of one."""
    assert parse_name(CONFIG, 0).algorithm == KernelConfig(66, split_k=1)
    assert parse_name(CONFIG, 1).algorithm == KernelConfig(66, split_k=1)


def test_foreign_names_are_refused() -> None:
    """Any other name raises an error that quotes it and lists the accepted forms."""
    for text in FOREIGN:
        with pytest.raises(PluginError, match="use heuristic, sol…_v…_…, Cijk_… or id…_tile…_…") as error:
            parse_name(text, 1)
        assert f"got {text!r}" in str(error.value)


def test_tiles_match_the_header(header_text: str) -> None:
    """Each tile in NVIDIA's header has its number and sides; newer headers may have more."""
    enumerators = re.findall(r"CUBLASLT_MATMUL_TILE_(\d+)x(\d+)\s*=\s*(\d+)", header_text)
    header = {int(number): (int(rows), int(columns)) for rows, columns, number in enumerators}
    assert len(header) > 20
    ours = {number: sides for number, sides in tiles().items() if number in header}
    assert ours == {number: sides for number, sides in header.items() if number <= max(tiles())}


def test_clusters_match_the_header(header_text: str) -> None:
    """Each cluster shape that NVIDIA's header names has its number and sides."""
    enumerators = re.findall(r"CUBLASLT_CLUSTER_SHAPE_(\d+)x(\d+)x1\s*=\s*(\d+)", header_text)
    header = {int(number): (int(rows), int(columns)) for rows, columns, number in enumerators}
    assert len(header) > 20
    assert clusters() == {number: sides for number, sides in header.items() if number in clusters()}
    assert set(header) <= set(clusters()) or max(header) > max(clusters())


def test_tile_and_cluster_numbers() -> None:
    """Numbers are consecutive, sides are unique, and kernels of Hopper have their tiles."""
    assert list(tiles()) == list(range(1, 646))
    assert len(set(tiles().values())) == 645
    assert min(min(sides) for sides in tiles().values()) == 1
    assert list(clusters()) == list(range(2, 2 + len(clusters())))
    assert len(set(clusters().values())) == len(clusters())
    assert [tiles()[number] for number in (18, 20, 23, 24, 10)] == [(128, 64), (128, 128), (128, 256), (256, 128), (64, 8)]
    assert [clusters()[number] for number in (2, 3, 5)] == [(1, 1), (2, 1), (1, 2)]
