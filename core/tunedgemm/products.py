"""Products: memory bandwidth and peaks of devices with equal architecture and units.

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
#: Ratio of rates up to which products are alike.
_ALIKE = 1.05


@attrs.frozen
class Product:
    """Properties of one product.

    Attributes:
        name: slug of its name.
        gfx, units: its architecture, and its compute units or multiprocessors.
        gb_s, peak_tflops: memory bandwidth in GB/s and dense 16-bit TFLOP/s by its data sheet.
        read_gb_s, tflops: measured read bandwidth in GB/s and dense 16-bit TFLOP/s of large GEMMs;
            0 if not measured.
        untuned: whether heuristics for untuned calls were measured on it.
        source: the source of these facts.
    """

    name: str
    gfx: str
    units: int = attrs.field(converter=int)
    gb_s: int = attrs.field(converter=int, validator=attrs.validators.gt(0))
    peak_tflops: int = attrs.field(converter=int, validator=attrs.validators.gt(0))
    read_gb_s: int = attrs.field(converter=int)
    tflops: int = attrs.field(converter=int)
    untuned: bool = attrs.field(converter=flag)
    source: str = attrs.field(validator=attrs.validators.min_len(1))

    @property
    def balance(self) -> float:
        """Return the rows of x from which reading a large weight takes less time than its products.

        8-bit operands have half the bytes and twice the operations, so the same rows.
        """
        return 1e3 * self.peak_tflops / self.gb_s


@functools.cache
def products() -> dict[str, Product]:
    """Return the known products by name."""
    return {line["name"]: Product(**line) for line in read_facts(_FILE)}


def data_sheet(device: Device) -> Product | None:
    """Return the product of a device; None if its name is unknown or it has other units."""
    known = products().get(device.name)
    return known if known and (known.gfx, known.units) == (device.gfx, device.cu_num) else None


@functools.lru_cache(maxsize=64)
def unit_peak_over(device: Device, name: str) -> float:
    """Return the peak of one of a device's units over that of a product; 1 for an unknown device."""
    known, other = data_sheet(device), products()[name]
    return known.peak_tflops / known.units / (other.peak_tflops / other.units) if known else 1.0


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


def are_alike(name: str, other: str) -> bool:
    """Check whether times on one product hold on another: equal units, memory and peak within 5 %."""
    first, second = products().get(name), products().get(other)
    if first is None or second is None or (first.gfx, first.units) != (second.gfx, second.units):
        return False
    ratios = first.gb_s / second.gb_s, first.peak_tflops / second.peak_tflops
    return all(1 / _ALIKE <= ratio <= _ALIKE for ratio in ratios)


def was_measured(device: Device) -> bool:
    """Check whether heuristics were measured for a device.

    It must be like a measured product; a device without a name needs only equal units.
    """
    measured = [product for product in measured_near(device) if product.units == device.cu_num]
    return any(not device.name or are_alike(product.name, device.name) for product in measured)
