"""Time the solutions that run on the present device, heaviest first, until the seconds are spent."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Side
from tunedgemm.analysis.compare.verdict import Served
from tunedgemm.analysis.coverage.answers import word_of
from tunedgemm.analysis.coverage.result import Entry
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.tuner.trial import Options

_log = logging.getLogger("tunedgemm")

#: Most rounds and device seconds of one shape; their median is within a few per cent.
_ROUNDS, _SECONDS = 31, 0.25
#: Seconds until calls count as hung, in addition to the time of slow calls, and until binding does.
#: Both are short, because other shapes wait.
_HUNG, _BINDING = 10.0, 300.0


def measure_all(entries: Sequence[Entry], tables: Mapping[str, Path], device: Device, seconds: float) -> tuple[list[Entry], str]:
    """Check and time entries in a worker process for each op; a kernel that hangs costs its shape.

    Args:
        entries: the entries, as explained by dispatch.
        tables: the table above the layers, by op, if there is one.
        device: the present device.
        seconds: wall time; a shape that has begun is finished. Infinite for all shapes.

    Returns:
        The entries in their order, measured ones with their times and the solutions that ran; and
        a note on the number of measured shapes.

    Raises:
        UserError: *seconds* is not positive.
    """
    if not seconds > 0 or math.isnan(seconds):
        raise UserError(f"--measure: expected a positive number of seconds (got {seconds:g})")
    where = "cpu" if device.kind == "cpu" else str(max(device.index, 0))
    options = Options(device=where, iters=_ROUNDS, seconds=_SECONDS, kernel_timeout=_HUNG, timeout=_BINDING)
    asks: dict[str, Measuring] = {}
    measured: dict[int, Entry] = {}
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        for index in sorted(range(len(entries)), key=lambda index: -entries[index].time):
            entry = entries[index]
            if time.monotonic() > deadline:
                break
            if not entry.calls or entry.how == "refused":
                continue
            if entry.shape.op not in asks:
                table = tables.get(entry.shape.op)
                side = Side("now", swap=(table, table)) if table else Side("now")
                asks[entry.shape.op] = stack.enter_context(measuring(entry.shape.op, [side], options))
            served = asks[entry.shape.op].served(entry.shape)
            _log.info("%s: %.2f us, %s", served.shape, served.us, served.status)
            measured[index] = _with(entry, served)
    timed = [entry for entry in measured.values() if entry.us_from == "measured"]
    failed = [entry for entry in measured.values() if entry.us_from != "measured"]
    note = f"measured {len(timed)} of {len(entries)} shapes"
    note += "".join(f"\n  {entry.shape}: {entry.why}" for entry in failed)
    return [measured.get(index, entry) for index, entry in enumerate(entries)], note


def _with(entry: Entry, served: Served) -> Entry:
    """Add the measured time and the solution that ran, which differs if binding refused the explained one."""
    if not served.ok or not served.us or served.solution is None:
        return attrs.evolve(entry, why=f"{served.status} ({entry.why})")
    entry = attrs.evolve(entry, us=served.us, us_from="measured")
    if served.solution == entry.solution:
        return entry
    row_m = served.match.row.shape.m if served.match else -1
    return attrs.evolve(entry, how=word_of(served.origin, served.match), solution=served.solution, why=served.why, row_m=row_m)
