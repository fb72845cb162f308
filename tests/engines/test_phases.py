"""Seconds of start-up by phase."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from tunedgemm_engines import phases


def test_a_phase_within_counts_once(monkeypatch) -> None:
    """The outer phase has its time without that of the inner one, also after an error."""
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(phases, "_seconds", {})
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(now))
    with pytest.raises(ValueError, match="inner"), phases.phase("outer"), phases.phase("inner"):
        raise ValueError("inner")
    assert phases.report() == "tunedgemm: 7.00 s of start-up: inner 2.00, outer 5.00"
    assert not phases._open.within


def test_threads_have_phases_of_their_own(monkeypatch) -> None:
    """A phase that another thread ends first leaves the time of this one's alone."""
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(phases, "_seconds", {})
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(now))
    with ThreadPoolExecutor(1) as other:
        theirs, ours = phases.phase("theirs"), phases.phase("ours")
        other.submit(theirs.__enter__).result()
        ours.__enter__()
        other.submit(theirs.__exit__, None, None, None).result()
        ours.__exit__(None, None, None)
    assert phases._seconds == {"theirs": 3.0, "ours": 6.0}


def test_the_report_is_what_the_benchmark_reads(monkeypatch) -> None:
    """benchmarks/engine_start.py finds the seconds and the phases by this form."""
    monkeypatch.setattr(phases, "_seconds", {"imports": 0.25, "our first calls": 1.5})
    assert re.findall(r"tunedgemm: ([\d.]+) s of start-up: (.*)", phases.report()) == [("1.75", "imports 0.25, our first calls 1.50")]
