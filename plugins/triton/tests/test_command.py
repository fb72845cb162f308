"""``tunedgemm triton``: flags, output and errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Shape, Solution, UserError
from tunedgemm.tools.tables import Row, op_named, read_rows, upsert
from tunedgemm_triton import command
from tunedgemm_triton.jsonfiles import files, tune
from tunedgemm_triton.jsonfiles.dialect import dialect_of
from tunedgemm_triton.jsonfiles.tune import Request

AITER = Path(__file__).parents[4] / "shared" / "aiter" / "triton"
ENTRY = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 2}
BLOCKS = {"dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "block"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder of files, the only one."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(files.VARIABLE, raising=False)
    return tmp_path / "home" / "triton" / "gemm"


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", "--verbose", action="store_true")
    command.command.add_arguments(parser)
    return command.command.run(parser.parse_args(words))


@pytest.fixture
def requests_made(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return the requests of runs, each of which ends as if interrupted."""
    requests: list[Request] = []

    def run(request: Request, *_: Any) -> Any:
        requests.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "run", run)
    return requests


TUNE = ("tune", "--op", "a8w8_blockscale", "--n", "1024,4096", "--k", "1024")


def test_defaults_of_the_guide(requests_made: list[Request], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults are those of the guide, and an interrupted run prints how to resume."""
    assert _run(*TUNE) == 130
    [request] = requests_made
    assert request.pairs == ((1024, 1024), (4096, 1024))
    assert request.rows == (16, 32, 64, 128, 256, 512, 2048, 4096)
    assert request.shapes()[-1] == Shape("a8w8_blockscale", 4096, 4096, 1024, **BLOCKS)
    options = request.options
    assert (options.libtype, options.iters, options.atol, options.rtol, options.errRatio) == ("triton", 10, 0.01, 0.01, 0.05)
    assert (request.folder, request.style, request.space) == (home, "new", "")
    assert "run the same command to resume" in capsys.readouterr().out


def test_every_flag_reaches_the_request(requests_made: list[Request], tmp_path: Path) -> None:
    """Flags set the request's rows, tolerances, columns, space and folder."""
    words = (
        "--m 7,9 --num-iters 20 --atol 0.1 --rtol 0.2 --out-dtype fp16 --set dtype=fp8_e4m3fnuz --mp 3 --keys legacy --search-space aiter"
    )
    assert _run(*TUNE, *words.split(), "--save-path", str(tmp_path / "out")) == 130
    [request] = requests_made
    assert (request.rows, request.style, request.space, request.folder) == ((7, 9), "legacy", "aiter", tmp_path / "out")
    options = request.options
    assert (options.iters, options.atol, options.rtol, options.mp) == (20, 0.1, 0.2, 3)
    assert {(shape.dtype, shape.outdtype) for shape in request.shapes()} == {("fp8_e4m3fnuz", "fp16")}


def test_every_op_can_be_tuned(requests_made: list[Request]) -> None:
    """Sizes go to the op's columns."""
    for op, more, expected in (
        ("a16w16", (), Shape("a16w16", 16, 96, 64)),
        ("batched_bf16", ("--set", "B=5"), Shape("batched_bf16", 16, 96, 64, extra={"B": 5})),
        ("a4w4_blockscale", (), None),
        ("a8w8_bpreshuffle", (), None),
    ):
        assert _run("tune", "--op", op, "--n", "96", "--k", "64", "--m", "16", *more) == 130
        [shape] = requests_made[-1].shapes()
        assert (shape.op, shape.m, shape.n, shape.k) == (op, 16, 96, 64)
        assert expected is None or shape == expected


def test_fmoe_has_its_own_columns(requests_made: list[Request]) -> None:
    """N is model_dim, K inter_dim, M the tokens; --set gives the other columns."""
    more = ["expert=8", "topk=2", "act_type=ActivationType.Silu", "dtype=torch.bfloat16", "q_dtype_a=torch.bfloat16"]
    more += ["q_dtype_w=torch.bfloat16", "q_type=QuantType.No", "use_g1u1=1", "doweight_stage1=0"]
    words = [word for text in more for word in ("--set", text)]
    assert _run("tune", "--op", "fmoe", "--n", "256", "--k", "128", "--m", "16", *words) == 130
    [shape] = requests_made[0].shapes()
    assert (shape.m, shape.n, shape.k, shape["expert"]) == (16, 256, 128, 8)
    assert requests_made[0].table().name.startswith("GEMM-FMOE_A16W16-")


MISTAKES = [
    (("--op", "a16w16", "--n", "1,2", "--k", "1,2,3"), "--n and --k must have the same length"),
    (("--op", "a17", "--n", "1", "--k", "1"), "a17"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--set", "dtype"), "--set: must be COLUMN=TEXT"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--set", "M=4"), "--set M=4: set sizes with --m"),
    (("--op", "fmoe", "--n", "1", "--k", "1", "--set", "token=4"), "--set token=4: set sizes with --m"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--libtype", "absent"), "backend 'absent' is not installed"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--libtype", "skinny"), "has no JSON files|backend 'skinny' is not installed"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--num-iters", "0"), "--iters must be at least 1"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--atol", "-1"), "--atol must be at least 0"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--out-dtype", "f17"), "unknown dtype 'f17'"),
    (("--op", "a16w16", "--n", "0", "--k", "1"), "'n' must be at least 1"),
    (("--op", "a16w16", "--n", "1", "--k", "1", "--m", "0,16"), "M must be at least 1"),
    (("--op", "a16w16", "--n", "100", "--k", "128", "--set", "layout=aiter16x16"), "N divisible by 16"),
    (("--op", "a8w8_bpreshuffle", "--n", "96", "--k", "40"), "needs K divisible by 32"),
    (("--op", "a4w4_blockscale", "--n", "96", "--k", "40"), "K must be a multiple of 32"),
    (("--op", "batched_bf16", "--n", "96", "--k", "64"), "'B' must be a whole number"),
]


