"""Run as a child: compiles plans and prints what the code of their products says of itself as JSON.

Reads a JSON list of cases: gfx, shape as a dict, kernel name, split_k. A compiler that aborts takes only this process.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tunedgemm.plugin import Shape
from tunedgemm_triton.plan import Program
from tunedgemm_triton.planned import PLANNED

_MATRIX = r"v_mfma_\w+|v_wmma_\w+|wgmma\.mma_async\.[\w.]*|mma\.sync\.aligned\.[\w.]*"


def look(program: Program, gfx: str) -> dict[str, Any]:
    """Instructions, shared memory and spills of one program."""
    try:
        kernel = program.compiled(gfx)
    except Exception as error:
        return {"function": program.function, "failed": str(error)[-600:]}
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"]
    spills = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    found = {"function": program.function, "matrix": sorted(set(re.findall(_MATRIX, text))), "shared": kernel.metadata.shared}
    return {**found, "spills": sum(map(int, spills))}


def main(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What `look` finds of each case's programs; those that cases share are looked at once."""
    known: dict[tuple[Program, str], dict[str, Any]] = {}
    results = []
    for case in cases:
        shape, gfx = Shape.from_dict(case["shape"]), case["gfx"]
        family = PLANNED[shape.op]
        plan = family.plan_of(family.kernel_of(case["kernel"]), case["split_k"], shape)
        for step in plan.steps:
            if (step.program, gfx) not in known:
                known[step.program, gfx] = look(step.program, gfx)
        results.append([known[step.program, gfx] for step in plan.steps])
    return results


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
