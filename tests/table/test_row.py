"""Row: lines of other makers' tables are rows like any other."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.dispatch.offer import NATIVE
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.table.lookup import Table

OP = op_named("a16w16")


SHORT = (
    "M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n"
    "532,2048,2048,asm,bf16gemm_fp32bf16_tn_96x64_pf3_splitk,266.78,761.98\n"
    "532,2048,16384,hipblaslt,,540.44,1312.74\n"
    "788,2048,2048,asm,bf16gemm_fp32bf16_tn_128x64_bshuffle,423.0,950.0\n"
)


def test_the_short_form_names_no_device_and_gives_a_rate(tmp_path):
    """The short form gives rows for any device, any bias, bf16 and fp16, with times from the rate."""
    path = tmp_path / "t.csv"
    path.write_text(SHORT)
    rows, problems = read_rows(path, OP)

    assert problems == []
    assert {(row.gfx, row.cu_num, row.device) for row in rows} == {("", 0, "")}
    assert [row.solution.libtype for row in rows] == ["asm"] * 4 + ["hipblaslt"] * 4 + ["asm"] * 4
    assert [row.solution.kernel_name for row in rows[::4]] == [
        "bf16gemm_fp32bf16_tn_96x64_pf3_splitk", "", "bf16gemm_fp32bf16_tn_128x64_bshuffle"
    ]  # fmt: skip
    assert rows[0].us == pytest.approx(2 * 532 * 2048 * 2048 / 266.78 / 1e6)
    every = {(epilogue, dtype) for epilogue in ("none", "bias") for dtype in ("bf16", "fp16")}
    for first in (0, 4, 8):
        assert {(row.shape.epilogue, row.shape.dtype) for row in rows[first : first + 4]} == every
    assert [{row.shape.layout for row in rows[first : first + 4]} for first in (0, 4, 8)] == [{"row"}, {"row"}, {"aiter16x16"}]


class TestFp8:
    """A blank dtype of an fp8 op means the e4m3 of the line's gfx."""

    HEAD = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    BLOCKS = op_named("a8w8_blockscale")

    def rows(self, path, *devices, column="", cells=""):
        """The rows of a file with a line for each GFX,CU."""
        lines = [f"{device},16,1536,7168,ck,1,0,{number}.5,kernel,1.0,1.0,0.0{cells}" for number, device in enumerate(devices, 1)]
        path.write_text("\n".join([self.HEAD + column, *lines, ""]))
        rows, problems = read_rows(path, self.BLOCKS)
        assert problems == []
        return rows

    def test_follows_the_gfx(self, tmp_path):
        """gfx942 has FNUZ, also where an old file gives its 304 compute units alone; others have OCP's."""
        rows = self.rows(tmp_path / "t.csv", "gfx942,304", ",80", "gfx950,256", "gfx1250,96", "sm_90,132")
        assert [row.shape.dtype for row in rows] == ["fp8_e4m3fnuz"] * 2 + ["fp8_e4m3fn"] * 3

    def test_a_line_for_any_device_holds_for_both(self, tmp_path):
        """Without a gfx the line is a row of each kind of fp8, whose rewritten form states it."""
        path = tmp_path / "t.csv"
        rows = self.rows(path, ",0")
        assert [row.shape.dtype for row in rows] == ["fp8_e4m3fn", "fp8_e4m3fnuz"]
        write_rows(path, self.BLOCKS, rows)
        assert read_rows(path, self.BLOCKS) == (rows, [])

    def test_a_stated_dtype_stays(self, tmp_path):
        """A cell has precedence, and the word fp8 in it means that of the gfx."""
        for text, dtype in (("torch.float8_e4m3fn", "fp8_e4m3fn"), ("fp8", "fp8_e4m3fnuz"), ("dtypes.fp8", "fp8_e4m3fnuz")):
            [row] = self.rows(tmp_path / "t.csv", "gfx942,304", column=",dtype", cells=f",{text}")
            assert row.shape.dtype == dtype

    def test_answers_the_fp8_of_its_gfx_alone(self, tmp_path):
        """A look-up on a device finds the blank row by the device's fp8, and by no other."""
        path = tmp_path / "t.csv"
        for row in self.rows(path, "gfx942,304", "gfx950,256"):
            table, device = Table.load(self.BLOCKS, above=[path]), Device(row.gfx, row.cu_num)
            other = {"fp8_e4m3fn": "fp8_e4m3fnuz", "fp8_e4m3fnuz": "fp8_e4m3fn"}[row.shape.dtype]
            assert [match.row for match in table.candidates(row.shape, device)] == [row]
            assert [*table.candidates(attrs.evolve(row.shape, dtype=other), device)] == []

    def test_is_written_blank(self, tmp_path):
        """A row of a gfx's own fp8 leaves the column out; the other kind is stated."""
        path = tmp_path / "t.csv"
        rows = self.rows(path, "gfx942,304", "gfx950,256")
        write_rows(path, self.BLOCKS, rows)
        assert "float8" not in path.read_text() and read_rows(path, self.BLOCKS) == (rows, [])
        swapped = [
            attrs.evolve(row, shape=attrs.evolve(row.shape, dtype=other.shape.dtype)) for row, other in zip(rows, rows[::-1], strict=True)
        ]
        write_rows(path, self.BLOCKS, swapped)
        assert "float8_e4m3fn," in path.read_text() and read_rows(path, self.BLOCKS) == (swapped, [])


