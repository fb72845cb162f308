"""The rows of AITER's own files through the ops' parse and format."""

import csv
from pathlib import Path

import pytest
from tunedgemm.ops import op_named
from tunedgemm.table.row import shape_cells
from tunedgemm.testing.listed import listed

CONFIGS = Path(__file__).parents[2].parent / "shared" / "aiter" / "configs"
OPS = ("a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale", "batched_bf16", "batched_a8w8")


def rows(name):
    """The gfx and the key's cells of each row of an op's own files and of its models' files."""
    columns = op_named(name).columns
    stems = [name.removesuffix(".csv") for name in (columns.tuned_file, columns.untuned_file)]
    for path in sorted({path for stem in stems for path in CONFIGS.rglob(f"*{stem}*.csv")}):
        with path.open(newline="") as file:
            for row in csv.DictReader(file, skipinitialspace=True):
                yield path.name, row.get("gfx", "gfx942"), {column: row[column].strip() for column in columns.key}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's files are not here")
@listed(("name", "least"), zip(OPS, (645, 2150, 14277, 2204, 1724, 52, 52), strict=True))
def test_each_row_comes_back_as_it_was(name, least):
    """Every row is a shape of the op whose key is as AITER wrote it, without columns of ours."""
    op, count = op_named(name), 0
    for file, gfx, row in rows(name):
        shape = op.columns.parse({**row, "gfx": gfx})
        assert {column: text for column, text in shape_cells(shape, op, gfx).items() if text} == row, file
        assert op.equivalent_shapes(shape)[0] == shape, file
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
