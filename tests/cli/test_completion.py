"""Shell completion: bash completes subcommands, flags, libtypes and ops with argcomplete's function."""

import os
import shutil
import subprocess
import sys

import pytest
from tunedgemm import cli
from tunedgemm.cli.completion import add_completers
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import ops

#: Asks bash's registered function for the words that fit after a line, as the tab key does.
ASK = """
eval "$("$PYTHON" -c 'import argcomplete, sys; sys.stdout.write(argcomplete.shellcode(["tunedgemm"]))')"
function_of=$(complete -p tunedgemm | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
while IFS= read -r line; do
  COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMP_WORDS=($line) COMPREPLY=()
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  "$function_of" tunedgemm "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[*]}"
done
"""

#: Line -> words that must be among the answers, and words that must not.
LINES = {
    "tunedgemm ": ({"tune", "table", "plugins", "explain", "coverage", "--version"}, set()),
    "tunedgemm ta": ({"table"}, {"tune"}),
    "tunedgemm table ": ({"show", "check", "merge", "diff", "export"}, set()),
    "tunedgemm table show --": ({"--op", "--here", "--json"}, {"show"}),
    "tunedgemm plugins --": ({"--matrix", "--markdown", "--json", "--verbose"}, set()),
    "tunedgemm tune --libtype ": ({"all", BUILTIN}, set()),
    f"tunedgemm tune --libtype {BUILTIN},": (set(), {BUILTIN, f"{BUILTIN},{BUILTIN}"}),
    "tunedgemm explain 1,2,3 --op a8w8_block": ({"a8w8_blockscale", "a8w8_blockscale_bpreshuffle"}, {"a16w16"}),
    "tunedgemm coverage --by ": ({"op", "layer", "shape"}, set()),
    "tunedgemm tune --libtype torch --timing ": ({"graph", "eager"}, set()),
}


@pytest.fixture
def environment(tmp_path):
    """Put a `tunedgemm` on the path that runs this tree."""
    script = tmp_path / "tunedgemm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tunedgemm "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "PYTHON": sys.executable}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash not found")
def test_bash_completes(environment):
    """Each line gets the words that fit there."""
    pytest.importorskip("argcomplete")
    lines = "".join(f"{line}\n" for line in LINES)
    done = subprocess.run(["bash", "-c", ASK], input=lines, env=environment, capture_output=True, text=True, timeout=120, check=False)
    answers = [set(answer.split()) for answer in done.stdout.splitlines()]
    assert len(answers) == len(LINES), done.stdout + done.stderr
    for (line, (present, absent)), words in zip(LINES.items(), answers, strict=True):
        assert present <= words and not absent & words, (line, words)


def test_without_argcomplete_there_is_no_answer(environment, monkeypatch, tmp_path):
    """The process ends at once, without a traceback and without the command's work."""
    (tmp_path / "argcomplete.py").write_text("raise ImportError")
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "tunedgemm", "plugins"],
        env={**environment, "PYTHONPATH": path, "_ARGCOMPLETE": "1", "COMP_LINE": "tunedgemm pl", "COMP_POINT": "12"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_command_that_cannot_be_loaded_has_no_answer(environment, tmp_path):
    """Its package, or that of an extra, is missing: the shell gets no traceback."""
    (info := tmp_path / "lost-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.commands]\nlost = absent_module:command\n")
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "tunedgemm"],
        env={**environment, "PYTHONPATH": path, "_ARGCOMPLETE": "1", "COMP_LINE": "tunedgemm lost -", "COMP_POINT": "16"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_the_values_of_flags_have_completers():
    """Ops, libtypes after a comma, and words that a metavar lists."""
    top = cli.parser([])
    add_completers(top)
    tune = next(action for action in top._actions if action.dest == "command").choices["tune"]
    completers = {flag: action.completer for action in tune._actions for flag in action.option_strings if hasattr(action, "completer")}
    assert completers["--op"](prefix="") == sorted(ops())
    assert completers["--cache"](prefix="") == ["cold", "hot"]
    assert BUILTIN in completers["--libtype"](prefix="t")
    after = completers["--libtype"](prefix=f"{BUILTIN},x")
    assert f"{BUILTIN},{BUILTIN}" not in after and all(word.startswith(f"{BUILTIN},") for word in after)
