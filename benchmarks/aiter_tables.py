"""Count what is read, found and resolved of AITER's own tables, and which rows of libtype asm have
their kernel in AITER's manifests.

    python benchmarks/aiter_tables.py --configs DIR -o folder
    python benchmarks/aiter_tables.py --only asm --configs DIR --manifests DIR -o folder

tables
    DIR holds AITER's ``configs`` (``a8w8_tuned_gemm.csv`` ..., ``model_configs/``). Every row is
    looked up on its own device in the merged table of all files of its family. What serves its
    shape there is explained as by `tunedgemm explain`, with no backend installed but torch. Writes
    ``folder/README.md``.
asm
    The manifests are AITER's, of GEMM kernels, as ``<gfx>_<manifest>.csv``. A row is resolved as
    dispatch would on the row's device: its kernelName in the manifest of that gfx, then its splitK
    and shape against the limits of that kernel. Writes ``folder/asm.md``.

AITER's files are not part of this repository; only counts are written.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from harness import add_only, parser_of, write_page
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.choice import choose, offers
from tunedgemm.dtype import fp8_of
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN, OF_AITERS_OPS
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.table.csvfile import Problem, infer_op, read_rows, upsert
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import read_sheet
from tunedgemm.table.untuned import read_untuned

if TYPE_CHECKING:
    from tunedgemm_asm import packs

ASM = "asm"
ARCHITECTURES = ("gfx942", "gfx950")
MI300 = "gfx942"
_ASM_HEAD = "| table | op | gfx | rows of asm | kernel found | of another gfx alone | in no manifest | taken | refused |"


@attrs.define
class Family:
    """Counts of the files of one op.

    Attributes:
        files, unchanged: the files, tuned and untuned, and those that come out as they went in.
        rows: of all tuned files. Their keys tell device and shape.
        problems: lines that are not read, and rows that never win.
        shapes: of the untuned files.
        found: valid rows of which a look-up for their own shape and device returns the row, or a
            better one of its key.
        explained: valid rows of which the explanation names the libtype: as what runs, or with the
            reason why it cannot.
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
        """Return the rows that may win."""
        return [row for row in self.rows if row.valid]

    @property
    def unread(self) -> int:
        """Return the number of lines that are not rows."""
        read = {(row.source, row.line) for row in self.rows}
        return sum((problem.path, problem.line) not in read for problem in self.problems)


def survey(folder: Path) -> dict[str, Family]:
    """Read every CSV below *folder* and look up all its rows; return the families of which AITER
    has tables.
    """
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
    """Return the file's bytes after its own rows were put into a copy of it; of duplicates it keeps
    one.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(path.read_bytes())
        upsert(copy, op, rows, sort=False)
        return copy.read_bytes()


def look_up(op: Op, family: Family) -> None:
    """Count the rows that a look-up returns and that an explanation names."""
    table, registry = Table(op, [family.rows]), Registry(())
    for row in family.valid:
        device = Device(row.gfx, row.cu_num)
        best = next(table.candidates(row.shape, device)).row
        family.found += best.key == row.key and best.us <= row.us
        said = choose(offers(row.shape, device, table, registry, ()), row.shape, device, registry, lambda _: "")[0]
        named = [said.offer.solution.libtype, *(offer.solution.libtype for offer, reason in said.passed_over if reason)]
        family.explained += best.solution.libtype in named


def counts(families: dict[str, Family]) -> list[str]:
    """Return the table of the counts by family."""
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
    return [*lines, f"| all | {' | '.join(str(total[column]) for column in range(len(total)))} |"]


def _runner(registry: Registry, op: str, libtype: str) -> str:
    """Return the command that installs a backend for rows of a libtype."""
    own = registry.get(libtype)
    able = [own] if isinstance(own, Backend) and op in own.ops else registry.runners(op, libtype)
    if not able:
        return "no installed backend"
    return "built in" if able[0].libtype == BUILTIN else f"`pip install tunedgemm[{able[0].libtype}]`"


def kernels(families: dict[str, Family]) -> list[str]:
    """Return the table of rows and kernel names by op and libtype, with the backend that runs them."""
    registry, lines = Registry(), ["| op | libtype | rows | kernel names | who runs it |", "|---|---|---|---|---|"]
    for op, family in sorted(families.items()):
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in family.rows:
            rows[row.solution.libtype].append(row)
        for libtype, own in sorted(rows.items(), key=lambda item: (-len(item[1]), item[0])):
            names = len({row.solution.kernel_name for row in own})
            who = _runner(registry, op, libtype)
            lines.append(f"| `{op}` | {libtype} | {len(own)} | {names} | {who} |")
    return lines


def fp8_rows(families: dict[str, Family]) -> list[str]:
    """Return the table of the fp8 rows of `MI300`, and how many of them its own fp8 finds."""
    lines = ["| op | libtype | rows | of its fp8 | found by a call of it |", "|---|---|---|---|---|"]
    for name, family in sorted(families.items()):
        table, counted = Table(ops()[name], [family.rows]), defaultdict[str, Counter[str]](Counter)
        for row in family.valid:
            dtype = str(dict(row.shape.extra).get("q_dtype_w", row.shape.dtype))
            if row.gfx != MI300 or not dtype.startswith("fp8"):
                continue
            best = next(table.candidates(row.shape, Device(row.gfx, row.cu_num))).row
            is_own = dtype == fp8_of(MI300)
            counted[row.solution.libtype].update(rows=1, own=int(is_own), found=int(is_own and best.key == row.key))
        for libtype, figures in sorted(counted.items()):
            lines.append(f"| `{name}` | {libtype} | {figures['rows']} | {figures['own']} | {figures['found']} |")
    return lines


def page(folder: Path) -> str:
    """Return the page of tables; it says so if AITER's files are missing."""
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
    last = ["", f"## fp8 on {MI300}", "", f"Its fp8 is {fp8_of(MI300)}, also where AITER's key has no dtype.", ""]
    return "\n".join([*head, *notes, "", *counts(families), *middle, *kernels(families), *last, *fp8_rows(families), ""])


