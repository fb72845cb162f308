"""Print the results of comparing: lines that scripts for AITER's tuners parse, and ours below them.

A shape's line is ``(M, N, K, the rest) | time | status``. Lines with ``keys:``, ``runs:`` and
``reason:`` may follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunedgemm.analysis.compare.verdict import Change, Checked, Compared, Served
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.text.console import Console
from tunedgemm.tuner.report import sizes

#: Most untuned shapes that are named one by one; of more only the number is printed.
_NAMED = 10
#: Columns of a shape, and of a decision's reason.
_SHAPE, _REASON = 40, 18


def print_checked(checked: Checked, console: Console | None = None) -> None:
    """Print the result of `run_config`: a line a shape with its details, and the failed shapes to copy."""
    console = console or Console()
    source = ", ".join(map(str, checked.tables)) or "the configured tables"
    lines = [f"{checked.op} as served by {source}, on {checked.device}", *_title(f"Benchmark ({checked.kind}) Benchmark Results")]
    lines += _heading("Shape", f"{'E2E(us)':>10}", f"{'Status':>8}")
    for served in checked.served:
        status, reason = _status(served)
        lines.append(_row(served.shape, f"{_us(served.us):>10}", f"{status:>8}"))
        lines += [_keys(served.shape, checked.device), f"runs: {_ran(served)}"]
        lines += [f"reason: {reason}"] if reason else []
        lines += [f"  {served.detail}"] if served.detail else []
    lines += [f"note: {note}" for note in checked.notes]
    if checked.repro:
        lines += ["", *_title(f"Repro CSV ({len(checked.failed)} failed shapes)"), "Copy the lines below into a CSV file to reproduce:"]
        lines += checked.repro.splitlines()
    lines.append(f"{len(checked.served) - len(checked.failed)} ok, {len(checked.failed)} failed")
    _say(console, lines)


def print_compared(compared: Compared, console: Console | None = None) -> None:
    """Print the result of `compare`: each shape before and after, the decisions, and the files."""
    lines = [f"before and after tuning, on {compared.device}", *_title("Tune Performance Comparison")] if compared.changes else []
    lines += _heading("Shape", f"{'Pre-E2E(us)':>13}", f"{'Post-E2E(us)':>14}", f"{'Speedup':>8}", f"{'Status':>8}") if lines else []
    for change in compared.changes:
        status, reason = _status(change.after)
        speedup = f"{1 / change.ratio:.2f}x" if change.ratio else "N/A"
        times = f"{_us(change.before.us):>13}", f"{_us(change.after.us):>14}"
        lines.append(_row(change.shape, *times, f"{speedup:>8}", f"{status:>8}"))
        lines += [_keys(change.shape, compared.device), f"runs: {_ran(change.before)}, then {_ran(change.after)}"]
        lines += [f"reason: {reason}"] if reason else []
    lines += _report(compared)
    lines += [f"no solution passed: {shape}" for shape in compared.failed_tuning]
    for shapes, why in (
        (compared.skipped, "in the table already; --all tunes them again"),
        (compared.unbegun, "left by the budget"),
        (compared.lost, "without a working device; the same command resumes with them"),
    ):
        if shapes:
            few = f": {', '.join(map(str, shapes))}" if len(shapes) <= _NAMED else ""
            lines.append(f"{len(shapes)} not compared ({why}){few}")
    lines += [f"Compare candidate CSV written to {compared.candidate}", f"report: {compared.report}"]
    _say(console or Console(), lines)


def _report(compared: Compared) -> Iterator[str]:
    words = ("threshold_met", "no_baseline", "skip")
    improved, new, skipped = ([change for change in compared.changes if change.decision == word] for word in words)
    verb = "Updated" if compared.update else "Would update"
    yield from _title("Compare Report")
    yield (
        f"Total shapes: {len(compared.changes)} | {verb}: {len(improved) + len(new)} "
        f"(improved: {len(improved)}, new: {len(new)}) | Skipped: {len(skipped)}"
    )
    yield f"Threshold: >= {compared.least:.1f}% improvement to update {compared.output}"
    yield from _decisions(verb, [*improved, *new], "Action", compared.least)
    yield from _decisions("Skipped", skipped, "Reason", compared.least)
    if timed := [(change, change.count * change.before.us) for change in compared.changes if change.ratio]:
        better = sum(weight * (1 - change.ratio) for change, weight in timed if change.decision != "skip")
        yield f"time weighted by count: {better / sum(weight for _, weight in timed):.1%} less with the rows that qualify"
    if compared.update:
        yield f"{sum(change.updated for change in compared.changes)} rows replaced in {compared.output}"
    else:
        yield f"{compared.output}: unchanged. Re-run with --update_improved to apply."


def _decisions(verb: str, changes: Sequence[Change], last: str, least: float) -> Iterator[str]:
    if not changes:
        return
    yield f"--- {verb} ({len(changes)} shapes) ---"
    yield from _heading("Shape", f"{'Pre(us)':>10}", f"{'Post(us)':>10}", f"{'Improve':>9}", f"{last:>{_REASON}}")
    for change in changes:
        gain = f"{change.improvement_pct:.2f}%" if change.ratio else "N/A"
        word = {"threshold_met": "UPDATE", "no_baseline": "NEW"}.get(change.decision, "") or _skipped(change, least)
        yield _row(change.shape, f"{_us(change.before.us):>10}", f"{_us(change.after.us):>10}", f"{gain:>9}", f"{word:>{_REASON}}")
        noise = f", ± {change.noise:.1%}" if change.ratio else ""
        yield f"  {change.reason}{noise}"


def _skipped(change: Change, least: float) -> str:
    """Return AITER's word for the reason of a skip."""
    status, _ = _status(change.after)
    if status != "OK":
        return f"post-{status.lower()}"
    return f"< {least:.1f}% improve" if change.ratio and change.improvement_pct < least else "no improvement"


def _status(served: Served) -> tuple[str, str]:
    """Return AITER's word for a status, and its reason."""
    word, _, reason = served.status.partition(":")
    return word.upper(), reason


def _ran(served: Served) -> str:
    noise = f", ± {served.noise:.1%}" if served.us else ""
    origin = " ".join(filter(None, (served.origin, served.why)))
    return f"{served.solution or 'nothing'}{f' ({origin})' if origin else ''}{noise}"


def _us(us: float) -> str:
    return f"{us:.2f}" if us else "N/A"


def _keys(shape: Shape, device: Device) -> str:
    texts = {"gfx": device.gfx, "cu_num": str(device.cu_num), **op_named(shape.op).columns.format(shape)}
    return "keys: " + ", ".join(f"{column}={text}" for column, text in texts.items() if text)


def _row(shape: Shape, *cells: str) -> str:
    text = f"({', '.join((str(shape.m), str(shape.n), str(shape.k), *sizes(shape).split()[3:]))})"
    return " | ".join((f"{text:<{_SHAPE}}", *cells))


def _heading(first: str, *cells: str) -> Iterator[str]:
    heading = " | ".join((f"{first:<{_SHAPE}}", *cells))
    yield from (heading, "-" * len(heading))


def _title(text: str) -> Iterator[str]:
    yield f"============= {text} ============="


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
