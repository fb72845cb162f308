"""List the configurations worth timing for a shape, lowest predicted cost first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import dtype_bits

from tunedgemm_quack.limits import STEP_K, unsupported_splits
from tunedgemm_quack.names import KernelConfig

#: Tiles (M, N, pingpong) and clusters among which QuACK's own autotuner chooses on Hopper.
_TILES = (
    *((256, n, False) for n in (128, 160, 192, 208)),
    *((128, n, False) for n in (224, 256)),
    *((128, n, True) for n in (128, 160, 192, 208)),
    (192, 128, True),
)
_CLUSTERS = ((1, 2), (2, 1))
#: Tiles for few rows of x, which QuACK's autotuner does not try: weight rows, and rows of x.
_WEIGHT_TILES, _ROW_TILES = (64, 128, 256), (16, 32, 64, 128)
_SPLITS = (2, 4, 8, 16)
#: Solutions of a shape, and how many of them split K.
_MOST, _MOST_SPLIT = 36, 12

#: H200, per multiprocessor and clock: bf16 multiply-adds of WGMMA, and bytes loaded.
_MULTIPLIES, _BYTES = 2048, 40
#: Clocks of a block's start and end, and of one more kernel, which clears the counters of splits.
_BLOCK, _KERNEL = 3000, 2500


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions of a supported shape."""
    ranked = sorted((predicted_clocks(kernel, splits, shape, device), kernel, splits) for kernel, splits in _candidates(shape, device))
    whole = [entry for entry in ranked if not entry[2]]
    split = [entry for entry in ranked if entry[2]][:_MOST_SPLIT]
    for _, kernel, splits in sorted([*whole[: _MOST - len(split)], *split]):
        yield Solution(libtype, kernel.name, splits, batch_invariant=True)


def predicted_clocks(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> float:
    """Estimate a launch's time in clocks, to rank the solutions of one shape."""
    parts, tiles = max(splits, 1), _tiles(kernel, shape)
    waves = -(-tiles * parts // max(device.cu_num, 1))
    depth = -(-shape.k // (STEP_K * parts)) * STEP_K
    loads = (kernel.tile_m / kernel.cluster_n + kernel.tile_n / kernel.cluster_m) * dtype_bits(shape.dtype) / 8
    main = depth * max(kernel.tile_m * kernel.tile_n / _MULTIPLIES, loads / _BYTES)
    store = kernel.tile_m * kernel.tile_n * dtype_bits(shape.outdtype) / 8 / _BYTES
    return waves * (main + store / (1 + kernel.pingpong)) + _BLOCK + (_KERNEL + store * parts if splits else 0)


def _tiles(kernel: KernelConfig, shape: Shape) -> int:
    m, n = (shape.n, shape.m) if kernel.swapped else (shape.m, shape.n)
    return -(-m // kernel.tile_m) * -(-n // kernel.tile_n)


def _candidates(shape: Shape, device: Device) -> Iterator[tuple[KernelConfig, int]]:
    for kernel in dict.fromkeys((*_own(), *_for_few_rows(shape))):
        yield kernel, 0
        tiles, steps = _tiles(kernel, shape), -(-shape.k // STEP_K)
        if kernel.pingpong or tiles >= device.cu_num:
            continue
        for splits in _SPLITS:
            if tiles * splits <= 4 * device.cu_num and 2 * splits <= steps and not unsupported_splits(splits, shape):
                yield kernel, splits


def _own() -> Iterator[KernelConfig]:
    for (m, n, pingpong), cluster, swapped in itertools.product(_TILES, _CLUSTERS, (False, True)):
        yield KernelConfig(m, n, *cluster, pingpong=pingpong, swapped=swapped)


def _for_few_rows(shape: Shape) -> Iterator[KernelConfig]:
    """Yield swapped kernels whose tile has no more rows than the next power of two of M."""
    for n, m, cluster_m, pingpong in itertools.product(_ROW_TILES, _WEIGHT_TILES, (1, 2), (False, True)):
        kernel = KernelConfig(m, n, cluster_m, 1, pingpong, swapped=True)
        if kernel.is_valid and n < 2 * max(shape.m, 16):
            yield kernel
