"""Predict an instance's microseconds on a shape, where rates were fitted to AITER's tables.

`benchmarks/aiter_fit.py` fits the rates and judges them on layers that it did not fit. Nothing here
ran on an AMD GPU: AITER's authors measured the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_ck.xdl.names import XdlInstance
from tunedgemm_ck.xdl.resources import lds

#: The op of the fitted tables.
OP = "a8w8_blockscale"
#: Registers of a lane, and those that a block needs for neither sums nor operands.
_REGISTERS, _OTHERS = 512, 40
#: Blocks that a compute unit holds at most.
_BLOCKS = 8
#: Predicted times count so many times against torch: nine of ten are less wrong.
MARGIN = 1.2
#: Peaks per microsecond of MI325X and MI355X: bytes of memory and of the last cache, multiply-adds
#: of bf16. The sources are AMD's data sheets; the last is the fastest bf16 row of AITER's tables.
_PEAKS = {"gfx942": (6.0e6, 17.2e6, 6.5e8), "gfx950": (8.0e6, 17.2e6, 8.0e8)}


@attrs.frozen
class Rates:
    """The fitted rates of a device, per microsecond or in microseconds.

    Attributes:
        launch: microseconds of a launch.
        start: of a block's first loads.
        latency: of the shortest step along K.
        clear: of clearing an output that parts of K are added to.
        latency_byte: that a step waits per byte of its tiles.
        products: multiply-adds of a compute unit.
        cached: bytes that a compute unit loads from L2.
        stored: bytes of output that a compute unit stores.
        read, written: bytes that the device reads from memory, and writes to it.
        added: bytes that the device adds atomically.
        serial: fraction of the shorter of multiplying and loading that does not overlap.
        overlap: the same fraction of blocks' work and memory traffic.
        whole: share of a last round's idle units that is lost.
        factors: tile and pipeline of an instance -> multiple of its work.
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
    factors: Mapping[tuple[int, int, int, int], float]


@attrs.frozen
class Work:
    """A launch in numbers, or many in arrays.

    Attributes:
        m, n, k: sizes of the product.
        tile_m, tile_n, tile_k: sizes of a block.
        parts: of K.
        units: compute units.
        resident: blocks that a unit holds at a time.
        factor: multiple of the instance's work.
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


def tile_of(instance: XdlInstance) -> tuple[int, int, int, int]:
    """Return the key of an instance in `Rates.factors`."""
    return instance.m, instance.n, instance.sides[2], instance.pipeline


def resident_blocks(instance: XdlInstance, gfx: str) -> int:
    """Return the blocks that a compute unit holds, by LDS and registers."""
    m, n, k = instance.sides
    registers = m * n // instance.threads + (m + n) * k // (2 * instance.threads) + _OTHERS
    return max(1, min(ARCHITECTURES[gfx].shared_bytes // lds(instance), _REGISTERS // registers, _BLOCKS))


def rates_of(shape: Shape, device: Device) -> Rates | None:
    """Return the rates for a shape's op on a device with as many units as the measured one."""
    return RATES.get((device.gfx, device.cu_num)) if shape.op == OP else None


def work_of(instance: XdlInstance, split: int, shape: Shape, device: Device, factor: float = 1.0) -> Work:
    """Return the work of a launch with K in ``1 << split`` parts."""
    resident = resident_blocks(instance, device.gfx)
    return Work(shape.m, shape.n, shape.k, *instance.sides, 1 << split, device.cu_num, resident, factor)


def cost_of(instance: XdlInstance, split: int, shape: Shape, device: Device) -> float:
    """Return the predicted microseconds of an instance; the device has rates."""
    rates = RATES[device.gfx, device.cu_num]
    return float(predict_us(rates, work_of(instance, split, shape, device, rates.factors.get(tile_of(instance), 1.0))))


def torch_least_us(shape: Shape, device: Device) -> float:
    """Return the least microseconds of torch's routes, all of which dequantise the operands.

    The quickest has five kernels. Memory gives each byte once, and the last cache takes and gives
    the bf16 copies, all at the peaks.
    """
    memory, cache, products = _PEAKS[device.gfx]
    operands = (shape.m + shape.n) * shape.k
    dequantised = operands / memory + 2 * operands / cache
    product = max(2 * operands / cache + 2 * shape.m * shape.n / memory, shape.m * shape.n * shape.k / products)
    return 5 * RATES[device.gfx, device.cu_num].launch + dequantised + product


#: Architecture and compute units -> rates: of MI300X and MI325X, and of MI350X and MI355X.
RATES: dict[tuple[str, int], Rates] = {
    ("gfx942", 304): Rates(
        launch=1.84,
        start=0.744,
        latency=0.279,
        clear=3.98,
        latency_byte=1.61e-05,
        products=2.23e06,
        cached=5.88e04,
        stored=3.23e04,
        read=7.37e06,
        written=2.91e06,
        added=4.23e05,
        serial=0.717,
        overlap=0.506,
        whole=0.376,
        factors={
            (16, 64, 256, 1): 1.01,
            (64, 64, 256, 1): 1.06,
            (128, 128, 128, 3): 0.92,
            (32, 64, 256, 1): 1.49,
            (16, 64, 128, 1): 0.92,
            (64, 64, 128, 3): 0.96,
            (16, 128, 256, 1): 1.0,
            (64, 64, 128, 1): 0.97,
            (64, 128, 128, 3): 1.12,
            (32, 128, 256, 1): 1.17,
            (32, 64, 128, 1): 1.03,
            (64, 256, 128, 1): 1.2,
            (64, 128, 256, 1): 1.24,
            (16, 128, 128, 1): 1.0,
            (32, 256, 128, 1): 1.03,
            (64, 128, 128, 1): 1.14,
            (128, 64, 128, 3): 1.12,
        },
    ),
    ("gfx950", 256): Rates(
        launch=1.89,
        start=0.523,
        latency=0.271,
        clear=1.7,
        latency_byte=1.39e-05,
        products=4e06,
        cached=6.97e04,
        stored=1.56e04,
        read=5.82e06,
        written=2.66e06,
        added=3.01e05,
        serial=0.265,
        overlap=0.382,
        whole=0.193,
        factors={
            (16, 64, 256, 1): 0.98,
            (64, 64, 256, 1): 0.94,
            (128, 128, 128, 3): 1.04,
            (32, 64, 256, 1): 0.94,
            (16, 64, 128, 1): 0.98,
            (64, 64, 128, 3): 1.06,
            (16, 128, 256, 1): 0.99,
            (64, 64, 128, 1): 1.05,
            (64, 128, 128, 3): 1.1,
            (32, 128, 256, 1): 1.04,
            (32, 64, 128, 1): 1.01,
            (64, 256, 128, 1): 1.08,
            (64, 128, 256, 1): 1.21,
            (16, 128, 128, 1): 1.0,
            (32, 256, 128, 1): 1.03,
            (64, 128, 128, 1): 1.1,
            (128, 64, 128, 3): 1.13,
        },
    ),
}
