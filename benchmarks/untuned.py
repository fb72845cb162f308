"""Write one subset of shapes.csv as an untuned file for ``tunedgemm tune -i``: ``python benchmarks/untuned.py SUBSET FILE``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

if __name__ == "__main__":
    subset, target = sys.argv[1], Path(sys.argv[2])
    with (Path(__file__).parent / "shapes.csv").open(newline="") as file:
        rows = {(row["M"], row["N"], row["K"]) for row in csv.DictReader(file) if subset in row["subsets"].split(";")}
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("M", "N", "K"))
        writer.writerows(sorted(rows, key=lambda row: tuple(map(int, row))))
