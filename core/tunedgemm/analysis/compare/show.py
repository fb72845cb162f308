"""Print the results of comparing, as rich tables."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from tunedgemm.analysis.compare.verdict import Change, Checked, Compared, Served
from tunedgemm.tuner.report import TABLE_WIDTH, sizes

#: Most untuned shapes that are named one by one; of more only the number is printed.
_NAMED = 10
#: All columns of a comparison are shown from this width on.
_WIDE = 130


def print_checked(checked: Checked, console: Console | None = None) -> None:
    """Print the result of `run_config`: a line a shape, the failures, and the failed shapes to copy."""
    console = console or Console()
    source = checked.table or "the configured tables"
    title = f"{checked.op} as served by {source}, on {checked.device}"
    grid = Grid(title=Text(title), title_justify="left")
    for heading in ("shape", "runs", "from", "us", "± %", "status"):
        grid.add_column(heading, justify="right" if heading in ("us", "± %") else "left", overflow="fold")
    for served in checked.served:
        grid.add_row(*map(Text, (sizes(served.shape), str(served.solution or ""), served.origin, *_time(served), served.status)))
    if console.width >= TABLE_WIDTH:
        console.print(grid)
    else:
        _say(console, title)
        for served in checked.served:
            _say(console, f"{sizes(served.shape)}: {served.solution or 'nothing'}, {served.us:.2f} us, {served.status}")
    for served in checked.failed:
        detail = f"\n  {served.detail}" if served.detail else ""
        _say(console, f"failed: {served.shape}: {served.status}\n  {served.solution or 'nothing'}: {served.why}{detail}")
    for note in checked.notes:
        _say(console, f"note: {note}")
    if checked.repro:
        _say(console, "the failed shapes, to copy into a file for -i:")
        console.out(checked.repro, end="", highlight=False)
    _say(console, f"{len(checked.served) - len(checked.failed)} ok, {len(checked.failed)} failed")


def print_compared(compared: Compared, console: Console | None = None) -> None:
    """Print the result of `compare`: a line a shape, the sums, and the paths of the files."""
    console = console or Console()
    if compared.changes:
        _print_changes(compared, console)
    _say(console, _verdict(compared))
    for shape in compared.failed_tuning:
        _say(console, f"no solution passed: {shape}")
    for shapes, why in (
        (compared.skipped, "in the table already; --all tunes them again"),
        (compared.unbegun, "left by the budget"),
        (compared.lost, "without a working device; the same command resumes with them"),
    ):
        if shapes:
            few = f": {', '.join(map(str, shapes))}" if len(shapes) <= _NAMED else ""
            _say(console, f"{len(shapes)} not compared ({why}){few}")
    _say(console, f"candidate table: {compared.candidate}\nreport: {compared.report}")


def _print_changes(compared: Compared, console: Console) -> None:
    """Print a table with as many columns as fit; on a narrow console a line a shape."""
    title = f"before and after tuning, on {compared.device}"
    if console.width < TABLE_WIDTH:
        _say(console, title)
        for change in compared.changes:
            cells = _cells(change)
            _say(console, f"{cells['shape']}: {cells['us before']} us, then {cells['us after']} us: {cells['decision']}, {cells['why']}")
        return
    grid = Grid(title=Text(title), title_justify="left")
    few = ("shape", "us before", "us after", "gain %", "decision")
    headings = ("shape", "before", "after", *few[1:4], "± %", "decision", "why") if console.width >= _WIDE else few
    for heading in headings:
        grid.add_column(heading, justify="right" if heading.startswith("us ") or heading.endswith("%") else "left", overflow="fold")
    for change in compared.changes:
        cells = _cells(change)
        grid.add_row(*(Text(cells[heading]) for heading in headings))
    console.print(grid)


def _verdict(compared: Compared) -> str:
    changes = compared.changes
    decisions = Counter(change.decision for change in changes)
    timed = [(change, change.count * change.before.us) for change in changes if change.ratio]
    lines = [", ".join(f"{decisions[word]} {word}" for word in ("threshold_met", "no_baseline", "skip"))]
    if timed:
        before = sum(weight for _, weight in timed)
        better = sum(weight * (1 - change.ratio) for change, weight in timed if change.decision != "skip")
        lines.append(f"time weighted by count: {better / before:.1%} less with the rows that qualify")
    updated = sum(change.updated for change in changes)
    if compared.update:
        lines.append(f"{updated} rows replaced in {compared.output}")
    else:
        lines.append(f"{compared.output}: unchanged; --update_improved replaces the rows that qualify")
    return "\n".join(lines)


def _cells(change: Change) -> dict[str, str]:
    before, after = change.before, change.after
    return {
        "shape": sizes(change.shape), "before": _ran(before), "after": _ran(after),
        "us before": _time(before)[0], "us after": _time(after)[0],
        "gain %": f"{change.improvement_pct:+.1f}" if change.ratio else "", "± %": f"{change.noise * 100:.1f}" if change.ratio else "",
        "decision": change.decision, "why": change.reason,
    }  # fmt: skip


def _ran(served: Served) -> str:
    return str(served.solution or "") if served.ok else served.status


def _time(served: Served) -> tuple[str, str]:
    return (f"{served.us:.2f}", f"{served.noise * 100:.1f}") if served.us else ("", "")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
