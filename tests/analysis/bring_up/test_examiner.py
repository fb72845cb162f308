"""The child of the bring-up kit: what hangs or dies is named, and the next question gets a new child."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from tunedgemm.analysis.bring_up.examiner import Examiner
from tunedgemm.errors import UserError

#: Answers by the item's name.
CHILD = """
import json, os, sys, time
def say(**line): print(json.dumps(line), flush=True)
for line in sys.stdin:
    name = json.loads(line)["id"]
    if name == "silent": os._exit(7)
    if name in ("plain", "last"): say(answer={"status": "ok", "pid": os.getpid()})
    if name == "last": time.sleep(0.5); os._exit(1)
    say(at=["launch" if name != "slow" else "compile", "kernel 7", 0.3 if name != "patient" else 60])
    if name == "dies": print("first\\nsegment 7 fell over", file=sys.stderr); os.abort()
    if name == "exits": os._exit(3)
    if name != "plain": time.sleep(60)
"""


@pytest.fixture
def examiner():
    made = Examiner([sys.executable, "-c", CHILD])
    yield made
    made.stop()


def ask(examiner: Examiner, name: str, seconds: float = 30.0):
    return examiner.ask({"id": name}, time.monotonic() + seconds)


def test_one_child_answers_until_it_hangs(examiner: Examiner) -> None:
    """A launch that exceeds its time hangs, and the next question is answered by another process."""
    first = ask(examiner, "plain")
    hung = ask(examiner, "hangs")
    assert (hung["status"], hung["kernel"]) == ("hung", "kernel 7") and "killed" in hung["detail"]
    assert ask(examiner, "plain")["pid"] != first["pid"]
    assert not Path(f"/proc/{first['pid']}").exists() or os.getpid() == 1


def test_a_death_is_named_with_its_last_words(examiner: Examiner) -> None:
    """A signal and an exit code are crashes in the announced step."""
    assert ask(examiner, "dies") == {
        "status": "crashed", "detail": "SIGABRT in step launch: segment 7 fell over", "kernel": "kernel 7", "measures": {},
    }  # fmt: skip
    assert ask(examiner, "exits")["detail"] == "exit code 3 in step launch"


def test_a_child_that_ends_after_its_answer_is_replaced(examiner: Examiner) -> None:
    """A child whose context is lost ends while the next question waits for it; a new one answers."""
    first = ask(examiner, "last")
    assert first["status"] == "ok"
    assert ask(examiner, "plain")["pid"] != first["pid"]


def test_a_slow_compiler_is_no_fault(examiner: Examiner) -> None:
    """A step other than a launch that exceeds its time is late."""
    assert ask(examiner, "slow")["status"] == "late"


def test_the_end_of_the_budget_is_no_verdict(examiner: Examiner) -> None:
    """A launch that the budget cuts off has no result."""
    assert ask(examiner, "patient", 1.0) is None


def test_a_child_that_does_not_start_ends_the_run(examiner: Examiner) -> None:
    """A process that ends before its first line says nothing of the check."""
    with pytest.raises(UserError, match=r"a new process: does not open the device \(got exit code 7\); reset the device"):
        ask(examiner, "silent")
