"""Variables: one rule for bad values of every kind; none costs more than a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tunedgemm.analysis.doctor.environment import environment
from tunedgemm.backends.registry import Registry
from tunedgemm.dispatch.settings import Settings
from tunedgemm.process import variables
from tunedgemm.process.variables import KINDS, Kind, Switch, fault_of, read

#: Values that some kinds do not allow.
WORDS = (
    "tirton",
    "triton,foo",
    "enable",
    "-1",
    "0",
    "2",
    "01",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "٣",
    "²",
    "9" * 5000,
    "~nobody-here/x",
    ",",
    "'1'",
    "1;2",
    "\t",
)


@pytest.mark.parametrize("name", KINDS)
def test_reading_never_raises_and_doctor_names_what_is_bad(name, caplog):
    """A value is used, or is one warning, the default, and a fault of doctor's with value and remedy."""
    for word in WORDS:
        variables.warn_once.cache_clear()
        caplog.clear()
        given = {name: word}
        value = read(name, given)
        fault, remedy = fault_of(name, given)
        assert bool(fault) == any(name in record.message for record in caplog.records)
        if fault:
            some_known = name == "TUNEDGEMM_FALLBACK" and word == "triton,foo"  # its other names count
            assert value == (("triton", "foo") if some_known else KINDS[name].default)
            assert word.split(",")[-1] in fault
            assert remedy
        named = [found.thing for found in environment(Registry(()), given).faults]
        assert (name in named) == bool(fault)
        Settings.from_environment(given)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("2", True), ("01", True), ("-1", True), ("on", True), ("0", False), ("0.0", False)])
def test_any_number_but_0_switches_on(text, on):
    """AITER reads a switch as a number."""
    assert all(read(name, {name: text}) is on for name, kind in KINDS.items() if type(kind) is Switch)


def test_sizes_have_units():
    """A size is bytes or a power of 1024; one without a clear unit is a fault."""
    name = "TUNEDGEMM_DEQUANTISED_BYTES"
    sizes = {"": 0, "0": 0, "4096": 4096, "8GiB": 8 << 30, "1.5 mib": 3 << 19, "2TiB": 2 << 40, "512B": 512}
    assert {text: read(name, {name: text}) for text in sizes} == sizes
    for text in ("8GB", "8G", "-1", "GiB", "1e9", "8 GiB 2"):
        fault = f"must be a number of bytes, KiB, MiB, GiB or TiB, such as 8GiB (got {text!r})"
        assert (fault_of(name, {name: text})[0], read(name, {name: text})) == (fault, 0)


def test_a_bad_value_names_the_nearest_word():
    """The message has the variable's value and the word that is probably meant."""
    assert "did you mean triton?" in fault_of("TUNEDGEMM_FALLBACK", {"TUNEDGEMM_FALLBACK": "tirton"})[0]
    assert fault_of("TUNEDGEMM_FALLBACK", {"TUNEDGEMM_FALLBACK": "triton, torch,hipblaslt"}) == ("", "")


def test_signatures_stay_required_by_a_bad_word():
    """A mistake in the switch of a check does not switch the check off."""
    assert read("TUNEDGEMM_REQUIRE_SIGNED", {"TUNEDGEMM_REQUIRE_SIGNED": "enable"}) is True
    assert read("TUNEDGEMM_REQUIRE_SIGNED", {}) is False


CALL = """
import torch, tunedgemm
with torch.no_grad(), tunedgemm.patched():
    print(torch.nn.Linear(8, 8)(torch.randn(2, 8)).shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["tirton", "~nobody-here/x"])
def test_a_first_call_survives_bad_values_of_all_variables(word, tmp_path):
    """An import and a first call end well, and each bad value is at most one line."""
    bad = {name: word for name, kind in KINDS.items() if type(kind) is not Kind}
    given = {**os.environ, **bad, "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CALL]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "TUNEDGEMM_FALLBACK" in line]
    assert len(lines) <= 1
