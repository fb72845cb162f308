"""Subprocess of online tuning: tune one shape within the timeout, and print why if that fails.

`tunedgemm.dispatch.online` starts it, so that the serving process does not load the tuner.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path

from tunedgemm.errors import UserError
from tunedgemm.shape import Shape
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.report import why_failed

#: Solutions to try per libtype: as many as AITER requests from hipBLASLt's heuristic.
CANDIDATES = 32
#: Fractions of the timeout: end of the race, limits of one compilation or bind and of one kernel,
#: and device time of the race.
_RACED, _COMPILED, _HUNG, _MEASURED = 1 / 2, 1 / 3, 1 / 10, 1 / 10


def child() -> None:
    """Tune the shape in the last command-line argument; print the reason last if that fails."""
    question = json.loads(sys.argv[-1])
    shape, seconds = Shape.from_dict(question["shape"]), float(question["seconds"])
    signal.alarm(math.ceil(seconds))  # in case the parent has died
    options = Options(
        libtype=question["libtype"], device=question["device"], candidates=CANDIDATES, budget=_RACED * seconds,
        timeout=_COMPILED * seconds, kernel_timeout=_HUNG * seconds, seconds=min(_MEASURED * seconds, Options().seconds),
    )  # fmt: skip
    try:
        report = tune(shape.op, [shape], Path(question["table"]), options)
    except UserError as error:
        reasons = [" ".join(str(error).split())]
    else:
        reasons = [why_failed(outcome) for outcome in report.failed]
        reasons += ["no device was left to tune it on"] if report.lost else ["the tuner took too long to start"] if report.unbegun else []
    sys.stdout.write("\n".join(["", *reasons, ""]))
