"""Evidence in trial logs for the rows of a table: gains over torch, and the provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import attrs

from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.published import Provenance
from tunedgemm.table.row import Row, key_shape
from tunedgemm.tuner.log import Line, read_log

#: A row's key: gfx, cu_num, device and shape.
Key = tuple[str, int, str, Shape]

_BASELINE = Solution(BUILTIN, "native")
#: Fields of a run's identity that name distributions read ``LIBTYPE of DISTRIBUTION``.
_OF = " of "


@attrs.define
class Evidence:
    """Evidence in trial logs for the rows of a table.

    Attributes:
        runs: headers of the runs that timed solutions for these rows, by id.
        timed: number of timed candidates, by row key.
        noises: relative noise of the row's time, by row key.
        baselines: microseconds and error ratio of torch, by row key.
    """

    runs: dict[str, Line] = attrs.field(factory=dict)
    timed: Counter[Key] = attrs.field(factory=Counter)
    noises: dict[Key, float] = attrs.field(factory=dict)
    baselines: dict[Key, tuple[float, float]] = attrs.field(factory=dict)

    def gain(self, row: Row) -> float | None:
        """Return a row's speed-up over torch minus 1; None if torch was not timed."""
        baseline = self.baselines.get(row.key)
        return baseline[0] / row.us - 1.0 if baseline and row.valid else None

    def of_torch(self, row: Row) -> Row:
        """Replace a row's solution by torch's, with its logged time.

        It has no library version, since torch's solution is the same in all versions.
        """
        us, err_ratio = self.baselines[row.key]
        return attrs.evolve(row, solution=_BASELINE, us=us, err_ratio=err_ratio, libver="")


def evidence(op: Op, rows: Iterable[Row], logs: Sequence[Path]) -> Evidence:
    """Collect the evidence for rows from trial logs; later lines replace earlier ones.

    Raises:
        TableError: a log cannot be read.
    """
    solutions = {row.key: row.solution for row in rows}
    known: dict[str, Key | None] = {}
    found = Evidence()
    headers: dict[str, Line] = {}
    for entry in (entry for log in logs for entry in read_log(log)):
        if entry.kind == "run":
            headers[entry.run] = entry
        if entry.kind != "trial" or not entry.fields.get("us"):
            continue
        subject = entry.subject
        if subject not in known:
            known[subject] = _key(entry, op, solutions)
        if (key := known[subject]) is None:
            continue
        found.timed[key] += 1
        if entry.run in headers:
            found.runs[entry.run] = headers[entry.run]
        if entry.fields["status"] == "ok" and (solution := entry.solution("solution")) is not None:
            if solution == _BASELINE:
                found.baselines[key] = entry.fields["us"], entry.fields.get("err_ratio") or 0.0
            if solution == solutions[key]:
                found.noises[key] = entry.fields.get("noise", 0.0)
    return found


def _key(entry: Line, op: Op, wanted: Mapping[Key, Solution]) -> Key | None:
    """Return the row key of a trial; None if no row has it."""
    if entry.fields["shape"].get("op") != op.name or "gfx" not in entry.fields:
        return None
    device, shape = entry.where()
    key = device.gfx, device.cu_num, device.name, key_shape(shape)
    return key if key in wanted else None


def provenance(op: Op, rows: Sequence[Row], found: Evidence, **further: str) -> Provenance:
    """Return the provenance of rows from their trial logs, without host names and paths.

    Args:
        op: the op of the table.
        rows: the rows to publish, at least one.
        found: the evidence for the rows.
        further: further facts.
    """
    headers = [header.fields for header in found.runs.values()]
    identities = [identity for header in headers if isinstance(identity := header.get("identity"), dict)]
    days = sorted(str(header["started"])[:10] for header in headers if header.get("started"))
    stated = {(name.partition(_OF)[2], str(version)) for identity in identities for name, version in identity.items() if _OF in name}
    drivers = (f"{maker} {version}" for header in headers for maker, version in dict(header.get("drivers") or {}).items())
    noises = [noise for row in rows if (noise := found.noises.get(row.key)) is not None]
    timed = sum(found.timed[row.key] for row in rows)
    facts = {
        "device": _listed(str(Device(row.gfx, row.cu_num, row.device)) if row.gfx else "any device" for row in rows),
        "driver": _listed(drivers),
        "torch": _listed(str(identity.get("torch", "")) for identity in identities),
        "tuner": _listed(f"tunedgemm {header.get('version', '')}" for header in headers),
        "plugins": _listed(" ".join(plugin) for plugin in stated if plugin[0] != "tunedgemm"),
        "libraries": _listed(f"{row.solution.libtype}: {row.libver}" for row in rows if row.libver),
        "tuned": days[0] if len(set(days)) == 1 else f"{days[0]} to {days[-1]}" if days else "",
        "rows": str(len(rows)),
        "candidates": f"{timed} timed, for {sum(1 for row in rows if found.timed[row.key])} rows" if timed else "",
        "noise": f"{100 * median(noises):.2f} % (median of {len(noises)} rows)" if noises else "",
    }
    return Provenance(op.name, {name: text for name, text in {**facts, **further}.items() if text})


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(sorted({text for text in texts if text}))
