"""Static limits: what is taken, and what is refused with which reason."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm_skinny import Skinny, skinny
from tunedgemm_skinny.limits import ARCHITECTURES, supports
from tunedgemm_skinny.names import Rows, Tiles

PLAIN = Shape("a16w16", 4, 48, 64)
H200, MI300 = Device("sm_90", 132, "nvidia-h200"), Device("gfx942", 304, "amd-instinct-mi300x")

#: Refused, and what the reason says.
REFUSED = [
    (Device("cpu-avx512", 16), PLAIN, "not for a CPU"),
    (Device("gfx906", 60), PLAIN, "no limits are known for gfx906; known: sm_80, "),
    (Device("sm_75", 40), PLAIN, "no limits are known for sm_75"),
    (H200, attrs.evolve(PLAIN, m=0), "empty batch"),
    (H200, attrs.evolve(PLAIN, m=65), "M <= 64 (M=65)"),
    (H200, attrs.evolve(PLAIN, n=1 << 20, k=(1 << 20) + 1), "is too large"),
    (H200, attrs.evolve(PLAIN, dtype="fp32", outdtype="fp32"), "operands must be bf16 or fp16, not fp32"),
    (MI300, attrs.evolve(PLAIN, dtype="fp8_e4m3fnuz"), "not fp8_e4m3fnuz"),
    (H200, attrs.evolve(PLAIN, outdtype="fp8_e4m3fn"), "the output must be bf16, fp16, fp32, not fp8_e4m3fn"),
    (H200, attrs.evolve(PLAIN, epilogue="bias", bias_dtype="fp64"), "the bias must be bf16, fp16, fp32, not fp64"),
    (H200, attrs.evolve(PLAIN, scale="tensor"), "scale=tensor"),
    (MI300, attrs.evolve(PLAIN, layout="aiter16x16"), "not layout 'aiter16x16'"),
]


@pytest.mark.parametrize("gfx", ARCHITECTURES)
@pytest.mark.parametrize("m", [1, 8, 9, 64])
def test_taken(gfx: str, m: int) -> None:
    """Every architecture takes every dtype, with and without bias, up to 64 rows."""
    for dtype in ("bf16", "fp16"):
        for outdtype in ("bf16", "fp16", "fp32"):
            for fields in ({}, {"epilogue": "bias"}, {"epilogue": "bias", "bias_dtype": "fp32"}):
                assert supports(Shape("a16w16", m, 1, 1, dtype=dtype, outdtype=outdtype, **fields), Device(gfx, 100)) is True


@pytest.mark.parametrize(("device", "shape", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_refused(device: Device, shape: Shape, reason: str) -> None:
    """What is not covered is refused with the value that is wrong, nothing is listed for it, and nothing binds."""
    answer = supports(shape, device)
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason
    assert not list(skinny.enumerate_solutions(shape, device))
    assert skinny.heuristic_fallback(shape, device) is None


def test_devices_that_are_described_need_no_library() -> None:
    """For an absent device nothing is loaded to list solutions, and none binds."""

    def load(_: object) -> object:
        raise AssertionError("it must not be loaded")

    backend = Skinny(compiler=load, driver=load)  # type: ignore[arg-type]
    first = next(iter(backend.enumerate_solutions(PLAIN, H200)))
    assert list(backend.refine(first, PLAIN, H200))
    answer = backend.bind(first, PLAIN, H200)
    assert isinstance(answer, Unsupported)
    assert "described, not present" in answer.reason
    assert backend.library_version(H200) == ""


def test_wider_waves_have_fewer_warps() -> None:
    """A block of 32 warps is 1024 threads of NVIDIA's and too many of AMD's."""
    from tunedgemm_skinny.fit import refusal

    for kernel in (Rows(1, 16, 2, 1), Tiles(1, 2, 16, 1)):
        shape = Shape("a16w16", 4, 4096, 1 << 16)
        assert not refusal(kernel, 1, shape, "sm_90")
        assert "2048 threads on gfx942; 1024" in refusal(kernel, 1, shape, "gfx942")
