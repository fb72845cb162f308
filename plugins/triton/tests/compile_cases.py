"""Run as a child: compiles a list of solutions and prints what their code says of itself as JSON.

Reads a JSON list of cases: gfx, kernel name, split_k, and the shape as a dict. A compiler that aborts takes only this process.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tunedgemm.plugin import Device, Shape
from tunedgemm_triton.compile import build_of, compiled
from tunedgemm_triton.names import kernel_of

_MATRIX = r"v_mfma_\w+|v_wmma_\w+|wgmma\.mma_async[\w.]*|tcgen05\.mma|mma\.sync\.aligned[\w.]*|setmaxnreg|cp\.async\.bulk\.tensor"


def look(case: dict[str, Any]) -> dict[str, Any]:
    """Instructions, shared memory and spills of one compiled solution."""
    try:
        build = build_of(kernel_of(case["kernel"]), case["split_k"], Shape.from_dict(case["shape"]), Device(case["gfx"], 128))
        kernel = compiled(build)
    except Exception as error:
        return {"failed": str(error)[-600:]}
    text = kernel.asm["amdgcn"] if "amdgcn" in kernel.asm else kernel.asm["ptx"]
    consumers = kernel.asm["ttgir"].partition("partition0")[2]
    moved = re.findall(r"= arith\.addi %\w+, %c64_i32", consumers)
    spills = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    found = {"matrix": sorted(set(re.findall(_MATRIX, text))), "shared": kernel.metadata.shared}
    # Products of Hopper's tiles, and whether one of them is still under way while the next one begins.
    found["products"] = kernel.asm["ttgir"].count("warp_group_dot ")
    found["overlapped"] = bool(re.search(r"warp_group_dot_wait.*pendings = 1", kernel.asm["ttgir"]))
    found["additions"] = len(re.findall(r"\badd(?:\.rn)?\.f32", text))
    return {**found, "spills": sum(map(int, spills)), "moved_by_consumers": len(moved)}


if __name__ == "__main__":
    json.dump([look(case) for case in json.load(sys.stdin)], sys.stdout)
