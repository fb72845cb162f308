"""Each tutorial runs from its first line to its last, with the results that its sentences promise."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"

#: The text before a block, ```language, the block, ```
BLOCK = re.compile(r"([^\n]*)\n*^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"\bthis as `([\w./-]+)`:$")
#: Commands as a user has them, for a process that must not change the environment that it runs in.
#: Fewer rounds than a user's: the tests check no time.
COMMANDS = {
    "python": 'exec "{python}" "$@"',
    "pip": """action=$1; shift; test $action = wheel || set -- --target "{folder}/site" "$@"
exec "{python}" -m pip -q --disable-pip-version-check $action --no-index --no-deps --no-build-isolation "$@\"""",
    "tunedgemm": """test "$1" != tune || set -- "$@" --iters 9 --seconds 0.5
exec "{python}" -m tunedgemm "$@\"""",
}


def script(page: Path) -> str:
    """Return a page's blocks as one shell script: files are written, commands run in their order."""
    lines = []
    for before, language, text in BLOCK.findall(page.read_text()):
        if saved := SAVED.search(before):
            lines.append(f"cat > {saved[1]} <<'END OF FILE'\n{text}END OF FILE\n")
        else:
            assert language == "sh", f"{page.name}: a block of {language} that no sentence names a file for"
            lines.append("".join(f"printf '\\n$ %s\\n' {shlex.quote(line)}\n{line}\n" for line in text.splitlines()))
    return "".join(lines)


def ran(page: str, folder: Path) -> list[tuple[str, str]]:
    """Run a tutorial in an empty folder; return each command with its output."""
    (folder / "bin").mkdir()
    for name, text in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(f"#!/bin/sh\n{text.format(python=sys.executable, folder=folder)}\n")
        command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AITER_", "GTUNE_", "TUNEDGEMM_"))}
    environment = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), *filter(None, sys.path)]),
        "TUNEDGEMM_HOME": str(folder / "home"),
        "TUNEDGEMM_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    (folder / "work").mkdir()
    done = subprocess.run(
        ["bash", "-e", "-c", script(FOLDER / page)],
        cwd=folder / "work",
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return [tuple(part.split("\n", 1)) for part in done.stdout.split("\n$ ")[1:]]


def outputs(answers: list[tuple[str, str]], command: str) -> list[str]:
    """Return the outputs of the commands that contain some words, in order."""
    found = [output for line, output in answers if command in line]
    assert found, f"no command contains {command!r}"
    return found


@pytest.mark.slow
def test_a_faster_model(tmp_path):
    """The model's four shapes are tuned, and all of its calls have a row afterwards."""
    answers = ran("faster-model.md", tmp_path)

    before, after = outputs(answers, "tunedgemm coverage")
    assert "of 4 shapes" in before
    assert before.startswith("exact 0.0 % of calls") and after.startswith("exact 100.0 % of calls")
    assert "4 tuned, 0 failed" in outputs(answers, "tunedgemm tune")[0]
    assert all(re.match(r"prompt [\d.]+ ms, token [\d.]+ ms", output) for output in outputs(answers, "python model.py"))
    assert "bf16_tuned_gemm.csv:" in outputs(answers, "tunedgemm explain")[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_ship_a_kernel(tmp_path):
    """The package is installed, passes the suite, competes, wins without torch, and becomes a wheel."""
    answers = ran("ship-a-kernel.md", tmp_path)

    assert all(re.search(r"\bmine .*tunedgemm-mine .* yes\b", output) for output in outputs(answers, "tunedgemm plugins"))
    [checked] = outputs(answers, "python -m pytest")
    assert re.search(r"\d+ passed", checked) and "failed" not in checked
    with (tmp_path / "work" / "profile.csv").open(newline="") as file:
        assert {("mine", "transposed_v1"), ("mine", "transposed_fp32_v1"), ("torch", "native")} <= {
            (row["libtype"], row["kernelName"]) for row in csv.DictReader(file)
        }
    assert "runs mine:transposed" in outputs(answers, "tunedgemm explain")[0]
    assert list((tmp_path / "work" / "dist").glob("tunedgemm_mine-*.whl"))


@pytest.mark.slow
def test_the_same_answer(tmp_path):
    """Bits depend on M with torch's calls, not in the mode; the tables differ, and both are proved."""
    answers = ran("same-answer.md", tmp_path)

    before, after = ([int(count) for count in re.findall(r": (\d+) .*differ", output)] for output in outputs(answers, "python same.py"))
    assert len(before) == 8 and any(before)
    assert after == [0] * 8
    [tuned] = outputs(answers, "-i shapes.csv")
    assert re.search(r"bit class: .* for any M mine:float64_v1\n  other class: \w{16}: 1 kernel of mine", tuned)
    assert len(re.findall("mine:float64_v1", outputs(answers, "table show")[0])) == 3
    assert re.search(r"runs mine:float64_v1: tuned.csv:\d .* class \w{16}", outputs(answers, "tunedgemm explain")[0])
    assert "0 same, 1 different, 0 missing\nexit code 1" in outputs(answers, "tunedgemm bits tuned.csv")[0]
    assert re.findall(r"mine:(\w+): \w{16}$", outputs(answers, "--prove")[0], re.MULTILINE) == ["float64_v1", "rows_v1"]
    assert "tuned.csv: 3 rows, no fault" in outputs(answers, "table check")[0]


@pytest.mark.slow
def test_migrate_from_aiter(tmp_path):
    """AITER's rows are read and explained, the calls' own shapes are tuned, and a table goes back."""
    answers = ran("from-aiter.md", tmp_path)

    assert "aiter.csv: 2 rows, no fault" in outputs(answers, "table check")[0]
    first, second = outputs(answers, "explain aiter.csv")
    assert "aiter.csv:2 would serve it" in first and "aiter.csv:3 cannot serve it" in second and "AITER" in second
    served, untuned = outputs(answers, "--device gfx942:304")
    assert "runs hipblaslt:Cijk_" in served and "runs torch:native: untuned" in untuned
    assert "exact 100.0 % of calls" in outputs(answers, "tunedgemm coverage")[0]  # after a warning of AITER's table
    assert "mine.csv:" in outputs(answers, "AITER_LOG_TUNED_CONFIG=1")[0]
    assert "2 ok, 0 failed" in outputs(answers, "--run_config")[0]
    with (tmp_path / "work" / "back.csv").open(newline="") as file:
        assert {(row["M"], row["N"]) for row in csv.DictReader(file)} == {("1", "1280"), ("64", "1280")}


@pytest.mark.slow
@pytest.mark.nightly
def test_debug_a_slow_shape(tmp_path):
    """Each question is answered as the page says: padded M = 40, M = 1 without a row, then all tuned."""
    answers = ran("slow-shape.md", tmp_path)

    before, after = outputs(answers, "tunedgemm coverage")
    assert before.startswith("exact 0.0 % of calls") and re.search(r"fine: .* 1 \W+1 ", before) and "fallback" in before
    assert after.startswith("exact 100.0 % of calls")
    assert "healthy" in outputs(answers, "tunedgemm doctor")[0]
    one, forty = outputs(answers, "tunedgemm explain")
    assert "runs torch:native: untuned" in one and "tuned.csv:2" in forty
    trials = outputs(answers, "python trials.py")[0].splitlines()
    assert {line.split()[0] for line in trials} >= {"M=1", "M=40"}
    assert all(re.fullmatch(r"M=\d+ +[\d.]+ us ± [\d.]+ %  \w+:\S+.*", line) for line in trials if line)
