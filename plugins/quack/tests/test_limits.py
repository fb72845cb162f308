"""Static limits of shapes and splits."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_quack.limits import unsupported, unsupported_splits

H200 = Device("sm_90", 132, "nvidia-h200")
PLAIN = Shape("a16w16", 5, 256, 512)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""), ({"m": 1}, ""), ({"dtype": "fp16", "outdtype": "bf16"}, ""), ({"outdtype": "fp32", "n": 252}, ""),
        ({"epilogue": "bias", "bias_dtype": "fp32"}, ""), ({"m": 0}, "M: "), ({"k": 500}, "K: "), ({"n": 252}, "N: "),
        ({"outdtype": "fp32", "n": 250}, "N: "), ({"dtype": "fp32", "outdtype": "fp32"}, "dtype: "), ({"outdtype": "fp64"}, "outdtype: "),
        ({"layout": "aiter16x16"}, "layout: "), ({"scale": "tensor"}, "layout: "), ({"epilogue": "bias", "bias_dtype": "fp64"}, "bias: "),
    ],
)  # fmt: skip
def test_shapes(fields: dict[str, Any], reason: str) -> None:
    """A refusal names the fault; everything else is served."""
    assert unsupported(attrs.evolve(PLAIN, **fields), H200).startswith(reason)
    assert bool(unsupported(attrs.evolve(PLAIN, **fields), H200)) == bool(reason)


def test_other_devices_are_refused() -> None:
    """The kernels are Hopper's."""
    for device in (Device("sm_100", 148), Device("gfx942", 304), Device("cpu-avx512", 16)):
        assert unsupported(PLAIN, device) == f"device: QuACK's kernels here are for sm_90 (got {device.gfx})"


def test_splits() -> None:
    """A split has a step of K, and there are at most 32."""
    assert [splits for splits in range(-1, 40) if not unsupported_splits(splits, PLAIN)] == list(range(9))
    assert max(splits for splits in range(99) if not unsupported_splits(splits, attrs.evolve(PLAIN, k=1 << 20))) == 32
