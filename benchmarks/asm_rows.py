"""Which rows of AITER's own tables have their kernel in AITER's own manifests, and which of those the plugin asm takes.

::

    python benchmarks/asm_rows.py CONFIGS MANIFESTS [--out FILE]

CONFIGS holds AITER's tables (``configs`` with ``model_configs/``), MANIFESTS its manifests of GEMM kernels as
``<gfx>_<manifest>.csv``; neither is part of this repository, and only counts are written. A row is resolved as dispatch would on
its own device: its kernelName in the manifest of its own gfx, then its splitK and shape against the limits of that kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm.table.row import Row
from tunedgemm_asm import manifest, packs
from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.descriptor import AITER, Descriptor
from tunedgemm_asm.names import resolve

LIBTYPE = "asm"
ARCHITECTURES = ("gfx942", "gfx950")
_HEAD = "| table | op | gfx | rows of asm | kernel found | of another gfx alone | in no manifest | taken | refused |"


@attrs.define
class Counts:
    """The rows of one table and architecture.

    Attributes:
        rows: of libtype asm that may win.
        found: those whose kernel is in the manifest of their own architecture.
        elsewhere: those whose kernel is in that of another alone.
        taken: those of *found* whose shape and splitK the kernel takes.
        reasons: why others of *found* are refused.
    """

    rows: int = 0
    found: int = 0
    elsewhere: int = 0
    taken: int = 0
    reasons: Counter[str] = attrs.Factory(Counter)


def kernels(folder: Path) -> dict[str, packs.Found]:
    """The kernels of AITER's manifests by architecture; their code objects are not asked for."""
    listed = []
    for gfx in ARCHITECTURES:
        for family, (name, abi) in AITER.items():
            path = folder / f"{gfx}_{name}"
            read = manifest.read(path, ABIS[abi])
            if read.refused:
                raise SystemExit(f"{path}: {read.refused}")
            said = Descriptor(f"aiter-{gfx}-{family}", gfx, abi, name, ABIS[abi].dtypes)
            listed.append(packs.Pack(said, folder, "AITER", read.kernels))
    return {gfx: packs.gathered(gfx, listed) for gfx in ARCHITECTURES}


def count(rows: Iterable[Row], found: dict[str, packs.Found]) -> dict[str, Counts]:
    """Resolve every row of asm, by architecture."""
    counted: dict[str, Counts] = {}
    for row in rows:
        if row.solution.libtype != LIBTYPE or not row.valid:
            continue
        counts = counted.setdefault(row.gfx or "none", Counts())
        counts.rows += 1
        mine = found.get(row.gfx) or packs.gathered(row.gfx or "none", ())
        name = row.solution.kernel_name
        if name not in mine.kernels:
            counts.elsewhere += any(name in other.kernels for other in found.values())
            continue
        counts.found += 1
        try:
            resolve(row.solution, row.shape, Device(row.gfx, row.cu_num), mine)
            counts.taken += 1
        except PluginError as error:
            counts.reasons[str(error).replace(name, "it")] += 1
    return counted


def lines(configs: Path, found: dict[str, packs.Found]) -> Iterator[tuple[str, str, str, Counts]]:
    """Table, op, architecture and counts."""
    for path in sorted(configs.rglob("*.csv")):
        if "untuned" in path.name:
            continue
        op = infer_op([path])
        rows, _ = read_rows(path, op)
        for gfx, counts in sorted(count(rows, found).items()):
            yield path.name, op.name, gfx, counts


def page(configs: Path, manifests: Path) -> str:
    """The whole page; says so where AITER's files are not there."""
    head = ["# AITER's rows of libtype asm", "", "Written by `benchmarks/asm_rows.py`; counts only, the files themselves are AITER's.", ""]
    if not any(configs.rglob("*.csv")) or not any(manifests.glob("*.csv")):
        return "\n".join([*head, "AITER's files were not there: nothing was counted.", ""])
    notes = [
        "- rows of asm: those that may win; kernel found: by name in the manifest of the row's own gfx.",
        "- of another gfx alone, in no manifest: rows that dispatch passes over with that reason.",
        "- taken: the kernel's limits allow the row's shape and splitK; refused: the reasons are below.",
        "- The op fmoe has kernels of its own in other manifests, which the plugin does not launch.",
    ]
    table, reasons, total = [], [], Counter[int]()
    for name, op, gfx, counts in lines(configs, kernels(manifests)):
        nowhere, refused = counts.rows - counts.found - counts.elsewhere, counts.found - counts.taken
        figures = (counts.rows, counts.found, counts.elsewhere, nowhere, counts.taken, refused)
        table.append(f"| `{name}` | `{op}` | {gfx} | {' | '.join(map(str, figures))} |")
        total.update(dict(enumerate(figures)))
        reasons += [f"| `{name}` | {gfx} | {times} | {reason} |" for reason, times in counts.reasons.most_common()]
    table.append(f"| all | | | {' | '.join(str(total[place]) for place in range(6))} |")
    text = [*head, *notes, "", _HEAD, "|---|---|---|---|---|---|---|---|---|", *table, ""]
    if reasons:
        text += ["## Refused", "", "| table | gfx | rows | reason |", "|---|---|---|---|", *reasons, ""]
    return "\n".join(text)


def main(argv: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, help="AITER's tables")
    parser.add_argument("manifests", type=Path, help="AITER's manifests")
    parser.add_argument("--out", type=Path, help="the file to write; default: standard output")
    arguments = parser.parse_args(argv)
    text = page(arguments.configs, arguments.manifests)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
