"""foreign: whatever a plugin's code raises or changes costs that plugin alone."""

import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from tunedgemm.process.plugin_guard import attempt, described, entry_points, load


class Mute(Exception):
    def __str__(self):
        raise SystemExit("of __str__")


def raising(error):
    def function():
        raise error

    return function


def test_an_attempt_returns_whatever_is_raised():
    """Exits count as errors, an exception without text and a raised KeyboardInterrupt too."""
    assert attempt(divmod, 7, 2) == ((3, 1), "")
    errors = (SystemExit(3), GeneratorExit("bye"), MemoryError("none"), StopIteration(), Mute(), KeyboardInterrupt("x"))
    faults = [attempt(raising(error))[1] for error in errors]
    texts = ["SystemExit: 3", "GeneratorExit: bye", "MemoryError: none", "StopIteration: ", "Mute: its text raised SystemExit"]
    assert faults == [*texts, "KeyboardInterrupt: x"]
    assert described(ValueError("x")) == "ValueError: x"


def test_a_forked_copy_ends_in_the_attempt(child):
    """A function that forks returns in the calling process alone."""
    source = (
        "import os\nfrom tunedgemm.process.plugin_guard import attempt\n"
        "def forks():\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return 'returned'\nprint(attempt(forks)[0], flush=True)"
    )
    assert child(source) == "returned"


CHANGES = """
import os, sys, torch, warnings
os.chdir("/")
os.environ["PLUGIN_VARIABLE"] = "1"
os.environ.pop("TUNEDGEMM_HOME")
torch.set_num_threads(3)
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)
torch.set_float32_matmul_precision("medium")
torch.set_autocast_enabled("cpu", True)
warnings.simplefilter("ignore")
{}
"""


@pytest.mark.parametrize(("early", "end"), [(True, ""), (False, "sys.exit(0)")], ids=["torch loaded", "torch not loaded"])
def test_an_import_changes_no_switch(importable, child, end, early):
    """What an import changes is undone, also where it fails; the warning names the plugin and all."""
    (importable / "switching.py").write_text(CHANGES.format(end))
    source = f"""
import logging, os, sys, warnings
{"import torch" if early else ""}
from importlib.metadata import EntryPoint
from tunedgemm.process.plugin_guard import load
logging.basicConfig(stream=sys.stdout, format="%(message)s")
def state():
    torch = sys.modules.get("torch")
    of_torch = torch and (torch.get_default_dtype(), torch.empty(1).device.type, torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"), {"torch.get_num_threads()" if early else ""})
    return os.getcwd(), dict(os.environ), of_torch or 0
before = state()
answer, fault = load(EntryPoint("mine", "switching", "group"))
after = state()
assert after[:2] == before[:2], (before, after)
initial = sys.modules["torch"].float32, "cpu", False, True, "highest", False
assert after[2] == (before[2] or initial), after[2]
print(fault)
"""
    warning, fault = child(source, importable).splitlines() if end else (child(source, importable), "")
    assert fault == ("SystemExit: 0" if end else "")
    for name in ("mine", "switching", "working directory", "PLUGIN_VARIABLE", "TUNEDGEMM_HOME", "default dtype", "undone"):
        assert name in warning


def test_an_import_that_changes_nothing_is_silent(importable, caplog):
    """Importing a library that sets filters of warnings gets no warning."""
    (importable / "quiet_plugin.py").write_text("import warnings\nwarnings.filterwarnings('ignore', module='mine')\nvalue = 7\n")
    before = torch.get_num_threads(), Path.cwd(), sys.stdout
    with caplog.at_level(logging.INFO):
        assert load(EntryPoint("mine", "quiet_plugin:value", "group")) == (7, "")
    assert (torch.get_num_threads(), Path.cwd(), sys.stdout) == before and not caplog.records


def test_a_broken_distribution_costs_itself(importable, caplog):
    """Metadata that cannot be read hides no other distribution, and the warning names its folder."""
    for name in ("sound", "broken"):
        info = importable / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[tunedgemm.backends]\n{name} = {name}\n")
    (importable / "broken-1.dist-info" / "METADATA").write_bytes(b"\xff")
    names = [entry.name for entry in entry_points(group="tunedgemm.backends")]
    assert "sound" in names and "broken" not in names
    assert str(importable) in caplog.text
