"""Problem: what a plan's kernel is told to compute a shape: its arguments but for addresses, grid, scratch memory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from tunedgemm.plugin import PluginError, Shape

from tunedgemm_asm.limits import ceil_div
from tunedgemm_asm.ptx.matrix import multiplies
from tunedgemm_asm.ptx.plan import BESIDE_SUMS, COLUMNS, LINE, SCALE_BLOCK, Plan, Variant, step_of
from tunedgemm_asm.ptx.promotion import scales_by_block
from tunedgemm_asm.ptx.shares import Shares, shares_of
from tunedgemm_asm.ptx.splitk import slot_bytes

#: Parts of K at most, and counters of a launch.
MOST_SPLITS, MOST_COUNTERS = 16, 1 << 15
#: Rows and elements along K of an operand, and elements of an output's row: numbers have 32 bits, coordinates a sign.
MOST_SIZE = (1 << 31) - 1
#: Scales of x by block, which are counted with 32 bits.
MOST_SCALES = (1 << 32) - 1
#: Ops whose scales of x by block lie block of K by block of K.
TRANSPOSED = ("a8w8_blockscale_bpreshuffle",)
#: Items of a launch, or steps of all tiles where they are shared: what is numbered beyond the last must not wrap around, with so many
#: steps of a tile at most.
MOST_ITEMS, MOST_STEPS = 1 << 30, 1 << 16


@attrs.frozen
class Problem:
    """A shape as a kernel is told it.

    Attributes:
        variant: the kernel.
        values: the arguments that are no addresses.
        grid: thread blocks.
        workspace: bytes of scratch memory, for parts of K.
        counters: counters that are zero before and after.
    """

    variant: Variant
    values: Mapping[str, int] = attrs.field(hash=False)
    grid: int
    workspace: int = 0
    counters: int = 0


def units_of(plan: Plan, shape: Shape) -> tuple[int, int]:
    """Clusters along a, and tiles along b."""
    rows_a, rows_b = rows_of(plan, shape)
    return ceil_div(rows_a, plan.tile_a * plan.cluster), ceil_div(rows_b, plan.tile_b)


def tiles_of(plan: Plan, shape: Shape) -> int:
    """Tiles, those of a cluster beyond the operand, too."""
    units_a, tiles_b = units_of(plan, shape)
    return units_a * plan.cluster * tiles_b


def rows_of(plan: Plan, shape: Shape) -> tuple[int, int]:
    """Rows of a and of b."""
    return (shape.n, shape.m) if plan.swapped else (shape.m, shape.n)


def part_of(splits: int, shape: Shape) -> int:
    """Steps along K of each part but the last."""
    return ceil_div(steps_of(shape), splits)


def steps_of(shape: Shape) -> int:
    """Stages along K."""
    return ceil_div(shape.k, step_of(shape.dtype))


def refusal(plan: Plan, splits: int, shape: Shape) -> str:
    """Why the kernel cannot serve the shape with so many parts of K, or an empty text."""
    steps, (units_a, tiles_b) = steps_of(shape), units_of(plan, shape)
    if reason := _unable(plan, shape):
        return f"{plan.name} {reason}"
    if plan.stream and (splits > 1 or steps > MOST_STEPS or units_a * tiles_b * steps > MOST_ITEMS):
        most = f"{MOST_ITEMS} at most, of {MOST_STEPS} at most for a tile"
        return f"{plan.name} shares {units_a * tiles_b} times {steps} steps along K ({most}) with splitK 1 (got {splits})"
    if not 1 <= splits <= MOST_SPLITS:
        return f"{plan.name} cuts K into 1 to {MOST_SPLITS} parts (got {splits})"
    if ceil_div(steps, part_of(splits, shape)) != splits:
        return f"{plan.name} does not cut K={shape.k} into {splits} parts of whole steps of {step_of(shape.dtype)}"
    if units_a * tiles_b * splits > MOST_ITEMS:
        return f"{plan.name} has {units_a * tiles_b * splits} tiles; there are {MOST_ITEMS} at most"
    if splits > 1 and (counters := _slots(plan, shape)) > MOST_COUNTERS:
        return f"{plan.name} has {counters} parts of tiles that meet over parts of K; there are {MOST_COUNTERS} counters"
    return ""


def _unable(plan: Plan, shape: Shape) -> str:
    """What of a shape's dtypes, rows and scales the plan is not made for, or an empty text."""
    if plan.panels and (shape.outdtype == "fp32" or shape.n % LINE):
        return f"stores outputs of 16 bits, rows at multiples of 16 bytes: N % {LINE} = 0 (N={shape.n}, {shape.outdtype})"
    if plan.promoted and not shape.dtype.startswith("fp8"):
        return f"adds sums of fp8 products in float32; those of {shape.dtype} are whole"
    if not multiplies(plan.portion, shape.dtype):
        return f"has tiles of {plan.tile_b} rows, for which there is no instruction of {shape.dtype}"
    return _unable_by_block(plan) if shape.scale == "block" else ""


