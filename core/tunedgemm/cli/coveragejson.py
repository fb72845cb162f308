"""``tunedgemm coverage --json``: the document ``coverage``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from tunedgemm.analysis.coverage import Coverage, Next
from tunedgemm.analysis.coverage.result import PADDED, TUNED, UNTUNED, Entry, Group
from tunedgemm.cli.document import print_document


def print_json(result: Coverage, following: Sequence[Next], *, by: str, commands: Sequence[str]) -> None:
    """Print all that `print_coverage` and `print_next` show, without their limits.

    Args:
        by: the groups, as of ``--by``; by op without a word.
        commands: the lines that tune the proposals.
    """
    facts: dict[str, Any] = {
        "device": result.device,
        "files": result.paths,
        "calls": result.calls,
        "time_us": result.time,
        "served_by": {
            word: {"meaning": group.name, "shapes": len(group.entries), "calls": group.calls, "shares": result.parts(group)}
            for word, group in result.ways()
        },
        "table_layers": {name: result.parts(group) for name, group in result.by_table_layer().items()},
        "regrets": {"padded": _regret(result, PADDED), "untuned": _regret(result, UNTUNED)},
        "unused_rows": [attrs.asdict(unused) for unused in result.unused()],
        "with_unused_rows": {"calls": result.rows("exact", by="calls"), "time": result.rows("exact", by="time")},
        "by": by or "op",
        "groups": [_group(group, result) for group in result.by(by or "op")],
        "shapes": [_entry(entry) for entry in result.entries],
        "next": [_proposal(proposal) for proposal in following],
        "commands": commands,
        "problems": list(map(str, result.problems)),
        "notes": result.notes,
    }
    print_document("coverage", 1, facts)


def _regret(result: Coverage, words: Sequence[str]) -> dict[str, Any] | None:
    regret = result.regret(*words)
    if regret is None:
        return None
    worst = {"shape": regret.worst.shape, "regret": regret.worst.regret}
    return {"weighted": regret.weighted, "calls": regret.calls, "of": regret.of, "worst": worst}


def _group(group: Group, result: Coverage) -> dict[str, Any]:
    shares = {"exact": group.share(*TUNED), "padded": group.share(*PADDED), "other": group.share(*UNTUNED, "refused")}
    share = result.parts(group)["time"]
    return {"name": group.name, "calls": group.calls, "time_us": group.time, "share": share, "shares": shares}


def _entry(entry: Entry) -> dict[str, Any]:
    passed = [{"solution": row.solution, "how": row.word, "reason": row.reason} for row in entry.passed]
    counts = {"layer": entry.layer, "count": entry.count, "graph": entry.graph, "calls": entry.calls}
    row = entry.row_m if entry.row_m >= 0 else None
    served = {"how": entry.how, "solution": entry.solution, "why": entry.why, "us": entry.us, "us_from": entry.us_from, "row_m": row}
    served |= {"table_layer": entry.table_layer, "libver": entry.libver}
    best = {"best_us": entry.best_us or None, "best": entry.best, "regret": entry.regret}
    return {"shape": entry.shape, **counts, **served, **best, "passed_over": passed}


def _proposal(proposal: Next) -> dict[str, Any]:
    layer, m = proposal.layer.to_dict(), [row.shape.m for row in proposal.listed]
    del layer["m"]
    return {"layer": layer, "name": proposal.name, "share": proposal.share, "m": m}
