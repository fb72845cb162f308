"""limits: what vLLM's sources refuse is refused with its number, for any device, without vLLM."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_vllm import limits

H200 = Device("sm_90", 132, "nvidia-h200")
FP8 = Shape("a8w8", 4, 256, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
BLOCK = attrs.evolve(FP8, op="a8w8_blockscale", scale="block")


def refused(shape: Shape, gfx: str = "sm_90", release: tuple[int, int] | None = None) -> str:
    """Return the reason for an architecture, "" for none."""
    return limits.unsupported(shape, Device(gfx, 100), release)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp8_e4m3fnuz"}, "a8w8: operands must be int8 or fp8_e4m3fn (got fp8_e4m3fnuz)"),
        ({"op": "a8w8_blockscale"}, "a8w8_blockscale: scales must be by block (got row)"),
        ({"layout": "aiter16x16"}, "weight layout must be row (got 'aiter16x16')"),
        ({"n": 264}, "N and K must be multiples of 16 (got 264 and 512)"),
        ({"k": 520}, "N and K must be multiples of 16 (got 256 and 520)"),
        ({"op": "a8w8_blockscale", "scale": "block", "k": 400}, "K must be a multiple of 128 with block scales (got 400)"),
        ({"m": 0}, "M must be at least 1 (got 0)"),
        ({"outdtype": "fp32"}, "output must be bf16 or fp16 (got fp32)"),
        ({"epilogue": "bias", "bias_dtype": "fp32"}, "bias must be bf16, as the output (got fp32)"),
    ],
)
def test_reasons(fields: dict[str, object], reason: str) -> None:
    """Each limit gives the value it found; the shape without the change is served."""
    assert refused(FP8) == ""
    assert refused(attrs.evolve(FP8, **fields)) == reason


@pytest.mark.parametrize(
    ("shape", "served"),
    [
        (attrs.evolve(FP8, dtype="int8"), {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90"}),
        (FP8, {"sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}),
        (BLOCK, {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}),
    ],
)
def test_architectures(shape: Shape, served: set[str]) -> None:
    """int8 ends with Hopper, fp8 begins with Ada, fp8 by block with Hopper."""
    every = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "gfx942", "cpu-avx2")
    assert {gfx for gfx in every if not refused(shape, gfx)} == served
    named = {gfx for platform in limits.PLATFORMS if shape.op in platform.ops for gfx in platform.devices}
    assert named >= served


INT4 = Shape("a16wn", 4, 256, 512, "bf16", "bf16", scale="block", layout="marlin", extra={"w_format": "ct_int4", "w_group": 64})


@pytest.mark.parametrize(
    ("fields", "gfx", "reason"),
    [
        ({}, "sm_80", ""),
        ({"layout": "machete"}, "sm_90", ""),
        ({"layout": "row"}, "sm_90", "weight layout must be marlin or machete (got 'row'), as vLLM repacks it"),
        ({"layout": "machete"}, "sm_100", "machete_mm needs one of sm_90 (got sm_100)"),
        (
            {},
            "sm_75",
            "marlin_gemm needs one of sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_107, sm_110, sm_120, sm_121 (got sm_75)",
        ),
        ({"m": 0}, "sm_90", "M must be at least 1 (got 0)"),
        ({"outdtype": "fp32"}, "sm_90", "output must be bf16, as x (got fp32)"),
        ({"epilogue": "bias", "bias_dtype": "bf16"}, "sm_90", "marlin_gemm adds no bias in its order (got a bias in bf16)"),
        ({"scale": "row"}, "sm_90", "a16wn: scales must be by block (got row)"),
    ],
)
def test_repacked_weights(fields: dict[str, object], gfx: str, reason: str) -> None:
    """Marlin runs from Ampere on, Machete on Hopper alone; the core adds biases."""
    assert refused(attrs.evolve(INT4, **fields), gfx) == reason


@pytest.mark.parametrize(("release", "gfx", "fits"), [((0, 23), "sm_90", False), ((0, 24), "sm_90", True), ((0, 23), "sm_100", True)])
def test_groups_of_four_rows(release: tuple[int, int], gfx: str, fits: bool) -> None:
    """Hopper's block scales needed a multiple of four rows up to vLLM 0.23."""
    assert refused(BLOCK, gfx, release) == ""
    assert (refused(attrs.evolve(BLOCK, m=6), gfx, release) == "") is fits
    assert refused(attrs.evolve(FP8, m=6), gfx, release) == ""
