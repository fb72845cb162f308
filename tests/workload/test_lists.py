"""From what a user types to an op and its shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.table.csvfile import key_shape
from tunedgemm.table.sheet import Record, Sheet
from tunedgemm.table.untuned import Untuned
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.workload.lists import ShapeOverrides, op_of_file, override_shapes, shape_of_line, shape_of_texts


def header(path: Path, *columns: str) -> Path:
    path.write_text(",".join(columns) + "\n")
    return path


def test_columns_and_names_determine_the_op(tmp_path: Path, faults_of):
    """Columns of one op decide, AITER's names decide between several, and M,N,K alone is the default's."""

    def check(name: str, columns: str, op: str):
        assert op_of_file(header(tmp_path / name, columns)).name == op

    assert not faults_of(
        check,
        [
            ("shapes.csv", "M,N,K", "a16w16"),
            ("shapes.csv", "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle", "a16w16"),
            ("shapes.csv", "M,N,K,dtype,count", "a16w16"),
            ("a8w8_blockscale_untuned_gemm.csv", "M,N,K", "a8w8_blockscale"),
            ("a8w8_bpreshuffle_untuned_gemm.csv", "M,N,K,q_dtype_w", "a8w8_bpreshuffle"),
            ("a8w8_tuned_batched_gemm.csv", "gfx,cu_num,B,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio", "batched_a8w8"),
            (
                "shapes.csv",
                "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1",
                "fmoe",
            ),
            ("shapes.csv", "M,N,K,colour", "a16w16"),
        ],
    )


def test_columns_that_fit_several_ops_are_a_question(tmp_path: Path, faults_of):
    """The ops are named, and the flag that chooses one."""

    def check(columns: str, names: tuple[str, ...]):
        with pytest.raises(UserError, match="name one with --op") as caught:
            op_of_file(header(tmp_path / "shapes.csv", columns))
        assert set(names) <= set(str(caught.value).replace(";", "").split())

    assert not faults_of(check, [("M,N,K,q_dtype_w", ("a8w8", "a8w8_bpreshuffle")), ("B,M,N,K", ("batched_bf16", "batched_a8w8"))])


def test_a_file_that_cannot_be_read_is_left_to_its_reader(tmp_path: Path) -> None:
    """A missing or empty file counts as the default op's, and its reader raises the error."""
    (tmp_path / "empty.csv").touch()
    assert op_of_file(tmp_path / "empty.csv").name == op_of_file(tmp_path / "absent.csv").name == "a16w16"


def test_every_shape_can_be_written_in_its_tables_texts(tmp_path: Path, faults_of):
    """Of each op: the texts of its columns, or a line of its file, give the shape back."""

    def check(name: str):
        op = op_named(name)
        shapes = [shape for shape in shapes_of(name) if shape.bias_dtype in ("", shape.dtype)]
        assert shapes
        records = []
        for shape in shapes:
            texts = {column: text for column, text in op.columns.format(shape).items() if text}
            assert shape_of_texts(op, (), texts) == op.columns.parse(texts)
            sizes = [texts.pop(column) for column in op.columns.key[:3]]
            assert shape_of_texts(op, sizes, texts) == op.columns.parse(op.columns.format(shape))
            records.append(Record(cells=op.columns.format(shape)))
        path = tmp_path / "shapes.csv"
        path.write_text(Sheet([*op.columns.key, *op.columns.own], records).text())

        assert [shape_of_line(op, path, line)[0] for line in range(2, len(shapes) + 2)] == [op.columns.parse(r.cells) for r in records]
        with pytest.raises(UserError, match=f"no shape in line {len(shapes) + 2}; use a line from 2 to {len(shapes) + 1}"):
            shape_of_line(op, path, len(shapes) + 2)

    assert not faults_of(check, sorted(ops()))


def test_an_unknown_column_is_named_with_the_known_ones() -> None:
    """A column of another op, and more sizes than its key has."""
    with pytest.raises(UserError, match="a16w16 has no column 'expert'; use M, N, K, bias"):
        shape_of_texts(op_named("a16w16"), ["1", "2", "3"], {"expert": "8"})
    with pytest.raises(UserError, match=r"too many sizes for batched_bf16 \(got 5\); its key is B, M, N, K"):
        shape_of_texts(op_named("batched_bf16"), ["1", "2", "3", "4", "5"], {})


def test_changes_keep_all_else_of_a_shape(faults_of):
    """Overrides of dtype, output and bias keep sizes, layout, scale and experts in every op."""

    def check(name: str):
        op = ops()[name]
        columns = (*op.columns.key, *op.columns.own)
        for shape in shapes_of(name):
            row = Untuned(key_shape(shape), 3, graph=2, layer="some layer")
            assert override_shapes(op, [row], ShapeOverrides()) == (row,)
            if "bias" in columns:
                pair = override_shapes(op, [row], ShapeOverrides(all_bias=True))
                assert {(found.shape.bias, found.calls, found.layer) for found in pair} == {
                    (False, 5, "some layer"),
                    (True, 5, "some layer"),
                }
                assert all(op.columns.format(found.shape) | {"bias": ""} == op.columns.format(shape) | {"bias": ""} for found in pair)
            if "outdtype" in columns:
                (found,) = override_shapes(op, [row], ShapeOverrides(outdtype="f16"))
                assert found.shape.outdtype == "fp16"
                # the dtype of hidden states that come quantised is the output's
                changed = {"outdtype": ""} | ({"dtype": ""} if "quantised" in str(shape) else {})
                assert op.columns.format(found.shape) | changed == op.columns.format(shape) | changed

    assert not faults_of(check, sorted(ops()))
