"""List the solutions of a shape on Hopper in the order of the cost model, and the neighbours of
one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.launching import unit_peak_over

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.cost import FITTED_ON, cost_of
from tunedgemm_asm.ptx.limits import MOST_SPLITS, shared_evenly, tiles_of, unfit, units_of
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.names import LEAST_COLUMNS, SIDE, UNIT_B, KernelConfig, parse_name
from tunedgemm_asm.ptx.resources import BARRIER_BYTES, BLOCK_SHARED, SM_SHARED, SYSTEM_SHARED
from tunedgemm_asm.ptx.sums import solution_of

#: Most solutions of a shape.
MOST = 64
#: Kind of scales -> most solutions up to `_SURE_ROWS` rows of x, apart from stream-K. Of 64, the
#: first 16 held the best for each of 96 products in bf16, and the first 24 for 41 in fp8 by row
#: (H100, 26 November 2026). By block the last 32 gain 0.3 % in the mean, and up to 7 %.
_SURE, _SURE_ROWS = MappingProxyType({"none": 24, "tensor": 32, "row": 32}), 512
Tiles = Mapping[tuple[int, int], Sequence[int]]

#: Rows of a and consumers -> rows of b that registers hold and shared memory feeds at half speed or
#: more.
TILES = {
    (64, 1): (32, 64, 96, 128, 160, 192, 224, 256),
    (128, 1): (64, 96),
    (128, 2): (64, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (256, 2): (64, 96, 128, 160, 192),
}
#: Tiles of ping-pong consumers.
TURNS = {(64, 2): (256,), (128, 2): (96, 112, 128, 144, 160, 176, 192)}
#: Tiles of promoted configurations.
PROMOTED_TILES = {**TILES, (256, 2): (64, 96, 128)}
#: Most rows of x with which operands are also swapped; tiles then hold all of them, or half.
MOST_SWAPPED = 128
_SWAPPED = ((64, 1), (128, 2), (256, 2))
_GROUP, _GROUPS = 8, (1, 2, 4, 8, 16, 32)
#: Most useful stages; fewest stages of a CTA that shares its SM.
_MOST_STAGES, _FEWEST_STAGES = 12, 3
#: Listed splits of one configuration; `refine` yields their neighbours.
_LISTED_SPLITS = 2
#: Most listed solutions whose outputs TMA stores.
_LISTED_PANELS = 8
#: Most listed stream-K solutions. Each must be faster than its configuration without stream-K by
#: _GAIN, and within _ERROR, the model's error, of the best without stream-K.
_LISTED_STREAM, _GAIN, _ERROR = 8, 0.01, 0.05

Candidate = tuple[KernelConfig, int]


def enumerate_stages(make: KernelConfig) -> list[int]:
    """Return the most stages that fit, and the most with which two CTAs share an SM."""
    stage = make.stage_bytes + make.scale_bytes + 2 * BARRIER_BYTES
    rooms = [BLOCK_SHARED, SM_SHARED // 2 - SYSTEM_SHARED] if make.consumers == 1 else [BLOCK_SHARED]
    most = [min(_MOST_STAGES, (room - UNIT_B) // stage) for room in rooms]
    return [stages for stages in dict.fromkeys(most) if stages >= _FEWEST_STAGES]


def _promotions(shape: Shape) -> tuple[bool, ...]:
    """Return whether to promote: never, always, or both for bf16 outputs, which round more than
    that gains.
    """
    if not shape.dtype.startswith("fp8"):
        return (False,)
    return (True, False) if shape.scale != "block" and shape.outdtype == "bf16" else (True,)


def _covering(rows: int, dtype: str) -> int:
    """Return the fewest rows of b of an instruction that cover the rows."""
    least = ceil_div(rows, UNIT_B) * UNIT_B
    return least if multiplies(least, dtype) else least + UNIT_B


def enumerate_tiles(shape: Shape, promoted: bool, ladders: Tiles | None = None) -> Iterator[KernelConfig]:
    """Yield the tiles of a shape, before stages and clusters are chosen; *ladders* replace `TILES`."""
    staged = shape.scale == "block"
    for (tile_a, consumers), ladder in (ladders or (PROMOTED_TILES if promoted else TILES)).items():
        for tile_b in ladder:
            yield from _with_overlap(tile_a, tile_b, consumers, _GROUP, False, promoted, staged)
    for (tile_a, consumers), ladder in () if promoted else TURNS.items():
        yield from (KernelConfig(tile_a, tile_b, 2, consumers, group=_GROUP, turns=True) for tile_b in ladder)
    if shape.m <= MOST_SWAPPED:
        for tile_m in dict.fromkeys(_covering(rows, shape.dtype) for rows in (shape.m, ceil_div(shape.m, 2))):
            # Tiles of x that share rows of the weight are neighbours: eight apart they took up to
            # 1.2 times as long (H100, M = 96).
            group = _GROUP if tile_m >= shape.m else 1
            for tile_n, consumers in _SWAPPED:
                if not promoted or tile_n // SIDE // consumers * tile_m <= MOST_SWAPPED:
                    yield from _with_overlap(tile_m, tile_n, consumers, group, True, promoted, staged)


@functools.lru_cache(maxsize=4096)
def _with_overlap(
    tile_m: int, tile_n: int, consumers: int, group: int, swapped: bool, promoted: bool, staged: bool
) -> tuple[KernelConfig, ...]:
    """Return a configuration of the fewest stages and, if it promotes and the registers suffice, its
    overlapped twin.
    """
    config = KernelConfig(tile_m, tile_n, 2, consumers, group=group, swapped=swapped, promoted=promoted, staged=staged)
    if not config.promoted:
        return (config,)
    try:
        return config, attrs.evolve(config, overlapped=True)
    except PluginError:
        return (config,)


def with_panels(config: KernelConfig) -> list[KernelConfig]:
    """Return the configuration with TMA stores, at the same stages or one fewer; empty if they do
    not fit.

    At least half of the panels must have a buffer.
    """
    if config.swapped or config.turns or config.tile_b % LEAST_COLUMNS:
        return []
    for stages in range(config.stages, max(config.stages - 2, _FEWEST_STAGES - 1), -1):
        direct = attrs.evolve(config, stages=stages, panels=0)
        panels = min(config.all_panels, (BLOCK_SHARED - direct.shared_bytes) // (config.consumers * config.panel_bytes))
        if 2 * panels >= config.all_panels:
            return [attrs.evolve(direct, panels=panels)]
    return []


def _panels_may_pay(config: KernelConfig, shape: Shape) -> bool:
    """Check for many outputs, and that no other CTA of the SM multiplies while they are stored."""
    return shape.m > MOST_SWAPPED and config.consumers > 1


def enumerate_configs(shape: Shape) -> Iterator[KernelConfig]:
    """Yield every sensible configuration for a shape."""
    for tile in (tile for promoted in _promotions(shape) for tile in enumerate_tiles(shape, promoted)):
        for stages in enumerate_stages(tile):
            config = attrs.evolve(tile, stages=stages)
            yield config
            if _panels_may_pay(config, shape):
                yield from (other for other in with_panels(config) if not unfit(other, 1, shape))
            # Not for ping-pong: its list is short, and `refine` yields clusters of fast kernels.
            if not config.turns and config.tile_b % (2 * UNIT_B) == 0 and units_of(config, shape)[0] > 1:
                yield attrs.evolve(config, cluster=2)


def resident_ctas(config: KernelConfig, device: Device) -> int:
    """Return the number of tiles computed at once."""
    return max(1, device.cu_num) * config.resident


def is_worthwhile(config: KernelConfig, shape: Shape, device: Device) -> bool:
    """Check that ping-pong consumers have a tile each on some SM, and that stream-K saves steps.

    On an SM with one tile, the other consumer would only wait.
    """
    if config.stream and not shared_evenly(config, shape, max(1, device.cu_num)).saved:
        return False
    return not config.turns or tiles_of(config, shape) > resident_ctas(config, device)


def enumerate_candidates(shape: Shape, device: Device) -> list[Candidate]:
    """Return configurations with their splits, best guess first, at most `MOST`.

    K is split where CTAs would be idle. Of equal predicted times, those without ping-pong come
    first.
    """
    guesses: list[tuple[float, bool, str, int, KernelConfig]] = []
    shared = []
    for config in (config for config in enumerate_configs(shape) if is_worthwhile(config, shape, device)):
        idle = resident_ctas(config, device) // tiles_of(config, shape)
        fitting = [splits for splits in range(1, min(MOST_SPLITS, max(1, 2 * idle)) + 1) if not unfit(config, splits, shape)]
        costs = sorted(_guess(config, splits, shape, device) for splits in fitting)
        guesses += costs[:_LISTED_SPLITS]
        stream = attrs.evolve(config, stream=True)
        if not unfit(stream, 1, shape) and is_worthwhile(stream, shape, device):
            guess = _guess(stream, 1, shape, device)
            shared += [guess] * ((1 + _GAIN) * guess[0] < costs[0][0])
    most = (1 + _ERROR) * min(guesses)[0]
    guesses += [guess for guess in sorted(shared) if guess[0] <= most][:_LISTED_STREAM]
    ordered = [(config, splits) for *_, splits, config in sorted(guesses, key=lambda guess: guess[:4])]
    beyond = [chosen for chosen in ordered if chosen[0].panels][_LISTED_PANELS:]
    kept = [chosen for chosen in ordered if chosen not in beyond][:MOST]
    most = _SURE.get(shape.scale, MOST) if shape.m <= _SURE_ROWS else MOST
    return kept[:most] + [chosen for chosen in kept[most:] if chosen[0].stream]


def _guess(config: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float, bool, str, int, KernelConfig]:
    """Return the sort key of a candidate, followed by its configuration."""
    return (
        cost_of(config, splits, shape, max(1, device.cu_num), unit_peak_over(device, FITTED_ON)),
        config.turns,
        config.name,
        splits,
        config,
    )


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions of a shape, best guess first."""
    for config, splits in enumerate_candidates(shape, device):
        yield solution_of(libtype, config, splits, shape)


