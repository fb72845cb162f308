"""List the instances of CK Tile worth timing for a shape, and the neighbours of one.

The instances are those that AITER's tables choose, and those that AITER builds for gfx942, of which
its tables choose one. They are in the order of how often AITER's tables of August 2026 choose them,
every band of M having the same weight; those of gfx942 come last. Of the rows of gfx950, the first
16
cover all 160 with block scales and 67 % of the 123 of a8w8_bpreshuffle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.tile.limits import DEEPEST, unfit_sizes, unsupported
from tunedgemm_ck.tile.names import MOST_BLOCKS, PREFIXES, TileInstance, parse_name
from tunedgemm_ck.tile.resources import lds
from tunedgemm_ck.xdl.cost import fitting_costs, nearest, order_by_cost, order_fitting
from tunedgemm_ck.xdl.fitted_cost import Described, predictor
from tunedgemm_ck.xdl.limits import MOST_SPLIT, none_fits
from tunedgemm_ck.xdl.names import WAVE
from tunedgemm_ck.xdl.space import ROUNDS, first_instances

Candidate = tuple[TileInstance, int]

#: Op to its instances, without the prefix of their names.
LISTED: dict[str, tuple[str, ...]] = {
    "a8w8_bpreshuffle": (
        "0x0x8x4x1x0x0x0x0x2_32x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_256x256x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_256x256x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_32x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_16x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_256x256x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_128x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_32x64x512_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_32x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_128x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_16x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_16x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_16x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_96x256x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_48x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_128x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_64x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_128x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_128x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_80x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_80x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_96x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_96x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_96x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_32x64x512_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_224x128x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_256x128x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_128x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_160x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_48x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_64x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_96x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_96x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_48x64x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_96x256x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_224x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_256x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x4_256x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_224x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x2_112x128x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x3_224x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_96x192x256_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_96x192x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_96x256x128_1x4x1_16x16x128_default",
        "0x0x8x4x1x0x0x0x0x1_128x128x128_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_128x128x256_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x64x512_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x128x512_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x256x512_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x64x256_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x128x256_1x4x1_16x16x64_default",
        "0x0x8x4x1x0x0x0x0x1_16x256x256_1x4x1_16x16x64_default",
    ),
    "a8w8_blockscale": (
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_4",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_2",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_3",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_1",
        "32x128x128_1x4x1_16x16x64_intrawave_0x1x0_4",
        "16x128x256_1x4x1_16x16x128_intrawave_0x1x0_1",
        "128x128x128_2x2x1_16x16x128_intrawave_0x1x0_2",
        "16x128x256_1x4x1_16x16x128_intrawave_0x1x0_2",
        "16x128x256_1x4x1_16x16x64_intrawave_0x1x0_2",
        "32x128x128_1x4x1_16x16x64_intrawave_0x1x0_1",
        "16x128x256_1x4x1_16x16x128_intrawave_0x1x0_3",
        "16x128x256_1x4x1_16x16x128_intrawave_0x1x0_4",
        "128x128x128_2x2x1_16x16x128_intrawave_0x1x0_1",
        "128x128x128_1x4x1_16x16x64_intrawave_0x1x0_1",
        "16x128x256_1x4x1_16x16x64_intrawave_0x1x0_1",
        "128x128x128_1x4x1_16x16x64_intrawave_0x1x0_2",
    ),
    "a8w8_blockscale_bpreshuffle": (
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_4",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_3",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_1",
        "192x256x128_4x2x1_16x16x128_intrawave_0x1x0_2",
        "128x128x128_1x4x1_16x16x64_intrawave_0x1x0_1",
        "16x128x256_1x4x1_16x16x64_intrawave_0x1x0_1",
        "16x128x256_1x4x1_16x16x128_intrawave_0x1x0_1",
        "32x128x128_1x4x1_16x16x128_intrawave_0x1x0_1",
        "128x128x128_2x2x1_16x16x128_intrawave_0x1x0_2",
    ),
}

#: Listed instances of an op and architecture in the default space.
DEFAULT = 16


@functools.lru_cache(maxsize=64)
def listed_instances(op: str) -> tuple[TileInstance, ...]:
    """Return all listed instances of an op, in order."""
    return tuple(parse_name(f"{PREFIXES[op]}_{name}", op) for name in LISTED[op])


def of_architecture(op: str, gfx: str) -> tuple[TileInstance, ...]:
    """Return the listed instances whose matrix instructions an architecture has."""
    return tuple(instance for instance in listed_instances(op) if instance.warp_tile[2] < DEEPEST or gfx == "gfx950")


def unserved(shape: Shape, device: Device) -> str | None:
    """Return why no listed instance can serve a shape on a device, or None."""
    return unsupported(shape, device) or none_fits(
        unfit_sizes(instance, 0, shape, device) for instance in of_architecture(shape.op, device.gfx)
    )


def described(instance: TileInstance) -> Described:
    """Return threads of a block, bytes of LDS, and the key of an instance in fitted rates."""
    m, _, k = instance.tile
    return WAVE * math.prod(instance.warps), max(lds(instance), m * k), (*instance.tile, instance.blocks)


def enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterable[Candidate]:
    """Return instances with splitK for a supported shape, best guesses first; *full* lists all that
    fit.
    """
    offered = of_architecture(shape.op, device.gfx)
    most = 0 if shape.op == "a8w8_bpreshuffle" else MOST_SPLIT
    if predicted := predictor("cktile", described, shape, device):
        costs = fitting_costs(offered, unfit_sizes, most, shape, device, predicted, ROUNDS)
        return first_instances(order_by_cost(costs, full), len(offered) if full else DEFAULT)
    return order_fitting(offered if full else offered[:DEFAULT], unfit_sizes, most, shape, device, full)


def enumerate_neighbours(instance: TileInstance, split: int, shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the neighbours of an instance that fit.

    They change splitK, the blocks per unit, or the tile to one of the nearest listed ones.
    """
    candidates = [(instance, split + step) for step in (-1, 1)]
    counts = (instance.blocks - 1, instance.blocks + 1)
    candidates += [(attrs.evolve(instance, blocks=count), split) for count in counts if 1 <= count <= MOST_BLOCKS]
    candidates += [
        (other, split) for other in nearest(instance, (each for each in listed_instances(shape.op) if each.tile != instance.tile))
    ]
    for other, parts in dict.fromkeys(candidates):
        if not unfit_sizes(other, parts, shape, device):
            yield other, parts
