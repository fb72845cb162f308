"""The command line for every op: which op a file belongs to, how a shape is given, and the
errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import tunedgemm.tuner
from tunedgemm.backends.registry import Registry
from tunedgemm.cli import main
from tunedgemm.ops import op_named, ops
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner import Options, tune

QUICK = ["--libtype", "torch", "--iters", "3", "--warmup", "1", "--seconds", "0.1", "--cache", "hot", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_family_of_aiters_is_tuned_by_its_files_name_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER's file name gives the op, tune has its script's flags,
    and explain takes B,M,N,K or a line of the file."""
    shapes, table = tmp_path / "a8w8_untuned_batched_gemm.csv", tmp_path / "out.csv"
    shapes.write_text("B,M,N,K\n2,4,32,64\n")

    code, out, err = run(capsys, "tune", "-i", str(shapes), "-o", str(table), *QUICK, "-k", "--sort", "--blockPerCu", "1", "2")
    assert (code, err) == (0, "") and "1 tuned, 0 failed" in out
    [row] = read_rows(table, op_named("batched_a8w8"))[0]
    assert row.shape["B"] == 2

    monkeypatch.setenv("AITER_CONFIG_A8W8_BATCHED_GEMM", str(table))
    for words in (["2,4,32,64", "--op", "batched_a8w8"], ["4,32,64", "--op", "batched_a8w8", "--set", "B=2"], [f"{shapes}:2"]):
        code, out, _ = run(capsys, "explain", *words)
        assert code == 0 and "out.csv:2" in out
    assert "untuned" in run(capsys, "explain", "2,4,32,64", "--op", "batched_a8w8", "--dtype", "fp8", "--device", "gfx942:304")[1]
    assert "fp16->bf16" in run(capsys, "explain", "2,64,64", "--op", "a16w4_blockscale", "--dtype", "fp16", "--device", "sm_90:132")[1]


def test_explain_takes_the_fp8_of_the_named_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A blank fp8, and the word fp8, mean that of the row's gfx, else of --device."""
    listed, tuned = tmp_path / "a8w8_blockscale_untuned_gemm.csv", tmp_path / "a8w8_blockscale_tuned_gemm.csv"
    listed.write_text("M,N,K\n16,1536,7168\n")
    tuned.write_text(
        "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\ngfx942,304,16,1536,7168,ck,1,0,2,k,1,1,0\n"
    )
    blocks, batched = ["16,1536,7168", "--op", "a8w8_blockscale"], ["2,4,32,64", "--op", "batched_a8w8", "--dtype", "fp8"]
    for device, fp8 in (("gfx942:304", "fp8_e4m3fnuz->"), ("gfx950:256", "fp8_e4m3fn->")):
        for words in (blocks, batched, [f"{listed}:2"]):
            assert fp8 in run(capsys, "explain", *words, "--device", device)[1]
        assert "fp8_e4m3fnuz->" in run(capsys, "explain", f"{tuned}:2", "--device", device)[1]


