"""Spaces of CK's two stages of a mixture of experts: which pairs are worth timing for a shape, and the neighbours of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools import dtype_bits

from tunedgemm_ck.family import Instance
from tunedgemm_ck.stages import Stages
from tunedgemm_ck.xdl.cost import clocks, likely
from tunedgemm_ck.xdl.moe import MoeInstance
from tunedgemm_ck.xdl.moe_limits import kind_of, listed, misfit, static
from tunedgemm_ck.xdl.moe_listed import DEFAULTS

Chosen = tuple[Instance, int]


def space(shape: Shape, device: Device, full: bool) -> Iterable[Chosen]:
    """Pairs for a shape that is not refused, best guesses first; with *full* of all listed instances that fit."""
    first, second = ({stage: _cost(stage, shape, device) for stage in _offered(shape, device, number, full)} for number in (1, 2))
    costs = {(Stages(one, two), 0): first[one] + second[two] for one in first for two in second}
    return likely(costs, full)


def near(instance: Instance, split: int, shape: Shape, device: Device) -> Iterator[Chosen]:
    """Pairs of which one stage is another listed one."""
    if not isinstance(instance, Stages) or split or static(shape, device):
        return
    for other in _offered(shape, device, 1, full=True):
        if other != instance.first:
            yield Stages(other, instance.second), 0
    for other in _offered(shape, device, 2, full=True):
        if other != instance.second:
            yield Stages(instance.first, other), 0


def _offered(shape: Shape, device: Device, stage: int, full: bool) -> list[MoeInstance]:
    """The listed instances of a stage that fit; without *full* as many of each kind as `DEFAULTS` says."""
    if static(shape, device):
        return []
    instances = listed(shape, device, stage)
    most = None if full else DEFAULTS[kind_of(shape), stage]
    fitting = [instance for instance in instances[:most] if not misfit(instance, shape, device)]
    # a shape whose sizes none of the first divides still has others
    return fitting or [instance for instance in instances if not misfit(instance, shape, device)]


def _cost(of: MoeInstance, shape: Shape, device: Device) -> float:
    """Clocks of a stage, with tokens spread evenly over the experts that some are expected to hit."""
    experts, pairs = int(shape["expert"]), shape.m * int(shape["topk"])
    hit = max(experts * (1.0 - (1.0 - 1.0 / experts) ** pairs), 1.0)
    rows = pairs / hit
    n, k, wide = (shape.k, shape.n, 2) if of.stage == 1 else (shape.n, shape.k, 1)  # stage 1 multiplies gate and up
    blocks = hit * -(-rows // of.m) * (n // of.n)
    bits = dtype_bits(str(shape["q_dtype_w"]))
    return clocks((of.m, of.n * wide, of.k), min(rows, of.m) + of.n * wide, k // of.k, blocks / max(device.cu_num, 1), bits)
