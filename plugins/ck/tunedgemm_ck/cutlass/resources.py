"""Compute registers and shared memory of CUTLASS's kernels."""

from __future__ import annotations

from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits

from tunedgemm_ck.cutlass.kernels import KERNELS
from tunedgemm_ck.cutlass.names import MAX_ACCUMULATORS, TENSOR_MEMORY, CutlassInstance


def width_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return dtype_bits(dtype) // 8


def accumulators_of(dtype: str, fast: bool = False) -> int:
    """Return the maximum of accumulators per thread.

    fp8 keeps each twice, in the tensor core and in float32, unless it is *fast*; more would spill.
    """
    return MAX_ACCUMULATORS // 2 if dtype.startswith("fp8") and not fast else MAX_ACCUMULATORS


def unfit_shared_memory(instance: CutlassInstance, shape: Shape, gfx: str) -> str | None:
    slot = (instance.tile_m + instance.tile_n) * instance.tile_k * width_of(shape.dtype)
    slots = instance.stages or KERNELS[gfx][shape.dtype].slots
    # With TMA the epilogue has up to two additional buffers of 32 columns.
    rows = instance.tile_m if instance.schedule in TENSOR_MEMORY else min(instance.tile_m, instance.threads // 2)
    epilogue = 0 if instance.stages else 2 * rows * 32 * width_of(shape.outdtype)
    if slots * slot + epilogue > (most := ARCHITECTURES[gfx].shared_bytes):
        return f"{slots} stages of {slot} bytes and {epilogue} of the epilogue exceed the {most} bytes of shared memory of {gfx}"
    return None
