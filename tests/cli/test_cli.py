"""The command line: its commands, output and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm import cli
from tunedgemm.cli import commands, main
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.process import plugin_guard
from tunedgemm.solution import Unsupported
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry

SHAPES = "M,N,K\n1,64,128\n5,64,128\n"
#: flags of a short run
QUICK = ("--libtype", "torch", "--device", "cpu", "--iters", "2", "--seconds", "0.1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def untuned(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    path.write_text(SHAPES)
    return path


def test_tune_show_check_explain(
    tmp_path: Path, untuned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuning writes a table that the other commands read and find faultless."""
    table = tmp_path / "out.csv"
    code, out, _ = run(capsys, "tune", "-i", str(untuned), "-o", str(table), "--libtype", "torch", "--iters", "5", "-v")
    assert code == 0
    assert "2 tuned, 0 failed" in out and "geometric mean" in out and "seconds: " in out

    code, out, _ = run(capsys, "table", "show", str(table), "--here")
    assert code == 0 and out.count("out.csv:") == 2
    assert run(capsys, "table", "check", str(table))[:2] == (0, f"{table}: 2 rows, no fault\n")

    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table))
    code, out, _ = run(capsys, "explain", "5,64,128")
    assert code == 0 and "runs torch:" in out and "out.csv:" in out
    assert "untuned" in run(capsys, "explain", "5,64,128", "--device", "gfx942:304", "--bias")[1]
    assert "out.csv:" in run(capsys, "table", "show")[1]


