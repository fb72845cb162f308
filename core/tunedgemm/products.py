"""Products: the memory of devices that share an architecture and its units, and what was measured.

A line of the file is a product with its source. A device of another name has no facts here.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import attrs

from tunedgemm.architectures import flag, read_facts
from tunedgemm.device import Device

_FILE = Path(__file__).with_name("products.csv")


@attrs.frozen
class Product:
    """Facts of one product.

    Attributes:
        name: the slug of its name.
        gfx, units: its architecture, and its compute units or multiprocessors.
        gb_s: GB/s of its memory by its data sheet.
        read_gb_s, tflops: GB/s of reading alone, and dense TFLOP/s of large 16-bit products, both
            measured; 0 where they were not.
        untuned: whether choices for untuned calls were measured on it.
        source: the origin of these facts.
    """

    name: str
    gfx: str
    units: int = attrs.field(converter=int)
    gb_s: int = attrs.field(converter=int, validator=attrs.validators.gt(0))
    read_gb_s: int = attrs.field(converter=int)
    tflops: int = attrs.field(converter=int)
    untuned: bool = attrs.field(converter=flag)
    source: str = attrs.field(validator=attrs.validators.min_len(1))


@functools.cache
def products() -> dict[str, Product]:
    """Return the known products by name."""
    return {line["name"]: Product(**line) for line in read_facts(_FILE)}


def difference(name: str, other: str) -> float:
    """Return how unlike two products of one architecture are: the ratio of their memory rates, at least 1.

    It is infinite where one is unknown.
    """
    first, second = products().get(name), products().get(other)
    return max(first.gb_s / second.gb_s, second.gb_s / first.gb_s) if first and second else math.inf


def with_memory(name: str) -> str:
    """Return a product's name with the rate of its memory, where that is known."""
    known = products().get(name)
    return f"{name} ({known.gb_s} GB/s)" if known else name


def measured_near(device: Device) -> tuple[Product, ...]:
    """Return the products of the architecture on which untuned choices were measured."""
    return tuple(product for product in products().values() if product.untuned and product.gfx == device.gfx)


def was_measured(device: Device) -> bool:
    """Tell whether untuned choices were measured on a device, or on slower and faster ones of its units.

    A device without a name counts by its units alone.
    """
    alike = [product.gb_s for product in measured_near(device) if product.units == device.cu_num]
    known = products().get(device.name)
    return bool(alike) and (not device.name or (known is not None and min(alike) <= known.gb_s <= max(alike)))
