"""Solutions on Hopper: what serves a shape, in the order of the cost model, and the neighbours of one that timed well."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.cost import cost
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.plan import (
    BLOCK_SHARED,
    COLUMNS,
    ELEMENT_BYTES,
    LEAST_COLUMNS,
    SIDE,
    SM_SHARED,
    SYSTEM_SHARED,
    UNIT_B,
    Plan,
    plan_of,
    step_of,
)
from tunedgemm_asm.ptx.problem import MOST_SCALES, MOST_SIZE, MOST_SPLITS, refusal, shared_evenly, steps_of, tiles_of, units_of
from tunedgemm_asm.ptx.tensormap import ALIGNED

GFX = "sm_90"
#: What the operands of each op may be, their scales, and the layouts of the weight.
OPS = {
    "a16w16": (("bf16", "fp16"), ("none",), ("row", COLUMNS)),
    "a8w8": (("fp8_e4m3fn", "int8"), ("row", "tensor"), ("row",)),
    "a8w8_bpreshuffle": (("fp8_e4m3fn", "int8"), ("row", "tensor"), (COLUMNS,)),
    "a8w8_blockscale": (("fp8_e4m3fn",), ("block",), ("row",)),
    "a8w8_blockscale_bpreshuffle": (("fp8_e4m3fn",), ("block",), (COLUMNS,)),
}
_OUTPUTS = ("bf16", "fp16", "fp32")

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
#: The same for plans that add the sums of each stage to others.
PROMOTED_TILES = {**TILES, (256, 2): (64, 96, 128)}
#: Rows of x up to which operands are swapped, too; tiles then have them all, or half.
MOST_SWAPPED = 128
_SWAPPED = ((64, 1), (128, 2), (256, 2))
_GROUP, _GROUPS = 8, (1, 2, 4, 8, 16, 32)
#: Stages beyond which a load is long back when it is needed; and of a block that shares its SM.
_MOST_STAGES, _FEWEST_STAGES = 12, 3
#: Rows of x, and sizes of the weight, from which on an untuned product of fp8 by row gets a kernel: of those timed on an H200 (23 November
#: 2026; M of 256 to 4096, N and K of 2112 to 8192) each was 1.06 to 1.6 times as fast as `torch._scaled_mm`.
_UNTUNED_ROWS, _UNTUNED_WEIGHT = 256, 2048
#: Numbers of parts of K that are listed of one plan; `refine` has their neighbours.
_LISTED_SPLITS = 2
#: Solutions of a list at most whose outputs the copy engine stores.
_LISTED_PANELS = 8
#: The same of those that share steps along K. Each is a hundredth faster by the model than its plan is otherwise, and slower than the best
#: that shares none by no more than the model's error.
_LISTED_STREAM, _GAIN, _ERROR = 8, 0.01, 0.05

Chosen = tuple[Plan, int]


def supports(shape: Shape, device: Device) -> bool | Unsupported:
    """Whether the generated kernels take a shape on a device of this architecture, or why not."""
    if shape.op not in OPS:
        return Unsupported(f"on {device.gfx} op {shape.op} is not covered; covered: {', '.join(OPS)}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    operands, scales, layouts = OPS[shape.op]
    for what, dtype, taken in (("operands", shape.dtype, operands), ("the output", shape.outdtype, _OUTPUTS)):
        if dtype not in taken:
            return Unsupported(f"{what} may be {' or '.join(taken)}, not {dtype}")
    if shape.bias and shape.bias_dtype not in _OUTPUTS:
        return Unsupported(f"a bias may be {' or '.join(_OUTPUTS)}, not {shape.bias_dtype}")
    if shape.scale not in scales or shape.layout not in layouts:
        taken = f"takes scale {' or '.join(scales)} and weights of layout {' or '.join(layouts)}"
        return Unsupported(f"{taken}, not scale {shape.scale} and layout {shape.layout}")
    if shape.layout == COLUMNS and shape.k % (whole := step_of(shape.dtype)):
        return Unsupported(f"weights of layout {COLUMNS} have whole columns: K % {whole} = 0 (K={shape.k})")
    if shape.k % (whole := ALIGNED // ELEMENT_BYTES[shape.dtype]):
        return Unsupported(f"rows of operands start at multiples of {ALIGNED} bytes for the copy engine: K % {whole} = 0 (K={shape.k})")
    if max(shape.m, shape.n, shape.k) > MOST_SIZE:
        return Unsupported(f"sizes are {MOST_SIZE} at most")
    if shape.scale == "block" and (count := shape.m * steps_of(shape)) > MOST_SCALES:
        return Unsupported(f"x has {count} scales; there are {MOST_SCALES} at most")
    return True


def _stages(make: Plan) -> list[int]:
    """The most stages that fit, and where two blocks may share the SM, the most with which they do."""
    each = make.stage_bytes + 16
    rooms = [BLOCK_SHARED, SM_SHARED // 2 - SYSTEM_SHARED] if make.consumers == 1 else [BLOCK_SHARED]
    found = [min(_MOST_STAGES, (room - UNIT_B) // each) for room in rooms]
    return [stages for stages in dict.fromkeys(found) if stages >= _FEWEST_STAGES]


def _promotions(shape: Shape) -> tuple[bool, ...]:
    """Whether plans add the sums of each stage to others: never, always, or both ways for bf16, which rounds more than that gains."""
    if not shape.dtype.startswith("fp8"):
        return (False,)
    return (True, False) if shape.scale != "block" and shape.outdtype == "bf16" else (True,)


def _covering(rows: int, dtype: str) -> int:
    """The least rows of b of a matrix instruction that are so many."""
    least = ceil_div(rows, UNIT_B) * UNIT_B
    return least if multiplies(least, dtype) else least + UNIT_B


def _tiles(shape: Shape, promoted: bool) -> Iterator[Plan]:
    """Plans without a second thought about stages and clusters."""
    for (tile_a, consumers), ladder in (PROMOTED_TILES if promoted else TILES).items():
        yield from (Plan(tile_a, tile_b, 2, consumers, group=_GROUP, promoted=promoted) for tile_b in ladder)
    for (tile_a, consumers), ladder in () if promoted else TURNS.items():
        yield from (Plan(tile_a, tile_b, 2, consumers, group=_GROUP, turns=True) for tile_b in ladder)
    if shape.m <= MOST_SWAPPED:
        for tile_m in dict.fromkeys(_covering(rows, shape.dtype) for rows in (shape.m, ceil_div(shape.m, 2))):
            for tile_n, consumers in _SWAPPED:
                if not promoted or tile_n // SIDE // consumers * tile_m <= MOST_SWAPPED:
                    yield Plan(tile_m, tile_n, 2, consumers, group=_GROUP, swapped=True, promoted=promoted)


def with_panels(plan: Plan) -> list[Plan]:
    """The same whose outputs the copy engine stores: from places beside its stages, or where fewer than half fit, beside one stage less."""
    if plan.swapped or plan.turns or plan.tile_b % LEAST_COLUMNS:
        return []
    for stages in range(plan.stages, max(plan.stages - 2, _FEWEST_STAGES - 1), -1):
        direct = attrs.evolve(plan, stages=stages, panels=0)
        places = min(plan.all_panels, (BLOCK_SHARED - direct.shared_bytes) // (plan.consumers * plan.panel_bytes))
        if 2 * places >= plan.all_panels:
            return [attrs.evolve(direct, panels=places)]
    return []


def _panels_may_pay(plan: Plan, shape: Shape) -> bool:
    """Whether there are many outputs, and no other block on the SM that multiplies while they are stored."""
    return shape.m > MOST_SWAPPED and plan.consumers > 1


def plans(shape: Shape) -> Iterator[Plan]:
    """Every sensible plan for a shape."""
    for tile in (tile for promoted in _promotions(shape) for tile in _tiles(shape, promoted)):
        for stages in _stages(tile):
            plan = attrs.evolve(tile, stages=stages)
            yield plan
            if _panels_may_pay(plan, shape):
                yield from (other for other in with_panels(plan) if not refusal(other, 1, shape))
            # In turns without: their list is short, and `refine` has a cluster of what is fast.
            if not plan.turns and plan.tile_b % (2 * UNIT_B) == 0 and units_of(plan, shape)[0] > 1:
                yield attrs.evolve(plan, cluster=2)


def _places(plan: Plan, device: Device) -> int:
    """Tiles that are computed at once."""
    return max(1, device.cu_num) * plan.resident


def _worth(plan: Plan, shape: Shape, device: Device) -> bool:
    """Whether consumers that take turns have a tile each on some SM, and steps are shared of a round that is not full.

    Where an SM has one tile the other consumer would only wait.
    """
    if plan.stream and not shared_evenly(plan, shape, max(1, device.cu_num)).saved:
        return False
    return not plan.turns or tiles_of(plan, shape) > _places(plan, device)


def choices(shape: Shape, device: Device) -> list[Chosen]:
    """Plans with their parts of K, best guesses first, `MOST` at most; K is split where blocks would be idle.

    Of plans that should take the same time those without turns come first.
    """
    if not supports(shape, device):
        return []
    found: list[tuple[float, bool, str, int, Plan]] = []
    shared = []
    for plan in (plan for plan in plans(shape) if _worth(plan, shape, device)):
        idle = _places(plan, device) // tiles_of(plan, shape)
        fitting = [splits for splits in range(1, min(MOST_SPLITS, max(1, 2 * idle)) + 1) if not refusal(plan, splits, shape)]
        costs = sorted(_guess(plan, splits, shape, device) for splits in fitting)
        found += costs[:_LISTED_SPLITS]
        stream = attrs.evolve(plan, stream=True)
        if not refusal(stream, 1, shape) and _worth(stream, shape, device):
            guess = _guess(stream, 1, shape, device)
            shared += [guess] * ((1 + _GAIN) * guess[0] < costs[0][0])
    most = (1 + _ERROR) * min(found)[0]
    found += [guess for guess in sorted(shared) if guess[0] <= most][:_LISTED_STREAM]
    ordered = [(plan, splits) for *_, splits, plan in sorted(found, key=lambda each: each[:4])]
    beyond = [chosen for chosen in ordered if chosen[0].panels][_LISTED_PANELS:]
    return [chosen for chosen in ordered if chosen not in beyond][:MOST]


def _guess(plan: Plan, splits: int, shape: Shape, device: Device) -> tuple[float, bool, str, int, Plan]:
    """What a list is ordered by, but for the plan at its end."""
    return cost(plan, splits, shape, max(1, device.cu_num)), plan.turns, plan.name, splits, plan


def enumerate_solutions(libtype: str, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, best guesses first."""
    for plan, splits in choices(shape, device):
        yield Solution(libtype, plan.name, splits)


