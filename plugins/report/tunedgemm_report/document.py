"""The document of a report: plain values, which the page shows and programs can read."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from tunedgemm import __version__
from tunedgemm.analysis.results import SLOWER, STATUSES, TIMED, UNKNOWN, Entry, Findings, gain_of, printable_line, rank, sizes
from tunedgemm.plugin import Device

from tunedgemm_report.difference import VERDICTS, difference
from tunedgemm_report.strips import Names, room_of_shape, strip

#: Version of the document; it rises when a field goes or changes its meaning.
VERSION = 1
#: Files that a heading names.
_MOST_NAMES = 4


def document(
    findings: Findings,
    *,
    title: str = "",
    against: Findings | None = None,
    coverage: Mapping[str, Any] | None = None,
    ab: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return all that a page shows of some findings, as JSON's types.

    Args:
        title: the heading; by default the names of the files.
        against: earlier findings, with which these are compared.
        coverage: what `tunedgemm.analysis.results.covered` found.
        ab: what `tunedgemm_report.ab.read_ab` read of each file.
    """
    entries = sorted(findings.entries.values(), key=lambda entry: (entry.op.name, entry.shape.n, entry.shape.k, entry.shape.m))
    names, room = Names(), room_of_shape(len(entries))
    strips = [strip(entry, room, names) for entry in entries]
    devices = findings.devices
    read = [findings] if against is None else [against, findings]
    texts = _Texts.of([entry for each in read for entry in each.entries.values()])
    shapes = [_shape(number, entry, texts, len(devices) > 1) for number, entry in enumerate(entries)]
    won = {shape["libtype"] for shape in shapes if shape["libtype"]}
    return {
        "schema": "tunedgemm.report",
        "version": VERSION,
        "title": printable_line(title) or _title(findings, against),
        "made": {"by": __version__, "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")},
        "files": [{"path": printable_line(str(path)), "kind": kind} for each in read for path, kind in each.files],
        "devices": [device_text(device) for device in devices],
        "shared": {op: " ".join(sorted(fields)) for op, fields in texts.shared.items() if fields},
        "libtypes": sorted(won | {trial.libtype for entry in entries for trial in entry.trials.values()}, key=rank),
        "versions": sorted(map(printable_line, findings.versions)),
        "runs": [{"op": run.op, "version": run.version, "started": run.started, "identity": dict(run.identity)} for run in findings.runs],
        "summary": _summary(entries),
        "shapes": shapes,
        "roofs": (roofs := _roofs(entries)),
        "roof_lines": _roof_lines(roofs, shapes),
        "search": _search(entries),
        "candidates": {"names": list(names.texts), "of": strips, "room": room},
        "compare": None if against is None else _compared(against, findings, texts),
        "coverage": coverage,
        "ab": list(ab),
        "faults": [
            {"path": printable_line(str(fault.path)), "count": fault.count, "named": fault.named} for each in read for fault in each.faults
        ],
        "notes": list(dict.fromkeys(printable_line(note) for each in read for note in each.notes)),
    }


def _title(findings: Findings, against: Findings | None) -> str:
    """Return the names of the files, and of those that they are compared with."""
    if against is None:
        return _named(findings)
    names = _named(findings), _named(against)
    if names[0] == names[1]:  # of different folders
        names = _named(findings, whole=True), _named(against, whole=True)
    return " against ".join(names)


