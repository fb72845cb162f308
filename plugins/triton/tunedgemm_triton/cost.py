"""Predict the time of kernels, to order solutions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tunedgemm.plugin import Device, Shape

from tunedgemm_triton.names import Gemm, KernelConfig
from tunedgemm_triton.resources import ceil_div, tiles_of


def sort_splits(splits: Iterable[int], tiles: int, device: Device) -> list[int]:
    """Sort split factors so that the first leave the fewest multiprocessors idle at the end."""

    def cost(split: int) -> float:
        waves = tiles * split / device.cu_num
        return math.ceil(waves) / waves + 0.1 * math.ceil(waves) + 0.01 * split

    return sorted(splits, key=cost)


def wave_occupancy(kernel: KernelConfig, shape: Shape, device: Device) -> float:
    """Return the part of the multiprocessors' waves that tiles fill."""
    tiles = tiles_of(kernel, shape)
    return tiles / (ceil_div(tiles, device.cu_num) * device.cu_num)


def mi300x_clocks(kernel: Gemm, split: int, shape: Shape, device: Device) -> float:
    """Estimate the clocks of a launch with block scales on an MI300X, to order tiles.

    A CU does 4096 fp8 operations or reads 32 bytes from L2 a clock (AMD CDNA 3 white paper). The
    latencies are rounded guesses: 100 clocks a step, and 2000 for the fixup of splits.
    """
    waves = ceil_div(tiles_of(kernel, shape) * split, device.cu_num)
    step = max(kernel.block_m * kernel.block_n / 16, 4 * (kernel.block_m + kernel.block_n)) + 100
    # Half of the warps hide half of the latency of the others.
    return waves * ceil_div(ceil_div(shape.k, 128), split) * (step + 200 / kernel.warps) + 2000 * (split > 1)
