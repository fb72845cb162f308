"""Roofline: estimates of a shape's time before it is measured."""

from __future__ import annotations

import math

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner.roofline import cost, floor_us, guess_us, pace, patience_s, saving_us

H200, MI300X, MI355X = Device("sm_90", 132, "nvidia-h200", 0), Device("gfx942", 304, "amd-instinct-mi300x"), Device("gfx950", 256)
B200, CPU = Device("sm_100", 148), Device("cpu-avx512", 16)


def of(dtype: str, **extra: str) -> Shape:
    return Shape("a16w16", 4096, 4096, 4096, dtype, "bf16", extra=extra)


@pytest.mark.parametrize(
    ("shape", "device", "times"),
    [
        (of("bf16"), H200, 1), (of("fp32"), H200, 0.5), (of("fp8_e4m3fn"), H200, 2), (of("int8"), MI300X, 2),
        (of("fp4x2"), MI355X, 4), (of("fp4x2"), B200, 4), (of("fp4x2"), H200, 2), (of("fp4x2"), MI300X, 2),
        (of("fp4x2"), Device("sm_121", 48), 4), (of("fp4x2"), Device("sm_122", 48), 4), (of("fp4x2"), Device("gfx1151", 40), 2),
        (of("int8"), CPU, 1), (of("fp32"), CPU, 0.5),
        (of("bf16", q_dtype_a="fp8_e4m3fn", q_dtype_w="fp8_e4m3fn"), H200, 2),
        (of("bf16", q_dtype_a="torch.bfloat16", q_dtype_w="fp4x2"), MI355X, 1),
    ],
)  # fmt: skip
def test_narrow_operands_are_multiplied_faster_where_the_device_can(shape: Shape, device: Device, times: float) -> None:
    """8 bits twice as fast as 16, 4 bits four times where there is hardware for it.

    Of two dtypes the slower counts.
    """
    assert pace(shape, device) == times


@pytest.mark.parametrize("name", sorted(ops()))
def test_every_op_has_a_floor_a_guess_and_a_patience(name: str) -> None:
    """In that order for every example, on a GPU; more rows cost more.

    A saving is at least 0, and least where a backend chooses.
    """
    op = op_named(name)
    for shape in shapes_of(name, large=True):
        assert floor_us(op, shape, H200) > 0
        assert floor_us(op, shape, H200) <= guess_us(op, shape, H200) <= patience_s(op, shape, H200) * 1e6 + guess_us(op, shape, H200)
        for device in (H200, CPU, MI300X, B200):
            saved = [saving_us(op, shape, device, is_chosen=chosen) for chosen in (True, False)]
            assert 0 <= saved[0] <= saved[1] < math.inf
        for device in (H200, CPU):
            assert cost(op, attrs.evolve(shape, m=shape.m + 4096), device) > cost(op, shape, device) >= 0
