"""AITER's tuner scripts as its guides print them: the page names our command, the flags stay."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tunedgemm.tuner
from tunedgemm import cli
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import read_rows
from tunedgemm.tuner.trial import Report

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-aiter.md"
GRADLIB = "python3 gradlib/gradlib/gemm_tuner.py --tuned_file aiter/configs/bf16_tuned_gemm.csv --input_file aiter/configs/"
A4W4 = "python3 csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py -o aiter/configs/a4w4_blockscale_tuned_gemm.csv -i aiter/configs/"
#: short lists in the place of AITER's
LISTS = {
    "bf16_untuned_gemm.csv": "M,N,K,bias,dtype,outdtype,scaleAB\n1,64,128,False,torch.bfloat16,torch.bfloat16,False\n",
    "a4w4_blockscale_untuned_gemm.csv": "M,N,K\n16,64,256\n",
    "a8w8_untuned_gemm.csv": "M,N,K,q_dtype_w\n1,64,128,torch.int8\n",
    "untuned_fmoe.csv": (
        "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1\n"
        "4,64,128,4,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0\n"
    ),
}


def command_of(script: str) -> list[str]:
    """Return the words of our command for a script, as the page has them."""
    (row,) = (line.split("|") for line in PAGE.read_text().splitlines() if f"`{script}`" in line.split(" | ")[0])
    return shlex.split(re.findall(r"`tunedgemm ([^`]*)`", row[2])[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with AITER's lists, each short, which is the current one."""
    (tmp_path / "aiter" / "configs").mkdir(parents=True)
    for name, text in LISTS.items():
        (tmp_path / "aiter" / "configs" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[[str], int]:
    """Run a line of a guide with our command in the script's place."""

    def run(line: str) -> int:
        words = shlex.split(line)
        start = words.index("python3") + 1
        return cli.main([*command_of(words[start]), *words[start + 1 :]])

    return run


def test_gradlibs_line(run, folder: Path) -> None:
    """The captured file is tuned into the table, whose columns begin with AITER's."""
    assert run(f"{GRADLIB}bf16_untuned_gemm.csv") == 0

    table = folder / "aiter" / "configs" / "bf16_tuned_gemm.csv"
    assert table.read_text().startswith("gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName")
    assert len(read_rows(table, op_named("a16w16"))[0]) == 1
    # Retune all shapes of the table: one file for both.
    assert run(f"{GRADLIB}bf16_tuned_gemm.csv --all --iters 5") == 0


def test_the_a4w4_tuners_flags(run, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every flag that its guide documents is taken at once; more GPUs than there are is a warning."""
    flags = "--profile_file aiter/configs/profile_a4w4_blockscale_all.csv --sort --errRatio 0.01 --mp 4 --batch 50 --all --warmup 10"

    assert run(f"CLANG=/opt {A4W4}a4w4_blockscale_untuned_gemm.csv {flags} --iters 200 --timeout 300 -v") == 0

    assert len(read_rows(folder / "aiter" / "configs" / "a4w4_blockscale_tuned_gemm.csv", op_named("a4w4_blockscale"))[0]) == 1
    assert (folder / "aiter" / "configs" / "profile_a4w4_blockscale_all.csv").exists()
    assert "--mp 4: this machine has only" in caplog.text


@pytest.mark.parametrize(("line", "op", "changed"), [
    (f"{GRADLIB}bf16_untuned_gemm.csv --mp 1 --errRatio 0.10 --libtype all --batch 100 --profile_file path.csv --verbose", "a16w16",
     {"mp": 1, "errRatio": 0.1, "profile": Path("path.csv")}),
    (f"{GRADLIB}bf16_untuned_gemm.csv --sort", "a16w16", {}),
    ("python3 csrc/gemm_a16w16/gemm_a16w16_tune.py -i aiter/configs/bf16_untuned_gemm.csv -o t.csv --with-hipblaslt", "a16w16", {}),
    ("python3 csrc/ck_gemm_a8w8/gemm_a8w8_tune.py -i aiter/configs/a8w8_untuned_gemm.csv -o a.csv:b.csv -k", "a8w8", {}),
    ("python3 csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_tune.py -i aiter/configs/a4w4_blockscale_untuned_gemm.csv -o t.csv "
     "--libtype both --preshuffle --blockPerCu 1 2", "a8w8_blockscale_bpreshuffle", {"libtype": "both"}),
    ("python3 csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py -i aiter/configs/untuned_fmoe.csv -o t.csv --last --mxfp4-flydsl",
     "fmoe", {"all": True}),
])  # fmt: skip
def test_other_lines_reach_the_tuner(line: str, op: str, changed: dict, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op and the options are those that the script means."""
    asked = {}

    def noted(op, shapes, output, options, *, progress):
        asked.update(op=op, options=options)
        return Report((), Path("t.csv"), ())

    monkeypatch.setattr(tunedgemm.tuner, "tune", noted)

    assert run(line) == 0
    assert asked["op"] == op
    assert asked["options"] == tunedgemm.tuner.Options(**changed)


def test_a_models_line(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of the model's rank are tuned for each of the batch sizes."""
    pytest.importorskip("transformers")
    (folder / "model").mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 320}
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "dtype": "bfloat16", **sizes}))
    asked = []

    def noted(op, shapes, output, options, *, progress):
        asked.extend(shape.m for shape in shapes)
        return Report((), Path("t.csv"), ())

    monkeypatch.setattr(tunedgemm.tuner, "tune", noted)

    assert run("python3 gradlib/gradlib/gemm_tuner.py --model_dir model --tp 8 --nsets 1,512,1024,2048,4096") == 0
    assert set(asked) == {1, 512, 1024, 2048, 4096}
