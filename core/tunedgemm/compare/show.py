"""Results of comparing for people, as rich tables."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from tunedgemm.compare.verdict import Change, Checked, Compared, Served

#: Shapes that were not tuned and are named one by one; of more only the number is told.
_NAMED = 10


def print_checked(checked: Checked, console: Console | None = None) -> None:
    """Print what `run_config` found: a line a shape, why shapes failed, and the failed ones to copy."""
    console = console or Console()
    source = checked.table or "the tables as configured"
    grid = Grid(title=escape(f"{checked.op} as served by {source}, on {checked.device}"), title_justify="left")
    for heading in ("shape", "runs", "from", "us", "± %", "status"):
        grid.add_column(heading, justify="right" if heading in ("us", "± %") else "left", overflow="fold")
    for one in checked.served:
        grid.add_row(*map(escape, (_short(checked.op, one), str(one.solution or ""), one.origin, *_time(one), one.status)))
    console.print(grid)
    for one in checked.failed:
        detail = f"\n  {one.detail}" if one.detail else ""
        _say(console, f"failed: {one.shape}: {one.status}\n  {one.solution or 'nothing'}: {one.why}{detail}")
    for note in checked.notes:
        _say(console, f"note: {note}")
    if checked.repro:
        _say(console, "the failed shapes, to copy into a file for -i:")
        console.out(checked.repro, end="", highlight=False)
    _say(console, f"{len(checked.served) - len(checked.failed)} ok, {len(checked.failed)} failed")


def print_compared(compared: Compared, console: Console | None = None) -> None:
    """Print what `compare` found: a line a shape, the sums, and where the files are."""
    console = console or Console()
    grid = Grid(title=f"before and after tuning, on {compared.device}", title_justify="left")
    for heading in ("shape", "before", "after", "us before", "us after", "gain %", "± %", "decision", "why"):
        grid.add_column(
            heading, justify="right" if heading.endswith(("%", "before", "after")) and " " in heading else "left", overflow="fold"
        )
    for change in compared.changes:
        grid.add_row(*map(escape, _cells(change)))
    if compared.changes:
        console.print(grid)
    _say(console, _verdict(compared))
    for shape in compared.failed_tuning:
        _say(console, f"nothing passed: {shape}")
    for shapes, why in (
        (compared.skipped, "in the table already; --all tunes them again"),
        (compared.unbegun, "not begun within the budget"),
    ):
        if shapes:
            few = f": {', '.join(map(str, shapes))}" if len(shapes) <= _NAMED else ""
            _say(console, f"{len(shapes)} not compared ({why}){few}")
    _say(console, f"candidate table: {compared.candidate}\nreport: {compared.report}")


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
        lines.append(f"{compared.output} was not touched; --update_improved replaces the rows that qualify")
    return "\n".join(lines)


def _cells(change: Change) -> tuple[str, ...]:
    gain = f"{change.improvement_pct:+.1f}" if change.ratio else ""
    noise = f"{change.noise * 100:.1f}" if change.ratio else ""
    sides = (_ran(change.before), _ran(change.after), _time(change.before)[0], _time(change.after)[0])
    return (_short(change.shape.op, change.after), *sides, gain, noise, change.decision, change.reason)


def _ran(served: Served) -> str:
    return str(served.solution or "") if served.ok else served.status


def _short(op: str, served: Served) -> str:
    return str(served.shape).removeprefix(f"{op} ")


def _time(served: Served) -> tuple[str, str]:
    return (f"{served.us:.2f}", f"{served.noise * 100:.1f}") if served.us else ("", "")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
