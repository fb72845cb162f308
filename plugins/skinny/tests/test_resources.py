"""Resources of a kernel: splits, shared memory, and the reasons of unfit kernels."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_skinny.names import Rows, Tiles, Wgmma
from tunedgemm_skinny.resources import per_split, unfit


@pytest.mark.cases(
    ("kernel", "splits", "shape", "gfx", "reason"),
    [
        (Rows(1, 1, 1, 1), 1, Shape("a16w16", 9, 64, 64), "sm_90", "M must be at most 8 (got 9)"),
        (Rows(1, 1, 1, 1), 65, Shape("a16w16", 1, 64, 1 << 20), "sm_90", "splitK must be in 0..64 (got 65)"),
        (Rows(1, 1, 1, 1), 2, Shape("a16w16", 1, 64, 256), "sm_90", "a step of 256 of K=256 (got 2)"),
        (Rows(1, 1, 1, 1), 2, Shape("a16w16", 1, 64, 512), "gfx942", "a step of 512 of K=512 (got 2)"),
        (Tiles(1, 1, 1, 2), 3, Shape("a16w16", 1, 64, 128), "sm_90", "a step of 64 of K=128 (got 3)"),
        (
            Tiles(4, 4, 4, 1),
            1,
            Shape("a16w16", 64, 4096, 4096),
            "sm_90",
            "shared memory on sm_90 must be at most 232448 bytes (got 266240)",
        ),
        (Tiles(1, 1, 1, 1, cluster=True), 9, Shape("a16w16", 4, 64, 4096), "sm_90", "splitK of a cluster must be in 2..8 (got 9)"),
        (Rows(1, 1, 1, 1, cluster=True), 1, Shape("a16w16", 4, 64, 4096), "sm_90", "splitK of a cluster must be in 2..8 (got 1)"),
        (Rows(1, 1, 1, 1, cluster=True), 2, Shape("a16w16", 4, 64, 4096), "sm_80", "clusters need sm_90 or later (got sm_80)"),
        (Wgmma(1, 1, 1, 1), 1, Shape("a16w16", 4, 64, 4096), "sm_100", "wgmma needs sm_90 (got sm_100)"),
        (Wgmma(1, 1, 1, 1), 1, Shape("a16w16", 4, 64, 4095), "sm_90", "need K in multiples of 2 (got K=4095)"),
        (Wgmma(2, 4, 1, 4, 4), 1, Shape("a16w16", 4, 64, 4096), "sm_90", "shared memory on sm_90 must be at most"),
        (Rows(1, 1, 1, 1, True), 1, Shape("a16w16", 8, 4096, 16384), "sm_90", "shared memory"),
        (Rows(1, 1, 1, 1, stages=2), 1, Shape("a16w16", 1, 64, 64), "gfx942", "asynchronous copies need an NVIDIA GPU (got gfx942)"),
        (Tiles(1, 1, 1, 1, stages=2), 1, Shape("a16w16", 1, 64, 63), "sm_90", "K in multiples of 2 (got K=63)"),
        (Tiles(1, 1, 1, 1, stages=2), 1, Shape("a8w8", 1, 64, 66, dtype="int8", scale="row"), "sm_90", "K in multiples of 4 (got K=66)"),
        (
            Rows(1, 1, 1, 1),
            1,
            Shape("a8w8_blockscale", 1, 64, 256, dtype="fp8", scale="block"),
            "sm_90",
            "sums all of K before scaling (got block scales)",
        ),
    ],
)
def test_an_unfit_kernel_has_a_reason(kernel: Rows | Tiles, splits: int, shape: Shape, gfx: str, reason: str) -> None:
    """The reason of an unfit kernel has the wrong value and the limit."""
    assert reason in (unfit(kernel, splits, shape, gfx) or "")


def test_splits_share_k_in_whole_spans() -> None:
    """All splits but the last have the same whole number of spans."""
    kernel = Rows(1, 1, 2, 4)
    even = Shape("a16w16", 1, 64, 8192)
    assert [per_split(kernel, splits, even, "sm_90") for splits in (1, 2, 3, 4, 8)] == [8192, 4096, 3072, 2048, 1024]
    assert per_split(kernel, 1, attrs.evolve(even, k=501), "sm_90") == 501
    assert per_split(Tiles(1, 1, 1, 1), 3, attrs.evolve(even, k=100), "gfx942") == 64
    eight = Shape("a8w8", 1, 64, 8192, dtype="int8", scale="row")
    assert [per_split(kernel, splits, eight, "sm_90") for splits in (1, 2, 3, 4)] == [8192, 4096, 4096, 2048]


def test_wider_waves_have_fewer_warps() -> None:
    """A block of 32 warps fits NVIDIA and has too many threads on AMD."""
    for kernel in (Rows(1, 16, 2, 1), Tiles(1, 2, 16, 1)):
        shape = Shape("a16w16", 4, 4096, 1 << 16)
        assert not unfit(kernel, 1, shape, "sm_90")
        assert "must be at most 1024 (got 2048 on gfx942)" in unfit(kernel, 1, shape, "gfx942")
