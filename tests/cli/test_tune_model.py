"""``tunedgemm tune`` with the shapes of a model, AITER's ``GTUNE`` variables and dtype
overrides."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tunedgemm.device
import tunedgemm.tuner
from tunedgemm.cli import main
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import home_folder, untuned_path
from tunedgemm.table.untuned import Untuned, read_untuned, write_untuned
from tunedgemm.tuner.trial import Place, Planned, Report

A16W16, FMOE = op_named("a16w16"), op_named("fmoe")
PLACE = Place(Device("sm_90", 132, "nvidia-h200", 0))
#: the products of the dense model at TP 1 and how many a pass runs
PRODUCTS = {(256, 128): 3, (128, 128): 3, (512, 128): 4, (128, 256): 3}


def calls_of(run: dict[str, Any]) -> dict[Shape, int]:
    """Return the requested shapes of a file, with their calls."""
    return {row.shape: row.calls for row in run["shapes"].shapes}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What a tuner in the place of the real one is asked for, run by run."""
    found: list[dict[str, Any]] = []

    def tune(op, shapes, output, options, *, progress):
        found.append({"op": op, "shapes": shapes, "output": output, "options": options})
        progress(None, Planned((), (), (PLACE,), output or tmp_path / f"{op}.csv"))
        return Report((PLACE,), output or tmp_path / f"{op}.csv", ())

    monkeypatch.setattr(tunedgemm.tuner, "tune", tune)
    return found


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A file with a shape that is called ten times."""
    path = tmp_path / "list.csv"
    write_untuned(path, A16W16, [Untuned(Shape("a16w16", 2, 64, 128), 7, graph=3)])
    return path


@pytest.fixture
def names(dense: str, experts: str, listed: Path, tmp_path: Path) -> dict[str, Any]:
    """What mistaken words are filled in with."""
    return {"dense": dense, "experts": experts, "listed": listed, "tmp": tmp_path}


@pytest.mark.nightly
def test_every_op_of_a_model_gets_its_table(experts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The ops of a model are announced and tuned in turn;
    a second run skips finished ones, and --op tunes one."""
    words = [
        "tune",
        "--model_dir",
        experts,
        "--nsets",
        "1",
        "--layers",
        "*.mlp.*",
        "--libtype",
        "torch",
        "--iters",
        "3",
        "--seconds",
        "0.1",
    ]

    assert main(words) == 0

    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"MixtralForCausalLM of {experts} at TP 1, M = 1; shapes: 1 of a16w16, 1 of fmoe"
    dense_rows, expert_rows = (read_rows(home_folder() / op.columns.tuned_file, op)[0] for op in (A16W16, FMOE))
    assert sorted((row.shape.n, row.shape.k) for row in dense_rows) == [(8, 128)]
    assert [(row.shape.n, row.shape.k, row.shape["expert"]) for row in expert_rows] == [(128, 256, 8)]

    assert main([*words, "--op", "fmoe"]) == 0
    assert "0 tuned, 0 failed, 1 skipped" in capsys.readouterr().out


