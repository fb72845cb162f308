"""Write a subset of shapes.csv as an untuned file for ``tunedgemm tune -i``: ``python benchmarks/untuned.py SUBSET FILE [OP]``."""

from __future__ import annotations

import sys
from pathlib import Path

from speed import HERE, OP, shapes_of
from tunedgemm.ops import op_named
from tunedgemm.table.csvfile import write_untuned
from tunedgemm.table.row import Untuned

if __name__ == "__main__":
    subset, target, op = (*sys.argv[1:], OP.name)[:3]
    shapes = sorted((shape for _, shape in shapes_of(subset, HERE / "shapes.csv", op)), key=lambda shape: (shape.m, shape.n, shape.k))
    write_untuned(Path(target), op_named(op), [Untuned(shape) for shape in shapes])
