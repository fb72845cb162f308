"""Run kernels of the plugin `skinny` under NVIDIA's compute-sanitizer.

memcheck checks addresses, racecheck races in shared memory.

::

    python benchmarks/skinny_sanitize.py [--tool memcheck racecheck] [--op OP ...] [--most N] \\
        [--list]

The shapes are tiny products with tails, of every op that the plugin covers. Of the listed solutions
and their neighbours it runs enough to cover each pair of properties of each family. Properties are
every parameter of a kernel's name at its first value and beyond, with a split and without. New
parameters are included automatically.

Each tool first has to find the errors of a kernel that is wrong on purpose. Then all cases run in
one child process; if it is not clean, its halves do, down to single cases. Prints one line a case.
Exits 1 where a case is at fault, 2 without the tool or a GPU. ``--list`` needs neither: it prints
the cases for the present device or an H200.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
from tunedgemm.backends.driver import load_function, loaded_driver
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device, current_device
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.launching import output_fault
from tunedgemm.testing.shapes import shapes_of
from tunedgemm_skinny import driver, rtc, skinny
from tunedgemm_skinny.build import ENTRY
from tunedgemm_skinny.names import parse_name

#: Device of `--list` without a GPU.
H200 = Device("sm_90", 132, "nvidia-h200")
#: M, N and K: rows for every family, weight rows that fill no block, a K with tails of every load
#: width.
SIZES = ((3, 37, 1048), (8, 50, 1001), (1, 33, 1030), (17, 37, 1096), (61, 50, 2100))
#: Multiples of N and K for ops whose operands need them: whole scales of mxfp4, whole packs of
#: shuffled weights.
STEPS_OF_OPERANDS = ((1, 1), (1, 32), (16, 32), (16, 64), (32, 128))
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Steps of `refine` from the list: some parameters occur only with others.
STEPS = 3
#: Paths of the tool below a toolkit's folder.
PATHS = ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.MULTILINE)
FINDING = re.compile(r"^=+ (?!COMPUTE-SANITIZER|.*SUMMARY)(\S.*)", re.MULTILINE)
#: Exit statuses of a child, set by the tool or by the child.
FOUND, WRONG = 99, 3
SECONDS = 500
CONTROL = "control"
#: Reads elements that another warp of the block may not have written yet, and writes one element
#: beyond its output.
PLANTED = """
extern "C" __global__ void %s(float *out) {
    __shared__ float values[64];
    values[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x + 1] = values[63 - threadIdx.x];
}
"""


@attrs.frozen
class Case:
    """A solution of a shape, and its index in the list of all cases."""

    shape: Shape
    solution: Solution
    index: int = -1

    def __str__(self) -> str:
        return f"{self.shape} {self.solution}"


def properties(case: Case) -> set[tuple[object, ...]]:
    """Return the properties of a case: pairs of parameters, first value or beyond; dtypes and tail."""
    kernel, shape = parse_name(case.solution.kernel_name), case.shape
    beyond: dict[str, bool] = {"split": case.solution.split_k > 0}
    for field in attrs.fields(type(kernel)):
        value = getattr(kernel, field.name)
        beyond[field.name] = value != field.metadata.get("ladder", (type(value)(),))[0]
    pairs = itertools.combinations(sorted(beyond.items()), 2)
    width = next(width for width in (8, 4, 2, 1) if shape.k % width == 0)
    plain = {(name, getattr(shape, name)) for name in ("dtype", "outdtype", "bias_dtype", "scale", "layout")}
    return {(shape.op, kernel.family, *property_) for property_ in (*pairs, *plain, ("width", width), ("rows", shape.m))}


def tiny_shapes(op: str, device: Device) -> Iterator[Shape]:
    """Yield tiny shapes with tails in the dtypes and layouts of an op's examples that fit the plugin."""
    kinds = {attrs.evolve(shape, m=1, n=1, k=1): shape for shape in shapes_of(op)}
    for shape, (m, n, k) in itertools.product(kinds.values(), SIZES):
        tiny = next(filter(exists, (resized(shape, m, n + -n % rows, k + -k % columns) for rows, columns in STEPS_OF_OPERANDS)), None)
        if tiny is not None and skinny.supports(tiny, device):
            yield tiny


