"""Rank AMD kernels in the order in which they are tried."""

from __future__ import annotations

import functools
from pathlib import Path

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import Rates, Work, predict_us, read_rates

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.manifest import KernelConfig

_FILE = Path(__file__).with_name("rates.csv")
#: Elements of K of a step, by op.
STEPS = {"a16w16": 64, "a8w8_bpreshuffle": 128, "a8w8_blockscale_bpreshuffle": 128, "a4w4_blockscale": 256}


@functools.cache
def all_rates() -> dict[tuple[str, str, str, int], Rates]:
    """Return the rates fitted to AITER's tables (`benchmarks/aiter_fit.py`), by libtype, op and device."""
    return read_rates(_FILE)


def key_of(kernel: KernelConfig) -> tuple[int, ...]:
    """Return the key of a kernel in `Rates.factors`."""
    return kernel.tile_m, kernel.tile_n, kernel.prefetch, int(kernel.splits)


def rank(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float | str, ...]:
    """Return a total order of kernels, best first: by predicted times where rates were fitted, else
    as AITER's launchers.
    """
    rates = all_rates().get(("asm", shape.op, device.gfx, device.cu_num))
    if rates is None:
        return rank_by_launcher(kernel, splits, shape, device)
    sizes = shape.m, shape.n, shape.k, kernel.tile_m, kernel.tile_n, STEPS[shape.op]
    us = predict_us(rates, Work(*sizes, splits, device.cu_num, 1, rates.factors.get(key_of(kernel), 1.0)))
    return float(us), splits, kernel.name


def rank_by_launcher(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float | str, ...]:
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