def resolve(solution: Solution, shape: Shape) -> Candidate:
    """Return the configuration and splits that a solution names; no splits means one.

    Raises:
        PluginError: the kernel does not exist or does not support the shape.
    """
    config, splits = parse_name(solution.kernel_name), solution.split_k or 1
    if reason := unfit(config, splits, shape):
        raise PluginError(reason)
    return config, splits


def refine(libtype: str, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """Yield the solutions one step away: group, stages, cluster, splits, TMA stores, ping-pong,
    stream-K, or 16 rows of b more or fewer.
    """
    config, splits = resolve(solution, shape)
    side = "tile_m" if config.swapped else "tile_n"
    at = _GROUPS.index(config.group) if config.group in _GROUPS else 0
    changes: list[dict[str, int]] = [{"group": group} for group in (*_GROUPS[max(0, at - 1) : at], *_GROUPS[at + 1 : at + 2])]
    changes += [{"promoted": promoted, "overlapped": False} for promoted in _promotions(shape) if promoted != config.promoted]
    changes += [{"overlapped": not config.overlapped}] * config.promoted
    changes += [{"stages": config.stages + step} for step in (-1, 1)] + [{"cluster": 3 - config.cluster}, {"turns": not config.turns}]
    for step in (-2 * UNIT_B, 2 * UNIT_B):
        for fewer in (0, 1, 2):
            changes.append({side: config.tile_b + step, "stages": config.stages - fewer})
    near = [(config, splits - 1), (config, splits + 1)]
    near += [] if config.folded else [(attrs.evolve(config, stream=not config.stream), 1)]
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
        if (other, parts) != (config, splits) and not unfit(other, parts, shape) and is_worthwhile(other, shape, device):
            yield solution_of(libtype, other, parts, shape)
