"""Predict how long a grid of tiles takes on CDNA, in clocks, to order solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import dtype_bits

from tunedgemm_ck.problem import batches_of

#: Multiply-adds of one compute unit per clock, by the bits of an element: MI300X (AMD's CDNA 3
#: white paper).
_PRODUCTS = {16: 1024, 8: 2048, 4: 4096}
#: Load bandwidth of a compute unit in bytes per clock, between L2's 64 and HBM's 8 per unit.
_BYTES = 24
#: Clocks until the first tile arrives, and of the shortest step along K: some latency of HBM is
#: exposed.
_START, _STEP = 1500, 150
#: Bytes of the output that the whole device adds atomically per clock, for one part of K.
_ADDED = 512
#: Multiple of the best predicted cost beyond which an instance does not suit a shape.
_FAR = 3.0
#: Neighbours among the listed instances.
_NEAREST = 4


#: (instance, splitK, shape, device) -> why the instance cannot serve a supported shape, or None.
Unfit = Callable[[Any, int, Shape, Device], str | None]
#: The same -> a predicted cost, in any unit.
Cost = Callable[[Any, int, Shape, Device], float]


def cost_of(tile: tuple[int, int, int], split: int, shape: Shape, device: Device) -> float:
    """Return the clocks of the busiest compute unit: rounds of tiles, bound by products or memory.

    Args:
        tile: M, N and elements of K of a block.
        split: logarithm of the parts of K.
    """
    m, n, k = tile
    parts = 1 << split
    blocks = -(-shape.m // m) * -(-shape.n // n) * batches_of(shape) * parts
    # rows beyond M and N are multiplied but not loaded
    loaded = min(m, shape.m) + min(n, shape.n)
    added = shape.m * shape.n * batches_of(shape) * dtype_bits(shape.outdtype) / 8 * (parts + 1) / _ADDED if split else 0.0
    return clocks(tile, loaded, -(-shape.k // (k * parts)), blocks / max(device.cu_num, 1), dtype_bits(shape.dtype)) + added


def clocks(tile: tuple[int, int, int], loaded: float, steps: int, share: float, bits: int) -> float:
    """Return the clocks of a compute unit that gets *share* blocks.

    Args:
        tile: M, N and elements of K of a block.
        loaded: rows of both operands that a block loads.
        steps: along K, of a block.
        share: blocks per compute unit.
        bits: of an element.
    """
    m, n, k = tile
    step = max(m * n * k / _PRODUCTS[bits], loaded * k * bits / 8 / _BYTES, _STEP)
    rounds = max(1.0, share)
    rounds = -(-rounds // 1) if rounds < 4 else rounds  # late rounds overlap
    return rounds * (_START + steps * step)


def order_by_cost(costs: Mapping[Any, float], full: bool) -> list[Any]:
    """Return instances with splitK, the cheapest first; *full* keeps those far off the best."""
    ordered = sorted(costs, key=lambda candidate: (costs[candidate], candidate[0].name, candidate[1]))
    return ordered if full else [candidate for candidate in ordered if costs[candidate] <= _FAR * costs[ordered[0]]]


def order_fitting(instances: Iterable[Any], unfit: Unfit, most_split: int, shape: Shape, device: Device, full: bool) -> list[Any]:
    """Return the instances that fit, each with the splitK worth timing, as `order_by_cost`."""
    return order_by_cost(fitting_costs(instances, unfit, most_split, shape, device, _tile_cost), full)


def _tile_cost(instance: Any, split: int, shape: Shape, device: Device) -> float:
    return cost_of(instance.sides, split, shape, device)


def fitting_costs(
    instances: Iterable[Any], unfit: Unfit, most_split: int, shape: Shape, device: Device, cost: Cost, rounds: int = 1
) -> dict[Any, float]:
    """Return the costs of the instances that fit, with the splitK worth timing.

    Args:
        instances: the offered ones.
        unfit: says why one cannot serve the shape.
        most_split: the largest splitK.
        shape, device: of the product.
        cost: predicts one.
        rounds: K is split until so many rounds of blocks keep all units busy.
    """
    return {
        (instance, split): cost(instance, split, shape, device)
        for instance in instances
        for split in _useful_splits(instance.sides, most_split, shape, rounds * device.cu_num)
        if not unfit(instance, split, shape, device)
    }


def _useful_splits(sides: tuple[int, int, int], most: int, shape: Shape, enough: int) -> Iterator[int]:
    """Yield logarithms of the parts of K worth timing: 0, and more up to enough blocks."""
    blocks = -(-shape.m // sides[0]) * -(-shape.n // sides[1]) * batches_of(shape)
    yield 0
    for split in range(1, most + 1):
        if blocks << (split - 1) >= enough:
            return
        yield split


def nearest(instance: Any, others: Iterable[Any]) -> list[Any]:
    """Return the instances whose tiles' sides have the nearest ratios to an instance's."""

    def distance(other: Any) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(instance.sides, other.sides, strict=True))

    return sorted(others, key=lambda other: (distance(other), other.name))[:_NEAREST]
