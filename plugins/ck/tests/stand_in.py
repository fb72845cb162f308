"""Stand-ins for a template library: instances of one number; a fake compiler reads their first
line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm_ck.build import CALL, MOE_CALL
from tunedgemm_ck.family import Candidate, Family
from tunedgemm_ck.names import Stages, parse_stages
from tunedgemm_ck.problem import Problem


@attrs.frozen
class StandIn:
    """A stand-in for an instance.

    Attributes:
        tile: its one parameter.
    """

    tile: int

    @property
    def name(self) -> str:
        return f"tile{self.tile}"


TILES = (64, 128, 256)


def _parse(name: str, op: str) -> StandIn | Stages:
    if op == "fmoe":
        return parse_stages(name, "standin", lambda stage: _one(stage, op))
    return _one(name, op)


def _one(name: str, op: str) -> StandIn:
    found = re.fullmatch(r"tile(\d+)", name)
    if not found or int(found[1]) not in TILES:
        raise PluginError(f"no instance {name!r} of {op}")
    return StandIn(int(found[1]))


def _enumerate_instances(shape: Shape, device: Device, full: bool) -> Iterator[Candidate]:
    if shape.op == "fmoe":
        yield from ((Stages(StandIn(first), StandIn(second)), 1) for first in TILES[:2] for second in TILES[:2])
        return
    for tile in TILES if full else TILES[:2]:
        yield StandIn(tile), 1
        if shape.k >= 2 * tile:
            yield StandIn(tile), 2


def _render(instance: StandIn, problem: Problem) -> str:
    return f"// {instance.name} for {problem.op}\n{MOE_CALL if problem.stage else CALL}// the end\n"


def family(libtype: str, kind: str) -> Family:
    """Return a family of stand-ins for devices of a kind."""
    return Family(
        libtype=libtype,
        kind=kind,
        ops=("a16w16", "a8w8", "a8w8_blockscale", "batched_bf16", "batched_a8w8", "fmoe"),
        unsupported=lambda shape, device: "K is odd" if shape.k % 2 else None,
        enumerate_instances=_enumerate_instances,
        parse=_parse,
        unfit=lambda instance, split, shape, device: None if split <= 8 else f"{split} splits are too many",
        render=_render,
        flags=lambda instance, problem: (f"-DTILE={instance.tile}",),
        enumerate_neighbours=lambda instance, split, shape, device: [(StandIn(tile), split) for tile in TILES if tile != instance.tile],
        deterministic=lambda instance, split: split == 1,
        revision=3,
    )
