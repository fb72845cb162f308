"""Check whether a kernel of a code object fits a device and its argument layout."""

from __future__ import annotations

from tunedgemm_asm.abi import Abi
from tunedgemm_asm.codeobject import MAX_THREADS, WAVE, CodeObject, Metadata
from tunedgemm_asm.manifest import KernelConfig

#: Registers of a lane in a SIMD, and LDS of a compute unit in bytes by architecture.
REGISTERS, LDS = 512, {"gfx942": 64 << 10, "gfx950": 160 << 10}


def unfit(code: CodeObject, kernel: KernelConfig, abi: Abi, gfx: str) -> str | None:
    """Return why a kernel of the code object must not be launched on *gfx* with *abi*, or None."""
    if code.gfx != gfx:
        return f"built for {code.gfx}, not {gfx}"
    if gfx not in LDS:
        return f"unknown architecture {gfx}; known: {', '.join(LDS)}"
    if kernel.name not in code.kernels:
        return f"no kernel {kernel.name}; kernels: {', '.join(code.kernels) or 'none'}"
    seen = code.kernels[kernel.name]
    return _arguments(seen, abi) or _resources(seen, abi, gfx) or _promises(seen, kernel, abi) or None


def _arguments(seen: Metadata, abi: Abi) -> str:
    if seen.kernarg_bytes not in abi.sizes:
        return f"arguments take {seen.kernarg_bytes} bytes; {abi.name} passes {' or '.join(map(str, abi.sizes))}"
    listed = {arg.offset: arg for arg in seen.args}
    for field in abi.fields if listed else ():
        arg = listed.get(field.offset)
        if field.offset < seen.kernarg_bytes and (arg is None or arg.bytes != field.bytes or arg.pointer != (field.kind == "pointer")):
            return f"no {field.kind} argument at {field.offset}, where {abi.name} passes {field.name}"
    return ""


def _resources(seen: Metadata, abi: Abi, gfx: str) -> str:
    if seen.workgroup < abi.threads or (seen.required and seen.required != (abi.threads, 1, 1)):
        return f"built for workgroups of {seen.required or seen.workgroup} threads; {abi.name} launches {abi.threads}"
    if seen.workgroup > MAX_THREADS:
        return f"workgroup of {seen.workgroup} threads exceeds {MAX_THREADS}"
    if seen.lds_bytes > LDS[gfx]:
        return f"{seen.lds_bytes} bytes of LDS exceed the {LDS[gfx]} of {gfx}"
    if seen.wavefront != WAVE or seen.vgprs > REGISTERS:
        return f"waves of {seen.wavefront} threads with {seen.vgprs} registers; {gfx} has {WAVE} with at most {REGISTERS}"
    return ""


def _promises(seen: Metadata, kernel: KernelConfig, abi: Abi) -> str:
    """Return which promise of the manifest the code cannot keep; a tile's accumulators are in
    registers.
    """
    if kernel.splits and any(abi.field(name).offset >= seen.kernarg_bytes for name in abi.for_splits):
        return f"manifest claims split-K, but the code does not read {' and '.join(abi.for_splits)}"
    if kernel.tile_m * kernel.tile_n > abi.threads * REGISTERS:
        return f"manifest's tile of {kernel.tile_m}x{kernel.tile_n} exceeds the registers of a workgroup"
    return ""
