"""Coverage of captured calls, for a report of tables and lists of shapes."""

from __future__ import annotations

from typing import Any

from tunedgemm.analysis.coverage import PADDED, UNTUNED, Coverage, Replays, coverage
from tunedgemm.analysis.coverage.show import headline
from tunedgemm.analysis.results.findings import Findings
from tunedgemm.device import as_present
from tunedgemm.errors import TunedGemmError
from tunedgemm.text.printable import printable_line
from tunedgemm.workload.lists import op_of_file

#: Layers to tune next, reasons of unused rows, and values of M of one layer, that a page lists.
_MOST_NEXT, _MOST_UNUSED, _MOST_M = 8, 8, 12


def covered(findings: Findings, op: str = "", replays: Replays | str = "1") -> dict[str, Any] | None:
    """Return what serves the captured calls among the findings, by its tables and this machine's.

    Args:
        op: the op of all files, where the user named one.
        replays: the runs of graphs, as of `coverage`.

    Returns:
        None without lists of shapes; only ``why`` where coverage cannot be determined.
    """
    lists = [path for path, kind in findings.files if kind == "list"]
    tables = [path for path, kind in findings.files if kind == "table"]
    if not lists:
        return None
    if not tables:
        return {"why": "Coverage needs the table that serves the calls; name it, too."}
    try:
        called = {op or op_of_file(path).name for path in lists}
        used = [path for path in tables if (op or op_of_file(path).name) in called]
        return _facts(coverage(lists, op=op, device=as_present(findings.devices[0]), replays=replays, tables=used))
    except (TunedGemmError, ValueError) as error:
        return {"why": printable_line(f"Coverage could not be determined: {error}")}


def _facts(found: Coverage) -> dict[str, Any]:
    ways = [
        {"word": word, "meaning": group.name, "shapes": len(group.entries), "count": group.calls, **found.parts(group)}
        for word, group in found.ways()
    ]
    unused = [
        {"libtype": printable_line(rows.libtype), "reason": printable_line(rows.reason), "calls": rows.calls}
        for rows in found.unused()[:_MOST_UNUSED]
    ]
    return {
        "why": "",
        "headline": headline(found),
        "calls": found.calls,
        "device": str(found.device),
        "ways": ways,
        "regrets": [text for name, words in (("padded rows", PADDED), ("untuned calls", UNTUNED)) if (text := _regret(found, name, words))],
        "unused": unused,
        "with_unused": found.rows("exact", by="calls"),
        "next": [
            {"layer": printable_line(proposal.title), "share": proposal.share, "m": proposal.rows(_MOST_M)}
            for proposal in found.next(_MOST_NEXT)
        ],
        "left_out": len(found.problems),
        "notes": [printable_line(note) for note in found.notes],
    }


def _regret(found: Coverage, name: str, words: tuple[str, ...]) -> str:
    regret = found.regret(*words)
    if regret is None:
        return ""
    worst = f"{regret.worst.shape}, {100 * (regret.worst.regret or 0.0):.1f} %"
    known = f"known of {regret.calls:,} of {regret.of:,} calls"
    return printable_line(f"Regret of {name}: {100 * regret.weighted:.1f} % of their time; worst {worst}; {known}.")
