"""Compile, without a GPU, what a tuning on one begins with: time on the GPU's machine then goes to measuring.

    TUNEDGEMM_CACHE=ahead python benchmarks/compile_ahead.py --libtype triton,skinny --first 24 a16w16:shapes.csv a8w8:others.csv

The kernels lie in the cache folder, which is carried to that machine and named there by the same variable. They are found again by the
same versions of Python's packages: Triton, torch, NVRTC. What cannot be compiled is told at the end, and the tuner tells it again.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tunedgemm.csvfile import read_untuned
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.registry import Backend, Registry
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution


@functools.cache
def backend(libtype: str) -> Backend:
    """The backend of a libtype, once in a process."""
    found = Registry().get(libtype)
    if not isinstance(found, Backend):
        raise SystemExit(str(found))
    return found


def prepared(solution: Solution, shape: Shape, device: Device) -> str:
    """Compile one solution; what is wrong with it, or an empty text."""
    try:
        backend(solution.libtype).hooks["prepare"](solution, shape, device)
    except Exception as error:  # a compiler may fail in any way, and the others go on
        return f"{shape} {solution}: {str(error).splitlines()[0][:200]}"
    return ""


def main() -> None:
    """Compile what is listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="OP:FILE", help="untuned files, each with its op")
    parser.add_argument("--libtype", default="triton,skinny", help="backends (default: %(default)s)")
    parser.add_argument("--first", type=int, default=24, help="solutions of a shape and backend (default: %(default)s)")
    parser.add_argument("--gfx", default="sm_90", help="the architecture (default: %(default)s)")
    parser.add_argument("--cu", type=int, default=132, help="its multiprocessors (default: %(default)s)")
    parser.add_argument("--name", default="nvidia-h200", help="its name (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    arguments = parser.parse_args()
    device, work = Device(arguments.gfx, arguments.cu, arguments.name), []
    for asked in arguments.files:
        op, _, file = asked.partition(":")
        for row in read_untuned(Path(file), op_named(op)):
            for found in map(backend, arguments.libtype.split(",")):
                if "prepare" in found.hooks and found.supports(row.shape, device) is True:
                    work += [(solution, row.shape, device) for solution in found.solutions(row.shape, device)[: arguments.first]]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        failed = [reason for reason in pool.map(prepared, *zip(*work, strict=True), chunksize=4) if reason] if work else []
    print(*failed, f"{len(work)} solutions, {len(failed)} failed", sep="\n")


if __name__ == "__main__":
    main()
