"""Rates: predict the microseconds of tiled kernels by rates that were fitted to measured times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.architectures import read_facts


@attrs.frozen
class Rates:
    """The fitted rates of a libtype's op on a device, per microsecond or in microseconds.

    Attributes:
        launch: microseconds of a launch.
        start: of a block's first loads.
        latency: of the shortest step along K.
        clear: of clearing an output that parts of K are added to.
        latency_byte: that a step waits per element of its tiles.
        products: multiply-adds of a compute unit.
        cached: elements that a compute unit loads from L2.
        stored: bytes of output that a compute unit stores.
        read, written: elements that the device reads from memory, and bytes that it writes.
        added: bytes that the device adds atomically; infinite where parts of K were not tried.
        serial: fraction of the shorter of multiplying and loading that does not overlap.
        overlap: the same fraction of blocks' work and memory traffic.
        whole: share of a last round's idle units that is lost.
        factors: key of a kernel -> multiple of its work.
        margin: multiple of predicted times that nine of ten measured times do not exceed.
    """

    launch: float
    start: float
    latency: float
    clear: float
    latency_byte: float
    products: float
    cached: float
    stored: float
    read: float
    written: float
    added: float
    serial: float
    overlap: float
    whole: float
    factors: Mapping[tuple[int, ...], float]
    margin: float = 1.0


@attrs.frozen
class Work:
    """A launch in numbers, or many in arrays.

    Attributes:
        m, n, k: sizes of the product.
        tile_m, tile_n, tile_k: sizes of a block.
        parts: of K.
        units: compute units.
        resident: blocks that a unit holds at a time.
        factor: multiple of the kernel's work.
    """

    m: Any
    n: Any
    k: Any
    tile_m: Any
    tile_n: Any
    tile_k: Any
    parts: Any
    units: Any
    resident: Any
    factor: Any


def predict_us(rates: Rates, work: Work) -> Any:
    """Return the microseconds of a launch, or an array of them."""
    blocks = _ceil_div(work.m, work.tile_m) * _ceil_div(work.n, work.tile_n) * work.parts
    together = _least(work.resident, _ceil_div(blocks, work.units))
    rounds = _most(1, blocks / work.units / together)
    rounds = rounds + rates.whole * (_ceil_div(rounds, 1) - rounds)
    loaded = (_least(work.tile_m, work.m) + _least(work.tile_n, work.n)) * work.tile_k / rates.cached
    busy = _joined(work.tile_m * work.tile_n * work.tile_k / rates.products, loaded, rates.serial)
    waited = rates.latency + (work.tile_m + work.tile_n) * work.tile_k * rates.latency_byte
    steps = _ceil_div(work.k, work.tile_k * work.parts)
    stored = together * work.tile_m * work.tile_n * 2 / rates.stored
    taken = rounds * (rates.start + steps * _most(waited, together * busy * work.factor) + stored)
    output = 2 * work.m * work.n
    moved = (work.m + work.n) * work.k / rates.read + output / rates.written
    added = (work.parts > 1) * (rates.clear + output * (work.parts + 1) / rates.added)
    return rates.launch + _joined(taken, moved, rates.overlap) + added


def _ceil_div(total: Any, part: Any) -> Any:
    return -(-total // part)


# Unlike max and min, these take arrays, too: the fit predicts a whole table at once.
def _most(first: Any, second: Any) -> Any:
    return (first + second + abs(first - second)) / 2


def _least(first: Any, second: Any) -> Any:
    return (first + second - abs(first - second)) / 2


def _joined(first: Any, second: Any, share: float) -> Any:
    return _most(first, second) + share * _least(first, second)


def read_rates(path: Path) -> dict[tuple[str, str, str, int], Rates]:
    """Read a CSV file of rates: libtype, op, architecture and compute units -> its rates."""
    found = {}
    for line in read_facts(path):
        key = line.pop("libtype"), line.pop("op"), line.pop("gfx"), int(line.pop("units"))
        pairs = (text.split("=") for text in line.pop("factors").split())
        factors = {tuple(map(int, name.split("x"))): float(factor) for name, factor in pairs}
        found[key] = Rates(**{name: float(text) for name, text in line.items()}, factors=factors)
    return found
