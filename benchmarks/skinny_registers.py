"""Measure registers, spilled bytes and shared memory of the first kernels that `skinny` lists.

The figures are those of NVRTC's assembler.

::

    python benchmarks/skinny_registers.py --csv registers.csv
    python benchmarks/skinny_registers.py --op a8w8 --m 1 16 --count 60 --device sm_100:148 \\
        --csv registers.csv

Needs no GPU. All solutions of all shapes would be thousands of compiles. So this compiles the first
12 solutions (``--count``) of each shape of the subset `decode` of shapes.csv at M of 1, 2, 4, 8,
16, 32 and 64, each program once. ``M`` lists the rows that a compile serves, ``splitK`` its splits
(0: none). ``shared`` is the most dynamic shared memory of a block for any of its shapes.
``spilled`` counts stores and loads of a thread, in bytes of code.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import importlib.util
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import attrs
from harness import FIELDS as SHAPES
from harness import HERE, shapes_of
from tunedgemm.device import Device, device_of_text
from tunedgemm.errors import LaunchError
from tunedgemm.shape import Shape
from tunedgemm_skinny import rtc, skinny
from tunedgemm_skinny.names import parse_name
from tunedgemm_skinny.resources import shared_bytes

ROWS = (1, 2, 4, 8, 16, 32, 64)
COUNT = 12
FIELDS = ("op", "kernelName", "M", "splitK", "dtype", "outdtype", "registers", "spilled", "stack", "static", "shared")


@attrs.frozen
class Compile:
    """A program's text and the compiler's options."""

    source: str
    options: tuple[str, ...]


@attrs.frozen
class Resources:
    """32-bit registers, spilled bytes and stack bytes of a thread; static shared bytes of a block."""

    registers: int
    spilled: int
    stack: int
    static: int


@attrs.frozen
class Use:
    """A shape that a compile serves, as the kernel of this name in so many splits."""

    shape: Shape
    kernel_name: str
    splits: int


@attrs.define(eq=False)
class Noting:
    """A compiler that records each compile and refuses it, so that nothing is cached."""

    version: str = "none"
    noted: list[Compile] = attrs.field(factory=list)

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Record the compile and refuse it."""
        self.noted.append(Compile(source, tuple(options)))
        raise rtc.RefusedError(f"{name} is not compiled", "")


def wanted(shapes: Iterable[Shape], count: int, device: Device) -> dict[Compile, list[Use]]:
    """Map the distinct compiles of the first solutions of some shapes to the shapes they serve."""
    uses: dict[Compile, list[Use]] = {}
    for shape in shapes:
        noting = Noting()
        backend = attrs.evolve(skinny, compiler=lambda _, noting=noting: noting)
        for solution in itertools.islice(backend.enumerate_solutions(shape, device), count):
            with contextlib.suppress(LaunchError):
                backend.prepare(solution, shape, device)
            uses.setdefault(noting.noted.pop(), []).append(Use(shape, solution.kernel_name, solution.split_k))
    return uses


def compilers() -> ModuleType:
    """Load the module of the plugin's tests that reads a program's resources from a compiler."""
    path = HERE.parent / "plugins" / "skinny" / "tests" / "compilers.py"
    spec = importlib.util.spec_from_file_location("skinny_compilers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(work: Compile) -> Resources:
    """Return the resources of one compile; runs in a process of the pool."""
    code = compilers().nvrtc().compile(work.source, work.options)
    return Resources(code.registers, code.spilled, code.stack, code.shared)


def rows_of(compiles: dict[Compile, list[Use]], resources: Sequence[Resources], device: Device) -> Iterator[dict[str, object]]:
    """Yield one row of the CSV for each compile."""
    for uses, taken in zip(compiles.values(), resources, strict=True):
        first = uses[0].shape
        shared = max(shared_bytes(parse_name(use.kernel_name), use.splits or 1, use.shape, device.gfx) for use in uses)
        yield {
            "op": first.op, "kernelName": uses[0].kernel_name, "M": joined(use.shape.m for use in uses),
            "splitK": joined(use.splits for use in uses), "dtype": first.dtype, "outdtype": first.outdtype, **attrs.asdict(taken),
            "shared": shared,
        }  # fmt: skip


def joined(numbers: Iterable[int]) -> str:
    """Join distinct numbers in their order by spaces."""
    return " ".join(map(str, sorted(set(numbers))))


def main() -> int:
    """Choose, compile, write and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="write a row for each compile, after a comment with the device and the shapes")
    parser.add_argument("--op", choices=[op for op in skinny.OPS if op in SHAPES], default=skinny.OPS[0])
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    parser.add_argument("--count", type=int, default=COUNT, help=f"solutions of each shape (default: {COUNT})")
    parser.add_argument("--subset", default="decode")
    parser.add_argument("--device", type=device_of_text, default="sm_90:132:nvidia-h200", help="GFX:CU[:NAME] (default: an H200)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    libraries = rtc.beside(rtc.NVRTC)
    if not libraries:
        parser.error(f"NVRTC not found; {rtc.NVRTC.hint}")
    shapes = [shape for _, shape in shapes_of([arguments.subset], arguments.op) if shape.m in arguments.m]
    compiles = wanted(shapes, arguments.count, arguments.device)
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        resources = list(pool.map(compiled, compiles))
    rows = sorted(rows_of(compiles, resources, arguments.device), key=lambda row: (-int(row["spilled"]), row["kernelName"], row["M"]))
    if arguments.csv:
        day, version = datetime.datetime.now(datetime.timezone.utc).date(), rtc.bind_functions(rtc.NVRTC, libraries[0]).version
        about = f"{arguments.device}; {version}; {day}; the first {arguments.count} of each of {len(shapes)} shapes of {arguments.subset}"
        with arguments.csv.open("w", newline="") as file:
            file.write(f"# {about}\n")
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    spilling = [row for row in rows if row["spilled"]]
    for row in spilling:
        print(f"{row['kernelName']} M={row['M']}: {row['spilled']} bytes spilled with {row['registers']} registers")
    most = max(int(row["registers"]) for row in rows)
    print(f"{len(rows)} compiles for {len(shapes)} shapes, {len(spilling)} spill; at most {most} registers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
