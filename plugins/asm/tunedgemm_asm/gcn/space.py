"""Packs of generated kernels."""

from __future__ import annotations

from collections.abc import Iterator

from tunedgemm_asm.gcn.names import KernelConfig
from tunedgemm_asm.gcn.resources import TARGETS, target_of

#: Tiles: rows, columns, waves along M for a plain weight, steps loaded ahead for a plain weight and for a shuffled one.
#:
#: A small tile has few products to hide memory's latency behind and so looks further ahead. For gfx942 what is on its way takes registers,
#: for gfx950 with a plain weight LDS: where looking further ahead leaves room for one workgroup instead of two, both are there to be tuned.
#: A shuffled weight is no matter of LDS: there the four waves stand along N, and each loads its own columns.
_TILES = {
    "gfx942": (
        (32, 64, 1, (4,), (4,)),
        (32, 128, 1, (3,), (4,)),
        (64, 64, 2, (3,), (4,)),
        (64, 128, 2, (2,), (3,)),
        (96, 64, 2, (3,), (3,)),
        (96, 128, 2, (2,), (2,)),
        (128, 64, 4, (2,), (3,)),
        (128, 128, 2, (2,), (2,)),
        (160, 128, 2, (2,), (2,)),
        (128, 256, 2, (2,), (2,)),
        (256, 128, 2, (2,), (2,)),
        (256, 256, 2, (1,), (1,)),
    ),
    "gfx950": (
        (32, 64, 1, (4,), (4,)),
        (32, 128, 1, (3,), (4,)),
        (64, 64, 2, (3, 6), (4,)),
        (64, 128, 2, (2,), (3,)),
        (96, 64, 2, (3,), (3,)),
        (96, 128, 2, (1, 3), (2,)),
        (128, 64, 4, (2,), (3,)),
        (128, 128, 2, (1, 3), (2,)),
        (160, 128, 2, (2,), (2,)),
        (128, 256, 2, (2,), (2,)),
        (256, 128, 2, (2,), (2,)),
        (256, 256, 2, (1,), (1,)),
    ),
}
#: Elements of a tile at most that several workgroups share: K is split where there are few tiles, and large ones leave more to add up.
_SPLIT_MOST = 128 * 128


def enumerate_configs(gfx: str) -> Iterator[KernelConfig]:
    """All kernels of an architecture.

    Raises:
        PluginError: none are generated for it.
    """
    target_of(gfx)
    for tile_m, tile_n, waves_m, *depths in _TILES[gfx]:
        for split in (False, True) if tile_m * tile_n <= _SPLIT_MOST else (False,):
            for shuffled, ahead in zip((False, True), depths, strict=True):
                yield from (KernelConfig(gfx, tile_m, tile_n, 1 if shuffled else waves_m, steps, shuffled, split) for steps in ahead)


#: All kernels of all architectures.
CONFIGS = tuple(config for gfx in TARGETS for config in enumerate_configs(gfx))
