"""Command lines and environment variables: exit code 0, 1 or 2, and no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.cli import main
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.process.files import LARGEST, largest_file
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.untuned import Untuned, write_untuned

OP, SHAPE = op_named("a16w16"), Shape("a16w16", 4, 32, 64)
COMMANDS = (
    "coverage list.csv --op a16w16 --device gfx942:304:x --table table.csv --replays 1:2 --by layer --next 3 --csv out.csv --min-exact 5",
    "explain 4,32,64 --op a16w16 --set bias=True --dtype bf16 --outdtype bf16 --layout row --device gfx942:304 --table table.csv",
    "explain table.csv:2 --device gfx942:304",
    "explain list.csv:2",
    "table check table.csv",
    "table show table.csv --op a16w16",
    "table diff table.csv table.csv",
    "table merge merged.csv table.csv table.csv",
    "table export --aiter exported.csv table.csv",
    "shapes --model_dir . --tp 1,2 --nsets 1,2 --layers * --indtype bf16",
    "plugins",
    "new-plugin made --libtype made --op a16w16",
    "triton check gfx942-GEMM-A16W16.json",
    "triton export table.csv --op a16w16 --save-path made",
    "asm check .",
    "asm list --gfx gfx942",
    "tune -i missing.csv -o out.csv --op a16w16 --libtype torch --mp 1 --errRatio 0.05 --batch 4 --timeout 9 --part 1/2",
)
WORDS = (
    "",
    ".",
    "/dev/null",
    "table.csv",
    "loop.csv",
    "-",
    "--",
    "--op",
    "--help",
    "-v",
    "--device",
    "gfx942:-1",
    "1,2,3",
    "x" * 300,
    "\u00b2",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with files of each kind."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("table.csv"), OP, [Row(SHAPE, "gfx942", 304, "x", Solution("torch", "native"), 5.0)])
    write_untuned(Path("list.csv"), OP, [Untuned(SHAPE, 3)])
    Path("loop.csv").symlink_to("loop.csv")
    Path("gfx942-GEMM-A16W16.json").write_text('{"any": {"BLOCK_SIZE_M": 64}}')
    return tmp_path


def test_command_lines(fuzz: Any, mutations: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any words end in an exit code, with one line for a mistake, and keep the files that they name."""
    table = Path("table.csv").read_bytes()

    def mutate(seed: bytes, changes: list[Any]) -> bytes:
        words = seed.decode().split()
        for kind, place, value in changes:
            at = place % len(words)
            text = (*WORDS, *mutations.TEXTS)[value % (len(WORDS) + len(mutations.TEXTS))]
            match kind % 4:
                case 0 | 1:
                    words[at : at + 1] = [text] if at else words[:1]
                case 2:
                    words.insert(1 + at, text)
                case 3 if len(words) > 1 and at:
                    del words[at]
        return json.dumps([word for word in words if "\0" not in word and "\ud800" not in word]).encode()

    def check(line: bytes) -> None:
        words = json.loads(line) if line.startswith(b"[") else line.decode().split()
        try:
            code = main(words)
        except SystemExit as end:  # of --help
            code = end.code
        err = capsys.readouterr().err
        assert code in (0, 1, 2), (code, err)
        assert "Traceback" not in err
        assert Path("table.csv").read_bytes() == table or "-o" in words or "merge" in words

    fuzz([command.encode() for command in COMMANDS], mutate, check)


VARIABLES = (
    "TUNEDGEMM_HOME", "TUNEDGEMM_CACHE", "TUNEDGEMM_FALLBACK", "TUNEDGEMM_ONLINE_SECONDS", "TUNEDGEMM_ONLINE_LIBTYPE", LARGEST,
    "TUNEDGEMM_ONLINE", "AITER_TUNE_GEMM", "AITER_LOG_TUNED_CONFIG", "HIP_ONLINE_TUNING", "AITER_ONLINE_TUNE", OP.columns.variable,
    "TUNEDGEMM_TRITON_JSON",
)  # fmt: skip


def test_environment(fuzz: Any, mutations: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any text of a variable is used, or refused with the variable's name."""

    def mutate(_: bytes, changes: list[Any]) -> bytes:
        texts = (*WORDS, *mutations.TEXTS, os.pathsep, "default", "~nobody/x", "table.csv:default", "on", "torch,triton")
        return json.dumps({VARIABLES[place % len(VARIABLES)]: texts[value % len(texts)] for _, place, value in changes}).encode()

    def check(content: bytes) -> None:
        with monkeypatch.context() as patch:
            for name, text in json.loads(content or b"{}").items():
                if "\0" not in text and "\ud800" not in text:
                    patch.setenv(name, text)
            try:
                Settings.from_environment()
                Table.load(OP)
                main(["coverage", "list.csv", "--device", "gfx942:304"])
                main(["triton", "check"])
                assert largest_file() > 0
            except UserError as error:
                assert any(name in str(error) for name in VARIABLES), error

    fuzz([b"{}"], mutate, check)
