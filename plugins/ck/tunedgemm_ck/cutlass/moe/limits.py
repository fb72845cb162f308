"""Check which shapes of fmoe CUTLASS's grouped kernels support."""

from __future__ import annotations

import functools

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import unusual_experts

from tunedgemm_ck.cutlass.cost import ceil_div
from tunedgemm_ck.cutlass.limits import ALIGNMENT, MAX_BYTES, unfit_parameters
from tunedgemm_ck.cutlass.names import CutlassInstance
from tunedgemm_ck.cutlass.resources import width_of
from tunedgemm_ck.names import Stages

#: Kind of quantisation -> dtypes of the factors.
_DTYPES = {
    "No": ("bf16", "fp16"),
    "per_Tensor": ("fp8_e4m3fn", "int8"),
    "per_Token": ("fp8_e4m3fn", "int8"),
    "per_1x128": ("fp8_e4m3fn",),
}
#: Values that the kernels around the products read and write at a time (sources/moe_kernels.h).
_VECTOR = 8
_MOST = (1 << 31) - 1


def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why no instance can serve the shape on the architecture, or None."""
    kind, q_dtype = str(shape["q_type"]), str(shape["q_dtype_w"])
    if device.gfx != "sm_90":
        return f"fmoe needs sm_90 (got {device.gfx})"
    if unusual := unusual_experts(shape):
        return f"fmoe has no {unusual}"
    if kind not in _DTYPES:
        return f"q_type of fmoe must be {', '.join(_DTYPES)} (got {kind}); sm_90 has no fp4"
    if q_dtype not in _DTYPES[kind]:
        return f"factors of fmoe with {kind} must be {' or '.join(_DTYPES[kind])} (got {q_dtype})"
    if shape.layout != "row":
        return f"weights must be plain [experts, rows, K] (got layout {shape.layout})"
    return _sizes(shape, width_of(q_dtype))


def _sizes(shape: Shape, width: int) -> str | None:
    step, experts, pairs = max(_VECTOR, ALIGNMENT // width), int(shape["expert"]), shape.m * int(shape["topk"])
    if shape.n % step or shape.k % step:
        return f"model_dim and inter_dim must be multiples of {step} with factors of {width} bytes (got {shape.n} and {shape.k})"
    if pairs > _MOST or 2 * shape.k > _MOST:
        return f"tokens * topk, and rows of w1, may be at most {_MOST}"
    if max(experts * 2 * shape.k * shape.n * width, pairs * max(shape.n, 2 * shape.k) * 2) > MAX_BYTES:
        return f"an operand or an intermediate may have at most {MAX_BYTES} bytes"
    return None


def unfit(stages: Stages, split: int, shape: Shape, device: Device) -> str | None:
    """Return why the stages cannot serve the shape, or None."""
    del device
    if split > 1:
        return f"splitK of fmoe must be 0 or 1 (got {split})"
    for number, instance in enumerate((stages.first, stages.second), start=1):
        assert isinstance(instance, CutlassInstance)
        if reason := unfit_stage(instance, stage_of(shape, number)):
            return f"stage {number}: {reason}"
    return None


def unfit_stage(instance: CutlassInstance, stage: Shape) -> str | None:
    if instance.schedule not in ("cooperative", "pingpong") or instance.scheduler != "persistent":
        given = f"{instance.schedule} with {instance.scheduler}"
        return f"grouped products need schedule cooperative or pingpong with scheduler persistent (got {given})"
    return "grouped products do not support fast sums" if instance.fast else unfit_parameters(instance, 0, stage, "sm_90")


@functools.lru_cache(maxsize=1 << 12)
def stage_of(shape: Shape, stage: int) -> Shape:
    """Return a stage as a batch of products: an expert's rows, the weight's rows, K.

    The batch has one product for each expert that random tokens hit.
    """
    experts, topk, rows = int(shape["expert"]), int(shape["topk"]), shape.k * (2 if shape["g1u1"] else 1)
    hit = max(min(topk, experts), round(experts * (1 - max(0, 1 - topk / experts) ** shape.m)))
    expert_rows = ceil_div(shape.m * topk, hit)
    n, k = (rows, shape.n) if stage == 1 else (shape.n, shape.k)
    q_dtype, scale = str(shape["q_dtype_w"]), "block" if shape["q_type"] == "per_1x128" else "none"
    return Shape("batched_bf16", expert_rows, n, k, q_dtype, "bf16", scale=scale, extra={"B": hit})
