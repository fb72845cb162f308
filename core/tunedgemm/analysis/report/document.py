"""The document of a report: plain values, which the page shows and programs can read."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tunedgemm import __version__
from tunedgemm.analysis.coverage.result import layer_of
from tunedgemm.analysis.report.campaign import Campaign
from tunedgemm.analysis.report.entry import TIMED, UNKNOWN, Entry, gain_of
from tunedgemm.analysis.report.strips import Names, room_of_shape, strip
from tunedgemm.device import Device
from tunedgemm.libtypes import rank
from tunedgemm.text.printable import printable_line
from tunedgemm.timing import STATUSES
from tunedgemm.tuner.report import SLOWER, sizes
from tunedgemm.tuner.roofline import CEILINGS, LAUNCH_US, pace

#: Version of the document; it rises when a field goes or changes its meaning.
VERSION = 1


def document(campaign: Campaign, *, title: str = "") -> dict[str, Any]:
    """Return all that a page shows of a campaign, as JSON's types.

    Args:
        title: the heading; by default the names of the files.
    """
    entries = sorted(campaign.entries.values(), key=lambda entry: (entry.op.name, entry.shape.n, entry.shape.k, entry.shape.m))
    names, room = Names(), room_of_shape(len(entries))
    strips = [strip(entry, room, names) for entry in entries]
    devices = campaign.devices
    shapes = [_shape(number, entry, len(devices) > 1) for number, entry in enumerate(entries)]
    return {
        "schema": "tunedgemm.report",
        "version": VERSION,
        "title": printable_line(title or ", ".join(path.name for path, _ in campaign.files)),
        "made": {"by": __version__, "at": _now()},
        "files": [{"path": printable_line(str(path)), "kind": kind} for path, kind in campaign.files],
        "devices": [device_text(device) for device in devices],
        "libtypes": sorted({shape["libtype"] for shape in shapes if shape["libtype"]} | _tried(entries), key=rank),
        "versions": sorted(map(printable_line, campaign.versions)),
        "runs": [{"op": run.op, "version": run.version, "started": run.started, "identity": dict(run.identity)} for run in campaign.runs],
        "summary": _summary(entries),
        "shapes": shapes,
        "roofs": _roofs(entries),
        "search": _search(entries),
        "candidates": {"names": list(names.texts), "of": strips, "room": room},
        "faults": [{"path": printable_line(str(faults.path)), "count": faults.count, "named": faults.named} for faults in campaign.faults],
        "notes": [printable_line(note) for note in campaign.notes],
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def device_text(device: Device) -> str:
    """Return a device as text, also one that the files do not name."""
    return "a device that the files do not name" if device.gfx == UNKNOWN else str(device)


def _shape(number: int, entry: Entry, several: bool) -> dict[str, Any]:
    shape, winner, floor, torch_us = entry.shape, entry.winner, entry.floor_us, entry.torch_us
    flops, moved = entry.op.flops(shape), entry.op.bytes_moved(shape)
    us = winner.us if winner is not None else 0.0
    layer = printable_line(entry.layer) or sizes(layer_of(shape)).replace("M=0 ", "", 1)
    statuses = Counter(trial.status in TIMED for trial in entry.trials.values())
    return {
        "id": number,
        "op": shape.op,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "text": sizes(shape) + (f" on {entry.device.name or entry.device.gfx}" if several else ""),
        "layer": layer,
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
        "ties": entry.ties,
        "timed": statuses[True],
        "failed": statuses[False],
        "reason": printable_line(entry.reason) if winner is None else "",
    }


def _rounded(number: float) -> float | None:
    """Return a number to five significant digits, None for 0, which stands for an unknown one."""
    return float(f"{number:.5g}") if number else None


def _tried(entries: Sequence[Entry]) -> set[str]:
    return {trial.libtype for entry in entries for trial in entry.trials.values()}


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
        ceilings = CEILINGS.get(entry.device.name)
        if ceilings is not None:
            rate = pace(entry.shape, entry.device)
            roof = {"device": entry.device.name, "pace": rate, "bytes_s": ceilings[0], "flop_s": ceilings[1] * rate, "launch_us": LAUNCH_US}
            roofs[entry.device.name, rate] = roof
    return list(roofs.values())


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
        "statuses": STATUSES,
        "candidates": [{"libtype": printable_line(name), "status": status, "count": count} for (name, status), count in ranked],
        "won": [{"libtype": printable_line(name), "op": op, "count": count} for (name, op), count in sorted(won.items())],
        "seconds": {printable_line(activity): round(value, 3) for activity, value in seconds.items()},
    }
