"""docs/verified.md and the bring-up kit name each other, and a report settles lines of the page."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.libtypes import owners
from tunedgemm.testing.bring_up.checks import CHECKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "verified.md").read_text()
RUN = "| asm | never run (`kit kernels+outputs asm _ZN5aiter on gfx942 gfx950`) | x |\n| any | never run here (`kit tune ck on gfx`) |\n"


@pytest.fixture
def script(as_module) -> ModuleType:
    return as_module(ROOT / ".ci" / "verified.py")


def result(check: str, status: str = "ok", libtype: str = "asm", **measures: Any) -> dict[str, Any]:
    name = f"{check} {libtype} a16w16 M=1"
    return {"id": name, "check": check, "libtype": libtype, "status": status, "kernel": "k", "detail": "why", "measures": measures}


def report(*results: dict[str, Any], gfx: str = "gfx942") -> dict[str, Any]:
    device = {"gfx": gfx, "cu_num": 304, "name": "amd-instinct-mi300x"}
    versions = {"torch's GPU runtime": "ROCm 7.1.52802-26aae437f6"}
    return {"device": device, "versions": versions, "libraries": {}, "date": "2026-05-08", "results": list(results)}


WHOLE = (result("kernels", kernels=["_ZN5aiter9"]), result("outputs"), result("tune", libtype="", lists={"ck": {}}))


def test_the_two_lists_are_equal(script: ModuleType) -> None:
    """Each line that says "never run" names a check or why there is none; each check is named."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "never run" in line and "| never run |\n" not in line]
    lines = [line for line in rows if not line.startswith("| feature")]
    assert len(lines) > 30
    assert not [line[:80] for line in lines if not script.marks(line) and "(no kit: " not in line]
    named = {check for mark in script.marks(PAGE) for check in mark.checks}
    assert named == {check.name for check in CHECKS}
    assert PAGE.count("`kit ") == len(script.marks(PAGE)), "a mark has another form"
    assert {mark.libtype for mark in script.marks(PAGE)} - {""} <= {*owners(), "torch"}


def test_a_report_settles_lines(script: ModuleType) -> None:
    """Lines name device, runtime, date and number of checks; other architectures stay."""
    assert script.updated(RUN, report(*WHOLE)).splitlines() == [
        "| asm | run: MI300X, ROCm 7.1, 8 May 2026, 2 checks; elsewhere never run (`kit kernels+outputs asm _ZN5aiter on gfx950`) | x |",
        "| any | run: MI300X, ROCm 7.1, 8 May 2026, 1 checks (`kit tune ck on gfx`) |",
    ]


@pytest.mark.parametrize(
    "results",
    [
        (result("outputs"),),
        (result("outputs"), result("kernels", kernels=["tunedgemm_bf16"])),
        (*WHOLE[:2], result("outputs", "wrong")),
        (result("kernels", "refused"), result("outputs")),
        (result("kernels", kernels=["_ZN5aiter9"], libtype="ck"), result("outputs", libtype="ck")),
    ],
    ids=["one check of two", "another kernel", "a fault", "nothing ran", "another backend"],
)
def test_what_settles_no_line(script: ModuleType, results: tuple[dict[str, Any], ...]) -> None:
    """A check that did not run, another kernel or a fault leaves the line."""
    line = RUN.splitlines()[0]
    assert script.updated(line, report(*results)) == line
    assert script.updated(line, report(*WHOLE, gfx="gfx90a")) == line


def test_issues(script: ModuleType) -> None:
    """Faults of one backend, check and kind are one issue, with kernels and the command to repeat them."""
    found = dict(script.issues(report(*WHOLE, result("outputs", "hung"), result("outputs", "hung"), result("formats", "wrong", ""))))
    assert list(found) == ["asm: hung in check outputs on gfx942", "Bring-up: wrong in check formats on gfx942"]
    text = found["asm: hung in check outputs on gfx942"]
    assert text.count("- `outputs asm a16w16 M=1`, kernel `k`: why") == 2 and "MI300X, ROCm 7.1, 8 May 2026" in text
    assert "`tunedgemm doctor --bring-up --libtype asm -o again.json`" in text and not re.search("None|{", text)
