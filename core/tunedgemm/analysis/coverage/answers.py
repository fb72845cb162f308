"""The answer to a shape: dispatch's explanation, as one word and a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from tunedgemm.analysis.coverage.captured import Replays
from tunedgemm.analysis.coverage.known import KnownTimes
from tunedgemm.analysis.coverage.result import Entry, Passed
from tunedgemm.device import Device
from tunedgemm.dispatch.choice import Explanation
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.offer import Offer
from tunedgemm.ops.op import Op
from tunedgemm.table.match import Match
from tunedgemm.table.untuned import Untuned
from tunedgemm.tuner.roofline import guess_us

_ORIGINS = {"unbiased": "unbiased", "heuristic": "heuristic", "builtin": "fallback"}
#: prefix of the reasons of `choice.examine`, before the backend's fault
_LIBTYPE = re.compile(r"^libtype '[^']*': ")


def described(device: Device) -> Device:
    """Return the device as a described one: dispatch chooses by static limits and binds nothing."""
    return attrs.evolve(device, index=-1)


def entry_of(dispatcher: Dispatcher, device: Device, call: Untuned, replays: Replays, times: KnownTimes) -> Entry:
    """Return the solution that serves a captured shape, with the best available time of a call."""
    explanation = dispatcher.explain(call.shape, device)
    offer, match = explanation.offer, explanation.offer.match
    entry = Entry(
        shape=call.shape,
        count=call.count,
        graph=call.graph,
        calls=call.count + call.graph * replays.at(call.shape.m),
        how="refused" if explanation.refused else word_of(offer.origin, match),
        solution=offer.solution,
        us=0.0,
        us_from="guess",
        why=explanation.refused or offer.why,
        row_m=match.row.shape.m if match and not explanation.refused else -1,
        passed=tuple(_skipped_rows(explanation)),
        layer=call.layer,
        table_layer="" if explanation.refused else offer.table_layer,
        libver="" if explanation.refused else offer.libver,
    )
    return _add_times(entry, dispatcher.op, offer, device, times)


def word_of(origin: str, match: Match | None) -> str:
    """Return the word of `WORDS` for a row's match, or without a row for an `Offer.origin`."""
    if match is None:
        return _ORIGINS[origin]
    return match.granularity if match.same_device else "other device"


def _skipped_rows(explanation: Explanation) -> Iterator[Passed]:
    """Yield the skipped rows, and for a refused shape the last row tried."""
    over = explanation.passed_over
    for offer, reason in (*over, (explanation.offer, explanation.refused)) if explanation.refused else over:
        if offer.match is not None:
            yield Passed(offer.solution, word_of(offer.origin, offer.match), _LIBTYPE.sub("", reason))


def _add_times(entry: Entry, op: Op, offer: Offer, device: Device, times: KnownTimes) -> Entry:
    """Add the time of a call from its best source, and the best known solution."""
    shape, match = entry.shape, offer.match if entry.how != "refused" else None
    trial = times.of(op, shape, entry.solution) if entry.how != "refused" else None
    us, source = guess_us(op, shape, device), "guess"
    if entry.how == "exact" and match is not None and match.row.valid:
        us, source = match.row.us, "row"
    elif trial is not None:
        us, source = trial.us, trial.source
    elif match is not None and match.same_device and match.row.valid and match.row.shape.m > shape.m:
        us, source = match.row.us, "padded row"
    entry = attrs.evolve(entry, us=us, us_from=source)
    best = times.best(op, shape)
    return attrs.evolve(entry, best_us=best[1].us, best=f"{best[0]} ({best[1].source}, {best[1].path.name})") if best else entry
