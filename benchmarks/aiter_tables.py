"""What of AITER's own tables is read, found and resolved here, counted by family.

::

    python benchmarks/aiter_tables.py FOLDER [--out FILE]

FOLDER holds AITER's ``configs`` (``a8w8_tuned_gemm.csv`` ..., ``model_configs/``), whose files are not part of this
repository; only counts are written. Every row is looked up on its own device in the merged table of all files of its
family, and what serves its shape there is told as `tunedgemm explain` tells it, with no backend installed but torch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import attrs
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.choice import choose, offers
from tunedgemm.libtypes import OF_AITERS_OPS, absent, pip_hint
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.table.csvfile import Problem, infer_op, read_rows, read_untuned, upsert
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import read_sheet


@attrs.define
class Family:
    """What was found in the files of one op.

    Attributes:
        files, unchanged: the files, tuned and untuned, and those that come out as they went in.
        rows: of all tuned files. Their keys tell device and shape.
        problems: lines that are not read, and rows that never win.
        shapes: of the untuned files.
        found: valid rows of which a look-up for their own shape and device returns the row, or a better one of its key.
        explained: valid rows of which the explanation names the libtype: as what runs, or with the reason why it cannot.
    """

    files: int = 0
    unchanged: int = 0
    rows: list[Row] = attrs.Factory(list)
    problems: list[Problem] = attrs.Factory(list)
    shapes: int = 0
    found: int = 0
    explained: int = 0

    @property
    def valid(self) -> list[Row]:
        """The rows that may win."""
        return [row for row in self.rows if row.valid]

    @property
    def unread(self) -> int:
        """Lines that are no rows."""
        read = {(row.source, row.line) for row in self.rows}
        return sum((problem.path, problem.line) not in read for problem in self.problems)


def survey(folder: Path) -> dict[str, Family]:
    """Read every CSV below *folder*, and look up all its rows; the families of which AITER has tables."""
    families = {name: Family() for name in ops() if OF_AITERS_OPS.get(name)}
    for path in sorted(folder.rglob("*.csv")):
        op = infer_op([path])
        family = families[op.name]
        family.files += 1
        if "untuned" in path.name:
            family.shapes += len(read_untuned(path, op))
            family.unchanged += read_sheet(path).text().encode() == path.read_bytes()
        else:
            rows, problems = read_rows(path, op)
            family.rows += rows
            family.problems += problems
            family.unchanged += _rewritten(path, op, rows) == path.read_bytes()
    for name, family in families.items():
        look_up(ops()[name], family)
    return families


def _rewritten(path: Path, op: Op, rows: Iterable[Row]) -> bytes:
    """The file after the rows it has were put into a copy of it; of duplicates it keeps one."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(path.read_bytes())
        upsert(copy, op, rows, sort=False)
        return copy.read_bytes()


def look_up(op: Op, family: Family) -> None:
    """Count the rows that a look-up returns, and that an explanation names."""
    table, registry = Table(op, [family.rows]), Registry(())
    for row in family.valid:
        device = Device(row.gfx, row.cu_num)
        best = next(table.candidates(row.shape, device)).row
        family.found += best.key == row.key and best.us <= row.us
        said = choose(offers(row.shape, device, table, registry, ()), row.shape, device, registry, lambda _: "")[0]
        named = [said.offer.solution.libtype, *(offer.solution.libtype for offer, reason in said.passed_over if reason)]
        family.explained += best.solution.libtype in named


def counts(families: dict[str, Family]) -> list[str]:
    """The counts by family."""
    lines = [
        "| op | files | unchanged | rows | keys | duplicates | never win | unread lines | found | explained | shapes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[int] = Counter()
    for name, family in sorted(families.items()):
        keys = len({row.key for row in family.valid})
        figures = (
            family.files, family.unchanged, len(family.rows), keys, len(family.valid) - keys, len(family.rows) - len(family.valid),
            family.unread, family.found, family.explained, family.shapes,
        )  # fmt: skip
        total.update(dict(enumerate(figures)))
        lines.append(f"| `{name}` | {' | '.join(map(str, figures))} |")
    return [*lines, f"| all | {' | '.join(str(total[place]) for place in range(len(total)))} |"]


def kernels(families: dict[str, Family]) -> list[str]:
    """Rows and different kernel names by op and libtype, with who can run them."""
    lines = ["| op | libtype | rows | kernel names | who runs it |", "|---|---|---|---|---|"]
    for op, family in sorted(families.items()):
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in family.rows:
            rows[row.solution.libtype].append(row)
        for libtype, found in sorted(rows.items(), key=lambda item: (-len(item[1]), item[0])):
            names = len({row.solution.kernel_name for row in found})
            hint = pip_hint(libtype)
            who = absent(libtype) or (f"`{hint}`" if hint else "built in")
            lines.append(f"| `{op}` | {libtype} | {len(found)} | {names} | {who} |")
    return lines


def page(folder: Path) -> str:
    """The whole page; says so where AITER's files are not there."""
    head = ["# AITER's own tables", "", "Written by `benchmarks/aiter_tables.py`; counts only, the files themselves are AITER's.", ""]
    if not any(folder.rglob("*.csv")):
        return "\n".join([*head, "AITER's files were not there: nothing was counted.", ""])
    families = survey(folder)
    notes = [
        "- files: tuned and untuned; unchanged: those that are the same bytes after all their rows were put into them.",
        "- keys: devices and shapes of the rows that may win; duplicates: more such rows of a key, in whichever file of the family.",
        "- never win: rows without a time above 0; shapes: those of the untuned files, each once a file.",
        "- found: rows of which a look-up for their shape on their device returns the row, or a faster one of the same key.",
        "- explained: rows whose libtype the explanation of their shape names, as what runs or with the reason why it cannot here.",
    ]
    middle = ["", "## Kernel names", "", "The libtype is the file's, or follows from the kernel's name where the family has none.", ""]
    return "\n".join([*head, *notes, "", *counts(families), *middle, *kernels(families), ""])


def main(argv: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="AITER's configs")
    parser.add_argument("--out", type=Path, help="the file to write; default: standard output")
    arguments = parser.parse_args(argv)
    text = page(arguments.folder)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