def test_mistakes_are_errors_before_anything_starts() -> None:
    """An error names the flag or column and its possible values."""
    for words, message in MISTAKES:
        with pytest.raises(UserError, match=message):
            _run("tune", *words)


def test_an_op_without_outdtype_gets_none_by_default() -> None:
    """A user's op may have only sizes; with --out-dtype it gets the column."""
    op = op_named("a16w16")
    bare = attrs.evolve(op, columns=attrs.evolve(op.columns, key=("M", "N", "K"), own=()))
    parser = argparse.ArgumentParser()
    command.command.add_arguments(parser)
    words = ["tune", "--op", "a16w16", "--n", "1", "--k", "1"]
    assert command._columns(parser.parse_args(words), bare) == {}
    assert command._columns(parser.parse_args(words), op) == {"outdtype": "bf16"}
    assert command._columns(parser.parse_args([*words, "--out-dtype", "fp16"]), bare) == {"outdtype": "fp16"}


@pytest.mark.slow
def test_a_cpu_is_refused_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tuner starts its worker, learns the device, and prints why the op is unsupported."""
    with pytest.raises(UserError, match=r"unsupported by triton: Triton compiles for NVIDIA and AMD GPUs"):
        _run(*TUNE, "--device", "cpu", "--save-path", str(tmp_path / "out"))
    assert "Architecture: cpu-" in capsys.readouterr().out


def _put(folder: Path, name: str, entries: object) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return folder / name


FAULTS = [
    ("gfx942-GEMM-A8W8.json", "{", "invalid JSON"),
    ("gfx942-GEMM-A8W8.json", {"M_LEQ_31": ENTRY, "any": ENTRY}, "'M_LEQ_31' is never read"),
    ("gfx942-GEMM-A8W8.json", {"tiny": ENTRY, "any": ENTRY}, "'tiny' is not a bucket"),
    ("gfx942-GEMM-A8W8.json", {"small": ENTRY, "M_LEQ_64": ENTRY, "any": ENTRY}, "'small' is never read in a file with"),
    ("gfx942-GEMM-A8W8.json", {"any": {**ENTRY, "speed": 1}}, "any: gemm kernels have no parameter 'speed'"),
    ("gfx942-GEMM-A8W8.json", {"any": {**ENTRY, "num_warps": 3}}, "any: triton gemm: num_warps must be a power of two"),
    ("gfx942-GEMM-A8W8_BLOCKSCALE-N=256-K=512.json", {"any": {**ENTRY, "BLOCK_SIZE_K": 256}}, "serves no M="),
    ("mine.json", {"any": ENTRY}, "is never read; name it as"),
    ("GEMM-A8W8-N=64-K=64.json", {"any": ENTRY}, "is never read; name it as"),
]


def test_check_reports_faults(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault is a line with the file's name; the exit code is 1; by default `check` reads the
    user's folder.
    """
    for name, entries, text in FAULTS:
        path = _put(home, name, entries)
        assert _run("check") == 1
        output = capsys.readouterr().out
        assert f"{path}: " in output
        assert text in output
        path.unlink()


