"""The rows of AITER's own files through the ops' parse and format."""

import csv
from pathlib import Path

import pytest
from tunedgemm.ops import op_named
from tunedgemm.testing.listed import listed

CONFIGS = Path(__file__).parents[2].parent / "shared" / "aiter" / "configs"
OPS = ("a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale")


def rows(name):
    """The key's cells of each row of an op's own files and of its models' files."""
    columns = op_named(name).columns
    stem = columns.tuned_file.removesuffix("_tuned_gemm.csv")
    for path in sorted({*CONFIGS.rglob(f"*{stem}_tuned_gemm*.csv"), *CONFIGS.rglob(f"*{stem}_untuned_gemm*.csv")}):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield path.name, {column: row[column].strip() for column in columns.key}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's files are not here")
@listed(("name", "least"), zip(OPS, (645, 2150, 14277, 2204, 1724), strict=True))
def test_each_row_comes_back_as_it_was(name, least):
    """Every row is a shape of the op whose key is as AITER wrote it, without columns of ours."""
    columns, count = op_named(name).columns, 0
    for file, row in rows(name):
        shape = columns.parse(row)
        assert {column: text for column, text in columns.format(shape).items() if text} == row, file
        assert op_named(name).equivalent_shapes(shape) == (shape,), file
        count += 1
    assert count >= least


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's files are not here")
@listed("name", OPS)
def test_columns_are_those_of_aiters_files(name):
    """The key and the values, in AITER's order, behind gfx and cu_num."""
    columns = op_named(name).columns
    with (CONFIGS / columns.tuned_file).open() as file:
        assert file.readline().strip().split(",") == ["gfx", "cu_num", *columns.key, *columns.values]
    with (CONFIGS / columns.untuned_file).open() as file:
        assert file.readline().strip().split(",") == list(columns.key)
