"""Child: print what the LLVM of the installed Triton states of AMD's architectures, as JSON.

Its arguments are names; it adds those of gfx11 and gfx12 that LLVM knows. It prints nothing where
Triton is older than 3.9, the first with an AMD code generator to call. LLVM writes the limit of LDS
of each to stderr, in the same order.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton.backends.amd import compiler

#: A kernel with more LDS than any architecture has, and one whose lanes take 256 registers.
_PROGRAM = """
target triple = "amdgcn-amd-amdhsa"
@buffer = internal addrspace(3) global [1048576 x i8] poison
define amdgpu_kernel void @kernel(i32 %index) #0 {
  %byte = getelementptr i8, ptr addrspace(3) @buffer, i32 %index
  store volatile i8 1, ptr addrspace(3) %byte
  ret void
}
define amdgpu_kernel void @full() #0 {
  call void asm sideeffect "; all", "~{v255}"()
  ret void
}
attributes #0 = { "amdgpu-flat-work-group-size"="1,32" }
"""
#: Matrix instructions by their operands, with the registers of each generation.
_SUM8, _SUM16 = "v[8:15], {0}, {0}, v[8:15]", "v[16:23], {0}, {0}, v[16:23]"
_MATRIX = {
    "bf16": (
        "v_wmma_f32_16x16x16_bf16 " + _SUM8.format("v[0:7]"),
        "v_wmma_f32_16x16x16_bf16 " + _SUM8.format("v[0:3]"),
        "v_wmma_f32_16x16x32_bf16 " + _SUM8.format("v[0:7]"),
    ),
    "fp8": ("v_wmma_f32_16x16x16_fp8_fp8 " + _SUM8.format("v[0:1]"), "v_wmma_f32_16x16x128_fp8_fp8 " + _SUM16.format("v[0:15]")),
    "fp4": ("v_wmma_scale_f32_16x16x128_f8f6f4 " + _SUM16.format("v[0:15]") + ", v30, v31",),
}


def is_known(gfx: str) -> bool:
    """Check whether LLVM knows an architecture."""
    try:
        return bool(compiler.get_amd_codegen_target_triple(gfx))
    except ValueError:
        return False


def assembles(line: str, gfx: str) -> bool:
    """Check whether an architecture has an instruction."""
    try:
        return bool(compiler.assemble_amdgcn(f"{line}\n", gfx, ""))
    except RuntimeError:
        return False


def stated(gfx: str) -> dict[str, Any]:
    """Return the lanes, the matrix instructions, and the wavefronts of a SIMD that take 256 registers."""
    options = {"enable_fp_fusion": True, "disable_optimization": False, "canonicalize_gep": False, "dump_ir": False}
    triple = compiler.get_amd_codegen_target_triple(gfx)
    code = compiler.compile_amdgpu(_PROGRAM, triple, gfx, "", flags=[], disabled_passes="", enable_timing=False, **options)
    has = {name: any(assembles(line, gfx) for line in lines) for name, lines in _MATRIX.items()}
    lanes, waves = re.findall(r"\.wavefront_size:\s+(\d+)", code)[0], re.findall(r"; Occupancy: (\d+)", code)[1]
    return {"lanes": int(lanes), "waves": int(waves), **has}


if __name__ == "__main__" and hasattr(compiler, "assemble_amdgcn"):
    known = [name for last in range(512) if is_known(name := f"gfx1{0x100 + last:x}")]
    print(json.dumps({gfx: stated(gfx) for gfx in dict.fromkeys([*sys.argv[1:], *known])}))