NOTES = [
    ("sm_90-GEMM-A8W8.json", {"any": {**ENTRY, "kpack": 2}}, "kpack has no effect on sm_90 (any)"),
    ("sm_90-GEMM-A8W8.json", {"any": {**ENTRY, "SPLITK_BLOCK_SIZE": 2}}, "SPLITK_BLOCK_SIZE has no effect"),
    ("sm_90-GEMM-A8W8.json", {"M_LEQ_64": ENTRY}, "no bucket answers for M=128, 256"),
    ("gfx9999-GEMM-A8W8.json", {"any": ENTRY}, "no kernel is compiled for gfx9999"),
    ("gfx942-MOE-DEFAULT.json", {"small_M": ENTRY}, "unknown kernel MOE-DEFAULT"),
    ("gfx942-GEMM-A16W16-ATOMIC.json", {"any": ENTRY}, "unknown kernel GEMM-A16W16-ATOMIC"),
    ("gfx942-MHA-DEFAULT.json", {"fwd": 3}, "unknown kernel MHA-DEFAULT"),
    ("gfx950/gluon/gemm/gemm_a8w8/DEFAULT.json", {"any": ENTRY}, "a file of AITER for other kernels"),
    ("gfx942-GEMM-A16W16-N8=512-K=64.json", {"any": ENTRY}, "sizes in a name must be N and K"),
    ("gfx950-GEMM-AFP4WFP4.json", {"any": {**ENTRY, "waves_per_eu": 2}}, "waves_per_eu has no effect"),
]


