"""Tiles and cluster shapes against NVIDIA's header, where it is installed, and against its rule everywhere."""

from __future__ import annotations

import re

from tunedgemm_hipblaslt.names import clusters, tiles


def test_tiles_are_the_headers(text: str) -> None:
    """Each tile that the header names has its number and its sides; a newer header may name more."""
    found = re.findall(r"CUBLASLT_MATMUL_TILE_(\d+)x(\d+)\s*=\s*(\d+)", text)
    named = {int(number): (int(rows), int(columns)) for rows, columns, number in found}
    assert len(named) > 20
    ours = {number: sides for number, sides in tiles().items() if number in named}
    assert ours == {number: sides for number, sides in named.items() if number <= max(tiles())}


def test_clusters_are_the_headers(text: str) -> None:
    """Each cluster shape that the header names has its number and its sides."""
    found = re.findall(r"CUBLASLT_CLUSTER_SHAPE_(\d+)x(\d+)x1\s*=\s*(\d+)", text)
    named = {int(number): (int(rows), int(columns)) for rows, columns, number in found}
    assert len(named) > 20
    assert clusters() == {number: sides for number, sides in named.items() if number in clusters()}
    assert set(named) <= set(clusters()) or max(named) > max(clusters())


def test_numbers_follow_each_other() -> None:
    """Every number up to the last has a tile of its own, whose sides are positive."""
    assert list(tiles()) == list(range(1, 646))
    assert len(set(tiles().values())) == 645
    assert min(min(sides) for sides in tiles().values()) == 1
    assert list(clusters()) == list(range(2, 2 + len(clusters())))
    assert len(set(clusters().values())) == len(clusters())


def test_tiles_of_models() -> None:
    """Some that are known from kernels of Hopper: 128x64, 128x128, 128x256, 256x128, 64x8."""
    assert [tiles()[number] for number in (18, 20, 23, 24, 10)] == [(128, 64), (128, 128), (128, 256), (256, 128), (64, 8)]
    assert [clusters()[number] for number in (2, 3, 5)] == [(1, 1), (2, 1), (1, 2)]
