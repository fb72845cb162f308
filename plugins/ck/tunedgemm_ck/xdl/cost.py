"""Cost: a guess of how long a grid of tiles takes on CDNA, in clocks; it only orders what is then measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tunedgemm.plugin import Device, Shape, dtype_bits

from tunedgemm_ck.problem import batches_of

#: Multiplications of one compute unit in a clock, by the bits of an element: MI300X (AMD's CDNA 3 white paper).
_PRODUCTS = {16: 1024, 8: 2048, 4: 4096}
#: Bytes that a compute unit gets in a clock: between the 64 of L2 and its share of HBM, about 8.
_BYTES = 24
#: Clocks until the first tile is there, and of the shortest step along K: some of the latency of HBM is not hidden.
_START, _STEP = 1500, 150
#: Bytes of the output that the whole device adds atomically in a clock, a part of K at a time.
_ADDED = 512
#: An instance that is guessed to take longer than so many times the best guess does not suit a shape.
_FAR = 3.0


def cost(tile: tuple[int, int, int], split: int, shape: Shape, device: Device) -> float:
    """Clocks of the longest compute unit: its rounds of tiles, each step of which waits for products or for memory.

    Args:
        tile: M, N and elements of K of a block.
        split: logarithm of the parts of K.
    """
    m, n, k = tile
    parts = 1 << split
    blocks = -(-shape.m // m) * -(-shape.n // n) * batches_of(shape) * parts
    # rows that are not there are not loaded, but multiplied
    loaded = min(m, shape.m) + min(n, shape.n)
    added = shape.m * shape.n * batches_of(shape) * dtype_bits(shape.outdtype) / 8 * (parts + 1) / _ADDED if split else 0.0
    return clocks(tile, loaded, -(-shape.k // (k * parts)), blocks / max(device.cu_num, 1), dtype_bits(shape.dtype)) + added


def clocks(tile: tuple[int, int, int], loaded: float, steps: int, share: float, bits: int) -> float:
    """Clocks of a compute unit that gets *share* blocks.

    Args:
        tile: M, N and elements of K of a block.
        loaded: rows of both operands that a block loads.
        steps: along K, of a block.
        bits: of an element.
    """
    m, n, k = tile
    step = max(m * n * k / _PRODUCTS[bits], loaded * k * bits / 8 / _BYTES, _STEP)
    rounds = max(1.0, share)
    rounds = -(-rounds // 1) if rounds < 4 else rounds  # late rounds overlap
    return rounds * (_START + steps * step)


def order_by_cost(costs: Mapping[Any, float], full: bool) -> list[Any]:
    """Instances with splits of K, the cheapest first; not *full*, without those that do not suit the shape."""
    ordered = sorted(costs, key=lambda chosen: (costs[chosen], chosen[0].name, chosen[1]))
    return ordered if full else [chosen for chosen in ordered if costs[chosen] <= _FAR * costs[ordered[0]]]


def useful_splits(blocks: int, most: int, device: Device) -> Iterator[int]:
    """Logarithms of the parts of K that are worth a try beside the whole: more parts as long as compute units would be idle without."""
    for split in range(1, most + 1):
        if blocks << (split - 1) >= device.cu_num:
            return
        yield split
