"""Print coverage, and write it as a CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from tunedgemm.analysis.coverage.proposal import Next
from tunedgemm.analysis.coverage.result import PADDED, SOURCES, TUNED, UNTUNED, Entry, Group
from tunedgemm.analysis.coverage.whole import Coverage
from tunedgemm.errors import UserError
from tunedgemm.table.sheet import Record, Sheet, locked, present, read_sheet, replace_text
from tunedgemm.text.console import Column, Console, Grid, grid_of, print_grid
from tunedgemm.text.printable import printable
from tunedgemm.tuner.report import number_of, one_line

#: Most groups of `--by`, and most reasons or broken lines, without --verbose.
_MOST_GROUPS, _MOST_LINES = 25, 5
#: Most values of M of a layer without --verbose.
_MOST_M = 8
#: Columns of the file with all entries, around the shape's M, N and K.
_COLUMNS = (
    "op", "layer", "shape", "M", "N", "K", "count", "graph", "calls", "how", "solution", "us", "us_from", "best_us", "best", "regret",
    "row_M", "row", "why",
)  # fmt: skip


def percent(share: float) -> str:
    """Format a share in per cent; only exact 0 and 1 print as 0.0 and 100.0."""
    rounded = round(share * 100.0, 1)
    if rounded >= 100.0 > share * 100.0 + 1e-9:
        rounded = 99.9
    if rounded <= 0.0 < share:
        rounded = 0.1
    return f"{rounded:.1f} %"


def headline(group: Group) -> str:
    """Return the result in a sentence."""
    return f"exact {percent(group.share('exact', by='calls'))} of calls, {percent(group.share('exact'))} of the time"


def print_coverage(result: Coverage, console: Console, *, by: str = "", verbose: bool = False) -> None:
    """Print the result in a sentence, the shares, their costs, unused rows, and unreadable lines."""
    _say(console, headline(result))
    where = result.name if len(result.paths) <= _MOST_LINES else f"{len(result.paths)} files"
    _say(console, f"{number_of(result.calls, 'call')} of {number_of(len(result.entries), 'shape')} in {where}, on {result.device}")
    _say(console, f"their time is {_duration(result.time)}: {_sources(result)}")
    print_grid(_ways(result), console)
    for line in (*_tables(result), *_costs(result), *_unused(result, verbose)):
        _say(console, line)
    if by or len(result.ops) > 1:
        _print_groups(result, by or "op", console, verbose)
    for problem in result.problems[: None if verbose else _MOST_LINES]:
        _say(console, f"left out: {problem}")
    if len(result.problems) > _MOST_LINES and not verbose:
        _say(console, f"left out: {len(result.problems) - _MOST_LINES} more lines; -v names them")
    for note in result.notes:
        _say(console, f"note: {note}")


def print_next(result: Sequence[Next], console: Console, *, verbose: bool = False) -> None:
    """Print the layers to tune next, the longest time first, with their M."""
    if not result:
        _say(console, "nothing to tune: every call has an exact row, or the padded row that the rest of its layer shares")
        return
    most = None if verbose else _MOST_M
    rows = [{"layer": proposal.title, "% time": _bare(proposal.share), "M": proposal.rows(most)} for proposal in result]
    print_grid(grid_of(("layer", Column("% time", right=True), Column("M", prose=True)), rows, "what to tune next"), console)


def write_entries(result: Coverage, path: Path) -> None:
    """Write every entry as a line of a CSV, the longest time first.

    Raises:
        UserError: the file has other contents, or cannot be written.
    """
    if present(path) and read_sheet(path).columns != list(_COLUMNS):
        raise UserError(f"{path}: exists with other contents, which would be lost; name another file with --csv")
    with locked(path):
        replace_text(path, Sheet(list(_COLUMNS), [Record(cells=_cells(entry)) for entry in result.entries]).text())


def _cells(entry: Entry) -> dict[str, str]:
    shape, regret = entry.shape, entry.regret
    return {
        "op": shape.op, "layer": entry.layer, "shape": str(shape), "M": str(shape.m), "N": str(shape.n), "K": str(shape.k),
        "count": str(entry.count), "graph": str(entry.graph), "calls": str(entry.calls), "how": entry.how,
        "solution": str(entry.solution), "us": f"{entry.us:.4f}", "us_from": entry.us_from,
        "best_us": f"{entry.best_us:.4f}" if entry.best_us else "", "best": entry.best,
        "regret": "" if regret is None else f"{regret:.4f}", "row_M": str(entry.row_m) if entry.row_m >= 0 else "", "row": entry.row,
        "why": " ".join(printable("; ".join([entry.why, *(f"not {p.solution}: {p.reason}" for p in entry.passed)])).split()),
    }  # fmt: skip


def _ways(result: Coverage) -> Grid:
    numbers = ("shapes", "calls", "% calls", "% time")
    rows = []
    for word, group in result.ways():
        cells = (_number(len(group.entries)), _number(group.calls), *map(_bare, result.parts(group).values()))
        rows.append({"served by": f"{word}: {group.name}", **dict(zip(numbers, cells, strict=True))})
    return grid_of((Column("served by", prose=True), *(Column(heading, right=True) for heading in numbers)), rows)


def _tables(result: Coverage) -> Iterator[str]:
    layers = {name: map(percent, result.parts(group).values()) for name, group in result.by_table_layer().items()}
    if layers:
        yield "rows of: " + "; ".join(f"{name} {calls} of calls, {time} of the time" for name, (calls, time) in layers.items())


def _costs(result: Coverage) -> Iterator[str]:
    for name, words in (("padded rows", PADDED), ("untuned calls", UNTUNED)):
        chosen = [entry for entry in result.entries if entry.how in words and entry.calls]
        regret = result.regret(*words)
        if regret is not None:
            worst = regret.worst
            loss = percent(worst.regret or 0.0)
            known = f"{_number(regret.calls)} of {_number(regret.of)}"
            yield f"regret of {name}: {percent(regret.weighted)} in all, at worst {loss}, known of {known} calls"
            taken = worst.us_from if worst.row_m < 0 or worst.us_from != "padded row" else f"row at M={worst.row_m}"
            yield f"  the worst: {worst.shape}: {worst.solution} {worst.us:.2f} us ({taken}), {worst.best_us:.2f} us with {worst.best}"
        elif chosen:
            yield f"regret of {name}: unknown for all calls; tune these shapes into a separate table, and name it with --against"
    for entry in (entry for entry in result.entries if entry.how == "refused"):
        yield f"refused: {_number(entry.calls)} calls of {entry.shape}: {one_line(entry.why)}"


def _unused(result: Coverage, verbose: bool) -> Iterator[str]:
    """Yield the reasons why rows are not used, and the coverage with all of them."""
    unused = result.unused()
    for rows in unused[: None if verbose else _MOST_LINES]:
        share = percent(result.parts(rows)["time"])
        calls = "1 call" if rows.calls == 1 else f"{_number(rows.calls)} calls"
        verb = "has" if rows.calls == 1 else "have"
        yield f"{calls} ({share} of the time) {verb} a row of {rows.libtype} that is not used: {one_line(rows.reason)}"
    if len(unused) > _MOST_LINES and not verbose:
        yield f"and {len(unused) - _MOST_LINES} more reasons why rows are not used; -v lists them"
    if unused:
        calls, time = (percent(result.rows("exact", by=by)) for by in ("calls", "time"))
        yield f"with all of these rows in use: exact {calls} of calls, {time} of the time"


def _print_groups(result: Coverage, by: str, console: Console, verbose: bool) -> None:
    """Print a line a group with the shares of its time, or a line a shape with its answer and time."""
    groups = result.by(by)
    headings = ("served by", "us") if by == "shape" else ("exact", "padded", "other")
    columns = [Column(heading, right=heading not in (by, "served by")) for heading in (by, "calls", "% time", *headings)]
    rows = []
    shown = groups if verbose else groups[:_MOST_GROUPS]
    for group in shown:
        of_all = _bare(result.parts(group)["time"])
        shares = [group.share(*words) for words in (TUNED, PADDED, (*UNTUNED, "refused"))]
        entry = group.entries[0]
        cells = (entry.how, f"{entry.us:.2f}") if by == "shape" else map(_bare, shares)
        rows.append(dict(zip((by, "calls", "% time", *headings), (group.name, _number(group.calls), of_all, *cells), strict=True)))
    print_grid(grid_of(columns, rows, f"by {by}"), console)
    if len(shown) < len(groups):
        _say(console, f"and {len(groups) - len(shown)} more; -v lists them")


def _sources(result: Coverage) -> str:
    shares = {source: sum(entry.time for entry in result.entries if entry.us_from == source) for source in SOURCES}
    return ", ".join(f"{percent(time / result.time)} {SOURCES[source]}" for source, time in shares.items() if time and result.time)


def _duration(us: float) -> str:
    for unit, size in (("h", 3.6e9), ("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.1f} {unit}"
    return f"{us:.1f} us"


def _bare(share: float) -> str:
    return percent(share).removesuffix(" %")


def _number(number: float) -> str:
    return f"{math.floor(number):,}"


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
