"""The CSV files of `accuracy.py` in one folder, one for each device, condensed in its README.md.

::

    python benchmarks/accuracy_table.py benchmarks/results/accuracy
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

Row = dict[str, str]

INTRODUCTION = """# How exact torch's solutions are

Written by `benchmarks/accuracy_table.py` from the CSV files beside it, which `benchmarks/accuracy.py` wrote; its docstring says
what is drawn, and the first line of each file on what it ran. One line stands for all solutions of the backend `torch` and all K.

- row error: norm(out - exact) / norm(exact) of the worst row against float64, from the same quantised operands
- outside: the largest share of elements outside the op's bounds of one element (5 % pass)
- bound: the op's bound of the row error, and why it is that
- quantisation: the row error that the format itself makes, whatever computes it

| why | the bound |
|---|---|
| rounding | 8 roundings of a 16-bit output: 2^-9 each in bf16, 2^-12 in fp16 |
| order | 2^-12: the order of a float32 sum |
| fp8 sums | 2^-11: Hopper's tensor cores add fp8 products up in less than float32 (3.5e-4 with one scale a tensor) |
| intermediate | 1.5 to 3 times the worst row of an fmoe that keeps its intermediate in 16 bits, or rounds it before it quantises it |
"""

HEAD = "| op | format | out | row error | by | at K | outside | bound | why | quantisation |\n|---|---|---|---|---|---|---|---|---|---|\n"


def why(row: Row) -> str:
    """The word for the reason of a row's bound."""
    if row["op"] == "fmoe" and not row["format"].startswith("No"):
        return "intermediate"
    if row["outdtype"] != "fp32":
        return "rounding"
    return "fp8 sums" if row["format"].startswith("fp8") else "order"


def line(rows: list[Row]) -> str:
    """One format and output dtype: its worst solution and size."""
    worst = max(rows, key=lambda row: float(row["row_error"] or "inf"))
    names = sorted({row["solution"] for row in rows if row["row_error"] == worst["row_error"]}, key=lambda name: (name == "native", name))
    error = f"{float(worst['row_error']):.1e}" if worst["row_error"] else worst["status"]
    outside = max(float(row["error_ratio"] or 1) for row in rows)
    quantisation = max(float(row["quantisation"]) for row in rows)
    cells = (
        f"`{worst['op']}`", worst["format"], worst["outdtype"], error, names[0], worst["K"], f"{outside:.2%}",
        f"{float(worst['row_bound']):.1e}", why(worst), f"{quantisation:.1e}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def section(path: Path) -> str:
    """What one file measured."""
    with path.open(newline="") as file:
        title = file.readline().lstrip("# ").strip()
        rows = [row for row in csv.DictReader(file) if not row["status"].startswith("refused")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["format"], row["outdtype"]), []).append(row)
    bad = sum(row["status"] != "ok" for row in rows)
    verdict = f"{len(rows)} outputs measured, {bad or 'none'} outside their bounds or failed."
    return f"\n## {title}\n\n[`{path.name}`]({path.name}): {verdict}\n\n{HEAD}" + "\n".join(map(line, groups.values())) + "\n"


def write_readme(folder: Path) -> None:
    """README.md of every CSV file in *folder*."""
    sections = [section(path) for path in sorted(folder.glob("*.csv"))]
    (folder / "README.md").write_text(INTRODUCTION + "".join(sections))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_readme(Path(sys.argv[1]))
