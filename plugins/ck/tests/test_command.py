"""Check that ``tunedgemm ck`` compiles exactly what tables name, without a GPU."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.plugin import UserError
from tunedgemm_ck import Templates, command, toolchain

HEAD = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
PLUGIN = Path(__file__).parents[1]


@pytest.fixture
def backends(stand_in, monkeypatch):
    """Register stand-ins under the names of two backends."""
    made = {
        "cutlass": Templates(stand_in.family("cutlass", "nvidia"), toolchain.cuda),
        "ck": Templates(stand_in.family("ck", "amd"), toolchain.hip),
    }
    monkeypatch.setattr(command, "_LIBRARIES", made)
    return made


def table(path: Path, *rows: str) -> str:
    """Write a table of a16w16 with rows of gfx,M,dtype,libtype,name."""
    lines = [HEAD]
    for row in rows:
        gfx, m, dtype, libtype, name = row.split(",")
        lines.append(
            f"{gfx},{132 if gfx else 0},{m},256,512,False,torch.{dtype},torch.{dtype},False,False,{libtype},0,1,5.0,{name},0.0,1,1"
        )
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def main(words: list[str]) -> int:
    """Return the exit code of ``tunedgemm ck``; a user's error must be one line."""
    parser = argparse.ArgumentParser()
    command.command.add_arguments(parser)
    try:
        return command.command.run(parser.parse_args(words[1:]))
    except UserError as error:
        assert "\n" not in str(error)
        sys.stderr.write(f"{error}\n")
        return 2


