"""Compile what the plugin `triton` lists, for each op and architecture: how long a compile takes, and what spills.

::

    python benchmarks/triton_matrix.py --csv matrix.csv
    python benchmarks/triton_matrix.py --op fmoe a8w8 --gfx gfx942 --first 60 --csv matrix.csv

Needs no GPU. Of each shape the first solutions (``--first``) and as many more, evenly from the rest (``--more``), each in a process
whose end costs that compile alone. A row each: ``seconds`` of its compiles (those of all launches of a call), the most ``shared`` memory
of a block in bytes, and ``spilled``: on AMD vector registers, on NVIDIA bytes of local memory a thread, as Triton's cuobjdump tells
them. The last lines, also printed, are a table of op by architecture.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as Overdue
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool
from tunedgemm.device import Device
from tunedgemm.plugin import Shape
from tunedgemm.solution import Solution

#: Units as of an MI300X, an MI350X, a Radeon RX 9070 XT and an H200: what is listed first depends on them.
DEVICES = {
    "gfx942": Device("gfx942", 304),
    "gfx950": Device("gfx950", 256),
    "gfx1201": Device("gfx1201", 64),
    "sm_90": Device("sm_90", 132),
}
ROWS = (1, 16, 1024)
FIELDS = ("op", "gfx", "dtype", "layout", "M", "kernelName", "splitK", "status", "seconds", "shared", "spilled")
TIMEOUT = 300


def shapes_of(op: str, gfx: str) -> Iterator[Shape]:
    """One or two shapes of an op for each class of rows, in the architecture's kind of fp8."""
    from tunedgemm_triton.limits import ARCHITECTURES

    fp8, shuffled = {"dtype": ARCHITECTURES[gfx].fp8, "outdtype": "bf16"}, {"layout": "aiter16x16"}
    int8, block = {"dtype": "int8", "outdtype": "bf16"}, {"scale": "block"}
    given: dict[str, list[dict[str, Any]]] = {
        "a16w16": [{}, shuffled],
        "a8w8": [{"scale": "row", **fp8}, {"scale": "row", **int8}],
        "a8w8_bpreshuffle": [{"scale": "row", **fp8, **shuffled}],
        "a8w8_blockscale": [{**block, **fp8}],
        "a8w8_blockscale_bpreshuffle": [{**block, **fp8, **shuffled}],
        "batched_bf16": [{"extra": {"B": 16}}],
        "batched_a8w8": [{"scale": "row", **fp8, "extra": {"B": 16}}],
        "a4w4_blockscale": [{"dtype": "fp4x2", "outdtype": "bf16", **block, **shuffled}],
        "a16w4_blockscale": [{"outdtype": "bf16", **block}],
    }
    for m in ROWS:
        if op == "fmoe":
            yield from (_experts(m, *kind) for kind in (("No", "bf16"), ("per_1x128", ARCHITECTURES[gfx].fp8)))
        else:
            yield from (Shape(op, m, 2112, 7168, **fields) for fields in given[op])


def _experts(tokens: int, quantised: str, dtype: str) -> Shape:
    """Eight of 128 experts a token, as Qwen3's mixture of experts has them."""
    extra = {
        "expert": 128, "topk": 8, "act": "silu", "q_type": quantised, "q_dtype_a": dtype, "q_dtype_w": dtype, "g1u1": True,
        "doweight_stage1": False,
    }  # fmt: skip
    return Shape("fmoe", tokens, 2048, 768, layout="aiter16x16", extra=extra)