def test_check_notes_what_has_no_effect(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that is ignored has a note; the exit code is 0."""
    for name, entries, text in NOTES:
        path = _put(home, name, entries)
        assert _run("check") == 0
        assert text in capsys.readouterr().out
        path.unlink()


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's files not found next to the repository")
def test_files_of_aiter_have_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option of AITER has a meaning, or a note that it has no effect."""
    assert _run("check", str(AITER)) == 0
    assert "6 files, 0 faults" in capsys.readouterr().out


def test_check_reports_an_absent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder in the variable is a fault."""
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "slip"))
    assert _run("check") == 1
    assert f"{tmp_path / 'slip'}: folder of {files.VARIABLE} not found" in capsys.readouterr().out


def test_check_of_an_absent_path_is_an_error(tmp_path: Path) -> None:
    """The error names the path."""
    with pytest.raises(UserError, match="nowhere: file or folder not found"):
        _run("check", str(tmp_path / "nowhere"))


def _table(path: Path) -> list[Row]:
    op, shape = op_named("a16w16"), Shape("a16w16", 16, 4096, 1024)
    rows = [
        Row(Shape("a16w16", m, 4096, 1024), "sm_90", 132, "nvidia-h200", Solution("triton", name, split), us)
        for m, name, split, us in ((16, "gemm_r1_m16n64k128_g1_w4s5_t", 4, 5.0), (100, "tma_r1_m128n128k64_g8_w4s3", 0, 9.0))
    ]
    others = [
        Row(shape, "sm_90", 132, "nvidia-h100", Solution("torch", "native"), 4.0),
        Row(shape, "gfx942", 304, "", Solution("triton", "auto"), 4.0),
    ]
    upsert(path, op, [*rows, *others])
    return rows


def test_export_both_ways(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table's rows of the backend become files; these become the same rows with the table's
    times.
    """
    rows = _table(tmp_path / "tuned.csv")
    assert _run("export", str(tmp_path / "tuned.csv"), "--op", "a16w16") == 0
    assert capsys.readouterr().out.count("left out") == 3
    assert sorted(path.name for path in home.glob("*.json")) == ["sm_90-GEMM-A16W16-N=4096-K=1024.json", "sm_90-GEMM-A16W16.json"]
    entries = files.read(home / "sm_90-GEMM-A16W16-N=4096-K=1024.json")
    assert list(entries) == ["M_LEQ_16", "M_LEQ_128", "any"]
    assert entries["any"]["kernel"] == "tma"
    assert entries["M_LEQ_16"]["NUM_KSPLIT"] == 4

    back = tmp_path / "back.csv"
    assert _run("export", str(home), "--op", "a16w16", "-o", str(back), "--times", str(tmp_path / "tuned.csv")) == 0
    exported = {(row.shape, row.solution, row.us) for row in read_rows(back, op_named("a16w16"))[0]}
    assert exported == {(row.shape, row.solution, row.us) for row in rows}


def test_export_without_times_is_an_error(home: Path, tmp_path: Path) -> None:
    """A row needs a time, which a file does not have."""
    _put(home, "sm_90-GEMM-A16W16-N=4096-K=1024.json", {"any": ENTRY})
    with pytest.raises(UserError, match="no row has a time"):
        _run("export", str(home), "--op", "a16w16", "-o", str(tmp_path / "back.csv"))
    assert not (tmp_path / "back.csv").exists()


def test_export_ignores_times_of_other_ops(home: Path, tmp_path: Path) -> None:
    """A trial log with trials of several ops gives the rows of the requested op."""
    rows, log = _table(tmp_path / "tuned.csv"), tmp_path / "log.trials.jsonl"
    assert _run("export", str(tmp_path / "tuned.csv"), "--op", "a16w16") == 0
    common = {"schema": 2, "kind": "trial", "run": "1", "gfx": "sm_90", "cu_num": 132, "device": "nvidia-h200", "status": "ok"}
    timed = [(row.shape, row) for row in rows] + [(Shape("fancy", 16, 4096, 1024), rows[0])]
    trials = [{**common, "shape": shape.to_dict(), "solution": row.solution.to_dict(), "us": row.us} for shape, row in timed]
    log.write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    assert _run("export", str(home), "--op", "a16w16", "-o", str(tmp_path / "back.csv"), "--times", str(log)) == 0
    exported = {(row.shape, row.solution, row.us) for row in read_rows(tmp_path / "back.csv", op_named("a16w16"))[0]}
    assert exported == {(row.shape, row.solution, row.us) for row in rows}


def test_export_of_foreign_rows_is_an_error(tmp_path: Path) -> None:
    """A table without a row of the backend makes no file."""
    upsert(tmp_path / "t.csv", op_named("a16w16"), [Row(Shape("a16w16", 1, 64, 64), "sm_90", 132, "", Solution("torch", "native"), 1.0)])
    with pytest.raises(UserError, match="none of 1 rows has libtype triton"):
        _run("export", str(tmp_path / "t.csv"), "--op", "a16w16")


def test_our_dialect_needs_no_entry_point() -> None:
    """The command works for the plugin's own kernels without an installed entry point."""
    assert dialect_of("triton").libtype == "triton"
