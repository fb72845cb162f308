"""Every op: its shapes are captured, tuned and stored, its calls use the rows, and docs/ops.md is
current."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, error_ratio, worst_row_error
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.row import key_shape
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.listed import listed
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner import Options, tune

OPTIONS = Options(libtype="torch", iters=3, warmup=1, seconds=0.1, cache="hot", device="cpu")
EVERY = pytest.mark.parametrize("name", sorted(ops()))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of these tests are on the CPU, so that is the default device of questions, too."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))


@pytest.fixture(scope="module")
def matrix(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """benchmarks/ops_matrix.py."""
    return as_module(Path(__file__).parents[2] / "benchmarks" / "ops_matrix.py")


def two_of(op: Op) -> list[Shape]:
    """The two examples that are quickest to compute."""
    shapes = [shape for shape in shapes_of(op.name) if shape.m and shape.bias_dtype in ("", shape.dtype)]
    return sorted(shapes, key=lambda shape: (op.flops(shape), str(shape)))[:2]


def operands_of(op: Op, shape: Shape, seed: int = 3) -> tuple[torch.Tensor | None, ...]:
    return op.make_inputs(shape, torch.device("cpu"), seed)


def called(gemm: TunedGemm, shape: Shape, operands: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    fields = op_named(shape.op).fields(shape)
    return gemm.call(shape.op, *operands, otype=torch_dtype(shape.outdtype), **fields)


def check(op: Op, shape: Shape, operands: tuple[torch.Tensor | None, ...], out: torch.Tensor) -> None:
    """The output is right, and of the form that the op's fake promises."""
    otype, tolerance, wanted = torch_dtype(shape.outdtype), op.tolerance(shape), op.reference(shape, operands)
    assert (out.shape, out.dtype) == (op.fake(*operands, otype=otype).shape, otype)
    assert error_ratio(out, wanted, tolerance) <= MAX_ERROR_RATIO
    assert worst_row_error(out, wanted) <= tolerance.row_error


@EVERY
def test_captured_shapes_are_tuned_and_their_calls_find_the_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After capture and tune, calls use the row of the op's variable;
    AITER_LOG_TUNED_CONFIG names it."""
    op = op_named(name)
    shapes = two_of(op)
    workload = TunedGemm(settings=Settings(capture=True))
    operands = [operands_of(op, shape) for shape in shapes]
    for _ in range(2):
        for shape, given in zip(shapes, operands, strict=True):
            check(op, shape, given, called(workload, shape, given))
    workload.of(name)._capture.flush()
    file = tmp_path / "home" / op.columns.untuned_file
    assert file.read_text().startswith(",".join((*op.columns.key, "count", "graph")))
    captured = read_untuned(file, op)
    assert [(found.shape, found.count, found.graph) for found in captured] == [(key_shape(shape), 2, 0) for shape in shapes]

    table = tmp_path / "table.csv"
    report = tune(name, None, table, OPTIONS, registry=Registry())
    assert not report.failed and len(report.outcomes) == 2
    assert {row.shape for row in read_rows(table, op)[0]} == {key_shape(shape) for shape in shapes}

    monkeypatch.setenv(op.columns.variable, str(table))
    production = TunedGemm(settings=Settings(log_choices=True))
    with caplog.at_level(logging.WARNING, "tunedgemm"):
        for shape, given in zip(shapes, operands, strict=True):
            explanation = production.of(name).explain(shape)
            assert explanation.tuned and "exact" in explanation.offer.why and str(table) in explanation.offer.why
            for _ in range(2):
                check(op, shape, given, called(production, shape, given))
    assert caplog.text.count("table.csv:") == 2


@EVERY
def test_fakes_serve_meta_tensors(name: str) -> None:
    """The output's form is known without data; other tests compare it with outputs."""
    op = op_named(name)
    for shape in two_of(op):
        given, otype = operands_of(op, shape), torch_dtype(shape.outdtype)
        meta = [None if operand is None else torch.empty_like(plain_weight(operand), device="meta") for operand in given]
        found, wanted = op.fake(*meta, otype=otype), op.fake(*given, otype=otype)
        assert (found.shape, found.dtype, found.device.type) == (wanted.shape, otype, "meta")


@listed("name", ["a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "batched_a8w8"])
def test_scales_of_other_rows_change_the_result(name: str) -> None:
    """With the scales of another row, block or batch the result of random operands is out of bounds."""
    op, rolled = op_named(name), 0
    for shape in two_of(op):
        given, bound = operands_of(op, shape), op.tolerance(shape).row_error
        wanted = op.reference(shape, given)
        for place, scale in enumerate(given):
            if scale is None or not op.operands[place].rstrip("?").endswith("_scale"):
                continue
            for dimension in (dimension for dimension, size in enumerate(scale.shape) if size > 1):
                wrong = op.reference(shape, (*given[:place], scale.roll(1, dimension), *given[place + 1 :]))
                assert worst_row_error(wrong, wanted) > bound, (shape, op.operands[place])
                rolled += 1
    assert rolled


@EVERY
def test_the_committed_table_of_ops_is_true(name: str, matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of ops.md that needs a CPU alone passes now, on as many shapes as the file says."""
    committed = matrix.read()
    assert list(committed) == list(ops()), "run python benchmarks/ops_matrix.py"
    now = matrix.on_the_cpu(op_named(name))
    assert {column: committed[name][column] for column in now} == now, "run python benchmarks/ops_matrix.py"
    assert committed[name]["conformance"] == "passed"


def test_the_page_of_ops_is_as_generated(matrix: ModuleType) -> None:
    """The page is as generated, without edits by hand."""
    assert matrix.RESULT.read_text() == matrix.text(matrix.read())
