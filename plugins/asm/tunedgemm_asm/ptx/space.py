"""Solutions on Hopper: what serves a shape, in the order of the cost model, and the neighbours of one that timed well."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.cost import cost
from tunedgemm_asm.ptx.limits import MOST_SPLITS, shared_evenly, supports, tiles_of, units_of, unsupported
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.names import LEAST_COLUMNS, SIDE, UNIT_B, KernelConfig, config_of
from tunedgemm_asm.ptx.resources import BLOCK_SHARED, SM_SHARED, SYSTEM_SHARED

#: Solutions of a shape at most.
MOST = 64
#: Rows of a and consumers -> rows of b: what a thread's registers hold, and not less than shared memory feeds at half the speed.
TILES = {
    (64, 1): (32, 64, 96, 128, 160, 192, 224, 256),
    (128, 1): (64, 96),
    (128, 2): (64, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (256, 2): (64, 96, 128, 160, 192),
}
#: The same where consumers take turns.
TURNS = {(64, 2): (256,), (128, 2): (96, 112, 128, 144, 160, 176, 192)}
#: The same for configs that add the accumulators of each stage to others.
PROMOTED_TILES = {**TILES, (256, 2): (64, 96, 128)}
#: Rows of x up to which operands are swapped, too; tiles then have them all, or half.
MOST_SWAPPED = 128
_SWAPPED = ((64, 1), (128, 2), (256, 2))
_GROUP, _GROUPS = 8, (1, 2, 4, 8, 16, 32)
#: Stages beyond which a load is long back when it is needed; and of a block that shares its SM.
_MOST_STAGES, _FEWEST_STAGES = 12, 3
#: Numbers of parts of K that are listed of one config; `refine` has their neighbours.
_LISTED_SPLITS = 2
#: Solutions of a list at most whose outputs the copy engine stores.
_LISTED_PANELS = 8
#: The same of those that share steps along K. Each is a hundredth faster by the model than its config is otherwise, and slower than the best
#: that shares none by no more than the model's error.
_LISTED_STREAM, _GAIN, _ERROR = 8, 0.01, 0.05

Candidate = tuple[KernelConfig, int]


def enumerate_stages(make: KernelConfig) -> list[int]:
    """The most stages that fit, and where two blocks may share the SM, the most with which they do."""
    each = make.stage_bytes + 16
    rooms = [BLOCK_SHARED, SM_SHARED // 2 - SYSTEM_SHARED] if make.consumers == 1 else [BLOCK_SHARED]
    found = [min(_MOST_STAGES, (room - UNIT_B) // each) for room in rooms]
    return [stages for stages in dict.fromkeys(found) if stages >= _FEWEST_STAGES]


def _promotions(shape: Shape) -> tuple[bool, ...]:
    """Whether configs add the accumulators of each stage to others: never, always, or both ways for bf16, which rounds more than that gains."""
    if not shape.dtype.startswith("fp8"):
        return (False,)
    return (True, False) if shape.scale != "block" and shape.outdtype == "bf16" else (True,)


def _covering(rows: int, dtype: str) -> int:
    """The least rows of b of a matrix instruction that are so many."""
    least = ceil_div(rows, UNIT_B) * UNIT_B
    return least if multiplies(least, dtype) else least + UNIT_B


def enumerate_tiles(shape: Shape, promoted: bool) -> Iterator[KernelConfig]:
    """Plans without a second thought about stages and clusters."""
    for (tile_a, consumers), ladder in (PROMOTED_TILES if promoted else TILES).items():
        yield from (KernelConfig(tile_a, tile_b, 2, consumers, group=_GROUP, promoted=promoted) for tile_b in ladder)
    for (tile_a, consumers), ladder in () if promoted else TURNS.items():
        yield from (KernelConfig(tile_a, tile_b, 2, consumers, group=_GROUP, turns=True) for tile_b in ladder)
    if shape.m <= MOST_SWAPPED:
        for tile_m in dict.fromkeys(_covering(rows, shape.dtype) for rows in (shape.m, ceil_div(shape.m, 2))):
            for tile_n, consumers in _SWAPPED:
                if not promoted or tile_n // SIDE // consumers * tile_m <= MOST_SWAPPED:
                    yield KernelConfig(tile_m, tile_n, 2, consumers, group=_GROUP, swapped=True, promoted=promoted)


def with_panels(config: KernelConfig) -> list[KernelConfig]:
    """The same whose outputs the copy engine stores: from places beside its stages, or where fewer than half fit, beside one stage less."""
    if config.swapped or config.turns or config.tile_b % LEAST_COLUMNS:
        return []
    for stages in range(config.stages, max(config.stages - 2, _FEWEST_STAGES - 1), -1):
        direct = attrs.evolve(config, stages=stages, panels=0)
        places = min(config.all_panels, (BLOCK_SHARED - direct.shared_bytes) // (config.consumers * config.panel_bytes))
        if 2 * places >= config.all_panels:
            return [attrs.evolve(direct, panels=places)]
    return []


def _panels_may_pay(config: KernelConfig, shape: Shape) -> bool:
    """Whether there are many outputs, and no other block on the SM that multiplies while they are stored."""
    return shape.m > MOST_SWAPPED and config.consumers > 1


def enumerate_configs(shape: Shape) -> Iterator[KernelConfig]:
    """Every sensible config for a shape."""
    for tile in (tile for promoted in _promotions(shape) for tile in enumerate_tiles(shape, promoted)):
        for stages in enumerate_stages(tile):
            config = attrs.evolve(tile, stages=stages)
            yield config
            if _panels_may_pay(config, shape):
                yield from (other for other in with_panels(config) if not unsupported(other, 1, shape))
            # In turns without: their list is short, and `refine` has a cluster of what is fast.
            if not config.turns and config.tile_b % (2 * UNIT_B) == 0 and units_of(config, shape)[0] > 1:
                yield attrs.evolve(config, cluster=2)


def _places(config: KernelConfig, device: Device) -> int:
    """Tiles that are computed at once."""
    return max(1, device.cu_num) * config.resident


def is_worthwhile(config: KernelConfig, shape: Shape, device: Device) -> bool:
    """Whether consumers that take turns have a tile each on some SM, and steps are shared of a round that is not full.

    Where an SM has one tile the other consumer would only wait.
    """
    if config.stream and not shared_evenly(config, shape, max(1, device.cu_num)).saved:
        return False
    return not config.turns or tiles_of(config, shape) > _places(config, device)


def enumerate_candidates(shape: Shape, device: Device) -> list[Candidate]:
    """Plans with their parts of K, best guesses first, `MOST` at most; K is split where blocks would be idle.

    Of configs that should take the same time those without turns come first.
    """
    if not supports(shape, device):
        return []
    found: list[tuple[float, bool, str, int, KernelConfig]] = []
    shared = []
    for config in (config for config in enumerate_configs(shape) if is_worthwhile(config, shape, device)):
        idle = _places(config, device) // tiles_of(config, shape)
        fitting = [splits for splits in range(1, min(MOST_SPLITS, max(1, 2 * idle)) + 1) if not unsupported(config, splits, shape)]
        costs = sorted(_guess(config, splits, shape, device) for splits in fitting)
        found += costs[:_LISTED_SPLITS]
        stream = attrs.evolve(config, stream=True)
        if not unsupported(stream, 1, shape) and is_worthwhile(stream, shape, device):
            guess = _guess(stream, 1, shape, device)
            shared += [guess] * ((1 + _GAIN) * guess[0] < costs[0][0])
    most = (1 + _ERROR) * min(found)[0]
    found += [guess for guess in sorted(shared) if guess[0] <= most][:_LISTED_STREAM]
    ordered = [(config, splits) for *_, splits, config in sorted(found, key=lambda each: each[:4])]
    beyond = [chosen for chosen in ordered if chosen[0].panels][_LISTED_PANELS:]
    return [chosen for chosen in ordered if chosen not in beyond][:MOST]


def _guess(config: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float, bool, str, int, KernelConfig]:
    """What a list is ordered by, but for the config at its end."""
    return cost(config, splits, shape, max(1, device.cu_num)), config.turns, config.name, splits, config


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, best guesses first."""
    for config, splits in enumerate_candidates(shape, device):
        yield Solution(libtype, config.name, splits)


