"""Registers, spilled bytes and shared memory of the kernels that the plugin `skinny` lists first, as NVRTC's assembler tells them.

::

    python benchmarks/skinny_registers.py --csv registers.csv
    python benchmarks/skinny_registers.py --op a8w8 --m 1 16 --count 60 --device sm_100:148 --csv registers.csv

Needs no GPU. The whole list of all shapes would be thousands of compiles, so these are the distinct ones behind the first 12
solutions (``--count``) of each shape of the subset `decode` of shapes.csv at M of 1, 2, 4, 8, 16, 32 and 64, each compiled once.
``M`` are the numbers of rows that one compile was asked for, ``splitK`` those of parts, where 0 is none; ``shared`` is the most dynamic
shared memory that a block has for any of its shapes. ``spilled`` counts stores and loads of a thread, in bytes of code.
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
from tunedgemm_skinny.names import kernel_of
from tunedgemm_skinny.resources import shared_bytes

ROWS = (1, 2, 4, 8, 16, 32, 64)
COUNT = 12
FIELDS = ("op", "kernelName", "M", "splitK", "dtype", "outdtype", "registers", "spilled", "stack", "static", "shared")


@attrs.frozen
class Compile:
    """What a compiler is given: a program's text and the options."""

    source: str
    options: tuple[str, ...]


@attrs.frozen
class Resources:
    """What a kernel takes: 32-bit registers a thread, bytes of it spilled and on its stack; static shared memory of a block in bytes."""

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
    """In place of a compiler: notes what it would compile, and refuses it, so that nothing is kept."""

    version: str = "none"
    noted: list[Compile] = attrs.field(factory=list)

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Note it."""
        self.noted.append(Compile(source, tuple(options)))
        raise rtc.RefusedError(f"{name} is not compiled", "")


def wanted(shapes: Iterable[Shape], count: int, device: Device) -> dict[Compile, list[Use]]:
    """The distinct compiles behind the first solutions of some shapes, each with all that it serves."""
    found: dict[Compile, list[Use]] = {}
    for shape in shapes:
        noting = Noting()
        backend = attrs.evolve(skinny, compiler=lambda _, noting=noting: noting)
        for solution in itertools.islice(backend.enumerate_solutions(shape, device), count):
            with contextlib.suppress(LaunchError):
                backend.prepare(solution, shape, device)
            found.setdefault(noting.noted.pop(), []).append(Use(shape, solution.kernel_name, solution.split_k))
    return found


def compilers() -> ModuleType:
    """The module of the plugin's tests that asks a compiler what a program takes."""
    path = HERE.parent / "plugins" / "skinny" / "tests" / "compilers.py"
    spec = importlib.util.spec_from_file_location("skinny_compilers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(work: Compile) -> Resources:
    """What one compile takes; runs in a process of the pool."""
    code = compilers().nvrtc().compile(work.source, work.options)
    return Resources(code.registers, code.spilled, code.stack, code.shared)


def rows_of(found: dict[Compile, list[Use]], resources: Sequence[Resources], device: Device) -> Iterator[dict[str, object]]:
    """One row of the CSV for each compile."""
    for uses, taken in zip(found.values(), resources, strict=True):
        first = uses[0].shape
        shared = max(shared_bytes(kernel_of(use.kernel_name), use.splits or 1, use.shape, device.gfx) for use in uses)
        yield {
            "op": first.op, "kernelName": uses[0].kernel_name, "M": joined(use.shape.m for use in uses),
            "splitK": joined(use.splits for use in uses), "dtype": first.dtype, "outdtype": first.outdtype, **attrs.asdict(taken),
            "shared": shared,
        }  # fmt: skip


def joined(numbers: Iterable[int]) -> str:
    """Distinct numbers in their order, between spaces."""
    return " ".join(map(str, sorted(set(numbers))))


def main() -> int:
    """Choose, compile, write and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="a row for each compile; a line with # says what of")
    parser.add_argument("--op", choices=[op for op in skinny.OPS if op in SHAPES], default=skinny.OPS[0])
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    parser.add_argument("--count", type=int, default=COUNT, help=f"solutions of each shape (default: {COUNT})")
    parser.add_argument("--subset", default="decode")
    parser.add_argument("--device", type=device_of_text, default="sm_90:132:nvidia-h200", help="GFX:CU[:NAME] (default: an H200)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    beside = rtc.beside(rtc.NVRTC)
    if not beside:
        parser.error(f"there is no NVRTC: {rtc.NVRTC.hint}")
    shapes = [shape for _, shape in shapes_of([arguments.subset], arguments.op) if shape.m in arguments.m]
    found = wanted(shapes, arguments.count, arguments.device)
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        resources = list(pool.map(compiled, found))
    rows = sorted(rows_of(found, resources, arguments.device), key=lambda row: (-int(row["spilled"]), row["kernelName"], row["M"]))
    if arguments.csv:
        day, version = datetime.datetime.now(datetime.timezone.utc).date(), rtc.bind_functions(rtc.NVRTC, beside[0]).version
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
