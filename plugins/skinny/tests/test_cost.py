"""Predicted cost: the fitted model on NVIDIA, the estimate on AMD."""

from __future__ import annotations

import math

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_skinny.cost import FEATURES, cost_of, features, floor_of, weights
from tunedgemm_skinny.names import KernelConfig, Rows, Tiles, Wgmma
from tunedgemm_skinny.space import SPLITS, enumerate_kernels

H200, MI300 = Device("sm_90", 132), Device("gfx942", 304)
SMALL, LARGE = Shape("a16w16", 1, 256, 7168), Shape("a16w16", 1, 57344, 8192)


@pytest.mark.cases("device", [H200, MI300])
def test_bytes_in_flight_and_splits_count(device: Device) -> None:
    """More bytes in flight are cheaper on a small shape, and splits are dearer on a large one."""
    assert cost_of(Rows(1, 1, 8, 2), 1, SMALL, device) < cost_of(Rows(1, 1, 1, 1), 1, SMALL, device)
    assert cost_of(Rows(4, 4, 1, 2), 1, LARGE, device) < cost_of(Rows(4, 4, 1, 2), SPLITS[-1], LARGE, device)


@pytest.mark.cases("sizes", [(1280, 8192), (7168, 8192), (8192, 1024), (57344, 8192)])
def test_one_row_of_x_skips_shared_memory(sizes: tuple[int, int]) -> None:
    """At M = 1 x in shared memory costs more: it was slower in 55 of 56 measured pairs."""
    shape = Shape("a16w16", 1, *sizes)
    for kernel in (Rows(2, 2, 1, 2), Rows(4, 4, 1, 2), Rows(2, 8, 2, 2)):
        assert cost_of(kernel, 1, shape, H200) < cost_of(attrs.evolve(kernel, x_shared=True), 1, shape, H200)


def test_every_feature_has_a_finite_weight() -> None:
    """The data file has a finite weight for each feature and family."""
    assert set(weights()) == {"rows", "tiles", "wgmma", "packed"}
    for family in weights().values():
        assert len(family) == len(FEATURES) == len(set(FEATURES))
        assert all(map(math.isfinite, family))


@pytest.mark.cases(
    "shape",
    [
        Shape("a16w16", 1, 1, 8),
        Shape("a16w16", 64, 1 << 18, 1 << 15),
        Shape("a8w8", 5, 7168, 8192, dtype="int8", scale="row"),
        Shape("a8w8_blockscale", 5, 7168, 8192, dtype="fp8", scale="block"),
        Shape("batched_bf16", 5, 128, 512, extra={"B": 8}),
        Shape("a16wn", 5, 4096, 14336, scale="block", extra={"w_format": "gptq_int4", "w_group": 128}),
    ],
)
@pytest.mark.cases("gfx", ["sm_80", "sm_90", "sm_120"])
def test_every_listed_kernel_has_a_finite_cost(shape: Shape, gfx: str) -> None:
    """Costs are finite for shapes far from the measured ones."""
    device = Device(gfx, 132)
    for chosen in enumerate_kernels(shape, device):
        assert math.isfinite(cost_of(*chosen, shape, device))
        assert len(features(*chosen, shape, device)) == len(FEATURES)


@pytest.mark.cases("kernel", [Rows(2, 2, 2, 2), Tiles(1, 2, 4, 2, 3, True), Wgmma(1, 1, 1, 2, 4)])
def test_bytes_count_not_elements(kernel: KernelConfig) -> None:
    """Features of bytes, blocks and steps are equal for bf16 and for fp8 of twice the K."""
    halves = features(kernel, 1, Shape("a16w16", 1, 7168, 4096), H200)
    bytes_ = features(kernel, 1, Shape("a8w8", 1, 7168, 8192, dtype="fp8", scale="row"), H200)
    differing = {name for name, one, other in zip(FEATURES, halves, bytes_, strict=True) if one != pytest.approx(other)}
    assert differing <= {"8 bits", "rows", "rows*each", "rows*unroll", "resident", "flight", "flight^2", "flight*stages", "uneven"}
    assert "8 bits" in differing


def test_the_floor_is_a_launch_and_the_bytes() -> None:
    """The floor is 1.5 us plus all bytes at 4.2 TB/s on 132 multiprocessors."""
    shape = Shape("a16w16", 16, 7168, 8192)
    assert floor_of(shape, H200) == pytest.approx(1.5 + 2 * (7168 * 8192 + 16 * 8192 + 16 * 7168) / 4.224e6)
    batched = Shape("batched_bf16", 16, 7168, 8192, extra={"B": 4})
    assert floor_of(batched, H200) - 1.5 == pytest.approx(4 * (floor_of(shape, H200) - 1.5))