def _variant(plan: Plan, split: bool, shape: Shape) -> Variant:
    """The plan for a shape's dtypes, scales and layout."""
    together = next(count for count in (8, 2, 1) if shape.n % count == 0)
    return Variant(
        plan, shape.dtype, shape.outdtype, shape.bias_dtype if shape.bias else "", split, together, shape.scale,
        columns=shape.layout == COLUMNS, transposed=shape.op in TRANSPOSED,
    )  # fmt: skip


def _unable_by_block(plan: Plan) -> str:
    """Why the plan does not take scales by block, or an empty text."""
    if not plan.promoted:
        return "does not add up blocks of K with their scales: the name of one that does has _p"
    if not scales_by_block(plan):
        return f"has rows of the weight at too many places in blocks of scales: {SCALE_BLOCK} rows share one"
    # Of each row of x in b that is a thread's, a quarter of them, its scale and where that lies.
    held = plan.sums + plan.portion // 2 + plan.tile_b // 2 * plan.swapped
    if held + BESIDE_SUMS > plan.consumer_registers:
        return f"has {held} sums, scales and their places and {BESIDE_SUMS} others, a thread has {plan.consumer_registers} registers"
    return ""


def shared_evenly(plan: Plan, shape: Shape, multiprocessors: int) -> Shares:
    """How the clusters that so many multiprocessors hold at a time share the steps of tiles."""
    units_a, tiles_b = units_of(plan, shape)
    return shares_of(units_a * tiles_b, steps_of(shape), max(1, multiprocessors * plan.resident // plan.cluster))


def _slots(plan: Plan, shape: Shape) -> int:
    """Consumers' shares of all tiles, those of a cluster beyond the operand, too."""
    return tiles_of(plan, shape) * plan.sharing


def problem_of(plan: Plan, splits: int, shape: Shape, multiprocessors: int) -> Problem:
    """What a kernel is told of a shape on so many multiprocessors.

    Raises:
        PluginError: it does not take the shape so.
    """
    if reason := refusal(plan, splits, shape):
        raise PluginError(reason)
    (rows_a, rows_b), (units_a, tiles_b) = rows_of(plan, shape), units_of(plan, shape)
    tiles, steps = units_a * tiles_b, steps_of(shape)
    values = {"rows_a": rows_a, "rows_b": rows_b, "stride": shape.n, "units_a": units_a, "tiles_b": tiles_b, "tiles": tiles}
    if plan.stream:
        found = shared_evenly(plan, shape, multiprocessors)
        clusters, slots, parts = found.clusters, found.tiles * plan.cluster * plan.sharing, found.parts
        values |= {"items": found.tiles, "steps": steps, "part": found.length, "splits": parts}
    else:
        clusters = max(1, min(tiles * splits, multiprocessors * plan.resident // plan.cluster))
        slots, parts = _slots(plan, shape) if splits > 1 else 0, splits
        values |= {"items": tiles * splits, "steps": steps, "part": part_of(splits, shape), "splits": splits}
    return Problem(
        variant=_variant(plan, plan.stream or splits > 1, shape),
        values=values,
        grid=clusters * plan.cluster,
        workspace=slots * parts * slot_bytes(plan.sums),
        counters=slots,
    )
