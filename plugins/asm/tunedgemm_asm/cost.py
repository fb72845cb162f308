"""Rank AMD kernels in the order in which they are tried."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.manifest import KernelConfig


def rank(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float | str, ...]:
    """Return a total order of kernels, best first, by the criteria of AITER's launchers.

    In this order: rounds of workgroups over the compute units; idle units in the last round; padded
    rows; elements of the tile per element loaded, most first; splits; name. The name makes the
    order independent of a manifest's.
    """
    tiles, units = ceil_div(shape.m, kernel.tile_m) * ceil_div(shape.n, kernel.tile_n), max(device.cu_num, 1)
    rounds, loaded = ceil_div(tiles * splits, units), kernel.tile_m + kernel.tile_n
    return (
        rounds,
        rounds * units - tiles * splits,
        -shape.m % kernel.tile_m,
        -kernel.tile_m * kernel.tile_n / loaded,
        splits,
        kernel.name,
    )
