"""``table check --remeasure``: what the rows that carry most time cost today."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.cli.table.files import row_facts
from tunedgemm.errors import UserError
from tunedgemm.ops.op import Op
from tunedgemm.table.folders import SHIPPED
from tunedgemm.table.published import provenance_of
from tunedgemm.table.row import Row
from tunedgemm.tuner.report import number_of

if TYPE_CHECKING:
    from tunedgemm.analysis.remeasure import Remeasured, Retimed

#: Defaults of --top and --threshold.
_TOP, _THRESHOLD = 20, 0.03


def refuse(arguments: argparse.Namespace, file: Path) -> None:
    """Raise UserError for flags without --remeasure, and for a table that must not change."""
    if not arguments.remeasure:
        for flag in ("top", "threshold", "stale"):
            if (given := getattr(arguments, flag)) is not None and given is not False:  # 0 % is given
                raise UserError(f"--{flag}: requires --remeasure, which times the rows again")
    elif arguments.stale and (SHIPPED in file.parents or provenance_of(file) is not None):
        raise UserError(f"--stale: {file} is shipped or published, and stays as it is; `tunedgemm tune -i {file}` tunes its shapes here")


def measured(arguments: argparse.Namespace, op: Op, file: Path, rows: Sequence[Row]) -> Remeasured:
    """Time the rows, print them and what they cost, and tune them again if asked for."""
    from tunedgemm.analysis.remeasure import remeasure

    quiet = arguments.json
    found = remeasure(
        op, file, rows,
        top=arguments.top or _TOP,
        threshold=_THRESHOLD if arguments.threshold is None else arguments.threshold,
        progress=None if quiet else lambda row: print(_row_text(row), flush=True),
    )  # fmt: skip
    if not quiet:
        print("\n".join(summary_lines(found, file)), flush=True)
    if arguments.stale and found.stale:
        _tune(op, file, found, quiet=quiet)
    return found


def _tune(op: Op, file: Path, found: Remeasured, *, quiet: bool) -> None:
    from tunedgemm.tuner import Options, tune
    from tunedgemm.tuner.report import summary

    device = "cpu" if found.device.kind == "cpu" else str(max(found.device.index, 0))
    report = tune(op.name, {row.row.shape: row.calls for row in found.stale}, file, Options(all=True, device=device))
    if not quiet:
        summary(report)


def _row_text(row: Retimed) -> str:
    head = f"{row.row.source}:{row.row.line}: {row.row.shape}: {row.row.solution}"
    if row.failure:
        return f"{head}: {row.failure}"
    after, torch = row.change.after, row.against_torch
    against = f"; torch {row.change.before.us:.2f} us, row over torch {torch}" if torch else ""
    return f"{head}: {after.us:.2f} us ± {after.noise:.1%}, table {row.row.us:.2f} us{against}"


def summary_lines(found: Remeasured, file: Path) -> Iterator[str]:
    """Yield what was found, as lines."""
    from tunedgemm.analysis.remeasure import CONTROLS

    yield f"timed {len(found.rows)} of {number_of(found.of, 'row')}, {found.share:.0%} of the time, on {found.device}"
    yield from (f"note: left out: {note}" for note in found.notes)
    drift, noise = found.drift
    yield (
        f"times of rows of unchanged libraries over the table's: {drift:.3f} ± {noise:.1%}"
        if len(found.controls) >= CONTROLS
        else f"too few rows of unchanged libraries to know how fast this machine was on the table's day: ± {noise:.0%}"
    )
    if found.cost is None:
        yield "no timed row was tuned with another version of its library"
    else:
        versions = {f"{row.row.solution.libtype} {row.row.libver} -> {row.libver or 'unknown'}": None for row in found.moved}
        verb = "costs" if found.cost.share > 0 else "saves"
        what = (
            f"{verb} {abs(found.cost.share):.1%} ± {found.cost.high - found.cost.share:.1%}"
            if found.cost.resolved
            else f"costs: {found.cost}"
        )
        yield f"this upgrade {what} on these {number_of(len(found.moved), 'shape')} ({', '.join(versions)})"
    least = f" by {found.threshold:.1%} or more"
    for rows, what in (
        (found.failed, "not served"),
        (found.slower, "slower than the table" + least),
        (found.behind, "behind torch" + least),
    ):
        lines = f": line{'s' if len(rows) > 1 else ''} {', '.join(str(row.row.line) for row in rows)}" if rows else ""
        yield f"{number_of(len(rows), 'row')} now {what}{lines}"
    if found.stale:
        yield f"`tunedgemm table check {file} --remeasure --stale` tunes {number_of(len(found.stale), 'row')} again"


def facts_of(found: Remeasured) -> dict[str, Any]:
    """Return what was measured for a JSON document."""
    return {
        "device": found.device,
        "timed": len(found.rows),
        "of": found.of,
        "share": found.share,
        "threshold": found.threshold,
        "drift": dict(zip(("factor", "noise"), found.drift, strict=True)),
        "cost": found.cost,
        "moved": len(found.moved),
        "rows": [_facts(found, row) for row in found.rows],
        "notes": found.notes,
    }


def _facts(found: Remeasured, row: Retimed) -> dict[str, Any]:
    tests = {"failed": found.failed, "slower": found.slower, "behind": found.behind, "stale": found.stale}
    verdicts = [word for word, rows in tests.items() if row in rows]
    times = {"us": row.change.after.us, "noise": row.change.after.noise, "torch_us": row.change.before.us}
    against = {"against_torch": row.against_torch, "against_table": found.against_table(row)}
    return {"row": row_facts(row.row), "calls": row.calls, "libver": row.libver, **times, **against, "failure": row.failure, "is": verdicts}
