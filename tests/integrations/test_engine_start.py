"""Start-up of the engines' plugins."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tunedgemm.errors import UserError
from tunedgemm.integrations import engine_start, sglang, vllm

GROUPS = {"vllm.general_plugins": vllm, "sglang.srt.plugins": sglang}


@pytest.mark.parametrize("group", GROUPS)
def test_the_entry_point_is_ours(group) -> None:
    """An engine finds its plugin by its group."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [(name, value)] = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)

    assert EntryPoint(name, value, group).load() is GROUPS[group].register


@pytest.mark.parametrize(("value", "meaning"), [("", ""), ("0", ""), ("Off", ""), (" 1 ", "1"), ("TRUE", "1"), ("unpacked", "unpacked")])
def test_a_switch_is_read(monkeypatch, value, meaning) -> None:
    """Values are read in any case; off is the default."""
    monkeypatch.setenv("SWITCH", value)
    assert engine_start.read_switch("SWITCH", "unpacked") == meaning


def test_an_unknown_value_is_an_error(monkeypatch) -> None:
    """The error has the value and the valid ones."""
    monkeypatch.setenv("SWITCH", "yess")
    with pytest.raises(UserError, match=r"SWITCH: unknown value \(got 'yess'\); use 1, 0 or unpacked"):
        engine_start.read_switch("SWITCH", "unpacked")
    with pytest.raises(UserError, match="use 1 or 0"):
        engine_start.read_switch("SWITCH")