def resized(shape: Shape, m: int, n: int, k: int) -> Shape | None:
    """Return the shape with other sizes; None where its op restricts them."""
    try:
        return attrs.evolve(shape, m=m, n=n, k=k)
    except ShapeError:
        return None


def exists(shape: Shape | None) -> bool:
    """Return whether a shape has operands: packs of a shuffled weight and blocks of scales are whole."""
    if shape is None:
        return False
    try:
        op_named(shape.op).make_inputs(shape, torch.device("cpu"), 0)
    except OperandError:
        return False
    return True


def listed(shape: Shape, device: Device) -> list[Solution]:
    """List the plugin's solutions of a shape and some of those up to three steps of `refine` away.

    Splits of small products are only found by `refine`.
    """
    solutions = dict.fromkeys(skinny.enumerate_solutions(shape, device))
    kinds = {frozenset(properties(Case(shape, solution))): solution for solution in solutions}
    for _ in range(STEPS):
        neighbours = (near for solution in kinds.values() for near in skinny.refine(solution, shape, device))
        near = dict.fromkeys(solution for solution in neighbours if solution not in solutions)
        solutions |= near
        kinds = {frozenset(properties(Case(shape, solution))): solution for solution in near}
    return list(solutions)


def chosen(ops: Iterable[str], device: Device, most: int) -> list[Case]:
    """Choose about the fewest cases of each op that cover all properties; *most* at most."""
    cases: list[Case] = []
    for op in ops:
        candidates = dict.fromkeys(Case(shape, solution) for shape in tiny_shapes(op, device) for solution in listed(shape, device))
        having = {case: properties(case) for case in candidates}
        missing = set().union(*having.values())
        for _ in range(most):
            if not missing:
                break
            best = max(having, key=lambda case: len(having[case] & missing))
            missing -= having[best]
            cases.append(attrs.evolve(best, index=len(cases)))
    return cases


def sanitizer() -> str | None:
    """Find compute-sanitizer on PATH, in the environment's toolkit or in the usual folders.

    Returns None where it is not found.
    """
    if on_path := shutil.which("compute-sanitizer"):
        return on_path
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    usual = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    files = (folder / path for folder in (*named, *usual) for path in PATHS)
    return next((str(file) for file in files if os.access(file, os.X_OK) and file.is_file()), None)


