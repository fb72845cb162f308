"""Tests of the lists of mistakes: each fits the code that it names."""

import csv
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("*.csv")), ids=lambda path: path.stem)
def test_each_mistake_can_be_planted(path: Path) -> None:
    """The text that a mistake replaces occurs once in its file, and its tests exist."""
    root = HERE.parents[1]
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            assert (root / row["file"]).read_text().count(row["before"]) == 1, (row["file"], row["before"])
            assert row["before"] != row["after"]
            paths = [word.partition("::")[0] for word in row["tests"].split() if word.partition("::")[0].endswith((".py", "/"))]
            assert paths
            assert all((root / each).exists() for each in paths), paths
