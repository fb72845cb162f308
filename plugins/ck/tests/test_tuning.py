"""Check the way from a shape to a served call with the fake nvcc."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED = Path(__file__).with_name("installed")
SHAPES = "M,N,K\n4,128,256\n64,128,256\n"


def run(folder: Path, *words: str) -> str:
    """Return the output of ``tunedgemm`` with the distribution over the fakes installed."""
    path = os.pathsep.join([str(INSTALLED), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "TUNEDGEMM_HOME": str(folder / "home")}
    done = subprocess.run([sys.executable, "-m", "tunedgemm", *words], capture_output=True, text=True, env=env, cwd=folder, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_shape_is_tuned_and_served(fakes, tmp_path):
    """Each instance is compiled once for both shapes, and the row serves without compiling."""
    (tmp_path / "in.csv").write_text(SHAPES)
    words = ["--libtype", "fakecutlass", "--iters", "7", "--warmup", "1", "--topk", "3", "--device", "cpu"]
    run(tmp_path, "tune", "-i", "in.csv", "-o", "t.csv", *words)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "t.trials.jsonl").read_text().splitlines()]
    trials = [line for line in lines if line["kind"] == "trial"]
    assert [row["libtype"] for row in rows] == ["fakecutlass"] * 2
    assert {trial["status"] for trial in trials} <= {"ok", "screened"}
    sources = [each["folder"] for each in fakes.compilations]
    assert len(sources) == len(set(sources)) <= len({trial["solution"]["kernel_name"] for trial in trials})
    code = (
        "import torch, tunedgemm; x, w = torch.randn(4, 256).bfloat16(), torch.randn(128, 256).bfloat16(); "
        "out = tunedgemm.gemm_a16w16(x, w); torch.testing.assert_close(out.float(), (x @ w.t()).float(), rtol=0.05, atol=0.5)"
    )
    path, table = os.pathsep.join([str(INSTALLED), *sys.path]), str(tmp_path / "t.csv")
    environment = {"PYTHONPATH": path, "AITER_CONFIG_GEMM_BF16": table, "CUDACXX": "/nowhere", "AITER_LOG_TUNED_CONFIG": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"fakecutlass:{rows[0]['kernelName']}" in done.stderr
    assert len(fakes.compilations) == len(sources)


@pytest.mark.nightly
def test_fmoe_is_tuned_and_served(fakes, tmp_path):
    """Each stage is compiled once for all its pairs, and the row serves from the cache."""
    head = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,layout"
    text = "7,64,32,4,2,ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fn,torch.float8_e4m3fn,QuantType.per_Token,1,0,row"
    (tmp_path / "untuned_fmoe.csv").write_text(f"{head}\n{text}\n")
    words = ["--libtype", "fakecutlass", "--iters", "5", "--warmup", "1", "--topk", "2", "--device", "cpu"]
    run(tmp_path, "tune", "--op", "fmoe", "-i", "untuned_fmoe.csv", "-o", "tuned_fmoe.csv", *words)
    with (tmp_path / "tuned_fmoe.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["libtype"] == "fakecutlass"
    assert row["kernelName1"].endswith("_r1")
    assert row["kernelName2"].endswith("_r1")
    lines = [json.loads(line) for line in (tmp_path / "tuned_fmoe.trials.jsonl").read_text().splitlines()]
    solutions = [line["solution"] for line in lines if line["kind"] == "trial"]
    pairs = {solution["kernel_name"] for solution in solutions if solution["libtype"] == "fakecutlass"}
    assert len(fakes.compilations) == sum(len({pair.split("+")[stage] for pair in pairs}) for stage in (0, 1)) < len(pairs)
    code = (
        "import torch, tunedgemm; from tunedgemm.tools.tables import op_named; op = op_named('fmoe'); "
        "shape = op.columns.parse(dict(zip(HEAD.split(','), TEXT.split(',')))); "
        "given = op.make_inputs(shape, torch.device('cpu'), 0); wanted = op.reference(shape, given); "
        "out = tunedgemm.fused_moe(*given[:5], quant_type=2, w1_scale=given[5], w2_scale=given[6]); "
        "assert ((out - wanted).norm() / wanted.norm()).item() < 0.03"
    )
    code = code.replace("HEAD", repr(head)).replace("TEXT", repr(text))
    path, table = os.pathsep.join([str(INSTALLED), *sys.path]), str(tmp_path / "tuned_fmoe.csv")
    environment = {"PYTHONPATH": path, "AITER_CONFIG_FMOE": table, "CUDACXX": "/nowhere", "AITER_LOG_TUNED_CONFIG": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"fakecutlass:{row['kernelName1']}+{row['kernelName2']}" in done.stderr
