"""The documents are complete, and their examples run."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm import cli
from tunedgemm.backends.contract import HOOKS
from tunedgemm.backends.registry import Registry
from tunedgemm.libtypes import owners
from tunedgemm.ops import ops
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.untuned import read_untuned

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
#: Pages whose blocks `test_tutorials` runs, each after the blocks above it.
TUTORIALS = {page for page in DOCS if page.parent.name == "tutorials"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *DOCS,
    *sorted(ROOT.glob("[!b]*/*/README.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
TEXT = "\n".join(page.read_text() for page in PAGES)

#: ```language, the block, ```
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"\b(?:(?:AITER|TUNEDGEMM|GTUNE)_[A-Z0-9_]*[A-Z0-9]|HIP_ONLINE_TUNING)\b")


#: Options of the installed backends of this repository.
OPTIONS = sorted({option for backend in Registry().select("all") if backend.libtype in owners() for option in backend.options}, key=str)


def name(page):
    return str(page.relative_to(ROOT))


def blocks(*languages, pages=PAGES):
    """Return (page, number, text) of each fenced block in one of the languages."""
    for page in pages:
        for number, (language, text) in enumerate(BLOCK.findall(page.read_text()), 1):
            if language in languages:
                yield pytest.param(page, text, id=f"{name(page)}-{number}")


def shell_lines():
    """Yield every line of a shell block, as words without comments and leading assignments."""
    for block in blocks("sh", "bash"):
        for line in block.values[1].splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Za-z_]+=", words[0]):
                words = words[1:]
            if words:
                yield pytest.param(words, id=f"{block.id}: {' '.join(words)}")


def subcommands():
    """Return the core's subcommands and their parsers, without those of plugins."""
    choices = next(action for action in cli.parser(())._actions if isinstance(action, argparse._SubParsersAction))
    return {command.name: choices.choices[command.name] for command in cli.commands()}


def flags(command):
    return [flag for action in subcommands()[command]._actions for flag in action.option_strings if flag not in ("-h", "--help")]