def heuristic_fallback(libtype: str, shape: Shape, device: Device) -> Solution | None:
    """The solution of an untuned call, None where others serve it: the best guess, of fp8 one whose sums are as exact as torch's.

    That is for weights in columns, which torch would put in order in each call, and for large products of fp8 by row. One part of K and
    no cluster, so that calls of all M share few texts; about a millisecond, for each M once.
    """
    if not supports(shape, device) or (shape.layout != COLUMNS and not _faster_untuned(shape)):
        return None
    tiles = [attrs.evolve(tile, stages=stages[0]) for tile in _tiles(shape, shape.dtype.startswith("fp8")) if (stages := _stages(tile))]
    fitting = [tile for tile in tiles if not refusal(tile, 1, shape) and _worth(tile, shape, device)]
    plan = min(fitting, key=lambda plan: (cost(plan, 1, shape, max(1, device.cu_num)), plan.turns))
    return Solution(libtype, plan.name, 1)


def _faster_untuned(shape: Shape) -> bool:
    """Whether products like this one were measured to be faster than torch's without tuning."""
    if shape.op != "a8w8" or not shape.dtype.startswith("fp8") or shape.scale != "row":
        return False
    return shape.m >= _UNTUNED_ROWS and min(shape.n, shape.k) >= _UNTUNED_WEIGHT


