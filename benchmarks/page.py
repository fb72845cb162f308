"""Make the page of a result file: ``python benchmarks/page.py FOLDER/NAME.json [...]`` writes
``FOLDER/NAME.md``.

Benchmarks call this themselves when they write their data. ``--confirm FILE`` adds the gains that a
second process measured to the page of `speed.py`, ``--figure FILE`` draws its gains.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def page(data: dict[str, Any], confirmation: dict[str, Any] | None = None) -> str:
    """Return the page of one result: what it ran on, the summary, and a table of its rows."""
    rows = rows_of(data)
    versions = ", ".join(f"{name} {version}" for name, version in data.get("versions", {}).items())
    title = f"# {data.get('benchmark', 'speed')}: {data['device']}, {data['date']}"
    words = f"`python benchmarks/{data['benchmark']}.py {' '.join(data['command'])}`".replace(" `", "`") if "command" in data else ""
    summary = [f"- {line}" for line in data.get("summary", [])]
    lines = [title, "", "; ".join(filter(None, (words, versions))), "", *summary, *[""] * bool(summary)]
    if rows:
        lines += speed_table(rows, rows_of(confirmation or data)) if "default_us" in rows[0] else table(rows)
    return "\n".join(lines) + "\n"


def rows_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result."""
    rows: list[dict[str, Any]] = data["rows"] if "rows" in data else data.get("results", [])
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of the single values and the intervals of all rows."""
    named = (name for row in rows for name, value in row.items() if not name.startswith("samples") and shown(value) is not None)
    columns = list(dict.fromkeys(named))
    cells = ([shown(row.get(name, "")) or "" for name in columns] for row in rows)
    return markdown(columns, cells)


def markdown(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in cells)]


def shown(value: Any) -> str | None:
    """Return a cell's text: ``median [low, high]`` of an interval; None for samples and other
    structures.
    """
    if isinstance(value, bool) or value is None:
        return "" if value is None else ("yes" if value else "no")
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int | str):
        return str(value)
    if isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(part, int | float) for part in value):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return None


def speed_table(rows: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of `speed.py`: times, the gain with its interval, and the gain that a second
    process measured.
    """
    columns = ("layer", "M", "N x K", "solution", "torch us", "tuned us", "gain [95 %]", "confirmed", "A/A")
    cells = []
    for row, other in zip(rows, again, strict=True):
        solution = row["solution"] if row["tuned"] else "untuned"
        gain = f"{row['gain']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        cells.append(
            (
                row["layer"], str(row["M"]), f"{row['N']} x {row['K']}", f"`{solution}`", f"{row['default_us']:.2f}",
                f"{row['tuned_us']:.2f}", gain, f"{other['gain']:.3f}", f"{row['control']:.3f}",
            )
        )  # fmt: skip
    return markdown(columns, cells)


def draw(data: dict[str, Any], target: Path) -> None:
    """Draw the gains over F.linear, with their intervals, by layer and rows of the batch."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tunedgemm"  # the same data give the same file
    layers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(data):
        layers[f"{row['layer']}  {row['N']} x {row['K']}"].append(row)
    figure = Figure(figsize=(8, 3.6), layout="tight")
    axes = figure.subplots()
    for name, rows in layers.items():
        rows.sort(key=lambda row: row["M"])
        gains = [row["gain"] for row in rows]
        spread = [[row["gain"] - row["low"] for row in rows], [row["high"] - row["gain"] for row in rows]]
        axes.errorbar(range(len(rows)), gains, yerr=spread, marker="o", capsize=2, linewidth=1.5, label=name)
    axes.set_xticks(range(len(rows)), [f"M={row['M']}" for row in rows])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times faster than F.linear")
    device, shapes = data["device"].split("(")[-1].rstrip(")"), data.get("shapes", data.get("subset", ""))
    axes.set_title(f"{shapes}, bf16, {device}, torch {data['versions']['torch']}, cold weights, {data['date']}", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


def main(words: list[str] | None = None) -> None:
    """Write the pages of result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result files of benchmarks")
    parser.add_argument("--confirm", type=Path, metavar="FILE", help="result of speed.py from a second process")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the gains of the first file")
    arguments = parser.parse_args(words)
    confirmation = json.loads(arguments.confirm.read_text()) if arguments.confirm else None
    for path in arguments.files:
        path.with_suffix(".md").write_text(page(json.loads(path.read_text()), confirmation))
    if arguments.figure:
        draw(json.loads(arguments.files[0].read_text()), arguments.figure)


if __name__ == "__main__":
    main()
