"""Which files are one side, and which are two to compare."""

from __future__ import annotations

import pytest
from tunedgemm.analysis.results import read_sides
from tunedgemm.errors import UserError

from .conftest import TALL, TRIALS, WIDE, log_lines


def test_two_tables_of_one_op_are_two_sides(table):
    """The first is the earlier one; a file of earlier results may also be named."""
    files = [table("a.csv"), table("b.csv", scale=0.5)]
    for first, second in (read_sides(files), read_sides(files[1:], files[:1])):
        assert [[path for path, kind in side.files if kind == "table"] for side in (first, second)] == [[file] for file in files]


def test_a_table_and_its_profile_are_one_side(table, log):
    """Take files of two kinds for one side, and files of two ops as well."""
    single, _ = read_sides([table(), log(name="other.jsonl")])

    assert single is None


def test_tables_without_a_common_shape_are_one_side(table, log):
    """Take two logs of other shapes for one side, as there is nothing to compare."""
    single, all_of_both = read_sides([log(log_lines({shape: TRIALS[shape]}), f"{shape.m}.jsonl") for shape in (WIDE, TALL)])

    assert single is None and len(all_of_both.entries) == 2


def test_without_files_they_are_the_users_tables(table, tmp_path, monkeypatch):
    """They are those of the user folder; without one the error says how to get one."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no tuned table; run `tunedgemm tune`"):
        read_sides([])
    path = table("bf16_tuned_gemm.csv")
    assert read_sides([])[1].files == [(path, "table")]
