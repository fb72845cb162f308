"""The candidates of each shape, as few as a page can hold, and the reasons of those without a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from tunedgemm.analysis.results import BASELINE, TIMED, Entry, Trial, printable_line

#: Candidates of all shapes together, and of one shape, that a page holds.
MOST, MOST_OF_SHAPE = 60_000, 400
#: Fewest of a shape, whatever the number of shapes.
_LEAST_OF_SHAPE = 12
#: Share of a shape's candidates that are its fastest; the others stand for equal steps of the rest.
_FASTEST = 0.5
#: Most kinds of failures of a shape, and most names of one kind, that a page lists; of many shapes
#: it lists the fewest.
_MOST_KINDS, _FEWEST_KINDS, _MOST_NAMES = 12, 3, 3


@attrs.define
class Names:
    """Texts that repeat, each once: the page refers to them by number."""

    texts: dict[str, int] = attrs.field(factory=dict)

    def number(self, text: str) -> int:
        """Return the number of a text."""
        return self.texts.setdefault(text, len(self.texts))


def room_of_shape(shapes: int) -> int:
    """Return how many candidates of each shape a page of so many shapes holds."""
    return max(_LEAST_OF_SHAPE, min(MOST_OF_SHAPE, MOST // max(shapes, 1)))


def strip(entry: Entry, room: int, names: Names) -> dict[str, Any]:
    """Return the candidates of a shape as columns: name, time and noise, and those left out.

    The winner, torch's call and the fastest are always among them. The others are taken in equal
    steps of their rank, so that the shape of the distribution stays.
    """
    timed = sorted((trial.us, name) for name, trial in entry.trials.items() if trial.status in TIMED and trial.us > 0.0)
    winner = entry.winner
    needed = {BASELINE, winner.solution} if winner is not None else {BASELINE}
    kept = _thinned(timed, room, needed)
    trials = [entry.trials[name] for _, name in kept]
    return {
        "name": [names.number(printable_line(name)) for _, name in kept],
        "libtype": [names.number(trial.libtype) for trial in trials],
        "us": [round(trial.us, 3) for trial in trials],
        "noise": [round(trial.noise, 4) for trial in trials],
        "rough": "".join("0" if trial.status == "ok" else "1" for trial in trials),
        "left": len(timed) - len(kept),
        "failed": _failures(((name, trial) for name, trial in entry.trials.items() if trial.status not in TIMED), room, names),
    }


def _thinned(timed: Sequence[tuple[float, str]], room: int, needed: set[str]) -> list[tuple[float, str]]:
    if len(timed) <= room:
        return list(timed)
    first = int(room * _FASTEST)
    step = (len(timed) - first) / (room - first)
    chosen = {*range(first), *(first + int(index * step) for index in range(room - first)), len(timed) - 1}
    chosen |= {index for index, (_, name) in enumerate(timed) if name in needed}
    return [timed[index] for index in sorted(chosen)]


def _failures(failed: Iterable[tuple[str, Trial]], room: int, names: Names) -> list[dict[str, Any]]:
    """Return the refused and failed solutions by status, backend and reason, the most frequent first."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name, trial in failed:
        kinds.setdefault((trial.status, trial.libtype, " ".join(trial.detail.split())[:200]), []).append(name)
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    kept = max(_FEWEST_KINDS, _MOST_KINDS * room // MOST_OF_SHAPE)
    most = _MOST_NAMES if kept > _FEWEST_KINDS else 1
    shown = [
        {
            "status": status,
            "libtype": names.number(printable_line(libtype)),
            "reason": names.number(printable_line(detail) or "no reason was recorded"),
            "count": len(found),
            "names": [names.number(printable_line(name)) for name in found[:most]],
        }
        for (status, libtype, detail), found in ordered[:kept]
    ]
    if rest := ordered[kept:]:
        reason = names.number(f"{len(rest)} further reasons")
        count = sum(len(found) for _, found in rest)
        shown.append({"status": "", "libtype": names.number(""), "reason": reason, "count": count, "names": []})
    return shown