def resolve(solution: Solution, shape: Shape) -> Candidate:
    """The config and the parts of K that a solution means; no parts are one.

    Raises:
        PluginError: there is no such kernel, or it does not take the shape so.
    """
    config, splits = config_of(solution.kernel_name), solution.split_k or 1
    if reason := unsupported(config, splits, shape):
        raise PluginError(reason)
    return config, splits


def refine(libtype: str, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions one step away from one: another group, stage, cluster, part of K or way to store, turns, 16 rows of b more or fewer,
    steps along K shared or not.
    """
    if not supports(shape, device):
        return
    config, splits = resolve(solution, shape)
    side = "tile_m" if config.swapped else "tile_n"
    at = _GROUPS.index(config.group) if config.group in _GROUPS else 0
    changes: list[dict[str, int]] = [{"group": group} for group in (*_GROUPS[max(0, at - 1) : at], *_GROUPS[at + 1 : at + 2])]
    changes += [{"promoted": promoted} for promoted in _promotions(shape) if promoted != config.promoted]
    changes += [{"stages": config.stages + step} for step in (-1, 1)] + [{"cluster": 3 - config.cluster}, {"turns": not config.turns}]
    for step in (-2 * UNIT_B, 2 * UNIT_B):
        for fewer in (0, 1, 2):
            changes.append({side: config.tile_b + step, "stages": config.stages - fewer})
    near = [(config, splits - 1), (config, splits + 1), (attrs.evolve(config, stream=not config.stream), 1)]
    direct = attrs.evolve(config, panels=0)
    for change in changes:
        try:
            changed = attrs.evolve(direct, **change)
        except PluginError:
            continue  # no SM holds it
        near += [(other, splits) for other in (with_panels(changed) if config.panels else [changed])]
    if config.panels or _panels_may_pay(config, shape):
        near += [(other, splits) for other in ([direct] if config.panels else with_panels(config))]
    for other, parts in dict.fromkeys(near):
        if (other, parts) != (config, splits) and not unsupported(other, parts, shape) and is_worthwhile(other, shape, device):
            yield Solution(libtype, other.name, parts)