def test_kernels_of_a_table_are_built_once(fakes, backends, tmp_path, capsys):
    """Rows of both toolchains are built once per instance and class; others are skipped."""
    name = table(
        tmp_path / "bf16_tuned_gemm.csv",
        "sm_90,1,bfloat16,cutlass,tile64",
        "sm_90,16,bfloat16,cutlass,tile64",
        "sm_90,1,float16,cutlass,tile64",
        "gfx942,1,bfloat16,ck,tile128",
        "sm_90,32,bfloat16,torch,native",
    )
    assert main(["ck", "prebuild", name]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "3 instances: 0 stored, 3 built, 0 failed"
    assert "[3/3] " in out
    assert sorted(each["name"] for each in fakes.compilations) == ["clang++", "nvcc", "nvcc"]
    assert main(["ck", "prebuild", name]) == 0
    assert capsys.readouterr().out == "3 instances: 3 stored, 0 built, 0 failed\n"
    assert len(fakes.compilations) == 3


#: A table of fmoe, whose rows name two stages.
ROUTED_HEAD = (
    "gfx,cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,"
    "ksplit,kernelName1,kernelName2,us,libtype,layout"
)
ROUTED_KEY = "256,128,8,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0,1"


def test_stages_of_fmoe_are_built_once_each(fakes, backends, tmp_path, capsys):
    """Stages shared by rows are built once, and a row of one stage is refused with its line."""
    rows = [f"sm_90,132,{m},{ROUTED_KEY},{names},5.0,cutlass,row" for m, names in ((1, "tile64,tile64"), (16, "tile64,tile128"))]
    path = tmp_path / "tuned_fmoe.csv"
    path.write_text("\n".join([ROUTED_HEAD, *rows]) + "\n")
    assert main(["ck", "prebuild", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 instances: 0 stored, 3 built, 0 failed"
    assert len(fakes.compilations) == 3
    path.write_text("\n".join([ROUTED_HEAD, f"sm_90,132,4,{ROUTED_KEY},tile64,,5.0,cutlass,row"]) + "\n")
    assert main(["ck", "prebuild", str(path)]) == 1
    assert "tuned_fmoe.csv:2: standin fmoe: kernel 'tile64' must be the names of two stages" in capsys.readouterr().out


def test_the_source_of_a_pair_is_that_of_both_stages(backends, capsys):
    """``source`` prints both stages of a pair, each with the problem of the columns."""
    columns = ("act_type=Gelu", "dtype=bf16", "q_dtype_a=int8", "q_dtype_w=int8", "q_type=per_Token", "use_g1u1=0", "doweight_stage1=1")
    words = ["ck", "source", "tile64+tile128", "--libtype", "cutlass", "--op", "fmoe", "--gfx", "sm_90"]
    assert main([*words, *(word for column in (*columns, "layout=row") for word in ("--set", column))]) == 0
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("// tunedgemm {")]
    assert ['"instance": "tile64"' in headers[0], '"stage": 1, "act": "gelu"' in headers[0]] == [True, True]
    assert ['"instance": "tile128"' in headers[1], '"stage": 2, "act": ""' in headers[1], len(headers)] == [True, True, 2]


@pytest.mark.parametrize("how", ["--rebuild", "AITER_REBUILD"])
def test_rebuild_compiles_existing_objects(fakes, backends, tmp_path, monkeypatch, how):
    """--rebuild and AITER's variable recompile stored objects."""
    name = table(tmp_path / "t.csv", "sm_90,1,bfloat16,cutlass,tile64")
    main(["ck", "prebuild", name])
    if how == "AITER_REBUILD":
        monkeypatch.setenv(how, "1")
    main(["ck", "prebuild", name, *([how] if how.startswith("-") else [])])
    assert len(fakes.compilations) == 2


def test_one_architecture_alone(fakes, backends, tmp_path):
    """--gfx selects rows, and applies to rows that state none."""
    name = table(tmp_path / "t.csv", "sm_90,1,bfloat16,cutlass,tile64", "gfx942,1,bfloat16,ck,tile64", ",1,bfloat16,cutlass,tile128")
    assert main(["ck", "prebuild", name, "--gfx", "sm_90"]) == 0
    assert [each["name"] for each in fakes.compilations] == ["nvcc", "nvcc"]


def test_rows_that_cannot_be_built_are_reported(fakes, backends, tmp_path, monkeypatch, capsys):
    """Rows that cannot be built are listed with reasons, the others are built, and the exit code is
    1.
    """
    monkeypatch.setenv("HIPCXX", str(tmp_path / "none"))
    name = table(
        tmp_path / "t.csv",
        "sm_90,1,bfloat16,cutlass,tile64",
        "sm_90,2,bfloat16,cutlass,tile65",
        ",3,bfloat16,cutlass,tile64",
        "gfx942,1,bfloat16,ck,tile64",
    )
    assert main(["ck", "prebuild", name]) == 1
    out = capsys.readouterr().out
    assert "t.csv:3: no instance 'tile65' of a16w16" in out
    assert "t.csv:4: the row has no gfx; pass --gfx" in out
    assert "hipcc not found" in out
    assert out.splitlines()[-1] == "2 instances: 0 stored, 1 built, 3 failed"


def test_without_tables_those_in_effect_are_built(fakes, backends, tmp_path, monkeypatch, capsys):
    """Without tables the ones that dispatch reads are built."""
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", table(tmp_path / "t.csv", "sm_90,1,bfloat16,cutlass,tile64"))
    assert main(["ck", "prebuild"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 instances: 0 stored, 1 built, 0 failed"


def test_compilers_run_side_by_side(fakes, backends, tmp_path, monkeypatch):
    """With --jobs 2 two compilers run at the same time."""
    monkeypatch.setenv("FAKE_CK_DOES", "wait")
    monkeypatch.setenv("FAKE_CK_WAITS", str(fakes.log.with_suffix(".2")))
    name = table(tmp_path / "t.csv", "sm_90,1,bfloat16,cutlass,tile64", "sm_90,1,bfloat16,cutlass,tile128")
    code = "import sys, time; from pathlib import Path\nlog = Path(sys.argv[1])\n" + (
        "while not (log.exists() and len(log.read_text().splitlines()) > 1): time.sleep(0.05)\nlog.with_suffix('.2').touch()\n"
    )
    both = subprocess.Popen([sys.executable, "-c", code, str(fakes.log)])
    try:
        assert main(["ck", "prebuild", name, "--jobs", "2"]) == 0
        assert both.wait(timeout=60) == 0
    finally:
        both.kill()


def test_untuned_answers_are_built(fakes, capsys):
    """What untuned calls of MI300X take is compiled, each instance once."""
    wanted = {row.solution.kernel_name for row in command._untuned_rows("gfx942:304")}
    assert main(["ck", "prebuild", "--untuned", "gfx942:304"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(wanted)} instances: 0 stored, {len(wanted)} built, 0 failed"
    assert 3 <= len(wanted) <= 16 and all(name.startswith("a8w8_blockscale") for name in wanted)
    assert main(["ck", "prebuild", "nowhere.csv", "--untuned", "gfx942:304"]) == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prebuild", "--untuned", "MI300X"], "such as gfx942:304 (got MI300X)"),
        (["prebuild", "nowhere.csv"], "nowhere.csv"),
        (["prebuild", "--jobs", "-1"], "--jobs must be at least 0"),
        (
            ["source", "tile64", "--libtype", "other", "--op", "a16w16", "--gfx", "sm_90"],
            "--libtype must be one of ck, cutlass (got other)",
        ),
        (["source", "tile64", "--libtype", "ck", "--op", "other", "--gfx", "sm_90"], "--op must be one of a16w16"),
        (["source", "tile65", "--libtype", "ck", "--op", "a16w16", "--gfx", "sm_90"], "no instance 'tile65'"),
        (["source", "tile64", "--libtype", "ck", "--op", "a16w16", "--gfx", "sm_90", "--set", "dtype"], "--set: must be COLUMN=TEXT"),
    ],
)
def test_user_errors_are_one_line(backends, capsys, words, says):
    """A user's error is one line that lists the choices."""
    assert main(["ck", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_file_with_faults_is_refused(backends, tmp_path, capsys):
    """A table with an invalid line is refused."""
    name = table(tmp_path / "t.csv", "sm_90,one,bfloat16,cutlass,tile64")
    assert main(["ck", "prebuild", name]) == 2
    assert "tunedgemm table check" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["a16w16", "batched_bf16"])
def test_source_prints_the_compiled_source(backends, capsys, op):
    """``source`` prints the whole text for the given columns."""
    assert main(["ck", "source", "tile64", "--libtype", "ck", "--op", op, "--gfx", "gfx942", "--set", "dtype=fp16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f'// tunedgemm {{"instance": "tile64", "op": "{op}", "gfx": "gfx942", "dtype": "fp16"')
    assert "struct TunedGemmCall" in out


@pytest.mark.slow
def test_pip_install_prebuilds_on_request(fakes, tmp_path, monkeypatch):
    """PREBUILD_KERNELS=1 builds what the tables in effect name during installation."""
    monkeypatch.setenv("PREBUILD_KERNELS", "1")
    monkeypatch.setenv(
        "AITER_CONFIG_GEMM_BF16", table(tmp_path / "t.csv", "sm_90,1,bfloat16,cutlass,128x256x64_2x1_cooperative_streamk_r1")
    )
    folder = shutil.copytree(PLUGIN, tmp_path / "plugin", ignore=shutil.ignore_patterns("build", "*.egg-info", "tests"))
    words = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheels"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert done.returncode == 0, done.stderr
    assert [each["name"] for each in fakes.compilations] == ["nvcc"], done.stdout + done.stderr
