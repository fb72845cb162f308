"""The cost: what the fitted model and the guess know."""

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


@pytest.mark.parametrize("device", [H200, MI300], ids=lambda device: device.gfx)
def test_it_knows_what_starves_and_what_overlaps(device: Device) -> None:
    """More bytes in flight cost less on a shape too small for the device; a split costs more than it brings on a large one."""
    assert cost_of(Rows(1, 1, 8, 2), 1, SMALL, device) < cost_of(Rows(1, 1, 1, 1), 1, SMALL, device)
    assert cost_of(Rows(4, 4, 1, 2), 1, LARGE, device) < cost_of(Rows(4, 4, 1, 2), SPLITS[-1], LARGE, device)


@pytest.mark.parametrize("sizes", [(1280, 8192), (7168, 8192), (8192, 1024), (57344, 8192)], ids=str)
def test_one_row_of_x_is_read_where_it_is(sizes: tuple[int, int]) -> None:
    """Of the same kernel with x in shared memory and without, timed side by side with M = 1, the first took longer in 55 of 56 pairs."""
    shape = Shape("a16w16", 1, *sizes)
    for kernel in (Rows(2, 2, 1, 2), Rows(4, 4, 1, 2), Rows(2, 8, 2, 2)):
        assert cost_of(kernel, 1, shape, H200) < cost_of(attrs.evolve(kernel, x_shared=True), 1, shape, H200)


def test_every_family_has_a_finite_weight_for_each_feature() -> None:
    """The data file names the features of the code, all of them, for each family."""
    assert set(weights()) == {"rows", "tiles", "wgmma"}
    for family in weights().values():
        assert len(family) == len(FEATURES) == len(set(FEATURES))
        assert all(map(math.isfinite, family))


@pytest.mark.parametrize(
    "shape",
    [
        Shape("a16w16", 1, 1, 8),
        Shape("a16w16", 64, 1 << 18, 1 << 15),
        Shape("a8w8", 5, 7168, 8192, dtype="int8", scale="row"),
        Shape("a8w8_blockscale", 5, 7168, 8192, dtype="fp8", scale="block"),
        Shape("batched_bf16", 5, 128, 512, extra={"B": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("gfx", ["sm_80", "sm_90", "sm_120"])
def test_every_listed_kernel_has_a_finite_cost(shape: Shape, gfx: str) -> None:
    """However far a shape is from what was measured."""
    device = Device(gfx, 132)
    for chosen in enumerate_kernels(shape, device):
        assert math.isfinite(cost_of(*chosen, shape, device))
        assert len(features(*chosen, shape, device)) == len(FEATURES)


@pytest.mark.parametrize("kernel", [Rows(2, 2, 2, 2), Tiles(1, 2, 4, 2, 3, True), Wgmma(1, 1, 1, 2, 4)], ids=lambda kernel: kernel.family)
def test_bytes_count_not_elements(kernel: KernelConfig) -> None:
    """Half the columns of bf16 are as many bytes as all of fp8: what bytes, blocks and steps say is the same."""
    halves = features(kernel, 1, Shape("a16w16", 1, 7168, 4096), H200)
    bytes_ = features(kernel, 1, Shape("a8w8", 1, 7168, 8192, dtype="fp8", scale="row"), H200)
    differing = {name for name, one, other in zip(FEATURES, halves, bytes_, strict=True) if one != pytest.approx(other)}
    assert differing <= {"8 bits", "rows", "rows*each", "rows*unroll", "resident", "flight", "flight^2", "flight*stages", "uneven"}
    assert "8 bits" in differing


def test_the_floor_is_a_launch_and_the_bytes() -> None:
    """1.5 us and both operands and the output at 4.2 TB/s of 132 multiprocessors; of a batch all products."""
    shape = Shape("a16w16", 16, 7168, 8192)
    assert floor_of(shape, H200) == pytest.approx(1.5 + 2 * (7168 * 8192 + 16 * 8192 + 16 * 7168) / 4.224e6)
    batched = Shape("batched_bf16", 16, 7168, 8192, extra={"B": 4})
    assert floor_of(batched, H200) - 1.5 == pytest.approx(4 * (floor_of(shape, H200) - 1.5))