@attrs.define
class Counts:
    """Counts of the rows of one table and architecture.

    Attributes:
        rows: of libtype asm that may win.
        found: those whose kernel is in the manifest of their architecture.
        elsewhere: those whose kernel is only in the manifest of another.
        taken: those of *found* whose shape and splitK the kernel takes.
        reasons: why others of *found* are refused.
    """

    rows: int = 0
    found: int = 0
    elsewhere: int = 0
    taken: int = 0
    reasons: Counter[str] = attrs.Factory(Counter)


def asm_kernels(folder: Path) -> dict[str, packs.Catalog]:
    """Return the kernels of AITER's manifests by architecture, without their code objects."""
    from tunedgemm_asm import manifest, packs
    from tunedgemm_asm.abi import ABIS
    from tunedgemm_asm.descriptor import AITER, Descriptor

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


def asm_counts(rows: Iterable[Row], catalogs: dict[str, packs.Catalog]) -> dict[str, Counts]:
    """Resolve every row of asm, and count by architecture."""
    from tunedgemm_asm import packs
    from tunedgemm_asm.names import resolve

    counted: dict[str, Counts] = {}
    for row in rows:
        if row.solution.libtype != ASM or not row.valid:
            continue
        counts = counted.setdefault(row.gfx or "none", Counts())
        counts.rows += 1
        mine = catalogs.get(row.gfx) or packs.gathered(row.gfx or "none", ())
        name = row.solution.kernel_name
        if name not in mine.kernels:
            counts.elsewhere += any(name in other.kernels for other in catalogs.values())
            continue
        counts.found += 1
        try:
            resolve(row.solution, row.shape, Device(row.gfx, row.cu_num), mine)
            counts.taken += 1
        except PluginError as error:
            counts.reasons[str(error).replace(name, "it")] += 1
    return counted


def asm_lines(configs: Path, catalogs: dict[str, packs.Catalog]) -> Iterator[tuple[str, str, str, Counts]]:
    """Yield table, op, architecture and counts."""
    for path in sorted(configs.rglob("*.csv")):
        if "untuned" in path.name:
            continue
        op = infer_op([path])
        rows, _ = read_rows(path, op)
        for gfx, counts in sorted(asm_counts(rows, catalogs).items()):
            yield path.name, op.name, gfx, counts


def asm_page(configs: Path, manifests: Path) -> str:
    """Return the page of asm; it says so if AITER's files are missing."""
    head = [
        "# AITER's rows of libtype asm",
        "",
        "Written by `benchmarks/aiter_tables.py --only asm`; counts only, the files themselves are AITER's.",
        "",
    ]
    if not any(configs.rglob("*.csv")) or not any(manifests.glob("*.csv")):
        return "\n".join([*head, "AITER's files were not there: nothing was counted.", ""])
    notes = [
        "- rows of asm: those that may win; kernel found: by name in the manifest of the row's own gfx.",
        "- of another gfx alone, in no manifest: rows that dispatch passes over with that reason.",
        "- taken: the kernel's limits allow the row's shape and splitK; refused: the reasons are below.",
        "- The op fmoe has kernels of its own in other manifests, which the plugin does not launch.",
    ]
    table, reasons, total = [], [], Counter[int]()
    for name, op, gfx, counts in asm_lines(configs, asm_kernels(manifests)):
        nowhere, refused = counts.rows - counts.found - counts.elsewhere, counts.found - counts.taken
        figures = (counts.rows, counts.found, counts.elsewhere, nowhere, counts.taken, refused)
        table.append(f"| `{name}` | `{op}` | {gfx} | {' | '.join(map(str, figures))} |")
        total.update(dict(enumerate(figures)))
        reasons += [f"| `{name}` | {gfx} | {times} | {reason} |" for reason, times in counts.reasons.most_common()]
    table.append(f"| all | | | {' | '.join(str(total[column]) for column in range(6))} |")
    text = [*head, *notes, "", _ASM_HEAD, "|---|---|---|---|---|---|---|---|---|", *table, ""]
    if reasons:
        text += ["## Refused", "", "| table | gfx | rows | reason |", "|---|---|---|---|", *reasons, ""]
    return "\n".join(text)


def main(words: list[str] | None = None) -> int:
    """Write the pages, or print them without an output folder."""
    parser = parser_of(__doc__)
    add_only(parser, ("tables", "asm"), ("tables",))
    parser.add_argument("--configs", type=Path, required=True, help="AITER's tables")
    parser.add_argument("--manifests", type=Path, help="AITER's manifests, for asm")
    arguments = parser.parse_args(words)
    if "asm" in arguments.only and not arguments.manifests:
        parser.error("--only asm: needs AITER's manifests; name their folder with --manifests")
    for question in arguments.only:
        text = page(arguments.configs) if question == "tables" else asm_page(arguments.configs, arguments.manifests)
        write_page(arguments.output, "README.md" if question == "tables" else "asm.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
