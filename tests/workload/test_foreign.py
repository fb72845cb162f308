"""Foreign: shapes from the files of other tuners, with M and N as ops count them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.foreign import FORMATS
from tunedgemm.table.untuned import read_untuned
from tunedgemm.workload.foreign import _READERS, read_foreign

BENCH = "hipblaslt-bench --api_method c -m 28672 -n 512 -k 4096 --transA {} --batch_count {} --a_type {} --b_type {} --d_type bf16_r {}\n"
CSV = "transA,transB,grouped_gemm,batch_count,m,n,k,a_type,b_type,d_type,scaleA,activation_type,bias_vector,us\n"


def shapes(path: Path) -> dict[Shape, int]:
    return {row.shape: row.count for rows in read_foreign(path)[1].values() for row in rows}


def written(folder: Path, text: str, name: str = "file") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("GemmTunableOp_BFloat16_TN,tn_6144_8_2560_ld_2560_2560_6144,Gemm_Hipblaslt_TN_1,0.1", Shape("a16w16", 8, 6144, 2560)),
        ("GemmTunableOp_Half_TN,tn_6144_8_2560", Shape("a16w16", 8, 6144, 2560, "fp16")),
        ("GemmAndBiasTunableOp_Half_TN,tn_32_8_64_ld_64_64_32", Shape("a16w16", 8, 32, 64, "fp16", epilogue="bias")),
        ("GemmStridedBatchedTunableOp_BFloat16_TN,tn_32_8_64_B_4_ld_64_64_32", Shape("batched_bf16", 8, 32, 64, extra={"B": 4})),
        (
            "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_32_8_64_ld_64_64_32_rw_1_bias_None",
            Shape("a8w8", 8, 32, 64, "fp8_e4m3fn", "bf16", scale="row"),
        ),
        (
            "ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_Half_TN,tn_32_8_64_ld_64_64_32_rw_0_bias_Half",
            Shape("a16w16", 8, 32, 64, "fp8_e4m3fnuz", "fp16", "bias", "fp16", "tensor"),
        ),
    ],
)
def test_lines_of_tunableop(tmp_path: Path, line: str, shape: Shape) -> None:
    """A line of PyTorch's TunableOp is the shape of the call that it was recorded for."""
    assert shapes(written(tmp_path, f"Validator,PT_VERSION,2.9.0\n{line}\n")) == {shape: 1}


def test_what_torch_records_is_what_it_calls(tmp_path: Path) -> None:
    """torch's reader of such lines and ours agree on the sizes of `linear` and on what is transposed."""
    from torch.cuda import tunable

    source = Path(tunable.__file__).read_text()
    assert "[n, m, k] = [int(g) for g in untuned_gemm_temp[1:4]]" in source
    assert 'transB = layout[0] == "T"' in source


def test_logged_commands_are_counted(tmp_path: Path) -> None:
    """Each line of a bench log is one call; other forms are left out with the reason."""
    calls = [("T --transB N", 1, "bf16_r", "bf16_r", "")] * 3
    calls += [("T --transB N", 1, "i8_r", "i8_r", "--scaleA 2"), ("T --transB N", 2, "bf16_r", "bf16_r", "--bias_vector 1")]
    calls += [("N --transB T", 1, "bf16_r", "bf16_r", ""), ("T --transB N", 1, "bf16_r", "bf16_r", "--activation_type gelu")]
    calls += [("T --transB N", 1, "f8_r", "bf8_r", "--scaleA 1"), ("T --transB N", 1, "f8_r", "f8_r", "--scaleA 3")]
    calls += [("T --transB N", 1, "i8_r", "i8_r", "--scaleA 1")]
    calls += [("T --transB N", 1, "bf16_r", "bf16_r", more) for more in ("--beta 1", "--swizzleA 1", "--compute_type xf32_r")]
    calls += [("T --transB N", "abc", "bf16_r", "bf16_r", ""), ("T --transB N", 1, "f8_r", "f8_r", "--scaleA 1 --scaleB 2")]
    path = written(
        tmp_path, "".join(BENCH.format(*call) for call in calls) + "./rocblas-bench -f gemm --transposeA T -m 4\nhipblaslt-bench '"
    )

    assert shapes(path) == {
        Shape("a16w16", 512, 28672, 4096): 3,
        Shape("a8w8", 512, 28672, 4096, "int8", "bf16", scale="row"): 1,
        Shape("batched_bf16", 512, 28672, 4096, epilogue="bias", extra={"B": 2}): 1,
    }
    reasons = " ".join(read_foreign(path)[2])
    for reason in (
        "NT products",
        "an activation",
        "two dtypes",
        "other scales",
        "a16w16: ",
        "added to",
        "swizzled",
        "TF32",
        "whole numbers",
        "kinds of scales",
        "without transB and n and k",
        "cut off",
    ):
        assert reason in reasons


