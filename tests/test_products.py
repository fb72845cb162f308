"""Products: facts with sources, how alike they are, and where untuned choices were measured."""

import math

import pytest
from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.device import Device, slug
from tunedgemm.products import difference, products, was_measured, with_memory


def test_each_line_is_a_product_with_its_source():
    """Names are slugs, and architectures are known; rates were measured below those of data sheets."""
    for name, product in products().items():
        assert name == product.name == slug(name) and product.gfx in set(ARCHITECTURES) and len(product.source) > 10
        assert (
            product.read_gb_s <= product.gb_s and product.tflops <= product.peak_tflops and bool(product.read_gb_s) is bool(product.tflops)
        )


def test_products_are_as_alike_as_their_memory():
    """An H800 and an H100 NVL resemble the H100 more than the H200; unknown names resemble none."""
    for name in ("nvidia-h800", "nvidia-h100-nvl", "nvidia-gh200-480gb"):
        assert 1 <= difference(name, "nvidia-h100-80gb-hbm3") < difference(name, "nvidia-h200")
    assert difference("nvidia-gh200-144g-hbm3e", "nvidia-h200") < difference("nvidia-gh200-144g-hbm3e", "nvidia-h100-80gb-hbm3")
    assert difference("nvidia-h200", "nvidia-unknown") == math.inf == difference("", "nvidia-h200")
    assert with_memory("nvidia-h800") == "nvidia-h800 (3352 GB/s)" and with_memory("unknown") == "unknown"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device("sm_90", 132, "nvidia-h100-80gb-hbm3"), True),
        (Device("sm_90", 132, "nvidia-h200"), True),
        (Device("sm_90", 132, "nvidia-h800"), True),
        (Device("sm_90", 132), True),
        (Device("sm_90", 132, "nvidia-gh200-144g-hbm3e"), True),  # within 2 % of an H200
        (Device("sm_90", 132, "nvidia-gh200-480gb"), False),  # its memory is between two measured ones
        (Device("sm_90", 132, "nvidia-h200-nvl"), False),  # less arithmetic
        (Device("sm_90", 132, "nvidia-unknown"), False),
        (Device("sm_90", 78, "nvidia-h20"), False),
        (Device("sm_90", 114, "nvidia-h100-pcie"), False),
        (Device("sm_90", 60, "nvidia-h200"), False),  # a part of one
        (Device("sm_90", 78), False),
        (Device("sm_100", 132), False),
        (Device("gfx942", 304, "amd-instinct-mi300x"), False),
    ],
    ids=str,
)
def test_a_class_is_units_memory_and_peak(device, expected):
    """A device was measured if one with its units, memory and peak within 5 % was."""
    assert was_measured(device) is expected
