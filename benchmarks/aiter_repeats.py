"""Compare AITER's rows with each other: the same shape in two tables, and padded M."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from aiter_rows import Measured
from tunedgemm.ops.padded_m import padded_m


def _median(values: list[float]) -> str:
    return f"{np.median(values):.1%} / {np.quantile(values, 0.9):.1%}" if values else ""


def repeats(rows: Mapping[Any, list[Measured]]) -> str:
    """Say how many shapes of a device several tables have, and how much slower their slowest row is."""
    found = defaultdict[Any, list[Measured]](list)
    for (_, _, gfx, units), mine in rows.items():
        for row in mine:
            found[gfx, units, row.shape].append(row)
    several = [same for same in found.values() if len({row.table for row in same}) > 1]
    slower = [max(row.us for row in same) / min(row.us for row in same) - 1 for same in several]
    return f"{len(several)} of {len(found)} shapes are in several tables of their device. {_median(slower)}".strip()


def ladder_lines(rows: Mapping[Any, list[Measured]]) -> Iterator[str]:
    """Yield a table of what a row of a padded M costs a smaller M that has a row, too."""
    best = defaultdict[Any, dict[int, Measured]](dict)
    for (op, _, gfx, units), mine in rows.items():
        for row in mine if op != "fmoe" else ():
            layer = best[op, gfx, units, row.layer, row.shape.dtype]
            if row.shape.m not in layer or row.us < layer[row.shape.m].us:
                layer[row.shape.m] = row
    costs = defaultdict[Any, list[tuple[bool, float]]](list)
    for (op, gfx, units, (n, _), _dtype), layer in best.items():
        for m, row in layer.items():
            for level in (0, 1):
                padded = padded_m(m, n, level)
                if padded > m and padded in layer:
                    other = layer[padded]
                    costs[op, gfx, units, level].append((other.winner == row.winner, max(other.us / row.us - 1, 0.0)))
    yield "| op | device | padded | rows | the same kernel | else: loss at most, median / 90 % |\n|---|---|---|---|---|---|"
    for (op, gfx, units, level), values in sorted(costs.items()):
        other = [loss for is_same, loss in values if not is_same]
        share = 1 - len(other) / len(values)
        yield f"| `{op}` | {gfx}:{units} | {('finely', 'coarsely')[level]} | {len(values)} | {share:.0%} | {_median(other)} |"