def _named(findings: Findings, *, whole: bool = False) -> str:
    """Return the names, or whole paths, of the tables; without tables, of the other files."""
    tables = [path for path, kind in findings.files if kind == "table"]
    names = [str(path) if whole else path.name for path in tables or [path for path, _ in findings.files]]
    return printable_line(", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""))


def device_text(device: Device) -> str:
    """Return a device as text, also one that the files do not name."""
    return "a device that the files do not name" if device.gfx == UNKNOWN else str(device)


@attrs.frozen
class _Texts:
    """Texts of shapes, without the fields that all shapes of an op share, apart from sizes and dtypes.

    Attributes:
        shared: op to these fields, as ``name=value``.
    """

    shared: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> _Texts:
        """Find the fields that all shapes of an op share; a single shape keeps all."""
        fields: dict[str, list[frozenset[str]]] = {}
        for entry in entries:
            words = sizes(entry.shape).split()[3:]
            fields.setdefault(entry.op.name, []).append(frozenset(word for word in words if "=" in word))
        return cls({op: frozenset.intersection(*each) if len(each) > 1 else frozenset() for op, each in fields.items()})

    def shape(self, entry: Entry) -> str:
        """Return a shape as text."""
        return " ".join(word for word in sizes(entry.shape).split() if word not in self.shared[entry.op.name])

    def layer(self, entry: Entry) -> str:
        """Return the names of a shape's layers, else the shape without its M."""
        return printable_line(entry.layer) or self.shape(entry).partition(" ")[2]


def _shape(number: int, entry: Entry, texts: _Texts, several: bool) -> dict[str, Any]:
    shape, winner, floor, torch_us = entry.shape, entry.winner, entry.floor_us, entry.torch_us
    flops, moved = entry.op.flops(shape), entry.op.bytes_moved(shape)
    us = winner.us if winner is not None else 0.0
    statuses = Counter(trial.status in TIMED for trial in entry.trials.values())
    return {
        "id": number,
        "op": shape.op,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "text": texts.shape(entry) + (f" on {_place(entry.device)}" if several else ""),
        "layer": texts.layer(entry),
        "device": device_text(entry.device),
        "calls": entry.calls,
        "winner": printable_line(winner.solution) if winner is not None else "",
        "libtype": printable_line(winner.libtype) if winner is not None else "",
        "us": _rounded(us),
        "noise": round(winner.noise, 4) if winner is not None else 0.0,
        "torch_us": _rounded(torch_us),
        "gain": _rounded(entry.gain),
        "floor_us": _rounded(floor),
        "over_floor": _rounded(us / floor) if us and floor else None,
        "lost_us": _rounded(entry.weight * max(us - floor, 0.0)) if us and floor else None,
        "tflops": _rounded(flops / us / 1e6) if us else None,
        "torch_tflops": _rounded(flops / torch_us / 1e6) if torch_us else None,
        "floor_tflops": _rounded(flops / floor / 1e6) if floor else None,
        "intensity": _rounded(flops / moved) if moved else None,
        "time_us": _rounded(entry.weight * (torch_us or us)),
        "ties": entry.ties,
        "timed": statuses[True],
        "failed": statuses[False],
        "reason": printable_line(entry.reason) if winner is None else "",
    }


def _rounded(number: float) -> float | None:
    """Return a number to five significant digits, None for 0, which stands for an unknown one."""
    return float(f"{number:.5g}") if number else None


def _summary(entries: list[Entry]) -> dict[str, Any]:
    """Return the figures of the first screen."""
    gain = gain_of(entries)
    gains = [entry.gain for entry in entries if entry.gain]
    over = [entry.winner.us / floor for entry in entries if entry.winner is not None and entry.winner.us and (floor := entry.floor_us)]
    weighted = any(entry.calls for entry in entries)
    return {
        "shapes": len(entries),
        "without_winner": sum(entry.winner is None for entry in entries),
        "weighted": weighted,
        "gain": None if gain is None else {"shapes": gain.shapes, "mean": _rounded(gain.mean), "time": _rounded(gain.time)},
        "faster": sum(each > 1 / SLOWER for each in gains),
        "equal": sum(SLOWER <= each <= 1 / SLOWER for each in gains),
        "slower": sum(each < SLOWER for each in gains),
        "floor": {"median": _rounded(statistics.median(over)), "worst": _rounded(max(over)), "shapes": len(over)} if over else None,
    }


def _roofs(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the roof of each device and rate of products: bytes/s, FLOP/s and the launch's share."""
    roofs: dict[tuple[str, float], dict[str, Any]] = {}
    for entry in entries:
        if (roof := entry.roof) is not None:
            roofs[entry.device.name, roof.pace] = {"device": entry.device.name, **attrs.asdict(roof)}
    return list(roofs.values())


def _roof_lines(roofs: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of each roof over the range of the shapes."""
    spans = [shape["intensity"] for shape in shapes if shape["intensity"]]
    lines = []
    for number, roof in enumerate(roofs):
        knee = roof["flop_s"] / roof["bytes_s"]
        for intensity in sorted({min(spans), *([knee] if min(spans) < knee < max(spans) else []), max(spans)}):
            tflops = min(roof["bytes_s"] * intensity, roof["flop_s"]) / 1e12
            lines.append({"roof": number, "intensity": intensity, "tflops": tflops})
    return lines


def _compared(first: Findings, second: Findings, texts: _Texts) -> dict[str, Any]:
    """Return the changes from the first side to the second."""
    found = difference(first, second)
    mean, time = found.gain
    several = len({*first.devices, *second.devices}) > 1
    rows = [
        {
            "op": change.entry.op.name,
            "m": change.entry.shape.m,
            "text": texts.shape(change.entry) + (f" on {_place(change.entry.device)}" if several and not found.across else ""),
            "layer": texts.layer(change.entry),
            "calls": change.weight,
            "verdict": change.verdict,
            "ratio": _rounded(change.ratio),
            **_side("first", change.first),
            **_side("second", change.second),
        }
        for change in found.changes
    ]
    return {
        "first": _named(first),
        "second": _named(second),
        "first_devices": [device_text(device) for device in first.devices],
        "across": found.across,
        "verdicts": VERDICTS,
        "counts": found.counts,
        "mean": _rounded(mean),
        "time": _rounded(time),
        "rows": rows,
    }


def _side(name: str, entry: Entry | None) -> dict[str, Any]:
    winner = entry.winner if entry is not None else None
    if winner is None:
        return {f"{name}_winner": "", f"{name}_us": None, f"{name}_noise": None}
    return {f"{name}_winner": printable_line(winner.solution), f"{name}_us": _rounded(winner.us), f"{name}_noise": round(winner.noise, 4)}


def _place(device: Device) -> str:
    return device.name or device.gfx


def _search(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the cost of the search: candidates by backend and status, and seconds by activity."""
    counts = Counter((trial.libtype, trial.status) for entry in entries for trial in entry.trials.values())
    seconds: Counter[str] = Counter()
    for entry in entries:
        for activity, value in entry.seconds.items():
            seconds[activity] += value  # type: ignore[assignment]  # a Counter of floats
    won = Counter((entry.winner.libtype, entry.op.name) for entry in entries if entry.winner is not None)
    order = {status: index for index, status in enumerate(STATUSES)}
    ranked = sorted(counts.items(), key=lambda item: (rank(item[0][0]), order[item[0][1]]))
    return {
        "rows": _cost_rows(counts),
        "candidates": [{"libtype": printable_line(name), "status": status, "count": count} for (name, status), count in ranked],
        "won": [{"libtype": printable_line(name), "op": op, "count": count} for (name, op), count in sorted(won.items())],
        "seconds": {printable_line(activity): round(value, 3) for activity, value in seconds.items()},
    }


def _cost_rows(counts: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Return the candidates by backend, in three kinds of status."""
    totals: Counter[tuple[str, str]] = Counter()
    for (libtype, status), count in counts.items():
        totals[libtype, status if status in TIMED else "refused or failed"] += count
    libtypes = sorted({libtype for libtype, _ in totals}, key=rank)
    kinds = [*TIMED, "refused or failed"]
    return [
        {
            "libtype": printable_line(libtype),
            "status": kind,
            "count": totals[libtype, kind],
            "order": libtypes.index(libtype),
            "rank": place,
        }
        for libtype in libtypes
        for place, kind in enumerate(kinds)
        if totals[libtype, kind]
    ]
