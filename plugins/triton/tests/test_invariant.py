"""Untuned calls in batch-invariant mode get one order of sums for every M; names of orders."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.plugin import Device, Shape
from tunedgemm_triton import triton
from tunedgemm_triton.names import Gemm, Gemv, Streamk, Tma
from tunedgemm_triton.sums import order_of

H200 = Device("sm_90", 132, "nvidia-h200")
BF16 = Shape("a16w16", 1, 4096, 4096)
ROW = Shape("a8w8", 1, 4096, 4096, "fp8_e4m3fn", "bf16", scale="row")
SHAPES = (
    BF16,
    attrs.evolve(BF16, k=4095),
    attrs.evolve(BF16, n=72, k=8),
    ROW,
    attrs.evolve(ROW, dtype="fp8_e4m3fnuz", scale="tensor"),
    attrs.evolve(ROW, dtype="int8", epilogue="bias"),
    attrs.evolve(ROW, op="a8w8_blockscale", scale="block"),
    attrs.evolve(ROW, op="a8w8_blockscale", scale="block", dtype="fp8_e4m3fnuz"),
)
DEVICES = [Device(gfx, 100) for gfx in ARCHITECTURES]


def test_every_m_has_a_kernel_of_one_order() -> None:
    """On each architecture every M gets a kernel that serves it, of one order, or none does."""
    answered = set()
    for device in DEVICES:
        for like in SHAPES:
            found = {}
            for m in (1, 16, 17, 32, 33, 64, 65, 256, 257, 4096, 1 << 20):
                shape = attrs.evolve(like, m=m)
                found[m] = solution = triton.invariant_fallback(shape, device)
                assert solution is None or not triton.lacks(solution, shape, device), (shape, device)
            orders = {solution and solution.sum_order for solution in found.values()}
            assert len(orders) == 1 and "" not in orders, (like, device, found)
            answered |= {device.gfx} if orders != {None} else set()
    assert {"sm_80", "sm_90", "gfx942", "gfx950"} <= answered


@pytest.mark.parametrize(
    ("kernel", "split", "shape", "device", "order"),
    [
        (Gemm(64, 128, 64, 8, 4, 4), 1, BF16, H200, "wgmma-k16"),
        (Tma(128, 256, 64, 8, 8, 3), 1, BF16, H200, "wgmma-k16"),
        (Gemm(16, 64, 128, 1, 4, 4, swap=True), 1, BF16, H200, "wgmma-k16"),
        (Gemm(16, 64, 128, 1, 4, 4), 1, BF16, H200, "mma-k16"),
        (Gemm(64, 64, 128, 1, 2, 4), 1, BF16, H200, "mma-k16"),
        (Gemm(64, 128, 128, 8, 4, 4), 3, BF16, H200, "wgmma-k16-s1408"),
        (Streamk(128, 128, 64, 8, 4, 3), 1, BF16, H200, ""),
        (Gemv(1, 4, 1024, 2, 4), 2, BF16, H200, "gemv_r1_m1n4k1024u2_w4s1-s2048"),
        (Gemm(64, 128, 128, 8, 4, 4), 1, ROW, H200, "wgmma-k32-x-w"),
        (Gemm(64, 128, 128, 8, 4, 4), 1, attrs.evolve(ROW, outdtype="fp16"), H200, "wgmma-k32-p128-x-w"),
        (Gemm(64, 128, 64, 8, 4, 4), 1, attrs.evolve(ROW, outdtype="fp16"), H200, "wgmma-k32-p64-x-w"),
        (Gemm(64, 128, 128, 8, 4, 4), 1, attrs.evolve(ROW, scale="tensor", epilogue="bias"), H200, "wgmma-k32-xw-fma"),
        (Gemm(64, 128, 128, 8, 4, 4), 1, SHAPES[-2], H200, "wgmma-k32-p128"),
        (Gemm(64, 128, 128, 8, 4, 4), 2, attrs.evolve(ROW, dtype="int8"), H200, "exact-x-w"),
        (Gemv(1, 4, 1024, 2, 4), 1, attrs.evolve(ROW, dtype="int8"), H200, ""),
        (Gemm(64, 128, 64, 8, 4, 2, nonkdim=16, kpack=2), 1, BF16, Device("gfx942", 304), "mfma16-b64q2"),
        (Gemm(64, 128, 64, 8, 4, 2), 1, BF16, Device("gfx942", 304), ""),
        (Gemm(64, 64, 64, 8, 4, 2), 1, BF16, Device("gfx1201", 64), "wmma-b64"),
    ],
    ids=str,
)
def test_the_name_of_an_order_has_what_changes_bits(kernel, split: int, shape: Shape, device: Device, order: str) -> None:
    """Instruction by tile, promotion, parts, scales, fused bias; nothing where M or the compiler decides."""
    assert order_of(kernel, split, shape, device) == order
