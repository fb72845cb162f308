"""Coverage of captured calls in a report."""

from __future__ import annotations

import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.analysis.results.captured import covered
from tunedgemm.ops import op_named
from tunedgemm.solution import Solution
from tunedgemm.table.untuned import Untuned, write_untuned

from .conftest import TALL, WIDE


@pytest.fixture
def calls(tmp_path):
    """Write a list of ten calls, five of them recorded into a graph."""
    path = tmp_path / "bf16_untuned_gemm.csv"
    write_untuned(path, op_named("a16w16"), [Untuned(WIDE, 4), Untuned(TALL, 1, 5)])
    return path


def test_rows_serve_calls(table, calls):
    """State the share of calls and time by what serves them."""
    found = covered(read_findings([table(m64=Solution("torch", "native")), calls]))

    assert found["why"] == "" and found["calls"] == 10
    assert [(way["word"], way["shapes"], way["count"], way["calls"]) for way in found["ways"]] == [("exact", 2, 10, 1.0)]


def test_unused_rows_have_reasons(table, calls):
    """Name the rows of backends that cannot be used here."""
    found = covered(read_findings([table(m64=Solution("nobackend", "x")), calls]))

    assert [(each["libtype"], each["calls"]) for each in found["unused"]] == [("nobackend", 4)]
    assert found["with_unused"] == 1.0


def test_graphs_count_their_replays(table, calls):
    """Repeat recorded calls by the number of replays, in coverage and in weights."""
    findings = read_findings([table(m64=Solution("torch", "native")), calls], replays="100")

    assert covered(findings, replays="100")["calls"] == 505
    assert {entry.shape.m: entry.calls for entry in findings.entries.values()} == {64: 4, 4096: 501}


def test_coverage_needs_lists_and_a_table(table, log, calls):
    """Return nothing without a list, and the reason without a table."""
    assert covered(read_findings([table()])) is None
    assert "needs the table" in covered(read_findings([log(name="x.jsonl"), calls]))["why"]