@attrs.frozen
class Child:
    """A child process under a tool.

    Attributes:
        file: path of compute-sanitizer.
        tool: one of its tools.
        cases: file of the list of cases, which would take too long to choose again under a tool.
    """

    file: str
    tool: str
    cases: Path

    def command(self, selection: str) -> list[str]:
        """Return the command line; *selection* is the indices of cases, or `CONTROL`."""
        options = ["--tool", self.tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", "--kernel-name", f"kns={ENTRY}"]
        return [self.file, *options, sys.executable, str(Path(__file__).resolve()), "--child", str(self.cases), selection]

    def fault(self, selection: str) -> str:
        """Return the fault of a run; "" for a clean one."""
        # Each tensor gets a separate allocation, so that memcheck knows its end.
        environment, pipe = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, subprocess.PIPE
        options = {"env": environment, "stdout": pipe, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        with subprocess.Popen(self.command(selection), **options) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the tool and what runs under it
                return f"not done after {SECONDS} s"
        return fault_of(output, process.returncode)


def fault_of(output: str, status: int) -> str:
    """Return the fault in a tool's output and exit status, in a line; "" for none."""
    counts = SUMMARY.findall(output)
    if not counts:
        return f"no summary, status {status}: {' '.join(output.split()[-40:])}"
    if any(map(int, counts)):
        finding = FINDING.search(output)
        return f"{counts[-1]} found: {finding[1] if finding else 'it does not say what'}"
    lines = [line for line in output.splitlines() if line and not line.startswith("=")]
    return f"status {status}: {lines[-1] if lines else 'it says nothing'}" if status else ""


def halved(cases: Sequence[Case], fault: Callable[[str], str]) -> Iterator[tuple[Case, str]]:
    """Yield each case with its fault; *fault* runs several cases at once, by their indices."""
    reason = fault(",".join(str(case.index) for case in cases))
    if not reason or len(cases) == 1:
        yield from ((case, reason) for case in cases)
        return
    half = len(cases) // 2
    yield from halved(cases[:half], fault)
    yield from halved(cases[half:], fault)


def run(case: Case, device: Device) -> str:
    """Launch a case twice in a child and return the fault of its outputs.

    Twice, because a split has to reset its counters.
    """
    op = op_named(case.shape.op)
    try:
        operands = op.make_inputs(case.shape, device.torch_device, 0)
    except OperandError as error:
        return f"no operands: {error}"
    launcher = skinny.bind(case.solution, case.shape, device)
    if not isinstance(launcher, Launcher):
        return f"it does not bind: {launcher}"
    given = [getattr(operand, "plain", operand) for operand in operands]
    reference = op.reference(case.shape, operands)
    faults = [output_fault(case.shape, launcher.call(*given), reference) for _ in range(2)]
    torch.cuda.synchronize()
    return next(filter(None, faults), "")


def run_control(device: Device) -> None:
    """Launch the kernel that is wrong on purpose, in a child."""
    code = rtc.loaded(rtc.NVRTC).compile(PLANTED % ENTRY, "control.cpp", [f"--gpu-architecture={device.gfx}"])
    out, loaded = torch.zeros(64, device=device.torch_device), loaded_driver(driver.CUDA)
    function = load_function(loaded, code, ENTRY, device.index)
    pointer = ctypes.c_void_p(out.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    loaded.call("launch", function.address, 1, 1, 1, 64, 1, 1, 0, None, parameters, None, index=device.index)
    torch.cuda.synchronize()


def child(file: Path, selection: str, device: Device) -> int:
    """Run the selected cases of a file, or the control, in a child."""
    if selection == CONTROL:
        run_control(device)
        return 0
    cases: list[Case] = pickle.loads(file.read_bytes())
    for index in map(int, selection.split(",")):
        if fault := run(cases[index], device):
            print(f"{cases[index]}: {fault}")
            return WRONG
    return 0


def judged(under: Child, cases: Sequence[Case]) -> int:
    """Run the control and all cases under a tool, print a line for each; return how many fail."""
    bad = 0
    if under.tool in ("memcheck", "racecheck"):
        reason = under.fault(CONTROL)
        print(f"{under.tool} control: {reason or 'nothing found in a kernel that is wrong on purpose'}", flush=True)
        bad += " found: " not in reason
    for case, fault in halved(cases, under.fault):
        print(f"{under.tool} {case}: {fault or 'ok'}", flush=True)
        bad += bool(fault)
    return bad


def main() -> int:
    """Choose the cases, run them under each tool, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--op", nargs="+", choices=skinny.OPS, default=list(skinny.OPS))
    parser.add_argument("--most", type=int, default=40, help="cases of an op at most (default: 40)")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the operands are tiny, and processes for several ops may run side by side
    present = current_device()
    if arguments.child:
        return child(Path(arguments.child[0]), arguments.child[1], present)
    device = present if present.kind == "nvidia" else H200
    cases = chosen(arguments.op, device, arguments.most)
    if arguments.list:
        print(*cases, sep="\n")
        return 0
    file = sanitizer()
    if file is None:
        parser.error("compute-sanitizer not found on PATH, below CUDA_HOME or /usr/local/cuda; install the CUDA toolkit")
    if present.kind != "nvidia":
        parser.error("NVIDIA GPU not found; --list prints the cases without one")
    with tempfile.TemporaryDirectory(prefix="tunedgemm-sanitize-") as folder:
        listed_in = Path(folder) / "cases"
        listed_in.write_bytes(pickle.dumps(cases))
        bad = sum(judged(Child(file, tool, listed_in), cases) for tool in arguments.tool)
    print(f"{device}: {len(cases)} cases under {', '.join(arguments.tool)}, {bad} at fault")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
