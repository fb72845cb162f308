"""List the kernels that the generator builds for each architecture."""

from __future__ import annotations

from collections.abc import Iterator

from tunedgemm_asm_gcn.names import KernelConfig
from tunedgemm_asm_gcn.resources import TARGETS, target_of

#: Rows, columns, waves along M for a plain weight, prefetch for a plain and for a shuffled weight.
#:
#: A small tile has few MFMAs to hide memory latency and prefetches more. Steps in flight take
#: registers on gfx942 and, with a plain weight, LDS on gfx950. Where more prefetch leaves room for
#: one workgroup instead of two, both are listed for tuning. With a shuffled weight the four waves
#: are along N, and each loads its own columns without LDS.
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
#: Largest tile with split-K: few tiles need it, and large ones have larger fixups.
_SPLIT_MOST = 128 * 128


def enumerate_configs(gfx: str) -> Iterator[KernelConfig]:
    """Yield all kernels of an architecture.

    Raises:
        PluginError: the generator does not know the architecture.
    """
    target_of(gfx)
    for tile_m, tile_n, waves_m, *depths in _TILES[gfx]:
        for split in (False, True) if tile_m * tile_n <= _SPLIT_MOST else (False,):
            for shuffled, ahead in zip((False, True), depths, strict=True):
                yield from (KernelConfig(gfx, tile_m, tile_n, 1 if shuffled else waves_m, steps, shuffled, split) for steps in ahead)


#: All kernels of all architectures.
CONFIGS = tuple(config for gfx in TARGETS for config in enumerate_configs(gfx))