def test_a_tuning_file_of_hipblaslt(tmp_path: Path) -> None:
    """Columns are found by their header, which may be repeated in another order."""
    text = f"Git Version: a6254b89-dirty\n  {CSV}  T,N,0,1,32,8,64,bf16_r,bf16_r,bf16_r,0,none,0,99.8\n"
    text += "n,m,k,transA,transB,a_type,d_type\n16,32,64,T,N,f16_r,f16_r\n"
    assert shapes(written(tmp_path, text)) == {Shape("a16w16", 8, 32, 64): 1, Shape("a16w16", 16, 32, 64, "fp16"): 1}


def test_configurations_of_engines(tmp_path: Path) -> None:
    """fp8 by blocks has its N and K in the file's name; experts lack sizes, and the remedy is the model."""
    text = json.dumps({"triton_version": "3.6.0", "1": {"BLOCK_SIZE_M": 16}, "64": {"BLOCK_SIZE_M": 64}})
    blocks = written(tmp_path, text, "N=1536,K=7168,device_name=NVIDIA_H100,dtype=fp8_w8a8,block_shape=[128,128].json")
    experts = written(tmp_path, text, "E=8,N=1536,device_name=NVIDIA_H100,dtype=fp8_w8a8.json")

    assert [(shape.op, shape.m, shape.n, shape.k) for shape in shapes(blocks)] == [("a8w8_blockscale", m, 1536, 7168) for m in (1, 64)]
    with pytest.raises(UserError, match="experts without their hidden size and top-k; list the model's shapes with --model_dir"):
        read_foreign(experts)


def test_a_cache_of_flashinfer(tmp_path: Path) -> None:
    """Operands of known ops are shapes; others are counted in a note."""
    keys = ["('bf16_gemm', 'R', ((8, 64), (64, 128)))", "('mxfp8_gemm', 'R', ((32, 256), (256, 512), (4096,)))"]
    keys += ["('fp4_gemm', 'R', ((32, 128), (128, 512)))", "('fused_moe', 'R', ((1, 2), (3, 4, 5)))"]
    path = written(tmp_path, json.dumps({"_metadata": {"gpu_name": "B200"}} | dict.fromkeys(keys, 1)))

    found = {(shape.op, shape.m, shape.n, shape.k) for shape in shapes(path)}
    assert found == {("a16w16", 8, 128, 64), ("a8w8_mxfp8", 32, 512, 256)}
    assert [note.count("1 left out: calls of") for note in read_foreign(path)[2]] == [1, 1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("M,N,K\n1,2,3\n", "no file of another tuner whose shapes are known"),
        ('{"1": {"BLOCK_SIZE_M": ', "broken JSON"),
        ("Validator,PT_VERSION,2.9.0\n", "has no shape"),
        ("GemmTunableOp_BFloat16_TN,tn_0_8_2560\n", "'n' must be at least 1|'N'"),
        ("ScaledGemmTunableOp_Float8_e5m2_Float8_e4m3fn_BFloat16_TN,tn_32_8_64_rw_1_bias_None\n", "two dtypes"),
        ("GemmTunableOp_c10::complex<float>_TN,tn_1_8_2560\n", "none of TunableOp's"),
    ],
)
def test_files_without_shapes_are_errors(tmp_path: Path, text: str, fault: str) -> None:
    """A file of no known tuner, a broken one and one without a usable shape say why."""
    with pytest.raises(UserError, match=fault):
        read_foreign(written(tmp_path, text))


def test_each_format_that_promises_shapes_has_them() -> None:
    """Messages name the command for exactly the formats that it reads."""
    assert {form for form in FORMATS if "shapes --from" in form.remedy} == set(_READERS)


def test_the_command_writes_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shapes --from` shows the shapes, writes them as a list, and refuses a model with it."""
    path = written(tmp_path, "GemmTunableOp_BFloat16_TN,tn_64_8_128\nGemmTunableOp_BFloat16_NN,nn_64_8_128\n", "tunableop.csv")
    assert main(["shapes", "--from", str(path), "-o", str(tmp_path / "list.csv")]) == 0
    assert [row.shape for row in read_untuned(tmp_path / "list.csv", op_named("a16w16"))] == [Shape("a16w16", 8, 64, 128)]
    assert "1 left out: NN products" in capsys.readouterr().err
    assert main(["shapes", "--from", str(path)]) == 0
    assert "calls" in capsys.readouterr().out
    assert main(["shapes", "--from", str(path), "--model_dir", "llama"]) == 2
    assert "--from: a file has the shapes of its workload" in capsys.readouterr().err
    assert main(["shapes", "--from", str(path), "--op", "a8w8"]) == 2
    assert "it has products of a16w16" in capsys.readouterr().err
