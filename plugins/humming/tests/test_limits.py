"""limits: which shapes are served, and the reasons of refusals."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_humming.limits import unsupported

H200 = Device("sm_90", 132, "nvidia-h200")
PLAIN = Shape("a16wn", 5, 256, 512, scale="block", layout="marlin", extra={"w_format": "gptq_int4", "w_group": 128})
FP8: Any = {"w_format": "fp8_channel", "w_group": 0}
INT8: Any = {"w_format": "int8_channel", "w_group": 0}
FP16 = {"dtype": "fp16", "outdtype": "fp16"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"m": 0}, "M: an empty batch needs no kernel (got 0)"),
        ({"layout": "row"}, "layout: must be marlin or humming (got row)"),
        ({"layout": "machete"}, "layout: must be marlin or humming (got machete)"),
        ({"dtype": "fp32"}, "dtype: must be bf16 or fp16 (got fp32)"),
        ({"outdtype": "fp32"}, "outdtype: must be bf16, as x (got fp32)"),
        ({"epilogue": "bias", "bias_dtype": "bf16"}, "bias: the kernel adds none in its order (got one in bf16)"),
        ({"n": 320}, "N and K: must be multiples of 128 (got 320 and 512)"),
        ({"k": 576}, "N and K: must be multiples of 128 (got 256 and 576)"),
        ({"extra": FP8}, "layout: fp8_channel needs humming, whose scales or zero points are not Marlin's (got marlin)"),
        ({"extra": FP8, "layout": "humming"}, ""),
        ({"extra": INT8, **FP16}, ""),
        ({"extra": INT8}, "dtype: int8_channel must be with fp16, since its codes for bf16 are not Marlin's (got bf16)"),
    ],
)
def test_shapes(fields: dict[str, Any], reason: str) -> None:
    """A refusal names the fault, its value and what is served."""
    assert unsupported(attrs.evolve(PLAIN, **fields), H200) == reason


def test_other_devices_are_refused() -> None:
    """Hopper's kernels alone were checked."""
    for device in (Device("sm_80", 108), Device("sm_100", 148), Device("gfx942", 304), Device("cpu-avx512", 16)):
        assert unsupported(PLAIN, device) == f"device: Humming's kernels here are for sm_90 (got {device.gfx})"
