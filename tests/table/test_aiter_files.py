"""AITER's own tables and lists: every line is read, and each look-up answers as AITER's own rule."""

import csv
import math
from collections import defaultdict
from pathlib import Path

import pytest
from tunedgemm.device import Device
from tunedgemm.dtype import table_text
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import UNUSED
from tunedgemm.table.untuned import read_listed
from tunedgemm.testing.listed import listed

CONFIGS = Path(__file__).parents[3] / "shared" / "aiter" / "configs"
FP8 = {"gfx942": "torch.float8_e4m3fnuz", "gfx950": "torch.float8_e4m3fn", "gfx1250": "torch.float8_e4m3fn"}
#: AITER's rule for files without a gfx
GFX = {"256": "gfx950", "80": "gfx942", "304": "gfx942"}
#: op -> least number of look-ups
OPS = {
    "a16w16": 1700,
    "a8w8": 1700,
    "a8w8_bpreshuffle": 6000,
    "a8w8_blockscale": 42000,
    "a8w8_blockscale_bpreshuffle": 4400,
    "a4w4_blockscale": 4400,
    "batched_a8w8": 70,
    "batched_bf16": 70,
}

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's files are not here")


def files(*, untuned):
    """AITER's tables, or its lists of shapes."""
    return [path for path in sorted(CONFIGS.rglob("*.csv")) if ("untuned" in path.name) is untuned]


def lines(path):
    """The lines of a file by their numbers, as AITER's csv reader has them."""
    with path.open(newline="") as file:
        return {
            number: {column: (text or "").strip() for column, text in row.items()} for number, row in enumerate(csv.DictReader(file), 2)
        }


def test_every_line_is_a_row_but_those_that_aiter_drops(faults_of):
    """No line is refused other than AITER's tagged fallbacks, which it never looks up."""

    def check(path):
        rows, problems = read_rows(path, infer_op([path]))
        unread = {problem.line for problem in problems} - {row.line for row in rows}
        assert unread == {number for number, cells in lines(path).items() if cells.get(UNUSED[0]) == UNUSED[1]}
        assert {row.line for row in rows} | unread == {*lines(path)}

    assert not faults_of(check, [(path,) for path in files(untuned=False)])


def test_every_line_of_a_list_is_a_shape(faults_of):
    """Lists are read without --op, and a blank fp8 is that of the device that reads them."""

    def check(path):
        op = infer_op([path])
        for gfx, fp8 in FP8.items():
            shapes, problems = read_listed(path, op, gfx)
            assert not problems
            assert sum(line.count for line in shapes) == len(lines(path))
            if op.name.startswith("a8w8_blockscale"):
                assert {table_text(line.shape.dtype) for line in shapes} <= {fp8}

    assert not faults_of(check, [(path,) for path in files(untuned=True)])


def call_of(op, cells, m):
    """The shape of a call of M rows on the line's device, whose fp8 the family's operands have there."""
    own = {"dtype": FP8[cells["gfx"]]} if "blockscale" in op.name and "dtype" in op.columns.own else {}
    return op.columns.parse({column: cells[column] for column in op.columns.key if cells.get(column)} | own | {"M": str(m)})


def by_key_of(op, path):
    """AITER's dict of a table: key columns to (time, line) of the rows that may win."""
    by_key = defaultdict(list)
    for number, cells in lines(path).items():
        cells["gfx"] = cells.get("gfx") or GFX[cells["cu_num"]]
        if 0 < float(cells["us"]) < math.inf:
            by_key[tuple(cells[column] for column in ("gfx", "cu_num", *op.columns.key))].append((float(cells["us"]), number))
    return by_key


@listed(("name", "least"), OPS.items())
def test_look_ups_are_aiters(name, least):
    """A call of each row's M, and of its neighbours, gets the line that AITER's dict of keys gives: of
    the exact M, else of the padded ones."""
    op, count = op_named(name), 0
    for path in files(untuned=False):
        if infer_op([path]) is not op:
            continue
        table, by_key = Table.load(op, above=[path]), by_key_of(op, path)
        at = 2 + op.columns.key.index("M")
        for key in by_key:
            cells = dict(zip(("gfx", "cu_num", *op.columns.key), key, strict=True))
            for m in (int(cells["M"]) - 1, int(cells["M"]), int(cells["M"]) + 1):
                keys = [(*key[:at], str(padded), *key[at + 1 :]) for padded in op.padded_m(m, int(cells["N"]))]
                rows = next((by_key[other] for other in keys if other in by_key), [])
                match = next(table.candidates(call_of(op, cells, m), Device(cells["gfx"], int(cells["cu_num"]))), None)
                assert (match.row.us, match.row.line) in rows if match else not rows, (path.name, cells, m)
                assert match is None or match.row.us == min(rows)[0]
                count += 1
    assert count >= least


def test_a_row_of_mi300_answers_no_other_fp8():
    """Blank rows of gfx942 are e4m3fnuz, and no e4m3fn call finds one."""
    count = 0
    for path in files(untuned=False):
        op = infer_op([path])
        if not op.name.startswith("a8w8_blockscale"):
            continue
        rows = [row for row in read_rows(path, op)[0] if row.gfx == "gfx942"]
        table = Table(op, [rows])
        for row in rows:
            assert row.shape.dtype == "fp8_e4m3fnuz"
            other = op.columns.parse({**op.columns.format(row.shape), "dtype": "torch.float8_e4m3fn"})
            assert not [*table.candidates(other, Device("gfx942", row.cu_num))]
        count += len(rows)
    assert count > 800
