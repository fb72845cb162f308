"""Start-up of the engines' plugins."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tunedgemm.integrations import read_switch
from tunedgemm_engines import sglang, vllm

GROUPS = {"vllm.general_plugins": vllm, "sglang.srt.plugins": sglang}


@pytest.mark.parametrize("group", GROUPS)
def test_the_entry_point_is_ours(group) -> None:
    """An engine finds its plugin by its group."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [(name, value)] = re.findall(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)

    assert EntryPoint(name, value, group).load() is GROUPS[group].register


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("", ""), ("0", ""), ("Off", ""), (" 1 ", "1"), ("2", "1"), ("TRUE", "1"), ("unpacked", "unpacked"), ("yess", "")],
)
def test_a_switch_is_read(monkeypatch, caplog, value, meaning) -> None:
    """Values are read in any case; off is the default, also for an unknown value, which is named."""
    monkeypatch.setenv("TUNEDGEMM_VLLM", value)
    assert read_switch("TUNEDGEMM_VLLM") == meaning
    assert ("TUNEDGEMM_VLLM: must be 1, 0 or unpacked (got 'yess'); did you mean yes?; off counts" in caplog.text) == (value == "yess")
