"""What a table loses on rows of activations that it has no row for: the next power of two, finer steps, or the exact number.

    python benchmarks/padding.py --folder padding --model llama70B --tp 8

Three lists of shapes of a model are tuned: M that lie between powers of two, powers of two, and the fine rungs of the former.
Then what runs for the first list is timed three times over: with the powers of two alone, with the fine rungs too, and with rows
of its own. The folder keeps lists, tables and times; the same command goes on where the last one ended, and sums up at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tunedgemm.ops.padded_m import padded_m

#: Speculative decoding, batches between the sizes of graphs, and ends of prompts.
BETWEEN = (3, 6, 12, 24, 40, 48, 60, 84, 100, 160, 200, 300, 384, 700, 1500, 3000)
POWERS = tuple(1 << power for power in range(13))
FINE = tuple(sorted({padded_m(m, 1, 0) for m in BETWEEN} - {*POWERS}))
KEY = ["M", "N", "K"]
#: name of a list -> its M; name of a table that is judged -> the lists whose tables it joins
LISTS = {"between": BETWEEN, "powers": POWERS, "fine": FINE}
TABLES = {"powers": ("powers",), "fine": ("powers", "fine"), "exact": ("between",)}


def run(*words: object) -> None:
    """One command of tunedgemm; its failure ends this one."""
    subprocess.run([sys.executable, "-m", "tunedgemm", *map(str, words)], check=True)


def measure(folder: Path, model: str, tp: int, options: list[str]) -> None:
    """Tune the lists and time the first with each table; what the folder has already is not done again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in LISTS.items():
        listed = folder / f"{name}.csv"
        run("shapes", "--model_dir", model, "--tp", tp, "--layers", "*_proj", "--nsets", ",".join(map(str, rows)), "-o", listed)
        run("tune", "-i", listed, "-o", folder / f"{name}-tuned.csv", *options)
    for name, parts in TABLES.items():
        joined = folder / f"{name}-joined.csv"
        run("table", "merge", joined, *(folder / f"{part}-tuned.csv" for part in parts))
        run("coverage", folder / "between.csv", "--table", joined, "--measure", 120, "--csv", folder / f"{name}-measured.csv")


def losses(folder: Path) -> pd.DataFrame:
    """For each shape the time with each table, and what the first two lose beside the exact one."""
    found = None
    for name in TABLES:
        times = pd.read_csv(folder / f"{name}-measured.csv")
        times = times.loc[times["us_from"] == "measured", [*KEY, "us"]].rename(columns={"us": name})
        found = times if found is None else found.merge(times, on=KEY)
    assert found is not None
    return found.assign(loss_powers=found["powers"] / found["exact"] - 1, loss_fine=found["fine"] / found["exact"] - 1)


def summary(found: pd.DataFrame) -> str:
    """A row for each M, and the sum over those of decoding and over those of prompts, in Markdown."""
    groups = {f"{m:,}": found[found["M"] == m] for m in sorted(found["M"].unique())}
    groups |= {"all up to 256": found[found["M"] <= 256], "all above": found[found["M"] > 256]}
    lines = ["| M | powers of two | worst layer | and fine rungs | worst layer |", "|---|---|---|---|---|"]
    for name, part in groups.items():
        cells = [name]
        for judged in ("powers", "fine"):
            cells.append(f"{100 * (part[judged].sum() / part['exact'].sum() - 1):+.1f} %")
            cells.append(f"{100 * part[f'loss_{judged}'].max():+.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and sum up."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("padding"))
    parser.add_argument("--model", default="llama70B", help="a folder with config.json, or the bare name of a shipped one")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--only-sum", action="store_true", help="sum up what the folder has")
    parser.add_argument("options", nargs="*", default=["--libtype", "triton,torch", "--seconds", "1", "--iters", "51", "--topk", "8"])
    asked = parser.parse_args()
    if not asked.only_sum:
        measure(asked.folder, asked.model, asked.tp, asked.options)
    print(summary(losses(asked.folder)))


if __name__ == "__main__":
    main()
