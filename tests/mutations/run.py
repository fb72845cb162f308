"""Plant each listed mistake and check that its tests fail: `tests/mutations/run.py [list.csv ...]`.

A list has the columns file, before, after and tests. `before` occurs once in `file`; `tests` are
pytest's arguments.
"""

import csv
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def survives(row: dict[str, str]) -> bool:
    """Plant one mistake, run its tests, take it out; True where they pass all the same."""
    path = ROOT / row["file"]
    text = path.read_text()
    if text.count(row["before"]) != 1:
        raise SystemExit(f"{row['file']}: the text to change must occur once (got {text.count(row['before'])}): {row['before']!r}")
    path.write_text(text.replace(row["before"], row["after"]))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *row["tests"].split()]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 1  # 1: a test failed
    finally:
        path.write_text(text)


def main(arguments: list[str]) -> int:
    """Print each mistake that its tests miss; the exit code is 1 where there is one."""
    missed = 0
    for path in [Path(argument) for argument in arguments] or sorted(HERE.glob("*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if survives(row):
                missed += 1
                print(f"{path.stem}: missed {row['before']!r} -> {row['after']!r} in {row['file']}", flush=True)
        print(f"{path.stem}: {len(rows)} mistakes planted", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
