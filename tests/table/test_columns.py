"""Columns: the op of a file, and its lines of other ops."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import ops
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm.table.untuned import read_untuned, write_untuned


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((*lines, "")))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.csv"


FAMILY = {
    "a8w8": "gfx,cu_num,M,N,K,q_dtype_w,kernelId,splitK,us,kernelName,tflops,bw,errRatio",
    "a8w8_bpreshuffle": "gfx,cu_num,M,N,K,q_dtype_w,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio",
    "a8w8_blockscale": "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio",
    "batched_bf16": "gfx,cu_num,B,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio",
    "a16w16": "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw",
}
ROW = {
    "a8w8": "gfx942,80,1,64,64,torch.int8,1,0,2.0,k,1,1,0.0",
    "a8w8_bpreshuffle": "gfx942,80,1,64,64,torch.int8,asm,1,0,2.0,k,1,1,0.0",
    "a8w8_blockscale": "gfx942,80,1,128,128,ck,1,0,2.0,k,1,1,0.0",
    "batched_bf16": "gfx942,80,4,1,64,64,1,0,2.0,k,1,1,0.0",
    "a16w16": "gfx942,304,16,64,64,False,torch.bfloat16,torch.bfloat16,False,False,asm,3,4,9.5,k,0.0,1,1",
}


def test_the_table_of_another_op(path, faults_of):
    """A table of another op is refused with that op and its variable; its own op reads it."""

    def check(asked, given):
        written(path, FAMILY[given], ROW[given])
        if asked == given:
            rows, problems = read_rows(path, ops()[asked])
            assert (len(rows), problems) == (1, [])
            return
        with pytest.raises(TableError, match=rf"these are the columns of .*{given} \({ops()[given].columns.variable}\)") as caught:
            read_rows(path, ops()[asked])
        assert str(path) in str(caught.value) and asked in str(caught.value)

    assert not faults_of(check, itertools.product(FAMILY, FAMILY))


def test_rows_of_several_ops_in_one_file(path):
    """Where pandas joined two ops' tables, rows of the op load and each other one is named with its op."""
    written(path, FAMILY["a8w8_bpreshuffle"], ROW["a8w8_bpreshuffle"], ROW["a8w8_blockscale"].replace(",ck", ",,ck"))
    rows, [problem] = read_rows(path, ops()["a8w8_blockscale"])
    assert [found.line for found in rows] == [3]
    assert (problem.line, problem.reason) == (
        2, "a row of another op (a8w8 or a8w8_bpreshuffle); a8w8_blockscale has no 'q_dtype_w'"
    )  # fmt: skip


def test_a_list_of_shapes_for_a_table_and_the_reverse(path, faults_of):
    """A list given for a table, or the reverse, is refused with the name of the other file."""

    def check(name):
        op = ops()[name]
        with pytest.raises(TableError, match=f"a list of shapes, not a tuned table.*{op.columns.tuned_file} is a table"):
            read_rows(written(path, ",".join(op.columns.key)), op)
        with pytest.raises(TableError, match=f"a tuned table, not a list of shapes.*{op.columns.key[-1]}"):
            read_untuned(written(path, ",".join(("gfx", "cu_num", *op.columns.key, *op.columns.values))), op)

    assert not faults_of(check, sorted(ops()))


def test_the_op_of_a_file(tmp_path, faults_of):
    """AITER's names tell the op, also with a model's name around them, where its columns leave several."""

    def check(name):
        columns = ops()[name].columns
        tuned = ",".join(("gfx", "cu_num", *columns.key, *columns.values, "device"))
        for file, head in ((columns.tuned_file, tuned), (columns.untuned_file, ",".join(columns.key))):
            for given in (file, f"dsv3_{file}", file.replace(".csv", "_llama70B.csv")):
                assert infer_op([written(tmp_path / given, head)]).name == name

    assert not faults_of(check, sorted(ops()))


def test_a_list_names_the_dtype_as_another_family_does(tmp_path):
    """The name decides for a family without a dtype in its key; its list's q_dtype_w is then the dtype."""
    for name in ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle"):
        path = written(tmp_path / f"{name}_untuned_gemm_model.csv", "M,N,K,q_dtype_w", "16,512,256,torch.float8_e4m3fnuz", "32,512,256,")
        op = infer_op([path])
        assert op.name == name
        assert [line.shape.dtype for line in read_untuned(path, op)] == ["fp8_e4m3fnuz", "fp8_e4m3fn"]


def test_a_list_may_name_devices(tmp_path):
    """A list has AITER's gfx and cu_num before its key; a blank fp8 is that of the line's gfx."""
    lines = ("gfx,cu_num,M,N,K", "gfx942,304,16,512,256", ",80,32,512,256", "gfx950,256,16,512,256", ",,16,512,256")
    path = written(tmp_path / "a8w8_blockscale_untuned_gemm.csv", *lines)
    op = infer_op([path])
    assert op.name == "a8w8_blockscale"
    shapes = read_untuned(path, op)
    assert [line.shape.dtype for line in shapes] == ["fp8_e4m3fnuz", "fp8_e4m3fnuz", "fp8_e4m3fn", "fp8_e4m3fn"]
    write_untuned(path, op, shapes)
    assert read_untuned(path, op) == shapes


def test_an_op_that_is_left_open(tmp_path):
    """Ambiguous columns, also scale_order, and files of several ops ask for --op; M, N, K are a16w16."""
    with pytest.raises(UserError, match="the columns fit a8w8_blockscale and a8w8_blockscale_bpreshuffle; name one with --op"):
        infer_op([written(tmp_path / "mine.csv", FAMILY["a8w8_blockscale"])])
    paths = [written(tmp_path / f"{number}.csv", FAMILY[name]) for number, name in enumerate(("a8w8", "a8w8_bpreshuffle"))]
    with pytest.raises(UserError, match=r"the files are of several ops .*0.csv of a8w8, .*1.csv of a8w8_bpreshuffle"):
        infer_op(paths)
    with pytest.raises(UserError, match=r"the columns fit .*a4w4_nvfp4.* and a8w8_mxfp8; name one with --op") as caught:
        infer_op([written(tmp_path / "mine.csv", "M,N,K,outdtype,bias,scale_order")])
    assert "a16w16" not in str(caught.value)
    for columns in ("M,N,K", "M,N,K,dtype", "M,N,K,bias,dtype,outdtype", "M,N,K,count"):
        assert infer_op([written(tmp_path / "shapes.csv", columns)]).name == infer_op([]).name == "a16w16"