@pytest.mark.nightly
def test_run_config_takes_a_model(dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run_config and --compare take the shapes of a model as they take a file's."""
    words = ["tune", "--model_dir", dense, "--nsets", "2", "--layers", "lm_head", "--libtype", "torch", "--iters", "3"]

    assert main([*words, "--run_config"]) == 0
    assert "M=2 N=512 K=128" in capsys.readouterr().out
    assert main([*words, "--compare", "-o", str(tmp_path / "t.csv")]) == 0
    assert "Skipped: 1" in capsys.readouterr().out and not (tmp_path / "t.csv").exists()


def test_a_model_is_tuned_with_its_counts(asked, dense: str, tmp_path: Path) -> None:
    """Shapes carry their layer counts, so that --budget favours frequent ones;
    -o names a single op's table."""
    code = main(["tune", "--model_dir", dense, "--tp", "1", "--nsets", "1,2", "-o", str(tmp_path / "t.csv"), "--budget", "60"])

    assert code == 0 and [run["op"] for run in asked] == ["a16w16"]
    assert {(shape.m, shape.n, shape.k): count for shape, count in asked[0]["shapes"].items()} == {
        (m, *product): count for product, count in PRODUCTS.items() for m in (1, 2)
    }
    assert (asked[0]["output"], asked[0]["options"].budget) == (tmp_path / "t.csv", 60.0)


def test_an_engines_order_of_scales_is_tuned(
    asked, write_model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--nsets vllm tunes the keys of vLLM's calls on the device that tunes, and says their order."""
    monkeypatch.setattr(tunedgemm.device, "current_device", lambda: PLACE.device)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = write_model("b", "llama", hidden_size=256, quantization_config=block)
    words = ["tune", "--model_dir", model, "--op", "a8w8_blockscale", "--nsets", "vllm", "--max-num-seqs", "1"]

    assert main([*words, "--max-num-batched-tokens", "2"]) == 0 and main([*words, "--max-num-batched-tokens", "2", "--device", "cpu"]) == 0

    orders = [{dict(shape.extra).get("scale_order") for shape in run["shapes"] if shape.k > 128} for run in asked]
    assert orders == [{"m_major_padded"}, {None}]
    err = capsys.readouterr().err
    assert "listed as m_major_padded for vllm on sm_90, which DeepGEMM reads" in err and "listed as row for vllm on cpu" in err


def test_a_budget_is_shared_among_ops(asked, experts: str) -> None:
    """The op with the most valuable shape comes first, and an op's unused time goes to the next."""
    assert main(["tune", "--model_dir", experts, "--nsets", "1", "--budget", "100"]) == 0

    first, second = (run["options"].budget for run in asked)
    assert [(run["op"], len(run["shapes"])) for run in asked] == [("fmoe", 1), ("a16w16", 4)]
    assert 19 < first <= 20 and 90 < second <= 100


def test_an_op_that_cannot_be_tuned_is_left_out(
    asked, experts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An op that cannot be tuned is named and gives exit code 1; the rest are tuned. If all fail,
    it is a usage error."""
    works = tunedgemm.tuner.tune
    refusing = {"a16w16"}

    def tune(op, *arguments, **more):
        if op in refusing:
            raise LibtypeError(f"no backend covers {op}")
        return works(op, *arguments, **more)

    monkeypatch.setattr(tunedgemm.tuner, "tune", tune)
    assert main(["tune", "--model_dir", experts, "--nsets", "1"]) == 1
    assert [run["op"] for run in asked] == ["fmoe"]
    assert capsys.readouterr().err == "tunedgemm: a16w16: left out: no backend covers a16w16\n"

    refusing.add("fmoe")
    assert main(["tune", "--model_dir", experts, "--nsets", "1"]) == 2
    assert capsys.readouterr().err.endswith("tunedgemm: error: no backend covers fmoe\n")


def test_an_interruption_names_the_ops_that_are_done(
    asked, experts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several ops, those before were kept as they should be."""
    works = tunedgemm.tuner.tune

    def tune(op, *arguments, **more):
        if op == "fmoe":
            os.kill(os.getpid(), signal.SIGTERM)
        return works(op, *arguments, **more)

    monkeypatch.setattr(tunedgemm.tuner, "tune", tune)

    assert main(["tune", "--model_dir", experts, "--nsets", "1"]) == 143
    assert capsys.readouterr().err == "tunedgemm: interrupted by SIGTERM after the runs of a16w16 before anything more was measured\n"


def test_variables_are_defaults_of_flags(asked, dense: str, listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GTUNE_MODEL and its like replace absent flags;
    an input file precedes the model's variable."""
    for name, text in (("MODEL", dense), ("TP", "2"), ("BATCH_SIZE", "4"), ("TUNED", str(tmp_path / "env.csv"))):
        monkeypatch.setenv(f"GTUNE_{name}", text)
    for words in (["--nsets", "1"], ["--nsets", "1", "--tp", "1", "-o", str(tmp_path / "said.csv")], ["-i", str(listed)]):
        assert main(["tune", *words]) == 0
    monkeypatch.setenv("GTUNE_INPUT", str(listed))
    assert main(["tune"]) == 0
    assert main(["tune", "--model_dir", dense, "--nsets", "3"]) == 0

    assert [run["output"].name for run in asked] == ["env.csv", "said.csv", "env.csv", "env.csv", "env.csv"]
    assert [run["shapes"] for run in asked[2:4]] == [listed, listed]
    assert [sorted({shape.m for shape in asked[place]["shapes"]}) for place in (0, 1, 4)] == [[4], [4], [12]]
    assert [max(shape.n for shape in asked[place]["shapes"]) for place in (0, 1)] == [256, 512]


def test_a_files_shapes_are_changed_too(asked, listed: Path) -> None:
    """--indtype, --outdtype and --all_bias apply to -i and to captured shapes,
    which keep their calls."""
    write_untuned(untuned_path(A16W16), A16W16, read_untuned(listed, A16W16))
    for words in (["-i", str(listed)], []):
        assert main(["tune", *words, "--indtype", "f16", "--outdtype", "f32", "--all_bias"]) == 0

    shape = Shape("a16w16", 2, 64, 128, dtype="fp16", outdtype="fp32")
    biased = Shape("a16w16", 2, 64, 128, dtype="fp16", outdtype="fp32", epilogue="bias")
    assert list(map(calls_of, asked)) == [{shape: 10, biased: 10}] * 2


def test_shapes_that_become_equal_are_merged(asked, tmp_path: Path) -> None:
    """Shapes that become equal by a dtype override add up their calls;
    shapes with a bias are not doubled."""
    path = tmp_path / "l.csv"
    biased = Shape("a16w16", 2, 64, 128, epilogue="bias")
    write_untuned(
        path, A16W16, [Untuned(Shape("a16w16", 2, 64, 128), 5), Untuned(Shape("a16w16", 2, 64, 128, dtype="fp16"), 2), Untuned(biased)]
    )

    assert main(["tune", "-i", str(path), "--indtype", "bf16"]) == 0
    assert main(["tune", "-i", str(path), "--all_bias", "--op", "a16w16"]) == 0

    assert calls_of(asked[0]) == {Shape("a16w16", 2, 64, 128): 7, biased: 1}
    assert {(shape.dtype, shape.bias): count for shape, count in calls_of(asked[1]).items()} == {
        ("bf16", False): 6, ("bf16", True): 6, ("fp16", False): 2, ("fp16", True): 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model_dir {dense} -i {listed}", "-i and --model_dir: are mutually exclusive"),
        ("--tp 8 -i {listed}", "--tp: requires a model; name one with --model_dir"),
        ("--no-fuse", "--no-fuse: requires a model"),
        ("--nsets 1,2", "--nsets: requires a model"),
        ("--model_dir {experts} -o {tmp}/t.csv", "the shapes are of several ops (a16w16, fmoe); name a folder, as {tmp}/t.csv/"),
        ("--models {dense} --model_dir {dense}", "--model_dir and --models: are mutually exclusive"),
        ("--models {dense},{experts} --op batched_bf16", "no product of {dense}, {experts} is of this op"),
        ("--model_dir {experts} -o2 {tmp}/p.csv", "-o2 {tmp}/p.csv: is one file"),
        ("--model_dir {dense} --run_config {listed}", "leave out --model_dir"),
        ("--model_dir {dense} --op fmoe", "has no products of the op fmoe; it has products of a16w16"),
        ("--model_dir {dense} --tp 64", "tp=64 does not divide"),
        ("--model_dir {tmp}", "no config.json in it"),
        ("-i {listed} --indtype f99", "--indtype: invalid choice"),
        ("--op a4w4_blockscale -i dsv3_a8w8_blockscale_untuned_gemm.csv --indtype fp8", "--indtype: a4w4_blockscale has no such column"),
        ("-i dsv3_a8w8_blockscale_untuned_gemm.csv --indtype f16", "a8w8_blockscale cannot have dtype=f16, outdtype=f16"),
        ("-i dsv3_a8w8_blockscale_untuned_gemm.csv --all_bias", "--all_bias: a8w8_blockscale has no such column"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(asked, words: str, message: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the reason, before anything is tuned."""
    code = main(["tune", *words.format(**names).split()])

    err = capsys.readouterr().err
    assert code == 2 and err.startswith("tunedgemm: error: ") and err.count("\n") == 1 and message.format(**names) in err
    assert asked == []
