"""Child: compile programs of launch plans and print what their code shows, as JSON.

It reads a JSON list of cases: gfx, kernel name, split_k, and the shape as a dict. A compiler that
aborts ends only this process. Programs that cases share are compiled once.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

from tunedgemm.plugin import Device, Shape
from tunedgemm_triton.build import Program
from tunedgemm_triton.families import family_of

#: A load of the tensor memory accelerator: the sizes of its descriptor's box, and of its buffer.
_LOAD = r"async_tma_copy_global_to_local .*!tt\.tensordesc<(?:tensor<)?((?:\d+x)+).*-> !ttg\.memdesc<((?:\d+x)+)"
_MATRIX = r"v_mfma_\w+|v_wmma_\w+|wgmma\.mma_async[\w.]*|tcgen05\.mma[\w.:]*|mma\.sync\.aligned[\w.:]*|setmaxnreg|cp\.async\.bulk\.tensor"


def spilled(kernel: Any, text: str) -> tuple[int, int]:
    """Return the registers of a thread, 0 if not read, and those that it spills."""
    if "cubin" not in kernel.asm:
        return 0, sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)))
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())  # type: ignore[union-attr]
    return registers, stack // 4


@functools.cache
def inspect_program(program: Program, gfx: str) -> dict[str, Any]:
    """Return instructions, registers, memory and spills of one program."""
    try:
        kernel = program.compile(gfx)
    except Exception as error:
        return {"function": program.function, "failed": str(error)[-600:]}
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"]
    ttgir = kernel.asm["ttgir"]
    registers, spills = spilled(kernel, text)
    return {
        "function": program.function,
        "matrix": sorted(set(re.findall(_MATRIX, text))),
        "shared": kernel.metadata.shared,
        "fused": kernel.metadata.enable_fp_fusion,
        "tensor_columns": getattr(kernel.metadata, "tmem_size", 0) or 0,
        "registers": registers,
        "spills": spills,
        # Products of Hopper's tiles, and whether one of them is still in flight while the next one
        # begins.
        "products": ttgir.count("warp_group_dot "),
        "overlapped": bool(re.search(r"warp_group_dot_wait.*pendings = 1", ttgir)),
        "additions": len(re.findall(r"\badd(?:\.rn)?\.f32", text)),
        "boxes": re.findall(_LOAD, ttgir),
        "moved_by_consumers": len(re.findall(r"= arith\.addi %\w+, %c64_i32", ttgir.partition("partition0")[2])),
    }


def inspect_case(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the code of each program of a case shows."""
    shape, device = Shape.from_dict(case["shape"]), Device(case["gfx"], 128)
    family = family_of(shape.op)
    plan = family.plan_of(family.parse_name(case["kernel"]), case["split_k"], shape, device)
    return [inspect_program(step.program, device.gfx) for step in plan.steps]


if __name__ == "__main__":
    json.dump([inspect_case(case) for case in json.load(sys.stdin)], sys.stdout)
