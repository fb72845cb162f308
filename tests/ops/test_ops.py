"""ops: found by listing the folder and by entry point, each complete."""

import logging

import attrs
import pytest
import torch
from tunedgemm import ops as ops_module
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import UnknownOpError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import error_ratio, same_bits, worst_row_error
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.op import Tolerance
from tunedgemm.testing.listed import listed
from tunedgemm.testing.shapes import shapes_of


def bare(operand):
    """An operand without the type of its layout."""
    return None if operand is None else plain_weight(operand)


@listed("name", sorted(ops()))
def test_every_op_has_shapes_to_be_tested_with(name):
    """The conformance suite has something to ask about each op."""
    assert len(shapes_of(name)) >= 3
    assert op_named(name) is ops()[name]


def check_formats(op, shape, operands, reference):
    """Operands, shape, reference, fake and table columns of one op agree."""
    otype, fields = torch_dtype(shape.outdtype), op.fields(shape)
    assert op.shape_of(*operands, otype=otype, **fields) == shape
    assert len([name for name in op.operands if not name.endswith("?")]) <= len(operands) <= len(op.operands)
    assert reference.dtype in (torch.float32, torch.float64)
    fake = op.fake(*operands, otype=otype)
    assert fake.dtype == otype
    assert fake.numel() == reference.numel()
    assert fake.shape[-1] == reference.shape[-1] == shape.n
    row = op.columns.format(shape)
    assert set(row) == {*op.columns.key, *op.columns.own}
    assert all(isinstance(text, str) for text in row.values())


def check_equivalent_shapes(op, shape, operands, reference):
    """Check that a shape's own rows come first, without repeats,
    and that each can be in a table."""
    equivalent = op.equivalent_shapes(shape)
    assert equivalent[0] == shape
    assert len(set(equivalent)) == len(equivalent)
    for other in equivalent:
        present = {column: text for column, text in op.columns.format(other).items() if text}
        assert attrs.evolve(op.columns.parse(present), bias_dtype=other.bias_dtype) == op.as_asked(other)


def check_first_rows(op, shape, operands, reference):
    """The operands of the first rows form the same shape but for M, and give the first rows of the result."""
    if shape.m < 2:
        return
    few = attrs.evolve(shape, m=shape.m - 1)
    some = op.first_rows(shape, operands, few.m)
    assert op.shape_of(*some, otype=torch_dtype(shape.outdtype), **op.fields(shape)) == few
    if dict(shape.extra).get("q_type") != "per_Tensor":  # there one scale spans all rows
        assert torch.allclose(op.reference(few, some), reference[..., : few.m, :])


def check_seeds(op, shape, operands, reference):
    """The same seed gives the same operands, another seed others."""
    same, other = (op.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 4))
    assert all(same_bits(bare(a), bare(b)) for a, b in zip(operands, same, strict=True))
    assert shape.m == 0 or not same_bits(operands[0], other[0])


def check_tolerance(op, shape, operands, reference):
    """The reference rounded to the output dtype passes; with the sign of one row changed it does not."""
    tolerance = op.tolerance(shape)
    assert isinstance(tolerance, Tolerance)
    rounded = reference.to(torch_dtype(shape.outdtype))
    assert error_ratio(rounded, reference, tolerance) == 0.0
    assert worst_row_error(rounded, reference) <= tolerance.row_error / 2
    if shape.m:
        rounded[-1] *= -1
        assert worst_row_error(rounded, reference) > tolerance.row_error


def check_work(op, shape, operands, reference):
    """Check that operations and bytes are integers and cover at least the weights,
    of hit experts only."""
    extra = dict(shape.extra)
    once = 2 * shape.m * shape.n * shape.k * extra.get("B", 1)
    assert op.flops(shape) == once if "expert" not in extra else op.flops(shape) >= 2 * extra["topk"] * once
    held = [operand for name, operand in zip(op.operands, operands, strict=False) if name in ("weight", "w1", "w2")]
    hit = min(1, shape.m * extra["topk"] / extra["expert"]) if "expert" in extra else 1
    assert held
    assert op.bytes_moved(shape) >= hit * sum(operand.numel() * operand.itemsize for operand in held)


CHECKS = (check_formats, check_equivalent_shapes, check_first_rows, check_seeds, check_tolerance, check_work)


@pytest.mark.parametrize("name", sorted(ops()))
def test_every_op_is_consistent(name):
    """All that an op states agrees for each of its shapes."""
    op, faults = ops()[name], []
    for shape in shapes_of(name):
        operands = op.make_inputs(shape, torch.device("cpu"), 0)
        reference = op.reference(shape, operands)
        for check in CHECKS:
            try:
                check(op, shape, operands, reference)
            except Exception as error:
                faults.append(f"{shape}: {check.__doc__} {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


def test_an_unknown_op_lists_the_known():
    """The error has the requested name and the known ones."""
    with pytest.raises(UnknownOpError, match=r"unknown op 'a17w17'; registered: .*a16w16"):
        op_named("a17w17")


class Entry:
    """An entry point that loads what it was made with."""

    def __init__(self, name, value):
        self.name, self.value, self._loads = name, f"module:{name}", value

    def load(self):
        if isinstance(self._loads, Exception):
            raise self._loads
        return self._loads


def test_broken_ops_of_others_are_skipped_with_a_warning(monkeypatch, caplog):
    """An op that fails to load, is not an Op or takes our name is logged;
    the others are registered."""
    entries = [Entry("gone", ImportError("no module")), Entry("seven", 7), Entry("again", ops()["a16w16"])]
    monkeypatch.setattr(ops_module, "entry_points", lambda group: entries)
    with caplog.at_level(logging.WARNING, logger="tunedgemm"):
        found = ops_module.ops.__wrapped__()
    assert set(found) >= {"a16w16"}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "op 'again' from module:again skipped: its name is taken",
        "op 'gone' from module:gone cannot be loaded: ImportError: no module",
        "op 'seven' from module:seven skipped: not an Op",
    ]


def test_an_op_that_builds_on_ours(importable, caplog):
    """A module that requests our ops during its import gets
    them and is registered without a warning."""
    (importable / "built_op.py").write_text(
        "import attrs\nfrom tunedgemm.ops import ops\nop = attrs.evolve(ops()['a16w16'], name='built', functions=(), entry=None)\n"
    )
    info = importable / "built-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: built\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.ops]\nbuilt = built_op:op\n")
    ops.cache_clear()
    try:
        assert "built" in ops() and op_named("built").columns.key is op_named("a16w16").columns.key
        assert not caplog.records
    finally:
        ops.cache_clear()
