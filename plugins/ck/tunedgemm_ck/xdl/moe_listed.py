"""Tiles of CK's two stages of a mixture of experts that AITER's tables choose or its lists have, as data."""

from __future__ import annotations

#: Kind of the scales (``rows`` are per_Token's and per_Tensor's) and stage to tiles: threads, M, N and K, waves along M and N, pipeline.
#: In the order of how often AITER's tuned_fmoe tables of August 2026 choose them.
TILES: dict[tuple[str, int], tuple[str, ...]] = {
    ("No", 1): (
        "256x32x64x64_1x4_v1",
        "256x32x64x128_1x4_v1",
        "256x64x128x64_1x4_v3",
        "256x128x128x128_1x4_v3",
        "256x64x64x128_1x4_v1",
        "256x128x64x64_1x4_v1",
        "256x128x128x64_1x4_v3",
    ),
    ("No", 2): (
        "256x32x64x64_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x128x128x64_1x4_v3",
        "256x32x64x128_1x4_v1",
        "256x64x64x64_1x4_v1",
        "256x128x64x64_1x4_v1",
    ),
    ("rows", 1): (
        "256x32x64x256_1x4_v1",
        "256x32x64x128_1x4_v1",
        "256x16x128x256_1x4_v1",
        "256x16x64x256_1x4_v1",
        "256x64x64x128_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x128x128x128_1x4_v3",
    ),
    ("rows", 2): (
        "256x32x64x128_1x4_v1",
        "256x32x64x256_1x4_v1",
        "256x16x128x256_1x4_v1",
        "64x16x64x64_1x1_v1",
        "256x64x128x256_1x4_v3",
        "256x64x128x128_1x4_v3",
        "256x128x128x128_1x4_v3",
    ),
    ("per_1x128", 1): (
        "256x16x128x256_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x32x128x128_1x4_v1",
        "256x64x128x128_1x4_v1",
        "128x16x128x128_1x2_v1",
    ),
    ("per_1x128", 2): (
        "256x16x128x256_1x4_v1",
        "256x64x128x128_1x4_v3",
        "256x64x128x128_1x4_v1",
        "256x32x128x128_1x4_v1",
        "128x16x128x128_1x2_v1",
    ),
}

#: How many of them are there by default: 16 in all.
DEFAULTS = {("No", 1): 3, ("No", 2): 2, ("rows", 1): 3, ("rows", 2): 4, ("per_1x128", 1): 2, ("per_1x128", 2): 2}
