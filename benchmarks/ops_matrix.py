"""Write the table of what holds for which op, benchmarks/results/ops/README.md: each cell is a
check that has just passed.

    # every check that needs only a CPU, and the conformance suite
    python benchmarks/ops_matrix.py
    # the column of the GPU that is present
    python benchmarks/ops_matrix.py --gpu "H200"

    python benchmarks/ops_matrix.py --fill "real file" a8w8 "812 rows"

A cell that is not filled keeps its text; tests/ops/test_every_op.py compares the file with what
holds now.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from harness import parser_of
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device, device_of
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, error_ratio, same_bits, worst_row_error
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.row import key_shape
from tunedgemm.table.sheet import Record, Sheet
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.verify import rows_of

RESULT = Path(__file__).parent / "results" / "ops" / "README.md"
GPU, REAL = "torch on {}", "real file"
COLUMNS = ("reference", "torch on CPU", "torch on H200", "CSV round trip", REAL, "tune", "dispatch", "conformance")
TITLE = """# What holds for which op

Written by `benchmarks/ops_matrix.py`; a cell says on how much the check passed, and is empty where it has not been run.

- reference: finite, of the output's sizes, and that of the first row alone is the first row of all, within the op's tolerance
- torch on CPU, torch on H200: every solution of the backend `torch` that the device has is within the op's tolerance
- CSV round trip: rows and untuned shapes of a synthetic file are read as they were written, and written again as the same text
- real file: rows of AITER's files of the op that are read, found again by a look-up, and written back unchanged
- tune: shapes tuned over all solutions of the backend `torch`; dispatch: their rows serve a call by the op's name, which is right
- conformance: the suite of `tunedgemm.testing`, for the backend `torch`

"""


def _operands(op: Op, shape: Shape, device: Device) -> tuple[torch.Tensor | None, ...]:
    return op.make_inputs(shape, device.torch_device, 0)


def _right(op: Op, shape: Shape, out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise AssertionError for an output beyond the op's tolerance."""
    tolerance = op.tolerance(shape)
    ratio, row = error_ratio(out, wanted, tolerance), worst_row_error(out, wanted)
    assert ratio <= MAX_ERROR_RATIO and row <= tolerance.row_error, f"{shape}: error ratio {ratio}, worst row {row}"


def reference(op: Op) -> str:
    """Check the reference of every example."""
    shapes = shapes_of(op.name)
    for shape in shapes:
        operands = _operands(op, shape, device_of(-1))
        exact = op.reference(shape, operands)
        fake = op.fake(*operands, otype=torch_dtype(shape.outdtype))
        assert exact.dtype in (torch.float32, torch.float64) and bool(exact.isfinite().all()), shape
        assert exact.numel() == fake.numel() and fake.dtype == torch_dtype(shape.outdtype), shape
        assert op.shape_of(*operands, otype=fake.dtype, **op.fields(shape)) == shape, shape
        if shape.m:
            first = op.reference(attrs.evolve(shape, m=1), op.first_rows(shape, operands, 1))
            error = worst_row_error(rows_of(first, 1), rows_of(exact, shape.m)[:, :1])
            assert error <= op.tolerance(shape).row_error, f"{shape}: its first row alone is off by {error}"
    return f"{len(shapes)} shapes"


def torchs(op: Op, device: Device) -> str:
    """Check every solution of torch that binds, the first of the list included, on every example;
    on a GPU also on large ones.
    """
    backend = Registry().get("torch")
    assert isinstance(backend, Backend), backend
    shapes = shapes_of(op.name, large=device.kind != "cpu")
    for shape in shapes:
        operands = _operands(op, shape, device)
        wanted = op.reference(shape, operands)
        solutions = backend.solutions(shape, device)
        assert solutions, f"{shape}: torch lists nothing"
        bound = [(solution, backend.bind(solution, shape, device)) for solution in solutions]
        launchers = [launcher for _, launcher in bound if isinstance(launcher, Launcher)]  # a processor may lack what a route needs
        assert isinstance(bound[0][1], Launcher), f"{shape}: {bound[0]}"
        for launcher in launchers:
            _right(op, shape, launcher.call(*operands), wanted)
    return f"{len(shapes)} shapes"


