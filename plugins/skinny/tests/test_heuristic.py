"""Solutions of untuned calls: AITER's classes on AMD, the measured classes on Hopper."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_skinny import skinny

MI300, H200 = Device("gfx942", 304), Device("sm_90", 132)

#: (M, N, K), and whether AITER's rule takes it on 304 units.
CASES = [
    ((1, 608, 9216), True),
    ((1, 609, 9216), False),
    ((1, 608, 9224), False),
    ((1, 608, 9212), False),
    ((2, 304, 9216), True),
    ((4, 304, 9216), True),
    ((4, 305, 9216), False),
    ((5, 304, 5120), True),
    ((5, 304, 5128), False),
    ((8, 304, 5120), True),
    ((9, 304, 256), True),
    ((9, 304, 264), False),
    ((16, 304, 256), True),
    ((17, 304, 256), False),
]


@pytest.mark.cases(("sizes", "taken"), CASES)
def test_aiters_classes(sizes: tuple[int, int, int], taken: bool) -> None:
    """Shapes at the edges of each class of AITER get the first solution."""
    shape = Shape("a16w16", *sizes)
    solution = skinny.heuristic_fallback(shape, MI300)
    assert (solution is not None) == taken
    assert solution in (None, next(iter(skinny.solutions(shape, MI300))))


def test_other_devices_and_weights_get_none() -> None:
    """Narrow weights of small K on NVIDIA, shuffled ones on AMD and CPUs get none.

    AITER's rule counts compute units.
    """
    shape = Shape("a16w16", 1, 256, 4096)
    assert skinny.heuristic_fallback(shape, MI300) is not None
    assert skinny.heuristic_fallback(shape, Device("gfx942", 100)) is None
    assert skinny.heuristic_fallback(Shape("a16w16", 1, 256, 1784), H200) is None
    assert skinny.heuristic_fallback(shape, Device("cpu-avx512", 304)) is None
    assert skinny.heuristic_fallback(Shape("a16w16", 1, 256, 4096, layout="aiter16x16"), MI300) is None


@pytest.mark.cases(
    ("sizes", "taken"),
    [
        ((1, 8192, 3584), True),
        ((1, 57344, 8192), True),
        ((1, 8192, 28672), True),
        ((1, 8191, 3584), False),
        ((1, 57345, 8192), False),
        ((1, 1280, 28672), False),
        ((1, 8192, 8196), False),
        ((1, 65536, 1024), False),
        ((2, 8192, 3584), True),
        ((2, 8192, 10240), True),
        ((2, 8200, 8192), False),
        ((3, 8192, 3584), False),
        ((3, 24576, 1536), False),
        ((16, 7168, 8192), False),
        ((1, 64, 1792), True),
        ((4, 512, 7168), True),
        ((1, 320, 8896), True),
        ((4, 320, 8896), False),
        ((4, 1024, 6144), True),
        ((4, 1024, 6152), False),
        ((5, 512, 7168), False),
        ((1, 1032, 2048), False),
        ((1, 56, 7168), False),
    ],
)
def test_hopper_classes(sizes: tuple[int, int, int], taken: bool) -> None:
    """Shapes of the measured classes get the first solution, on Hopper in 16 bits only."""
    for dtype in ("bf16", "fp16"):
        shape = Shape("a16w16", *sizes, dtype=dtype)
        solution = skinny.heuristic_fallback(shape, H200)
        assert solution == (next(iter(skinny.solutions(shape, H200))) if taken else None)
        assert skinny.heuristic_fallback(shape, Device("sm_100", 148)) is None
    assert skinny.heuristic_fallback(Shape("a8w8", *sizes, dtype="fp8", scale="row"), H200) is None


@pytest.mark.cases("m", [1, 64])
def test_weights_that_torch_rewrites_in_each_call(m: int) -> None:
    """Weights of 4 bits and shuffled weights get the first solution on NVIDIA, none on AMD."""
    fields = {"outdtype": "bf16", "scale": "block"}
    for shape in (
        Shape("a16w4_blockscale", m, 2112, 7168, dtype="bf16", **fields),
        Shape("a4w4_blockscale", m, 2112, 7168, dtype="fp4x2", layout="aiter16x16", **fields),
        Shape("a16w16", m, 2112, 7168, layout="aiter16x16"),
        Shape("a16wn", min(m, 16), 2112, 7168, scale="block", extra={"w_format": "awq_int4", "w_group": 128}),
    ):
        for device in (H200, Device("sm_100", 148)):
            assert skinny.heuristic_fallback(shape, device) == next(iter(skinny.solutions(shape, device)))
        for gfx in ("gfx942", "gfx941", "gfx1100", "gfx1201", "gfx1250"):
            assert skinny.heuristic_fallback(shape, Device(gfx, 304)) is None, gfx
    assert skinny.heuristic_fallback(Shape("a16w4_blockscale", 65, 2112, 7168, dtype="bf16", **fields), H200) is None
