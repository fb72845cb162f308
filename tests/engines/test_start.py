"""Start-up of the engines' plugins."""

import importlib
import importlib.util
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tunedgemm.integrations import read_switch
from tunedgemm_engines import sglang, vllm
from tunedgemm_engines.start import after_import, fingerprint

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


def test_deny_lists_are_part_of_the_key_of_graphs(tmp_path, monkeypatch) -> None:
    """What is denied counts, wherever the list is."""
    keys = [fingerprint("1")]
    for name, kernel in (("one.csv", "k1"), ("two.csv", "k1"), ("one.csv", "k2")):
        (tmp_path / name).write_text(f"op,libtype,kernelName\na16w16,hipblaslt,{kernel}\n")
        monkeypatch.setenv("TUNEDGEMM_DENY", str(tmp_path / name))
        keys.append(fingerprint("1"))
    assert len({*keys}) == 3 and keys[1] == keys[2]


def test_an_action_follows_the_import_of_a_module(tmp_path, monkeypatch) -> None:
    """An action waits for a module's first import, whoever imports it, and is not called again."""
    (tmp_path / "awaited_one.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen, before = [], list(sys.meta_path)
    after_import("awaited_one", lambda: seen.append(sys.modules["awaited_one"].value))
    importlib.import_module("json")
    assert seen == []
    module = importlib.import_module("awaited_one")
    assert seen == [1] and sys.meta_path == before
    importlib.reload(module)
    assert seen == [1]
    del sys.modules["awaited_one"]


def test_an_action_survives_questions_and_failures(tmp_path, monkeypatch) -> None:
    """A module that is looked for, fails at first, or has two waiters, still calls each action once."""
    path, seen = tmp_path / "awaited_two.py", []
    path.write_text("raise RuntimeError('not yet')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for word in ("first", "second"):
        after_import("awaited_two", lambda word=word: seen.append(word))
    assert importlib.util.find_spec("awaited_two") is not None
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("awaited_two")
    path.write_text("value = 20\n")
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.import_module("awaited_two")
    assert sorted(seen) == ["first", "second"]
    del sys.modules["awaited_two"]


@pytest.mark.parametrize("module", ["json", "json.no_module", "no_package.module"])
def test_an_action_does_not_wait_for_what_will_not_come(module) -> None:
    """For a module that is imported already, or that does not exist, an action is called at once."""
    seen: list[str] = []
    after_import(module, lambda: seen.append(module))
    assert seen == [module]
