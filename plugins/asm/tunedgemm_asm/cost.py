"""Rank kernels in the order in which they are tried."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.manifest import KernelConfig


def rank(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float | str, ...]:
    """What AITER's launchers compare, as a total order, least first.

    Rounds of workgroups over the compute units, then units idle in the last one, then rows computed for nothing, then the tile's elements
    for each that it loads, most first; then fewer parts and the name, so that no order of a manifest decides.
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