def variables():
    sources = [*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/*/tunedgemm_*/**/*.py")]
    return sorted({variable for source in sources for variable in VARIABLE.findall(source.read_text())})


def columns():
    """Return every column that a written table of any op may have."""
    return sorted({(op.name, column) for op in ops().values() for column in ("gfx", "cu_num", *op.columns.key, *op.columns.values)})


def in_code(word):
    """Return whether the pages have *word*, whole, inside `code`."""
    return any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", code) for code in re.findall(r"`([^`\n]+)`", TEXT))


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook):
    """Each hook of the contract is described, with its arguments."""
    assert re.search(rf"`{hook}\([a-z, ]+\)`", TEXT)


@pytest.mark.parametrize("flag", flags("tune"))
def test_flags_of_tune(flag):
    """Each flag of `tunedgemm tune` is described in docs/tuning.md."""
    page = (ROOT / "docs" / "tuning.md").read_text()

    assert f"`{flag}`" in page


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_flags_of_our_backends(option):
    """Each option is described in docs/tuning.md with its variable and default."""
    page = (ROOT / "docs" / "tuning.md").read_text()
    default = f"`{option.default}`" if option.default else "none"

    assert f"| `{option.flag}` | `{option.variable}` | {default} |" in page


def test_defaults_of_tune():
    """The defaults that docs/tuning.md gives are those of the parser."""
    page = (ROOT / "docs" / "tuning.md").read_text()
    told = dict(re.findall(r"^\| `(--?[\w]+)`[^|]*\| `?([\w.]+)`? \|", page, re.MULTILINE))

    wrong = {}
    for action in subcommands()["tune"]._actions:
        texts = [told[flag] for flag in action.option_strings if flag in told]
        if texts and isinstance(action.default, int | float | str) and action.default != "":
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            expected = "off" if action.default is False else default
            wrong |= {action.dest: (texts[0], expected)} if texts[0] != expected else {}

    assert len(told) > 8
    assert wrong == {}


@pytest.mark.parametrize("command", subcommands())
def test_subcommands(command):
    """Each subcommand is shown."""
    assert re.search(rf"\btunedgemm {command}\b", TEXT)


@pytest.mark.parametrize(("op", "column"), columns(), ids="-".join)
def test_columns(op, column):
    """Each column of each op's tables is described."""
    assert in_code(column)


def test_appended_columns(tmp_path):
    """The columns that are appended to AITER's are described, too."""
    for op in ops().values():
        write_rows(tmp_path / "table.csv", op, [])

        header = (tmp_path / "table.csv").read_text().splitlines()[0].split(",")

        assert [column for column in header if not in_code(column)] == []
        assert len(header) > 2 + len(op.columns.key) + len(op.columns.values)


@pytest.mark.parametrize("op", sorted(ops()))
def test_ops(op):
    """Each op is named, with its table's file and its variable."""
    assert in_code(op)
    assert in_code(ops()[op].columns.variable)
    assert in_code(ops()[op].columns.tuned_file)


@pytest.mark.parametrize("variable", variables())
def test_variables(variable):
    """Each environment variable that the sources name is described."""
    assert in_code(variable)


@pytest.mark.parametrize(("page", "text"), blocks("python", pages=[page for page in PAGES if page not in TUTORIALS]))
def test_python_blocks(page, text, tmp_path):
    """A Python block runs in a fresh process with an empty user folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AITER_", "TUNEDGEMM_"))}

    answer = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={**environment, "TUNEDGEMM_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert answer.returncode == 0, answer.stderr


def found_blocks(page, language):
    return [text for word, text in BLOCK.findall((ROOT / "docs" / page).read_text()) if word == language]


def captured(folder, *command, **environment):
    """Return the shapes that a command captures into *folder*: the calls of each M, N and K."""
    home = folder / "home"
    subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "AITER_TUNE_GEMM": "1", "TUNEDGEMM_HOME": str(home), **environment},
        check=True,
        timeout=300,
    )
    rows = read_untuned(home / "bf16_untuned_gemm.csv", ops()["a16w16"])
    return {(row.shape.m, row.shape.n, row.shape.k): row.calls for row in rows}


#: a model that does not import tunedgemm
PLAIN = "import torch\nwith torch.inference_mode(): torch.nn.Linear(64, 32)(torch.randn(3, 64))\n"


def test_capturing_block(tmp_path):
    """The example of docs/which-shapes.md captures the counts that the sentence below it names."""
    block = next(text for text in found_blocks("which-shapes.md", "python") if "AITER_TUNE_GEMM" in text)

    assert captured(tmp_path, "-c", block) == {(1, 512, 256): 3, (1, 256, 512): 3, (7, 512, 256): 1, (7, 256, 512): 1}


def test_sitecustomize_block(tmp_path):
    """The `sitecustomize` captures an unchanged model in a new process."""
    source = next(text for text in found_blocks("which-shapes.md", "python") if "sitecustomize" in text)
    (tmp_path / "sitecustomize.py").write_text(source)

    assert captured(tmp_path, "-c", PLAIN, PYTHONPATH=str(tmp_path)) == {(3, 32, 64): 1}


@pytest.mark.parametrize("words", shell_lines())
def test_shell_lines(words):
    """The core's commands parse with the real parser, and make's targets exist."""
    if words[0] == "tunedgemm":
        cli.parser(words[1:]).parse_args(words[1:])
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

        assert set(targets) <= set(rules)


def slugs(page):
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    """Relative links lead to existing files and headings of this repository."""
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", link) and (not target.exists() or (anchor and anchor not in slugs(target))):
            broken.append(link)

    assert broken == []


@pytest.mark.slow
def test_main_job(tmp_path):
    """`make tune` captures, tunes and dispatches a small model, and its outputs agree."""
    answer = subprocess.run(
        [sys.executable, ROOT / "examples" / "models" / "tune_llama.py", "--small", "--iters", "5", "--rounds", "3", "--home", tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "9 tuned, 0 failed" in answer.stdout
    assert "Outputs agree" in answer.stdout
    assert [line.split()[3] for line in answer.stdout.splitlines() if line.startswith("The table answers")] == ["0%", "100%"]
    assert len((tmp_path / "bf16_tuned_gemm.csv").read_text().splitlines()) == 10
