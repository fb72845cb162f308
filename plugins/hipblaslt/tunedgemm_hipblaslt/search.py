"""Search: what lies around a good configuration of cuBLASLt. Which of all its attributes to try, and what not to.

One kind of matrix product has some ten million combinations, of which the library accepts tens of thousands; nearly all are slow.
So the library's own answers come first, and around the best one attribute is changed at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import attrs

from tunedgemm_hipblaslt.descriptors import Capabilities, Described, Found
from tunedgemm_hipblaslt.names import Algorithm
from tunedgemm_hipblaslt.problem import BLOCK, Problem
from tunedgemm_hipblaslt.tiles import clusters, tiles

#: Neighbouring tiles have sides of at most so many times those of the tile, either way.
_NEAR = 2.0
#: Tiles that are tried, of so many nearest in their sides that the library is asked about: Hopper has a tile every 8 elements, so
#: that the nearest few alone lead nowhere, and which of them leaves the last wave full is what they differ in.
_TILES, _ASKED = 24, 256
#: Other stages that a tile is tried with whose own are refused.
_STAGES = 3
#: Octaves of wasted time that count as much as an octave between the sides of two tiles.
_OCTAVE = 0.5
#: Blocks of a cluster at most: more are not portable, and rarely pay.
_CLUSTER = 4
#: Parts of K at most, and elements of K that each keeps at least.
_PARTS, _PART = 32, 256
#: Values of a custom option that are all tried; of more, those nearby.
_OPTIONS = 8
#: A change that leaves this share of the last wave's multiprocessors idle more than before is not tried.
_IDLE = 0.35


def neighbours(described: Described, algorithm: Algorithm, workspace: int) -> Iterator[tuple[Algorithm, Found]]:
    """Configurations one step away that the library accepts within *workspace* bytes and whose waves make sense."""
    here, sizes = described.check(algorithm), described.problem.sizes
    idle = _idle(here.waves) if isinstance(here, Found) else 1.0
    able, taken = _within_a_scale(described.capabilities(algorithm.id), described.problem), dict[Algorithm, Found]()
    for changed in around(algorithm, able, sizes):
        candidate, found = _accepted(described, changed, able if changed.tile != algorithm.tile else None)
        if isinstance(found, Found) and found.workspace <= workspace and _idle(found.waves) <= idle + _IDLE:
            taken[candidate] = found
    others = [candidate for candidate in taken if candidate.tile != algorithm.tile]
    others.sort(key=lambda other: _OCTAVE * _distance(other.tile, algorithm.tile) + _wasted(other.tile, taken[other].waves, sizes))
    dropped = set(others[_TILES:])
    yield from ((candidate, found) for candidate, found in taken.items() if candidate not in dropped)


def _within_a_scale(able: Capabilities, problem: Problem) -> Capabilities:
    """What can be configured, without tiles of more rows than share a scale of the weight.

    cuBLASLt accepts those and multiplies all of their rows by one scale: 30 of 30 with 256 rows were wrong on an H200 (CUDA 13.0).
    """
    if problem.a_scale != "square":
        return able
    known = tiles()
    return attrs.evolve(able, tiles=tuple(tile for tile in able.tiles if tile not in known or known[tile][0] <= BLOCK))


def _accepted(described: Described, algorithm: Algorithm, able: Capabilities | None) -> tuple[Algorithm, Found | str]:
    """A configuration and the library's answer; with the nearest other stages where *able* is given and its own are refused.

    A larger tile with as many stages does not fit into shared memory.
    """
    found = described.check(algorithm)
    if isinstance(found, Found) or able is None or algorithm.stages not in able.stages:
        return algorithm, found
    place = able.stages.index(algorithm.stages)
    for stages in sorted(able.stages, key=lambda each: abs(able.stages.index(each) - place))[1 : _STAGES + 1]:
        other = attrs.evolve(algorithm, stages=stages)
        if isinstance(answer := described.check(other), Found):
            return other, answer
    return algorithm, found


def _distance(tile: int, other: int) -> float:
    """Octaves between the sides of two tiles, both sides' together; 0 where their sides are not known."""
    known = tiles()
    if tile not in known or other not in known:
        return 0.0
    return sum(abs(math.log2(mine / yours)) for mine, yours in zip(known[tile], known[other], strict=True))


def _wasted(tile: int, waves: float, sizes: tuple[int, int, int]) -> float:
    """Octaves of time that go to the idle part of the last wave and to tiles that stand out over the edges of D."""
    sides = zip(sizes[:2], tiles().get(tile, sizes[:2]), strict=True)
    return math.log2(math.prod(math.ceil(size / side) * side / size for size, side in sides)) - math.log2(1 - _idle(waves))


def _idle(waves: float) -> float:
    """The share of the device's time that the last wave leaves unused; 0 where the library does not tell."""
    return 1 - waves / math.ceil(waves) if waves > 0 else 0.0


def around(algorithm: Algorithm, able: Capabilities, sizes: tuple[int, int, int]) -> Iterable[Algorithm]:
    """Configurations with one attribute changed, each once, without asking the library.

    Args:
        algorithm: where to start.
        able: what can be configured.
        sizes: rows and columns of D, and K.
    """
    changed = functools.partial(attrs.evolve, algorithm)
    found = [changed(tile=tile) for tile in near_tiles(algorithm.tile, able.tiles, sizes, _ASKED)]
    found += [changed(stages=stages) for stages in able.stages]
    found += [changed(cluster=number) for number, (rows, columns) in clusters().items() if rows * columns <= _CLUSTER]
    found += list(_splits(algorithm, able, sizes[2]))
    found += [changed(swizzle=swizzle) for swizzle in range(able.swizzles + 1)]
    found += [changed(option=option) for option in near_options(algorithm.option, able.options)]
    return [each for each in dict.fromkeys(found) if each != algorithm]


def near_tiles(tile: int, possible: Iterable[int], sizes: tuple[int, int, int], most: int = _TILES) -> list[int]:
    """Tiles whose sides differ least from this one's, *most* beside itself, none with a side that the output would leave half empty."""
    known = tiles()
    if tile not in known:
        return list(possible)[:most]
    rows, columns = known[tile]

    def sensible(number: int) -> bool:
        sides = zip(known[number], (rows, columns), sizes[:2], strict=True)
        return all(before / _NEAR <= side <= before * _NEAR and (side <= before or side < 2 * size) for side, before, size in sides)

    found = [number for number in possible if number in known and sensible(number)]
    return sorted(found, key=lambda number: _distance(number, tile))[: most + 1]


def _splits(algorithm: Algorithm, able: Capabilities, k: int) -> Iterator[Algorithm]:
    """Other numbers of parts of K, each with every way to sum them up; one part needs none."""
    if not able.split_k:
        return
    parts = algorithm.split_k
    for number in dict.fromkeys((1, parts - 1, parts, parts + 1, 2 * parts, parts // 2, 3 * parts)):
        if number == 1:
            yield attrs.evolve(algorithm, split_k=1, reduction=0)
        elif 1 < number <= min(_PARTS, k // _PART):
            for way in (1, 2, 4):
                if able.reductions & way:
                    yield attrs.evolve(algorithm, split_k=number, reduction=way)


def near_options(option: int, largest: int) -> list[int]:
    """Values of the custom option to try: all of few, else those a step of one or of a power of two away."""
    if largest <= _OPTIONS:
        return list(range(largest + 1))
    steps = (1, 2, 4, 8, 16)
    near = [option + sign * step for step in steps for sign in (-1, 1)]
    return [0, *(value for value in near if 0 < value <= largest)]