def resolve(solution: Solution, shape: Shape) -> Chosen:
    """The plan and the parts of K that a solution means; no parts are one.

    Raises:
        PluginError: there is no such kernel, or it does not take the shape so.
    """
    plan, splits = plan_of(solution.kernel_name), solution.split_k or 1
    if reason := refusal(plan, splits, shape):
        raise PluginError(reason)
    return plan, splits


def unknown(name: str) -> str:
    """Why no plan has this name, or an empty text."""
    try:
        plan_of(name)
    except PluginError as error:
        return str(error)
    return ""


def refine(libtype: str, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions one step away from one: another group, stage, cluster, part of K or way to store, turns, 16 rows of b more or fewer,
    steps along K shared or not.
    """
    if not supports(shape, device):
        return
    plan, splits = resolve(solution, shape)
    side = "tile_m" if plan.swapped else "tile_n"
    at = _GROUPS.index(plan.group) if plan.group in _GROUPS else 0
    changes: list[dict[str, int]] = [{"group": group} for group in (*_GROUPS[max(0, at - 1) : at], *_GROUPS[at + 1 : at + 2])]
    changes += [{"promoted": promoted} for promoted in _promotions(shape) if promoted != plan.promoted]
    changes += [{"stages": plan.stages + step} for step in (-1, 1)] + [{"cluster": 3 - plan.cluster}, {"turns": not plan.turns}]
    for step in (-2 * UNIT_B, 2 * UNIT_B):
        for fewer in (0, 1, 2):
            changes.append({side: plan.tile_b + step, "stages": plan.stages - fewer})
    near = [(plan, splits - 1), (plan, splits + 1), (attrs.evolve(plan, stream=not plan.stream), 1)]
    direct = attrs.evolve(plan, panels=0)
    for change in changes:
        try:
            changed = attrs.evolve(direct, **change)
        except PluginError:
            continue  # no SM holds it
        near += [(other, splits) for other in (with_panels(changed) if plan.panels else [changed])]
    if plan.panels or _panels_may_pay(plan, shape):
        near += [(other, splits) for other in ([direct] if plan.panels else with_panels(plan))]
    for other, parts in dict.fromkeys(near):
        if (other, parts) != (plan, splits) and not refusal(other, parts, shape) and _worth(other, shape, device):
            yield Solution(libtype, other.name, parts)