def chosen(shape: Shape, device: Device, first: int, more: int) -> list[Solution]:
    """The first solutions of a shape, and others evenly from the rest."""
    import tunedgemm_triton

    found = list(tunedgemm_triton.enumerate_solutions(shape, device))
    rest = found[first:]
    return [*found[:first], *(rest[:: max(len(rest) // more, 1)][:more] if more else [])]


def compiled(shape: Shape, solution: Solution, device: Device) -> tuple[float, int, int]:
    """Seconds, bytes of shared memory and what is spilled, of all launches of a call; runs in a process of the pool."""
    from tunedgemm_triton.families import family_of

    family, began = family_of(shape.op), time.perf_counter()
    plan = family.plan_of(family.parse_name(solution.kernel_name), max(solution.split_k, 1), shape, device)
    kernels = [program.compile(device.gfx) for program in dict.fromkeys(step.program for step in plan.steps)]
    seconds = time.perf_counter() - began
    return seconds, max(kernel.metadata.shared for kernel in kernels), max(map(spilled, kernels))


def spilled(kernel: Any) -> int:
    """Vector registers that a kernel for AMD spills; bytes of local memory of one for NVIDIA."""
    if "amdgcn" in kernel.asm:
        return sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])))
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"LOCAL:(\d+)", told))) + sum(map(int, re.findall(r"STACK:(\d+)", told)))


def rows_of(work: list[tuple[Shape, Solution, Device]], processes: int) -> Iterator[dict[str, Any]]:
    """A row for each compile, in order."""
    with ProcessPool(max_workers=processes, context=multiprocessing.get_context("spawn")) as pool:  # LLVM outlives no fork
        futures = [pool.schedule(compiled, args=each, timeout=TIMEOUT) for each in work]
        for (shape, solution, device), future in zip(work, futures, strict=True):
            status, seconds, shared, lost = "ok", 0.0, 0, 0
            try:
                seconds, shared, lost = future.result()
            except Overdue:
                status = f"more than {TIMEOUT} s"
            except ProcessExpired as error:
                status = f"the compiler died: {error.exitcode}"
            except Exception as error:  # what a compiler raises is the result
                status = f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ")
            dtype = str(shape["q_dtype_w"]) if shape.op == "fmoe" else shape.dtype
            yield {
                "op": shape.op, "gfx": device.gfx, "dtype": dtype, "layout": shape.layout, "M": shape.m,
                "kernelName": solution.kernel_name, "splitK": solution.split_k, "status": status, "seconds": f"{seconds:.2f}",
                "shared": shared, "spilled": lost,
            }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of op by architecture: compiles, those that failed, the median of seconds, the share that spills."""
    found = list(dict.fromkeys(row["gfx"] for row in rows))
    lines = [f"| op | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = []
        for gfx in found:
            mine = [row for row in rows if (row["op"], row["gfx"]) == (op, gfx)]
            right = [row for row in mine if row["status"] == "ok"]
            if not mine:
                cells.append("not taken")
                continue
            seconds = statistics.median(float(row["seconds"]) for row in right) if right else 0.0
            spills = sum(int(row["spilled"]) > 0 for row in right)
            failed = f", {len(mine) - len(right)} failed" if len(mine) > len(right) else ""
            cells.append(f"{len(mine)}{failed}, {seconds:.1f} s, {100 * spills / max(len(right), 1):.0f} % spill")
        lines.append(f"| `{op}` | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Choose, compile, write and print; exit 1 if something did not compile."""
    import triton
    import tunedgemm_triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=tunedgemm_triton.OPS, default=tunedgemm_triton.OPS)
    parser.add_argument("--gfx", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--first", type=int, default=4, help="solutions of each shape from the beginning of its list (default: 4)")
    parser.add_argument("--more", type=int, default=4, help="and from the rest (default: 4)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, help="a row for each compile; a line with # says what of")
    arguments = parser.parse_args()
    work = [
        (shape, solution, DEVICES[gfx])
        for op in arguments.op
        for gfx in arguments.gfx
        for shape in shapes_of(op, gfx)
        for solution in chosen(shape, DEVICES[gfx], arguments.first, arguments.more)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEDGEMM_CACHE"] = folder  # nothing is there that was compiled before
        for row in rows_of(work, arguments.processes):
            rows.append(row)
            if row["status"] != "ok":
                print(f"{row['op']} {row['gfx']} M={row['M']} {row['kernelName']} splitK={row['splitK']}: {row['status']}", flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(
                f"# Triton {triton.__version__}; {datetime.now(timezone.utc).date()}; N=2112, K=7168; fmoe as Qwen3's, 128 experts\n"
            )
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    print("\n".join(table(rows)))
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
