"""Orders of x's scales in dispatch: which rows serve an order, and what a refusal leaves."""

from pathlib import Path

import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.scale_order import scale_order, with_order
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, upsert, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.fakes import exact, fake_backend, fake_registry
from tunedgemm.testing.listed import listed
from tunedgemm.workload.capture import Capture

OP = op_named("a8w8_blockscale")
CPU, ALL = device_of(-1), ("m_major", "m_major_padded")


def shape_of(m, order="row"):
    return with_order(OP.columns.parse({"M": str(m), "N": "96", "K": "392"}), order)


def row(kernel, m, order="row", us=5.0):
    return Row(shape_of(m, order), CPU.gfx, CPU.cu_num, "", Solution("fake", kernel), us)


def dispatcher(*rows, orders=ALL, call=exact):
    """Return a dispatcher over one backend that reads these orders, and a table of these rows."""
    names = dict.fromkeys(row.solution.kernel_name for row in rows)
    backend = fake_backend("fake", ops=(OP.name,), solutions=tuple(names) or ("none",), call=call, scale_orders=orders)
    return Dispatcher(OP, fake_registry(backend), settings=Settings(), table=Table(OP, [rows]))


@listed(
    ("m", "order", "kernels"),
    [
        (61, "row", ["row61"]),
        (61, "m_major", ["major61", "padded61", "row61", "major64"]),
        (61, "m_major_padded", ["padded61", "major61", "row61", "major64"]),
        (64, "m_major", ["major64"]),
        (62, "m_major_padded", ["major64"]),
        (62, "m_major", ["major64"]),
        (62, "row", []),
    ],
)
def test_rows_of_an_order(m, order, kernels):
    """A row of the order precedes the other M-major one, then row-major; padded M has one M-major order."""
    table = Table(
        OP, [[row("row61", 61), row("major61", 61, "m_major"), row("padded61", 61, "m_major_padded"), row("major64", 64, "m_major")]]
    )
    assert [match.row.solution.kernel_name for match in table.candidates(shape_of(m, order), CPU)] == kernels


def test_a_padded_row_of_a_multiple_of_four_serves_m_major():
    """Both words are one order where no column is padded, so a row found by either serves."""
    table = Table(OP, [[row("padded64", 64, "m_major_padded")]])
    for m, order in ((64, "m_major"), (61, "m_major_padded"), (61, "m_major")):
        assert [match.row.solution.kernel_name for match in table.candidates(shape_of(m, order), CPU)] == ["padded64"]
    assert not list(table.candidates(shape_of(64), CPU))


@listed(("orders", "served"), [((), "torch"), (("m_major",), "fake"), (ALL, "fake")])
def test_a_row_major_row_serves_if_its_kernel_reads_the_order(orders, served):
    """A backend that does not state an order is passed over with the reason, and the result is right."""
    seen = []
    dispatch = dispatcher(
        row("only", 6), orders=orders, call=lambda solution, shape, *operands: seen.append(shape) or exact(solution, shape, *operands)
    )
    shape = shape_of(6, "m_major")
    operands = OP.make_inputs(shape, torch.device("cpu"), 0)
    explanation = dispatch.explain(shape, CPU)
    assert explanation.libtype == served
    reasons = [reason for _, reason in explanation.passed_over]
    assert reasons == ([] if orders else ["scale_order must be row (got m_major)"])
    out = dispatch.call(*operands)
    assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error
    assert seen == [shape] * bool(orders)
    assert dispatch.explain(shape_of(6), CPU).libtype == "fake"


def test_a_backend_reads_the_orders_that_it_states():
    """Rows of a backend without the padded order serve M-major calls, and no padded ones."""
    dispatch = dispatcher(row("row", 62), row("major", 64, "m_major"), orders=("m_major",))
    explanation = dispatch.explain(shape_of(62, "m_major"), CPU)
    assert explanation.offer.solution.kernel_name == "row"
    explanation = dispatch.explain(shape_of(62, "m_major_padded"), CPU)
    assert explanation.libtype == "torch" and len(explanation.passed_over) == 2


def test_copies_for_alignment_keep_the_order():
    """A kernel that reads an order gets scales from an unaligned address as an aligned copy in that order."""
    seen = []
    dispatch = dispatcher(
        row("only", 6), call=lambda solution, shape, *operands: seen.append(operands[2]) or exact(solution, shape, *operands)
    )
    for order in ALL:
        x, weight, x_scale, w_scale = OP.make_inputs(shape_of(6, order), torch.device("cpu"), 0)
        shifted = torch.zeros(64)[1:].as_strided(x_scale.shape, x_scale.stride(), 1).copy_(x_scale)
        dispatch.call(x, weight, shifted, w_scale)
        assert seen[-1].stride() == x_scale.stride() and seen[-1].data_ptr() % 16 == 0 != shifted.data_ptr() % 16


class TestFiles:
    """The column scale_order in tuned and untuned files."""

    def test_orders_come_back(self, tmp_path):
        """Rows that differ in the order alone are rows of two shapes."""
        path = tmp_path / "table.csv"
        rows = [row("row", 61), row("major", 61, "m_major"), row("padded", 61, "m_major_padded")]
        upsert(path, OP, rows, sort=False)
        upsert(path, OP, rows[1:2])
        found, problems = read_rows(path, OP)
        assert not problems and {(r.solution.kernel_name, scale_order(r.shape)) for r in found} == {
            ("row", "row"), ("major", "m_major"), ("padded", "m_major_padded")
        }  # fmt: skip

    def test_an_unknown_order_names_file_line_and_words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """The line is left out, and so is it where the whole file is scanned."""
        path = tmp_path / "table.csv"
        write_rows(path, OP, [row("row", 61), row("major", 61, "m_major")])
        path.write_text(path.read_text().replace("m_major", "column"))
        message = f"{path}:3: column 'scale_order' must be one of row, m_major, m_major_padded (got 'column')"
        assert [str(problem) for problem in read_rows(path, OP)[1]] == [message]
        monkeypatch.setenv(OP.columns.variable, str(path))
        assert message in map(str, Table.load(OP).problems)

    def test_a_scanned_file_keeps_orders_apart(self, tmp_path, monkeypatch):
        """A look-up in a file finds the rows of its order, as one in rows does."""
        path = tmp_path / "table.csv"
        write_rows(path, OP, [row("padded61", 61, "m_major_padded"), row("padded64", 64, "m_major_padded"), row("row64", 64)])
        monkeypatch.setenv(OP.columns.variable, str(path))
        table = Table.load(OP)
        asked = {(64, "m_major"): ["padded64", "row64"], (61, "m_major_padded"): ["padded61", "padded64", "row64"], (64, "row"): ["row64"]}
        for (m, order), kernels in asked.items():
            assert [match.row.solution.kernel_name for match in table.candidates(shape_of(m, order), CPU)] == kernels

    def test_captured_orders(self, tmp_path):
        """A capture of row-major calls has no column of ours; the first M-major call adds it."""
        path = tmp_path / OP.columns.untuned_file
        capture = Capture(OP, path)
        for m in (4, 8):
            capture.register(shape_of(m))[0] += 1
        capture.flush()
        assert path.read_text() == "M,N,K,count,graph\n4,96,392,1,0\n8,96,392,1,0\n"
        for order in ALL:
            capture.register(shape_of(61, order))[0] += 1
        capture.flush()
        assert [scale_order(line.shape) for line in read_untuned(path, OP)] == ["row", "row", *ALL]
