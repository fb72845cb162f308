"""Read documents of ``tunedgemm ab -o``, and refuse others."""

from __future__ import annotations

import json

import pytest
from tunedgemm.cli import main
from tunedgemm.plugin import UserError
from tunedgemm_report.ab import read_ab


@pytest.fixture
def written(tmp_path):
    """Write the document of an A/B of a command that prints 1."""
    path = tmp_path / "ab.json"
    assert main(["ab", "--b", "X=1", "--turns", "8", "-o", str(path), "--", "echo", "1"]) == 0
    return path


def test_a_document_becomes_texts(written):
    """Show the command, both arms, the estimates and the verdict."""
    assert read_ab(written) == {
        "path": str(written), "what": "echo 1", "a": "no variables", "b": "X=1", "turns": "8 turns",
        "effect": "+0.00% [+0.00%, +0.00%]", "control": "+0.00% [+0.00%, +0.00%]", "verdict": "not resolved",
    }  # fmt: skip


def test_an_early_end_is_shown(written):
    """Show why it ended, and that too few turns have no estimate."""
    document = json.loads(written.read_text()) | {"turns": [], "effect": None, "control": None, "ended": "interrupted"}
    written.write_text(json.dumps(document))

    texts = read_ab(written)
    assert texts["turns"] == "0 turns; ended early: interrupted" and texts["effect"] == "too few turns"


@pytest.mark.parametrize("text", ["", "[]", "1", '{"schema": "tunedgemm.ab"}', '{"schema": "tunedgemm.ab", "version": 9}', "\x00"])
def test_another_file_is_refused(tmp_path, text):
    """Name the file and the command that writes one."""
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(UserError, match=r"other.json: not a document of `tunedgemm ab -o`"):
        read_ab(path)
