"""Grouped: fmoe by CUTLASS's grouped kernels: which shapes, which pairs of instances, best guesses first, and their neighbours.

Each stage is judged as a batch of products, one for each expert that is hit, of as many rows as come to it on average.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from tunedgemm.plugin import Device, Shape

from tunedgemm_ck.cutlass import instance as names
from tunedgemm_ck.cutlass.cost import ceil_div, cost_of
from tunedgemm_ck.cutlass.instance import CutlassInstance
from tunedgemm_ck.cutlass.limits import ALIGNMENT, MAX_BYTES, misfit, width_of
from tunedgemm_ck.cutlass.spaces import WORSE, every, neighbours
from tunedgemm_ck.stages import Stages, parsed

Chosen = tuple[Stages, int]

#: How factors are quantised -> to what.
_DTYPES = {
    "No": ("bf16", "fp16"),
    "per_Tensor": ("fp8_e4m3fn", "int8"),
    "per_Token": ("fp8_e4m3fn", "int8"),
    "per_1x128": ("fp8_e4m3fn",),
}
#: Values that the kernels around the products read and write at a time (sources/moe_kernels.h).
_VECTOR = 8
_MOST = (1 << 31) - 1

#: (tile_m, tile_n, bytes of tile_k, cluster, schedule, swap): large tiles for many rows an expert, then swapped ones for few.
_Row = tuple[int, int, int, tuple[int, int], str, bool]
_WIDE: tuple[_Row, ...] = (
    (128, 256, 128, (1, 1), "cooperative", False),
    (128, 256, 128, (2, 1), "cooperative", False),
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (1, 1), "pingpong", False),
    (64, 256, 128, (1, 1), "pingpong", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (256, 128, 128, (1, 1), "cooperative", True),
    (128, 128, 128, (1, 1), "pingpong", True),
    (256, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "pingpong", True),
    (64, 64, 256, (1, 1), "pingpong", True),
    (128, 32, 256, (1, 1), "cooperative", True),
    (64, 32, 256, (1, 1), "pingpong", True),
    (128, 16, 256, (1, 1), "cooperative", True),
    (64, 16, 256, (1, 1), "pingpong", True),
)
#: The same for fp8, whose sums take twice the registers.
_FP8: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (2, 1), "cooperative", False),
    (256, 64, 128, (1, 1), "cooperative", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (128, 128, 128, (1, 1), "cooperative", True),
    (256, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "cooperative", True),
    (128, 64, 128, (1, 1), "pingpong", True),
    (64, 64, 128, (1, 1), "pingpong", True),
    (128, 32, 128, (1, 1), "cooperative", True),
    (64, 32, 128, (1, 1), "pingpong", True),
    (128, 16, 128, (1, 1), "cooperative", True),
    (64, 16, 128, (1, 1), "pingpong", True),
)
#: The same with scales of blocks, which ask for 128 of K and for 128 rows of the weight.
_BLOCKS: tuple[_Row, ...] = (
    (128, 128, 128, (1, 1), "cooperative", False),
    (128, 128, 128, (2, 1), "cooperative", False),
    (64, 128, 128, (1, 1), "pingpong", False),
    (128, 128, 128, (1, 1), "cooperative", True),
    *((128, n, 128, (1, 1), schedule, True) for n in (64, 32, 16) for schedule in ("cooperative", "pingpong")),
)
#: Instances of a stage that are paired with those of the other one.
_BEST = 4


@functools.cache
def instances(q_type: str, q_dtype: str, full: bool) -> tuple[CutlassInstance, ...]:
    """All instances of either stage, at most 24; with *full* all that parameters and registers allow."""
    if full:
        found = every("sm_90", q_dtype, q_type == "per_1x128")
        return tuple(each for each in found if each.scheduler == "persistent")
    listed, width = _BLOCKS if q_type == "per_1x128" else _FP8 if q_dtype.startswith("fp8") else _WIDE, width_of(q_dtype)
    return tuple(CutlassInstance(m, n, k // width, cluster, schedule, swap=swap) for m, n, k, cluster, schedule, swap in listed)


def parse(name: str, op: str) -> Stages:
    """The stages of a name.

    Raises:
        PluginError: it names none, or no instance; the message says which part is unknown.
    """
    return parsed(name, "cutlass", lambda stage: names.parse(stage, op))


def refused(shape: Shape, device: Device) -> str:
    """Why no instance can serve the shape on the architecture, "" where one can."""
    kind, q_dtype = str(shape["q_type"]), str(shape["q_dtype_w"])
    if device.gfx != "sm_90":
        return f"there are kernels of fmoe for sm_90, not for {device.gfx}"
    if shape.m == 0:
        return "an empty batch needs no kernel"
    if kind not in _DTYPES:
        return f"q_type of fmoe must be {', '.join(_DTYPES)}, not {kind}: sm_90 multiplies no fp4"
    if q_dtype not in _DTYPES[kind]:
        return f"factors of fmoe with {kind} must be {' or '.join(_DTYPES[kind])}, not {q_dtype}"
    if shape.layout != "row":
        return f"weights must be plain [experts, rows, K], not in layout {shape.layout}"
    return _sizes(shape, width_of(q_dtype))


def _sizes(shape: Shape, width: int) -> str:
    step, experts, pairs = max(_VECTOR, ALIGNMENT // width), int(shape["expert"]), shape.m * int(shape["topk"])
    if shape.n % step or shape.k % step:
        return f"model_dim and inter_dim must be multiples of {step} with factors of {width} bytes (got {shape.n} and {shape.k})"
    if pairs > _MOST or 2 * shape.k > _MOST:
        return f"tokens * topk, and rows of w1, may be {_MOST} at most"
    if max(experts * 2 * shape.k * shape.n * width, pairs * max(shape.n, 2 * shape.k) * 2) > MAX_BYTES:
        return f"an operand or an intermediate may have {MAX_BYTES} bytes at most"
    return ""


def unfit(stages: Stages, split: int, shape: Shape, device: Device) -> str:
    """Why the stages cannot serve the shape, "" where they can."""
    if reason := refused(shape, device):
        return reason
    if split > 1:
        return f"the K of fmoe is not split (got {split})"
    for place, instance in enumerate((stages.first, stages.second), start=1):
        assert isinstance(instance, CutlassInstance)
        if reason := _misfit(instance, stage_of(shape, place)):
            return f"stage {place}: {reason}"
    return ""


def _misfit(instance: CutlassInstance, stage: Shape) -> str:
    if instance.schedule not in ("cooperative", "pingpong") or instance.scheduler != "persistent":
        given = f"{instance.schedule} with {instance.scheduler}"
        return f"grouped products need schedule cooperative or pingpong with scheduler persistent, not {given}"
    return "grouped products have no fast sums" if instance.fast else misfit(instance, 0, stage, "sm_90")


@functools.lru_cache(maxsize=1 << 12)
def stage_of(shape: Shape, stage: int) -> Shape:
    """A stage as a batch of products: an expert's rows, the weight's rows, K; one for each expert that random tokens hit."""
    experts, topk, rows = int(shape["expert"]), int(shape["topk"]), shape.k * (2 if shape["g1u1"] else 1)
    hit = max(topk, round(experts * (1 - (1 - topk / experts) ** shape.m)))
    each = ceil_div(shape.m * topk, hit)
    n, k = (rows, shape.n) if stage == 1 else (shape.n, shape.k)
    q_dtype, scale = str(shape["q_dtype_w"]), "block" if shape["q_type"] == "per_1x128" else "none"
    return Shape("batched_bf16", each, n, k, q_dtype, "bf16", scale=scale, extra={"B": hit})


def cost(stages: Stages, shape: Shape, device: Device) -> float:
    """The guessed microseconds of both products."""
    pairs = ((stages.first, 1), (stages.second, 2))
    return sum(cost_of(instance, 0, stage_of(shape, stage), device) for instance, stage in pairs)  # type: ignore[arg-type]


def space(shape: Shape, device: Device, full: bool) -> Iterator[Chosen]:
    """Pairs that fit the shape, best guesses first: of the best of each stage all, with *full* each of all with the best of the other."""
    if refused(shape, device):
        return
    listed = instances(str(shape["q_type"]), str(shape["q_dtype_w"]), full)
    ranked = [_ranked(listed, stage_of(shape, stage), device) for stage in (1, 2)]
    pairs = set(itertools.product(*(some[:_BEST] for some in ranked)))
    if full:
        (first, *_), (second, *_) = ranked
        pairs |= {(each, second) for each in ranked[0]} | {(first, each) for each in ranked[1]}
    costs = {stages: cost(stages, shape, device) for stages in itertools.starmap(Stages, pairs)}
    ordered = sorted(costs, key=lambda stages: (costs[stages], stages.name))
    for stages in ordered:
        if full or costs[stages] <= WORSE * costs[ordered[0]]:
            yield stages, 0


def _ranked(listed: tuple[CutlassInstance, ...], stage: Shape, device: Device) -> list[CutlassInstance]:
    fitting = [instance for instance in listed if not _misfit(instance, stage)]
    return sorted(fitting, key=lambda instance: (cost_of(instance, 0, stage, device), instance.name))


def near(stages: Stages, split: int, shape: Shape, device: Device) -> Iterator[Chosen]:
    """The neighbours that fit: one parameter of one stage, one step along its ladder."""
    del split
    seen = {stages}
    for place, instance in enumerate((stages.first, stages.second)):
        assert isinstance(instance, CutlassInstance)
        for changed, _ in neighbours(instance, 0):
            found = Stages(stages.first, changed) if place else Stages(changed, stages.second)
            if found not in seen and not unfit(found, 0, shape, device):
                seen.add(found)
                yield found, 0
