"""Share the options, the statistics and the result files of all benchmarks.

A benchmark is called as ``python benchmarks/NAME.py [--shapes ...] [-o FOLDER]``. With ``-o`` it
writes ``FOLDER/NAME.json``, which holds every sample, and ``FOLDER/NAME.md``, which `page.py` makes
from it.

torch and tunedgemm are imported where they are needed: processes of serving engines import this
file and must not load them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from page import page

if TYPE_CHECKING:
    from tunedgemm.device import Device
    from tunedgemm.shape import Shape

HERE = Path(__file__).parent
SHAPES = HERE / "shapes.csv"
OP = "a16w16"
#: Fields of an op's shapes in addition to M, N and K.
FIELDS: dict[str, dict[str, str]] = {
    "a16w16": {},
    "a8w8": {"dtype": "fp8", "outdtype": "bf16", "scale": "row"},
    "a8w8_blockscale": {"dtype": "fp8", "outdtype": "bf16", "scale": "block"},
    "a4w4_blockscale": {"dtype": "fp4x2", "outdtype": "bf16", "scale": "block"},
    "a16w4_blockscale": {"dtype": "bf16", "outdtype": "bf16", "scale": "block"},
}
#: Op for shuffled weights -> the op for plain ones.
OF_PLAIN = {f"{op}_bpreshuffle": op for op in ("a8w8", "a8w8_blockscale")}
FIELDS |= {op: {**FIELDS[plain], "layout": "aiter16x16"} for op, plain in OF_PLAIN.items()}
#: A gain whose whole interval is below this counts as slower.
SLOWER = 0.98

Interval = tuple[float, float, float]


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that every benchmark has, described by the script's
    docstring.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write all samples and the page there")
    return parser


def add_shapes(parser: argparse.ArgumentParser, default: str, *, op: bool = False) -> None:
    """Add ``--shapes`` and, if asked for, ``--op``."""
    about = "subsets of shapes.csv ('all' for all), files of untuned shapes, or M,N,K"
    parser.add_argument("--shapes", nargs="+", default=default.split(), metavar="SHAPES", help=f"{about} (default: {default})")
    if op:
        parser.add_argument("--op", default=OP, help="default: %(default)s")


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Add ``--rounds``."""
    parser.add_argument("--rounds", type=int, default=default, help="rounds in which the subjects take turns (default: %(default)s)")


def add_only(parser: argparse.ArgumentParser, questions: Sequence[str], default: Sequence[str] = ()) -> None:
    """Add ``--only``, which picks some of the questions that a script answers."""
    chosen = list(default or questions)
    parser.add_argument("--only", nargs="+", choices=questions, default=chosen, help=f"default: {' '.join(chosen)}")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add ``--check``."""
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal or a budget is missed")


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Add ``--budget``."""
    parser.add_argument("--budget", type=float, default=0.0, metavar="SECONDS", help="begin nothing after this time; 0 is no limit")


def shapes_of(words: Sequence[str], op: str = OP, layout: str = "") -> list[tuple[str, Shape]]:
    """Return (layer, shape) of each shape that ``--shapes`` names, each shape once.

    Args:
        words: subsets of shapes.csv, ``all``, files of untuned shapes, or ``M,N,K``.
        op: the op of the shapes.
        layout: layout of the weights; the op's default if empty.

    Raises:
        SystemExit: a word names neither a subset nor a file nor three numbers.
    """
    from tunedgemm.ops import op_named
    from tunedgemm.shape import Shape
    from tunedgemm.table.untuned import read_untuned

    fields = FIELDS.get(op, {}) | ({"layout": layout} if layout else {})
    named: dict[Shape, str] = {}
    for word in words:
        if word.endswith(".csv"):
            named |= dict.fromkeys((row.shape for row in read_untuned(Path(word), op_named(op))), "")
            continue
        if op not in FIELDS:
            raise SystemExit(f"--shapes: {op} has no shapes in shapes.csv (got {word}); name a file of untuned shapes")
        sizes = {tuple(map(int, word.split(","))): ""} if "," in word else _subset(word)
        chosen = {Shape(op, *size, **fields): layer for size, layer in sizes.items()}  # type: ignore[arg-type]
        named |= dict(sorted(chosen.items(), key=lambda item: (item[0].n, item[0].k, item[0].m)))
    return [(layer, shape) for shape, layer in named.items()]


def _subset(name: str) -> dict[tuple[int, ...], str]:
    with SHAPES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if name in ("all", *row["subsets"].split(";"))]
    if not chosen:
        subsets = sorted({subset for row in rows for subset in row["subsets"].split(";")})
        raise SystemExit(f"--shapes: no such subset (got {name}); there are {', '.join(subsets)}")
    return {(int(row["M"]), int(row["N"]), int(row["K"])): row["layer"] for row in reversed(chosen)}


def spread(shapes: list[Shape], count: int) -> list[Shape]:
    """Return *count* of the shapes at equal distances in their order; all if *count* is 0."""
    return shapes if not count or count >= len(shapes) else [shapes[index * len(shapes) // count] for index in range(count)]


def interval(values: Sequence[float]) -> Interval:
    """Return the median and its 95 % interval by order statistics."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    return ordered[count // 2], ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, math.ceil(count / 2 + reach))]


def ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Return the median of the per-round ratios and its 95 % interval."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; 0 of an empty sequence."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def head(name: str, device: Device | None = None, **more: Any) -> dict[str, Any]:
    """Return what the result file of the benchmark *name* begins with: date, device, versions, and
    the command.
    """
    import tunedgemm
    from tunedgemm.device import current_device

    device = device or current_device()
    versions = {**dict(device.versions), "tunedgemm": tunedgemm.__version__, "python": platform.python_version()}
    return {
        "benchmark": name, "date": today(), "device": str(device), "machine": platform.machine(), "versions": versions,
        "command": sys.argv[1:], **more,
    }  # fmt: skip


def save(folder: Path | None, data: dict[str, Any], name: str = "") -> None:
    """Write a result as ``NAME.json`` and its page as ``NAME.md``; do nothing without a folder."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name or data['benchmark']}.json"
    target.write_text(json.dumps(data) + "\n")
    target.with_suffix(".md").write_text(page(data))


def write_page(folder: Path | None, name: str, text: str) -> None:
    """Write a page of text to a folder, or print it without one."""
    if folder is None:
        sys.stdout.write(text)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def read_log(path: Path, kinds: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the records of a log of JSON lines by kind and shape; a torn last line is skipped."""
    records: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in kinds}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["kind"]][json.dumps(record["shape"], sort_keys=True)] = record
    return records
