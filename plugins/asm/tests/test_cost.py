"""Order of AITER's kernels: by fitted times where there are rates, else as AITER's launchers."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_asm import asm
from tunedgemm_asm.cost import all_rates, rank, rank_by_launcher
from tunedgemm_asm.manifest import KernelConfig

MI355X, MI350P = Device("gfx950", 256), Device("gfx950", 128)
OP = "a4w4_blockscale"


def kernel_of(m: int, n: int, splits: bool = False) -> KernelConfig:
    """Return a kernel of mxfp4 by its tile."""
    return KernelConfig(f"{m}x{n}", "file.co", "aiter-f4gemm", m, n, 0, True, splits, 256, False)


def shape_of(m: int, n: int, k: int) -> Shape:
    """Return a product of mxfp4."""
    return Shape(OP, m, n, k, "fp4x2", "bf16", scale="block", layout="aiter16x16")


def test_fitted_devices_take_the_least_predicted_time() -> None:
    """Few rows take few-row tiles, and times grow with K; ties go to the name."""
    kernels = [kernel_of(32, 128), kernel_of(256, 256), kernel_of(128, 512, splits=True)]
    first = min(kernels, key=lambda kernel: rank(kernel, 1, shape_of(16, 4096, 4096), MI355X))
    assert (first.tile_m, first.tile_n) == (32, 128)
    us = [rank(first, 1, shape_of(16, 4096, k), MI355X)[0] for k in (1024, 4096, 16384)]
    assert us == sorted(us) and us[-1] > 1.5 * us[0] > 0
    assert rank(first, 1, shape_of(16, 4096, 4096), MI355X)[1:] == (1, "32x128")


def test_other_units_keep_the_launchers_order() -> None:
    """Rates count for devices with the measured units alone."""
    shape, kernel = shape_of(16, 4096, 4096), kernel_of(32, 128)
    assert rank(kernel, 1, shape, MI350P) == rank_by_launcher(kernel, 1, shape, MI350P)
    assert rank(kernel, 1, shape, MI355X) != rank_by_launcher(kernel, 1, shape, MI355X)


@pytest.mark.parametrize(("libtype", "op", "gfx", "units"), sorted(all_rates()))
def test_ranked_ops_have_rates(libtype: str, op: str, gfx: str, units: int) -> None:
    """A quick search trusts the order where rates were fitted, and not on other units."""
    assert libtype == "asm"
    assert asm.is_ranked(op, Device(gfx, units)) and not asm.is_ranked(op, Device(gfx, units + 1))