def test_a_short_form_may_have_further_columns(tmp_path):
    """A column that the short form lacks and a file of it has narrows its lines."""
    path = tmp_path / "t.csv"
    path.write_text("M,N,K,bias,lib,kernel_name,tflops\n8,64,128,True,asm,a,9\n8,64,128,,asm,a,9\n8,64,128,,asm,a,\n")
    rows, problems = read_rows(path, OP)

    assert [(row.shape.epilogue, row.shape.dtype) for row in rows[:2]] == [("bias", "bf16"), ("bias", "fp16")]
    assert len(rows) == 2 + 4 + 4
    assert [problem.line for problem in problems] == [4]  # without a rate it has no time


def test_gradlibs_rocblas_is_torchs_default(tmp_path, caplog):
    """rocblas rows run torch's own product; one warning says that their solution numbers are ignored."""
    path = tmp_path / "t.csv"
    path.write_text("cu_num,M,N,K,libtype,solidx,soltimes\n304,1,64,64,rocblas,77,2.5\n304,2,64,64,rocblas,78,2.5\n")

    rows, problems = read_rows(path, OP)

    assert problems == []
    assert [(row.solution, row.solution.solidx, row.us) for row in rows] == [(NATIVE, 0, 2.5)] * 2
    assert caplog.text.count("run torch:native") == 1


def test_a_row_of_another_op(tmp_path):
    """A line that fills a key column of another op is not a row; with the column empty it is."""
    path = tmp_path / "t.csv"
    path.write_text("gfx,cu_num,M,N,K,q_dtype_w,libtype,us\ngfx942,304,1,64,64,torch.int8,asm,1\ngfx942,304,1,64,64,,asm,1\n")

    rows, [problem] = read_rows(path, OP)

    assert [row.line for row in rows] == [3]
    assert problem.line == 2 and problem.reason.startswith("a row of another op (a8w8 or ")
    assert problem.reason.endswith("a16w16 has no 'q_dtype_w'")


def test_two_files_in_one(tmp_path):
    """A second header is reported as one and skipped."""
    path = tmp_path / "t.csv"
    line = "gfx942,304,1,64,64,asm,1"
    path.write_text("\n".join(["gfx,cu_num,M,N,K,libtype,us", line, "gfx,cu_num,M,N,K,libtype,us", line.replace(",1,", ",2,"), ""]))

    rows, [problem] = read_rows(path, OP)

    assert [row.shape.m for row in rows] == [1, 2]
    assert problem.line == 3 and "repeats the header" in problem.reason


def test_a_later_file_of_another_op(tmp_path):
    """A header of another op is reported as one, too, although it is longer than the first."""
    path = tmp_path / "t.csv"
    line = "gfx942,304,1,64,64,asm,1"
    path.write_text("\n".join(["gfx,cu_num,M,N,K,libtype,us", line, "cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype", ""]))

    rows, [problem] = read_rows(path, OP)

    assert len(rows) == 1
    assert problem.line == 3 and "a header of another table" in problem.reason
