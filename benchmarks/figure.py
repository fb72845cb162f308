"""Draw the README's figure from a committed speed.json: ``python benchmarks/figure.py speed.json figure.svg``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

rcParams["svg.hashsalt"] = "tunedgemm"  # the same data give the same file


def draw(data: dict[str, Any], target: Path) -> None:
    """One line a layer: times faster than F.linear over the rows of the batch, with the 95 % interval."""
    layers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in data["results"]:
        layers[f"{result['layer']}  {result['N']} x {result['K']}"].append(result)
    figure = Figure(figsize=(8, 3.6), layout="tight")
    axes = figure.subplots()
    for name, results in layers.items():
        results.sort(key=lambda result: result["M"])
        gains = [result["gain"] for result in results]
        spread = [[r["gain"] - r["low"] for r in results], [r["high"] - r["gain"] for r in results]]
        axes.errorbar(range(len(results)), gains, yerr=spread, marker="o", capsize=2, linewidth=1.5, label=name)
    axes.set_xticks(range(len(results)), [f"M={result['M']}" for result in results])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times faster than F.linear")
    device = data["device"].split("(")[-1].rstrip(")")
    axes.set_title(f"{data['subset']}, bf16, {device}, torch {data['versions']['torch']}, cold weights, {data['date']}", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
