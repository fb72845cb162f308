"""Products: memory bandwidth and measured peaks of devices with equal architecture and units.

Each line of the file is a product with its source; other devices are unknown.
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
    """Properties of one product.

    Attributes:
        name: slug of its name.
        gfx, units: its architecture, and its compute units or multiprocessors.
        gb_s: memory bandwidth in GB/s by its data sheet.
        read_gb_s, tflops: measured read bandwidth in GB/s and dense 16-bit TFLOP/s of large GEMMs;
            0 if not measured.
        untuned: whether heuristics for untuned calls were measured on it.
        source: the source of these facts.
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
    """Return the ratio of two products' memory bandwidths, at least 1; infinity if unknown."""
    first, second = products().get(name), products().get(other)
    return max(first.gb_s / second.gb_s, second.gb_s / first.gb_s) if first and second else math.inf


def with_memory(name: str) -> str:
    """Return a product's name with its memory bandwidth, if known."""
    known = products().get(name)
    return f"{name} ({known.gb_s} GB/s)" if known else name


def measured_near(device: Device) -> tuple[Product, ...]:
    """Return the products of a device's architecture on which heuristics were measured."""
    return tuple(product for product in products().values() if product.untuned and product.gfx == device.gfx)


def was_measured(device: Device) -> bool:
    """Check whether heuristics were measured for a device.

    Its bandwidth must be within that of measured products with equal units; a device without a name
    needs only equal units.
    """
    alike = [product.gb_s for product in measured_near(device) if product.units == device.cu_num]
    known = products().get(device.name)
    return bool(alike) and (not device.name or (known is not None and min(alike) <= known.gb_s <= max(alike)))