def round_trip(op: Op) -> str:
    """Write rows and shapes of the examples to files, and read them back."""
    shapes = list(dict.fromkeys(key_shape(shape) for shape in shapes_of(op.name) if shape.m))
    with tempfile.TemporaryDirectory() as folder:
        tuned, untuned = Path(folder) / "tuned.csv", Path(folder) / "untuned.csv"
        native = Solution("torch", "native")
        rows = [
            Row(shape=shape, gfx="gfx942", cu_num=304, device="", solution=native, us=index + 1.0) for index, shape in enumerate(shapes)
        ]
        write_rows(tuned, op, rows)
        text = tuned.read_text()
        read, problems = read_rows(tuned, op)
        assert not problems, problems
        assert [(row.shape, row.solution, row.us) for row in read] == [(row.shape, row.solution, row.us) for row in rows]
        write_rows(tuned, op, read)
        assert tuned.read_text() == text
        untuned.write_text(Sheet([*op.columns.key, *op.columns.own], [Record(cells=op.columns.format(shape)) for shape in shapes]).text())
        assert [row.shape for row in read_untuned(untuned, op)] == shapes
    return f"{len(rows)} rows"


def _cheapest(op: Op, count: int = 2) -> list[Shape]:
    """Return the examples that take the least work."""
    shapes = [shape for shape in shapes_of(op.name) if shape.m and shape.bias_dtype in ("", shape.dtype)]
    return sorted(shapes, key=lambda shape: (op.flops(shape) + op.bytes_moved(shape), str(shape)))[:count]


def tuned(op: Op, output: Path) -> str:
    """Tune two examples into a table."""
    options = Options(libtype="torch", iters=3, warmup=1, seconds=0.1, cache="hot", device="cpu", resume=False)
    shapes = _cheapest(op)
    report = tune(op.name, shapes, output, options, registry=Registry())
    failed = [f"{outcome.task.shape}: {outcome.reason or outcome.timings}" for outcome in report.failed]
    assert not failed and len(report.outcomes) == len(shapes), failed
    return f"{len(shapes)} shapes"


def dispatched(op: Op, table: Path) -> str:
    """Call the shapes that `tuned` has tuned."""
    gemm = TunedGemm(Registry())
    gemm.load_config(table, op.name)
    shapes = _cheapest(op)
    for shape in shapes:
        device = device_of(-1)
        explanation = gemm.of(op.name).explain(shape, device)
        assert explanation.tuned and f"{table}:" in explanation.offer.why, explanation
        operands = _operands(op, shape, device)
        otype = torch_dtype(shape.outdtype)
        wanted = op.reference(shape, operands)
        outs = [gemm.call(op.name, *operands, otype=otype, **op.fields(shape)) for _ in range(2)]
        for out in outs:
            assert out.shape == op.fake(*operands, otype=otype).shape and out.dtype == otype, shape
            _right(op, shape, out, wanted)
        assert same_bits(*outs) or not explanation.offer.solution.deterministic
    return f"{len(shapes)} shapes"


SUITE = """
from tunedgemm.ops import op_named
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.shapes import shapes_of


class TestTorch(BackendConformance):
    libtype = "torch"
    shapes = shapes_of({name!r})
"""


def conformance(op: Op) -> str:
    """Run the suite in a separate process, on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_torch.py").write_text(SUITE.format(name=op.name))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_torch.py"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    return "passed"


def on_the_cpu(op: Op) -> dict[str, str]:
    """Return the cells of the quick checks that need only a CPU, by column."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "tuned.csv"
        return {
            "reference": reference(op),
            "torch on CPU": torchs(op, device_of(-1)),
            "CSV round trip": round_trip(op),
            "tune": tuned(op, table),
            "dispatch": dispatched(op, table),
        }


def read(path: Path = RESULT) -> dict[str, dict[str, str]]:
    """Return the cells of the committed table: op -> column -> text."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")] if path.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = rows[0][1:] if rows else []
    return {row[0].strip("`"): dict(zip(header, row[1:], strict=True)) for row in rows[2:]}


def text(cells: dict[str, dict[str, str]]) -> str:
    """Return the page."""
    lines = [f"| op | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(cell.get(column, '') for column in COLUMNS)} |" for name, cell in cells.items()]
    return TITLE + "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    """Fill what was asked for, and write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", metavar="NAME", help="fill the column of the GPU that is present, which is called NAME there")
    parser.add_argument("--fill", nargs=3, action="append", default=[], metavar=("COLUMN", "OP", "TEXT"), help="a cell from another run")
    arguments = parser.parse_args(words)
    page = arguments.output / "README.md" if arguments.output else RESULT
    cells = read(page)
    checks: Callable[[Op], dict[str, str]] = lambda op: {**on_the_cpu(op), "conformance": conformance(op)}  # noqa: E731
    if arguments.gpu:
        column = GPU.format(arguments.gpu)
        assert column in COLUMNS and current_device().kind != "cpu", f"{column}: no such column, or no GPU"
        checks = lambda op: {column: torchs(op, current_device())}  # noqa: E731
    elif arguments.fill:
        checks = lambda op: {column: cell for column, name, cell in arguments.fill if name == op.name}  # noqa: E731
    filled = {name: cells.get(name, {}) | checks(op_named(name)) for name in ops()}
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text(filled))
    print(text(filled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
