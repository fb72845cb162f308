"""Predict an instance's microseconds on a shape, where rates were fitted to AITER's tables.

`benchmarks/aiter_fit.py` writes the rates and judges them on layers that it did not fit. Nothing
here ran on an AMD GPU: AITER's authors measured the times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, Rates, Work, predict_us, read_rates

from tunedgemm_ck.xdl.cost import Cost
from tunedgemm_ck.xdl.names import XdlInstance
from tunedgemm_ck.xdl.resources import lds

#: Threads, bytes of LDS and key of an instance.
Described = tuple[int, int, tuple[int, ...]]

_FILE = Path(__file__).with_name("rates.csv")
#: Registers of a lane, and those that a block needs for neither sums nor operands.
_REGISTERS, _OTHERS = 512, 40
#: Blocks that a compute unit holds at most.
_BLOCKS = 8
#: Peaks per microsecond of MI325X and MI355X: bytes of memory and of the last cache, multiply-adds
#: of bf16. The sources are AMD's data sheets; the last is the fastest bf16 row of AITER's tables.
_PEAKS = {"gfx942": (6.0e6, 17.2e6, 6.5e8), "gfx950": (8.0e6, 17.2e6, 8.0e8)}


@attrs.frozen
class _Torch:
    """Least work of torch's quickest route for an op.

    Attributes:
        kernels: launches.
        copied: bytes of an operand's element in the last cache, written and read between kernels.
        reordered: bytes of an element of the weight that reordering it takes in addition.
        between: bytes of an element of the output between kernels.
        speed: multiple of bf16's products.
    """

    kernels: int
    copied: float
    reordered: float = 0
    between: float = 0
    speed: float = 1


#: Op and kind of its operands -> torch's route. With block scales both operands become bf16. A
#: shuffled weight is written in order first. int8 gives int32, and float32 with one of the scales.
_TORCH = {
    ("a8w8", "int8"): _Torch(3, 0, between=16, speed=2),
    ("a8w8_blockscale", "fp8"): _Torch(5, 4),
    ("a8w8_bpreshuffle", "fp8"): _Torch(2, 0, reordered=2, speed=2),
    ("a8w8_blockscale_bpreshuffle", "fp8"): _Torch(6, 4, reordered=2),
    ("a4w4_blockscale", "fp4x2"): _Torch(8, 4, reordered=1),
}


@functools.cache
def all_rates() -> dict[tuple[str, str, str, int], Rates]:
    """Return the rates of ``ck`` and ``cktile`` by libtype, op, architecture and units."""
    return read_rates(_FILE)


def rates_of(libtype: str, shape: Shape, device: Device) -> Rates | None:
    """Return the rates for a shape's op on a device with as many units as the measured one."""
    return all_rates().get((libtype, shape.op, device.gfx, device.cu_num))


def described(instance: XdlInstance) -> Described:
    """Return threads of a block, bytes of LDS, and the key in `Rates.factors`."""
    return instance.threads, lds(instance), (*instance.sides, instance.pipeline)


def resident_blocks(sides: tuple[int, int, int], threads: int, shared: int, gfx: str) -> int:
    """Return the blocks that a compute unit holds, by *shared* bytes of LDS and by registers."""
    m, n, k = sides
    registers = m * n // threads + (m + n) * k // (2 * threads) + _OTHERS
    return max(1, min(ARCHITECTURES[gfx].shared_bytes // shared, _REGISTERS // registers, _BLOCKS))


def predictor(libtype: str, describe: Callable[[Any], Described], shape: Shape, device: Device) -> Cost | None:
    """Return what predicts the microseconds of a libtype's instances, or None without rates.

    Parts of K take forever where AITER did not try them.
    """
    rates = rates_of(libtype, shape, device)
    if rates is None:
        return None

    def cost(instance: Any, split: int, shape: Shape, device: Device) -> float:
        if split and math.isinf(rates.added):
            return math.inf
        threads, shared, key = describe(instance)
        resident = resident_blocks(instance.sides, threads, shared, device.gfx)
        sizes = shape.m, shape.n, shape.k, *instance.sides
        return float(predict_us(rates, Work(*sizes, 1 << split, device.cu_num, resident, rates.factors.get(key, 1.0))))

    return cost


def torch_least_us(rates: Rates, shape: Shape, device: Device) -> float:
    """Return the least microseconds of torch's routes; 0 for ops where one kernel is its route.

    Memory gives each byte once, and the last cache takes and gives copies, all at the peaks.
    """
    memory, cache, products = _PEAKS[device.gfx]
    route = _TORCH.get((shape.op, shape.dtype.split("_")[0]))
    if route is None:
        return 0.0
    elements, outputs = (shape.m + shape.n) * shape.k, shape.m * shape.n
    loaded = elements * (0.5 if shape.dtype == "fp4x2" else 1) / memory
    copied = (elements * route.copied / 2 + shape.n * shape.k * route.reordered + outputs * route.between) / cache
    product = max(elements * route.copied / 2 / cache + 2 * outputs / memory, outputs * shape.k / products / route.speed)
    return route.kernels * rates.launch + loaded + copied + product
