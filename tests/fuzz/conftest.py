"""Run each reader on mutated files, briefly or for FUZZ_SECONDS, and hold it to one promise.

A reader returns values, or raises the package's error, which names the file. It raises nothing
else, does not hang, and takes memory in proportion to the file.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tunedgemm.testing.siblings import module_at

#: Seconds of one core for each reader; 0 for a few fixed examples.
SECONDS = float(os.environ.get("FUZZ_SECONDS") or 0)

#: Examples of a reader without FUZZ_SECONDS; of a batch with it.
EXAMPLES, BATCH = 25, 100

#: Most CPU seconds, and most megabytes of new memory, for one small file.
LONGEST, LARGEST = 3.0, 100

AITER = Path(__file__).parents[3] / "shared" / "aiter"
CORPUS = Path(__file__).with_name("corpus")


@pytest.fixture(scope="session")
def mutations() -> ModuleType:
    """Return the module of mutations."""
    return module_at(Path(__file__).with_name("mutations"))


class Hang(BaseException):
    """Raised in a reader that took too long; not an Exception, so that no reader handles it."""


def _interrupt(*_: object) -> None:
    raise Hang(f"took more than {LONGEST:g} s of CPU time")


def _guarded(check: Callable[[bytes], None], content: bytes) -> None:
    """Run a check with a limit of CPU time and of memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGVTALRM, _interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        check(content)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > LARGEST:
        raise AssertionError(f"took {grown} MB for a file of {len(content)} bytes")


Fuzz = Callable[..., None]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Iterator[Fuzz]:
    """Return a function that checks a reader on mutations of seeds, and counts the executions.

    Its *share* is the part of the reader's examples and seconds that this test takes.
    """
    count = 0

    def run(seeds: Sequence[bytes], mutate: Callable[..., bytes], check: Callable[[bytes], None], *, share: float = 1.0) -> None:
        nonlocal count

        def one(seed: int, changes: list[Any]) -> None:
            nonlocal count
            count += 1
            _guarded(check, mutate(seeds[seed], changes))

        for seed in seeds:  # imports and caches of the first file cost memory once
            check(seed)
        numbers = st.integers(0, (1 << 20) - 1)
        changes = st.lists(st.tuples(st.integers(0, 63), numbers, numbers), min_size=1, max_size=4)
        settings = hypothesis.settings(
            max_examples=max(3, round((BATCH if SECONDS else EXAMPLES) * share)), derandomize=not SECONDS, deadline=None, database=None,
            suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=True, print_blob=False,
        )  # fmt: skip
        test = settings(hypothesis.given(st.integers(0, len(seeds) - 1), changes)(one))
        end = time.process_time() + SECONDS * share
        while True:
            test() if not SECONDS else hypothesis.seed(time.time_ns())(test)()
            if time.process_time() >= end:
                return

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # pytest keeps every message
    yield run
    logging.disable(level)
    if SECONDS:
        terminal = request.config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f" {request.node.nodeid}: {count} executions")


@pytest.fixture(scope="session")
def corpus() -> Callable[..., list[bytes]]:
    """Return a function that lists the seeds of a reader: our small files, and AITER's where present."""

    def seeds(folder: str, *aiters: str) -> list[bytes]:
        ours = [path.read_bytes() for path in sorted((CORPUS / folder).glob("*")) if path.is_file()]
        theirs = [path.read_bytes() for pattern in aiters for path in sorted(AITER.glob(pattern))]
        return ours + [b"".join(content.splitlines(keepends=True)[:8]) for content in theirs]

    return seeds


@pytest.fixture
def guarded() -> Callable[..., None]:
    """Return a function that runs a check on one content with the limits of time and memory."""
    return _guarded
