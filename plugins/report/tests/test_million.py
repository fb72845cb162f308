"""A million timings become a page in seconds and a few megabytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import TRIALS, WIDE, log_lines, trial_line

#: Shapes, and solutions of each.
MANY = {"shapes": (5000, 200), "solutions": (50, 20_000)}
SECONDS, MEGABYTES, MEMORY = 20.0, 20.0, 1 << 30

PROGRAM = """
import pathlib, resource, sys, time
from tunedgemm.cli import main
start = time.process_time()
assert main(["report", sys.argv[1], "-o", sys.argv[2]]) == 0
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, pathlib.Path(sys.argv[2]).stat().st_size)
"""


def write(path: Path, shapes: int, solutions: int) -> None:
    """Write a log: torch, then candidates; a tenth passed, a tenth were refused for different reasons."""
    torch, fast, *_ = (trial_line(timing) for timing in TRIALS[WIDE])
    refused = json.loads(trial_line(TRIALS[WIDE][3]))
    with path.open("w") as file:
        file.write(log_lines({})[0])
        for number in range(shapes):
            sizes = f'"m": {1 << number % 13}, "n": {512 + 64 * (number // 13)}'
            file.write(torch.replace('"m": 64, "n": 2048', sizes))
            for index in range(1, solutions):
                line = json.dumps({**refused, "detail": f"K must be a multiple of {index}"}) + "\n" if index % 10 == 1 else fast
                line = (
                    line.replace('"m": 64, "n": 2048', sizes).replace('"fast"', f'"kernel_{index}"').replace('"bad"', f'"kernel_{index}"')
                )
                status = "ok" if index % 10 == 0 else "screened"
                file.write(line.replace('"status": "ok", "us": 8.0', f'"status": "{status}", "us": {8.0 + index * 7919 % 1000 / 100}'))


@pytest.mark.nightly
@pytest.mark.parametrize(("shapes", "solutions"), MANY.values(), ids=MANY)
def test_a_million_timings(tmp_path, child, shapes, solutions):
    """Take less than 20 seconds of a core, a gigabyte of memory, and 20 MB of page."""
    log, out = tmp_path / "tuned.trials.jsonl", tmp_path / "report.html"
    write(log, shapes, solutions)

    printed = child(f"import sys\nsys.argv = ['', {str(log)!r}, {str(out)!r}]\n{PROGRAM}").splitlines()

    assert f"{shapes:,} shapes, 1,000,000 timings" in printed[0]
    seconds, memory, size = map(float, printed[1].split())
    assert seconds < SECONDS and memory < MEMORY and size < MEGABYTES * 1e6
    print(f"{seconds:.1f} s, {memory / 1e6:.0f} MB, page {size / 1e6:.1f} MB")
    assert out.read_text().startswith("<!doctype html>\n")
