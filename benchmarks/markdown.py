"""Print a speed.json as the Markdown table of the results pages: ``python benchmarks/markdown.py speed.json [confirmation.json]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def line(result: dict[str, Any], again: dict[str, Any]) -> str:
    """One shape: what runs, microseconds, the gain with its interval, and the gain that the second process found."""
    interval = f"{result['gain']:.3f} [{result['low']:.3f}, {result['high']:.3f}]"
    solution = result["solution"] if result["tuned"] else "untuned"
    sizes = f"{result['layer']} | {result['M']} | {result['N']} x {result['K']}"
    times = f"{result['default_us']:.2f} | {result['tuned_us']:.2f}"
    return f"| {sizes} | `{solution}` | {times} | {interval} | {again['gain']:.3f} | {result['control']:.3f} |"


if __name__ == "__main__":
    first, second = (json.loads(Path(path).read_text())["results"] for path in (sys.argv[1], sys.argv[-1]))
    print("| layer | M | N x K | solution | F.linear us | tuned us | gain [95 %] | confirmed | A/A |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(line, first, second)))
