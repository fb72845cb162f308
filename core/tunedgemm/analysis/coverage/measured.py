"""What runs for the shapes, timed on the present device: heaviest first, until the seconds are spent."""

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

#: Of one shape: most rounds, and device seconds; a median of so many is within a few per cent.
_ROUNDS, _SECONDS = 31, 0.25
#: Seconds until calls count as hung, beside what slow ones take, and until binding does: there are other shapes to time.
_HUNG, _BINDING = 10.0, 300.0


def measure_all(entries: Sequence[Entry], tables: Mapping[str, Path], device: Device, seconds: float) -> tuple[list[Entry], str]:
    """Check and time what runs, in child processes, a worker for each op; a kernel that hangs costs its shape.

    Args:
        entries: what was explained.
        tables: the table above the layers, by op, where there is one.
        device: the present device.
        seconds: wall time; what is begun is finished. Infinite for all shapes.

    Returns:
        The entries in their order, those measured with their times and with what really ran; and
        what was done in words.

    Raises:
        UserError: the time makes no sense.
    """
    if not seconds > 0 or math.isnan(seconds):
        raise UserError(f"--measure takes seconds, more than 0 (got {seconds:g})")
    where = "cpu" if device.kind == "cpu" else str(max(device.index, 0))
    options = Options(device=where, iters=_ROUNDS, seconds=_SECONDS, kernel_timeout=_HUNG, timeout=_BINDING)
    asks: dict[str, Measuring] = {}
    found: dict[int, Entry] = {}
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        for place in sorted(range(len(entries)), key=lambda place: -entries[place].time):
            entry = entries[place]
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
            found[place] = _with(entry, served)
    timed = [entry for entry in found.values() if entry.us_from == "measured"]
    failed = [entry for place, entry in found.items() if entry.us_from != "measured"]
    said = f"measured {len(timed)} of {len(entries)} shapes"
    said += "".join(f"\n  {entry.shape}: {entry.why}" for entry in failed)
    return [found.get(place, entry) for place, entry in enumerate(entries)], said


def _with(entry: Entry, served: Served) -> Entry:
    """The entry with what was timed; what ran instead of the explained solution, as binding may refuse it, is what answers."""
    if not served.ok or not served.us or served.solution is None:
        return attrs.evolve(entry, why=f"{served.status} ({entry.why})")
    entry = attrs.evolve(entry, us=served.us, us_from="measured")
    if served.solution == entry.solution:
        return entry
    row_m = served.match.row.shape.m if served.match else -1
    return attrs.evolve(entry, how=word_of(served.origin, served.match), solution=served.solution, why=served.why, row_m=row_m)