def test_plugins_lists_installed_and_missing_backends(
    capsys: pytest.CaptureFixture[str], fake_plugins: Path, hide: Callable[[str], None]
) -> None:
    """Each backend is listed with distribution and ops;
    a missing one with its pip command; rivals are named."""
    hide("ck")
    code, out, _ = run(capsys, "plugins", "-v")

    assert code == 0
    assert "torch" in out and "a16w16" in out and "yes" in out
    assert "pip install tunedgemm[ck]" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "-i", "absent.csv"], "absent.csv: no such file"),
        (["tune", "--libtype", "nope", "-i", "{untuned}"], "no backend of that name; installed:"),
        (["tune", "--libtype", "ck", "-i", "{untuned}"], "pip install tunedgemm[ck]"),
        (["tune", "--op", "a99w99", "-i", "{untuned}"], "unknown op 'a99w99'; registered: a16w16"),
        (["tune", "--iters", "0", "-i", "{untuned}"], "--iters must be at least 1"),
        (["tune"], "AITER_TUNE_GEMM=1"),
        (["tune", "--update_improved", "-i", "{untuned}"], "--update_improved: requires --compare"),
        (["tune", "--compare", "--run_config", "-i", "{untuned}"], "choose one of them"),
        (["tune", "--compare", "--min_improvement_pct", "nan"], "--min_improvement_pct: must be at least 0"),
        (["tune", "--run_config", "absent.csv"], "absent.csv: no such file"),
        (["tune", "--cache", "warm"], "--cache must be one of cold, hot"),
        (["tune", "--timing", "events"], "--timing must be one of graph, eager"),
        (["tune", "--executor", "slurm"], "--executor must be one of local, ray"),
        (["tune", "--shard", "3"], "--shard: expected I/N such as 2/8 (got '3')"),
        (["tune", "--shard", "3/2"], "--shard must be I/N"),
        (["tune", "--shard", f"1/{'9' * 5000}"], "--shard: expected I/N such as 2/8 (got '1/999"),
        (["tune", "--live", "9" * 5000], "--live: expected a port, 0 to 65535 (got '999"),
        (["shapes", "--batch_size", "9" * 5000], "--batch_size: expected a whole number (got '999"),
        (["tune", "--jobs", "99999999999999999999", "-i", "{untuned}"], "--jobs must be at most 1024 (got 99999999999999999999)"),
        (["tune", "--mp", "-1"], "--mp must be at least 0"),
        (["tune", "--budget", "nan"], "--budget must be at least 0"),
        (["tune", "--kernel_timeout", "soon"], "--kernel_timeout: invalid float value: 'soon'"),
        (["tune", "--sort", "perhaps"], "--sort: expected True or False"),
        (["tune", "--colour", "red"], "unrecognized arguments: --colour red; `tunedgemm tune --help`"),
        (["tune", "--errRatio", "2"], "--errRatio must be a share of the elements, 0 to 1"),
        (["tune", "--stale", "-i", "{untuned}", "-o", "absent.csv"], "--stale: absent.csv does not exist"),
        (["tuna"], "invalid choice: 'tuna'"),
        ([], "COMMAND"),
        (["explain", "1,2"], "expected three sizes"),
        (["explain", "1,2,3", "--device", "gfx942"], "GFX:CU"),
        (["explain", "1,2,3", "--device", "GFX 942:304"], "GFX:CU"),
        (["explain", "1,2,3", "--dtype", "bf17"], "unknown dtype 'bf17'"),
        (["table"], "show|check|merge"),
        (["table", "check"], "file"),
        (["table", "show", "absent.csv"], "absent.csv"),
        (["table", "merge", "out.csv"], "IN"),
        (["table", "merge", "out.csv", "absent.csv"], "absent.csv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_users_mistakes_are_one_line_without_a_traceback(
    arguments: list[str], message: str, untuned: Path, capsys: pytest.CaptureFixture[str], hide: Callable[[str], None]
) -> None:
    """A mistake exits with 2 and prints its reason on one line of standard error, nothing else."""
    hide("ck")
    code, out, err = run(capsys, *[text.format(untuned=untuned) for text in arguments])

    assert code == 2
    assert message in err
    assert err.startswith("tunedgemm: error: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\x00\x01\x02\xff\xfe" * 40, "in.csv"),
        (b"M,N\n1,2\n", "K"),
        (b"M,N,K,dtype\n1,2,3,__import__('os').abort()\n", "dtype"),
        (b"M,N,K\n-1,64,128\n", "in.csv:2"),
        (b"M,N,K\n1,64,99999999999999\n", "in.csv:2"),
        (b"M,N,K\n1,64,banana\n", "in.csv:2"),
        (b"M,N,K,bias\n1,64,128,perhaps\n", "bias"),
        (b"gfx,cu_num,M,N,K,libtype,us\ngfx942,304,1,64,-1,asm,2.5\n", "in.csv:2"),
    ],
    ids=["empty", "binary", "no K", "code as dtype", "negative", "absurd", "word", "bad flag", "tuned"],
)
def test_bad_input_files_name_the_fault(tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of bad untuned file is one clear line, and no table is written."""
    path = tmp_path / "in.csv"
    path.write_bytes(content)

    code, _, err = run(capsys, "tune", "-i", str(path), "-o", str(tmp_path / "out.csv"))

    assert code == 2
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "out.csv").exists()


def test_an_unknown_column_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The shapes of -i are tuned without it, it is named, and the exit code is 1."""
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text("M,N,K,colour\n1,64,32,red\n")

    assert run(capsys, "tune", "-i", str(path), "-o", str(out), *QUICK)[0] == 1
    assert f"left out: {path}:1: unknown column 'colour', not read; an untuned file of a16w16 may have M, N, K" in caplog.text
    assert [row.shape.m for row in read_rows(out, op_named("a16w16"))[0]] == [1]


def test_a_tuned_table_is_tuned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --all and one file for -i and -o, this device's rows are replaced and all others stay."""
    path, here = tmp_path / "t.csv", device_of(-1)
    path.write_text(
        "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
        "gfx942,304,4,64,32,False,torch.bfloat16,torch.bfloat16,False,False,hipblaslt,7,0,2.5,Cijk,0.0,1.0,1.0\n"
        f"{here.gfx},{here.cu_num},8,64,32,False,torch.bfloat16,torch.bfloat16,False,False,asm,0,0,99999.0,gone,0.0,1.0,1.0\n"
    )
    code, text, _ = run(capsys, "tune", "-i", str(path), "-o", str(path), "--all", *QUICK)

    assert code == 0 and "1 tuned, 0 failed, 1 of other devices left" in text
    rows = {row.shape.m: row for row in read_rows(path, op_named("a16w16"))[0]}
    assert (rows[4].solution.libtype, rows[8].solution.libtype) == ("hipblaslt", "torch") and rows[8].us < 99999


def test_every_command_has_help_and_the_module_runs() -> None:
    """python -m tunedgemm is the command; each subcommand explains itself."""
    assert {"tune", "plugins", "table", "explain"} <= {command.name for command in commands()}
    for command in commands():
        done = subprocess.run([sys.executable, "-m", "tunedgemm", command.name, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and command.help[:20] in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("extra", "words", "thing"),
    [
        ("report", ("report", "t.csv"), "command 'report'"),
        ("report", ("tune", "-i", "{untuned}", "--live"), "--live"),
        ("ray", ("tune", "-i", "{untuned}", "--executor", "ray", "--libtype", "torch"), "--executor ray"),
    ],
)
def test_what_an_extra_brings_names_it(capsys, monkeypatch, untuned: Path, extra: str, words: tuple[str, ...], thing: str) -> None:
    """Without its distribution the command stays in the list, and using it says what to install."""
    for module in (cli, plugin_guard):
        found = module.entry_points
        monkeypatch.setattr(module, "entry_points", lambda found=found, **asked: [each for each in found(**asked) if each.name != extra])
    code, _, err = run(capsys, *(word.format(untuned=untuned) for word in words))
    assert code == 2
    fault = f"not installed (got no tunedgemm-{extra} in this environment); pip install 'tunedgemm[{extra}]'"
    assert err == f"tunedgemm: error: {thing}: {fault}\n"
    assert f"needs tunedgemm[{extra}]" in cli.parser([]).format_help() or extra == "ray"


def test_a_backend_of_few_rows_is_usable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that serves only M up to 16 reads "yes"; one that serves nothing gives its reason
    for the first shape."""
    few = fake_backend("few", supports=lambda shape, _: None if shape.m <= 16 else Unsupported(f"M={shape.m} is not 1 to 16"))
    none = fake_backend("none", supports=lambda shape, _: Unsupported(f"M={shape.m} is too pretty"))
    monkeypatch.setattr("tunedgemm.backends.registry.Registry", lambda: fake_registry(few, none))
    out = " ".join(run(capsys, "plugins")[1].replace("│", " ").split())

    assert "a16w16 yes" in out and "no: M=64 is too pretty" in out and "not 1 to 16" not in out


def test_only_what_is_named_is_imported(child: Callable[..., str], fake_plugins: Path, untuned: Path) -> None:
    """The list of commands and ``--libtype torch`` import no plugin;
    the help of tune and ``all`` do."""
    table = untuned.with_name("out.csv")
    words = {
        "--help": False, f"tune -i {untuned} -o {table} --libtype torch --iters 2": False, "tune --help --libtype torch": True,
        f"tune -i {untuned} -o {table} --libtype torch,fake --iters 2": True,
    }  # fmt: skip
    for line, loads in words.items():
        source = "import sys\nfrom tunedgemm.cli import main\ntry:\n    main(sys.argv[1].split())\nexcept SystemExit:\n    pass\n"
        shown = "print(sorted(name for name in sys.modules if name.startswith(('tunedgemm_', 'fake_plugin')) and '.' not in name))"
        found = child(f"import sys\nsys.argv[1:] = [{line!r}]\n{source}{shown}", fake_plugins).splitlines()[-1]
        assert ("fake_plugin" in found) is loads, (line, found)
        assert loads or found == "[]"


def test_plugins_contribute_commands_and_a_broken_one_is_named(tmp_path: Path) -> None:
    """The group tunedgemm.commands adds subcommands with their owners; a broken one fails alone."""
    (tmp_path / "greeting.py").write_text(
        "from tunedgemm.plugin import Command\n"
        "command = Command('greet', 'say hello', lambda parser: None, lambda arguments: print('hello') or 0)\n"
    )
    info = tmp_path / "greeting-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[tunedgemm.commands]\ngreet = greeting:command\nbroken = not_there:command\nleaves = leaving:command\n"
    )
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def call(word: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "tunedgemm", word]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
        return done.returncode, done.stdout, done.stderr

    assert call("greet") == (0, "hello\n", "")
    code, out, err = call("broken")
    assert (code, out) == (2, "") and err.startswith("tunedgemm: error: command 'broken' of not_there:command: cannot be loaded: ModuleNot")
    code, out, err = call("leaves")
    assert (code, out) == (2, "") and err.startswith(
        "tunedgemm: error: command 'leaves' of leaving:command: cannot be loaded: SystemExit: 0"
    )
    code, out, err = call("--help")
    assert (code, err) == (0, "") and " ".join(out.split()).count("commands of greeting") == 3


@pytest.mark.parametrize(
    ("command", "where", "unbuffered", "code"),
    [
        ("explain 16,1280,8192", "| true", "", 0),
        ("explain 16,1280,8192", ">&-", "", 0),
        ("explain 16,1280,8192", ">/dev/full", "", 1),
        ("explain 16,1280,8192", ">/dev/full", "1", 1),
        ("table show t.csv", "| true", "", 0),
        ("table show t.csv", ">/dev/full", "", 1),
        ("shapes --model_dir llama8B --nsets 1", ">/dev/full", "", 1),
        ("tune --help", "| true", "", 0),
        ("tune --help", ">/dev/full", "", 1),
        ("tune --help", ">/dev/full", "1", 1),
        ("--version", ">/dev/full", "", 1),
    ],
)
def test_a_closed_output_or_a_full_disk(tmp_path: Path, command: str, where: str, unbuffered: str, code: int) -> None:
    """A closed pipe or output is not an error; a full disk is one line and exit code 1."""
    (tmp_path / "t.csv").write_text("gfx,cu_num,M,N,K,libtype,solidx,splitK,us,kernelName\ngfx942,304,16,64,128,asm,1,0,2.5,x\n")
    shell = f"set -o pipefail; {sys.executable} -m tunedgemm {command} {where}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}

    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == code, done.stderr
    told = [line for line in done.stderr.splitlines() if ": note: " not in line]
    assert told == (["tunedgemm: standard output: cannot be written: No space left on device"] if code else [])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["| true", ">/dev/full"])
def test_output_errors_do_not_change_the_exit_code(tmp_path: Path, untuned: Path, where: str) -> None:
    """A closed pipe or a full disk, which is reported, changes neither the table nor exit code 0."""
    command = f"{sys.executable} -m tunedgemm tune --libtype torch --iters 3 -i {untuned} -o {tmp_path / 't.csv'} {where}"

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert read_rows(tmp_path / "t.csv", op_named("a16w16"))[0]
    assert done.stderr == ("tunedgemm: standard output: cannot be written: No space left on device\n" if "full" in where else "")