@pytest.mark.parametrize("name", sorted(ops()))
def test_every_op_is_explained_in_its_tables_texts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, and --set for the other columns, give the shape."""
    op = op_named(name)
    for shape in shapes_of(name)[:4]:
        texts = {column: text for column, text in op.columns.format(shape).items() if text}
        sizes = ",".join(texts.pop(column) for column in op.columns.key[:3])
        words = [word for column, text in texts.items() for word in ("--set", f"{column}={text}")]
        code, out, _ = run(capsys, "explain", sizes, "--op", name, *words, "--device", "sm_90:132")
        assert code == 0 and out.startswith(f"{op.columns.parse(op.columns.format(shape))} on sm_90")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "1,2,3", "--op", "folded"], "unknown op 'folded'; registered: a16w16"),
        (
            ["explain", "1,2,3", "--op", "batched_bf16"],
            "column 'K' must be a whole number (got ''); the sizes were taken for B, M, N; set others",
        ),
        (["explain", "1,2,3,4,5", "--op", "batched_bf16"], "too many sizes for batched_bf16 (got 5); its key is B, M, N, K"),
        (["explain", "1,2,3", "--set", "expert=8"], "a16w16 has no column 'expert'; use M, N, K"),
        (["explain", "1,2,3", "--set", "bias"], "--set: must be COLUMN=TEXT"),
        (["explain", "1,2", "--op", "fmoe"], "expected three sizes or more, token,model_dim,inter_dim, or FILE:LINE"),
        (["explain", "1,2,3,8,2", "--op", "fmoe", "--set", "q_type=QuantType.per_1x31"], "QuantType.per_1x31"),
        (["explain", "{shapes}:9", "--op", "a8w8"], "no shape in line 9; use a line from 2 to 2"),
        (["explain", "{shapes}:2", "--op", "a8w8", "--bias"], "already has every field; leave out --set"),
        (["explain", "absent.csv:2"], "absent.csv"),
        (["tune", "-i", "{shapes}"], "the columns fit a8w8 and a8w8_bpreshuffle; name one with --op"),
        (["tune", "-i", "{shapes}", "--op", "batched_bf16"], "B"),
        (["tune", "--op", "batched_bf16", "--preshuffle"], "batched_bf16 has no op for shuffled weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_with_a_remedy(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the fault and the remedy."""
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("M,N,K,q_dtype_w\n4,32,64,torch.int8\n")

    code, out, err = run(capsys, *(text.format(shapes=shapes) for text in arguments))

    assert (code, out) == (2, "")
    assert err.startswith("tunedgemm: error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("words", "op"),
    [
        ([], "a16w16"),
        (["--op", "a8w8_blockscale", "--preshuffle"], "a8w8_blockscale_bpreshuffle"),
        (["--op", "a8w8_bpreshuffle", "--preshuffle"], "a8w8_bpreshuffle"),
        (["--run_config", "dsv3_a4w4_blockscale_tuned_gemm.csv"], "a4w4_blockscale"),
    ],
    ids=str,
)
def test_the_op_is_given_or_inferred(words: list[str], op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op comes from --op, from AITER's --preshuffle or from the table given to --run_config."""
    asked: list[str] = []
    monkeypatch.chdir(tmp_path)
    head = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
    Path("dsv3_a4w4_blockscale_tuned_gemm.csv").write_text(head)

    def noted(op: str, *_: object, **__: object) -> object:
        asked.append(op)
        raise KeyboardInterrupt

    monkeypatch.setattr(tunedgemm.tuner, "tune", noted)
    monkeypatch.setattr("tunedgemm.analysis.compare.run_config", noted)
    assert main(["tune", *words]) == 130
    assert asked == [op]


def test_the_profile_has_the_columns_of_the_op(tmp_path: Path) -> None:
    """Also for an op whose sizes have other names, such as fused MoE."""
    op, shape = op_named("fmoe"), shapes_of("fmoe")[0]
    options = Options(libtype="torch", iters=3, seconds=0.1, cache="hot", device="cpu", profile=tmp_path / "profile.csv")

    tune("fmoe", [shape], tmp_path / "t.csv", options, registry=Registry())

    head, *lines = (row.split(",") for row in (tmp_path / "profile.csv").read_text().splitlines())
    for line in lines:
        cells = dict(zip(head, line, strict=True))
        assert op.columns.parse({column: cells[column] for column in (*op.columns.key, *op.columns.own) if cells[column]}) == shape
    assert lines


def test_captured_shapes_of_other_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --op and -i one op is tuned;
    other ops with captured shapes are listed with their command."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path))
    (tmp_path / "untuned_fmoe.csv").write_text("token\n")
    (tmp_path / "a8w8_blockscale_untuned_gemm.csv").write_text("M,N,K\n4,32,64\n")
    code, _, err = run(capsys, "tune", *QUICK)
    assert code == 2 and "; shapes of a8w8_blockscale, fmoe are captured: name one with --op" in err

    (tmp_path / "bf16_untuned_gemm.csv").write_text("M,N,K\n4,32,64\n")
    code, out, err = run(capsys, "tune", *QUICK)
    assert (code, err) == (0, "") and "not tuned: captured shapes of a8w8_blockscale, fmoe; name one with --op" in out
    code, out, err = run(capsys, "tune", "--op", "a8w8_blockscale", *QUICK)
    assert (code, err) == (0, "") and "also captured" not in out
