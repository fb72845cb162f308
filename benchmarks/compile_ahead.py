"""Compile, without a GPU, what a tuning on one begins with: time on the GPU's machine then goes to measuring.

    TUNEDGEMM_CACHE=ahead python benchmarks/compile_ahead.py --libtype triton,skinny --first 24 a16w16:shapes.csv a8w8:others.csv

The kernels lie in the cache folder, which is carried to that machine and named there by the same variable. They are found again by the
same versions of Python's packages: Triton, torch, NVRTC. What cannot be compiled is told at the end, and the tuner tells it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_untuned
from tunedgemm.tuner.compilers import Compilers


def listed(arguments: argparse.Namespace, registry: Registry, device: Device) -> list[tuple[Shape, list[Solution]]]:
    """The first solutions of each shape and backend."""
    backends = [registry.get(libtype) for libtype in arguments.libtype.split(",")]
    if missing := [found for found in backends if not isinstance(found, Backend)]:
        raise SystemExit(str(missing[0]))
    work = []
    for asked in arguments.files:
        op, _, file = asked.partition(":")
        for row in read_untuned(Path(file), op_named(op)):
            able = [found for found in backends if isinstance(found, Backend) and found.supports(row.shape, device) is True]
            work += [(row.shape, found.solutions(row.shape, device)[: arguments.first]) for found in able]
    return work


def main() -> None:
    """Compile what is listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="OP:FILE", help="untuned files, each with its op")
    parser.add_argument("--libtype", default="triton,skinny", help="backends (default: %(default)s)")
    parser.add_argument("--first", type=int, default=24, help="solutions of a shape and backend (default: %(default)s)")
    parser.add_argument("--gfx", default="sm_90", help="the architecture (default: %(default)s)")
    parser.add_argument("--cu", type=int, default=132, help="its multiprocessors (default: %(default)s)")
    parser.add_argument("--name", default="nvidia-h200", help="its name (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 is one for each core (default: %(default)s)")
    arguments = parser.parse_args()
    device, registry = Device(arguments.gfx, arguments.cu, arguments.name), Registry()
    work, compilers = listed(arguments, registry, device), Compilers(arguments.jobs, registry=registry)
    try:
        for shape, solutions in work:
            compilers.begin(shape, solutions, device)
        failed = [timing for shape, solutions in work for timing in compilers.finish(shape, solutions, device)]
    finally:
        compilers.stop()
    for timing in failed:
        print(f"{timing.shape} {timing.solution}: {timing.status}: {timing.detail}")
    print(f"{sum(len(solutions) for _, solutions in work)} solutions, {len(failed)} failed")


if __name__ == "__main__":
    main()
