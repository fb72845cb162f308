"""``table check``: the strict check of one file, whose faults dispatch tolerates."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunedgemm.backends import split_bias
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.cli.document import print_document
from tunedgemm.cli.table.files import op_of, shape_text, solution_text
from tunedgemm.device import Device, as_present, current_device
from tunedgemm.dispatch.offer import row_refusal
from tunedgemm.libtypes import JOINT, is_known
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported
from tunedgemm.table.bit_classes import class_faults
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.deny import DenyList
from tunedgemm.table.folders import named_file
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import provenance_of
from tunedgemm.table.row import Row, key_shape
from tunedgemm.tuner.report import number_of

#: Share of elements outside the tolerance that no row may have.
MOST_ERRORS = 0.2


def run(arguments: argparse.Namespace) -> int:
    """List every fault with its line; return 1 if there is any, or if rows are slower than they may be."""
    from tunedgemm.cli.table import remeasure

    file = named_file(arguments.file)
    op = op_of(arguments, [file])
    remeasure.refuse(arguments, file)
    rows, problems = read_rows(file, op)
    faults = [*map(str, problems), *faults_of(file, rows, op), *(_changed_bits(rows, op) if arguments.bits else ())]
    notes = [*_stated(file), *_notes(file, rows), *_elsewhere(file, rows, op)]
    if not arguments.json:
        print("\n".join([*(faults or [f"{file}: {len(rows)} rows, no fault"]), *notes]), flush=True)
    found = remeasure.measured(arguments, op, file, rows) if arguments.remeasure else None
    if arguments.json:
        facts = {"op": op.name, "file": file, "rows": len(rows), "faults": faults, "notes": notes}
        print_document("table.check", 1, facts | {"remeasured": remeasure.facts_of(found) if found else None})
    return 1 if faults or (found and found.fails) else 0


def faults_of(file: Path, rows: Sequence[Row], op: Op) -> list[str]:
    """Return the faults of a table's rows."""
    return [*_errors(rows), *_duplicates(file, rows), *_unreachable(rows, op), *_unsplit(rows), *_unknown(rows), *_classes(file, rows)]


def _changed_bits(rows: Sequence[Row], op: Op) -> Iterator[str]:
    """Yield the kernels whose bits on this device are not those of their rows' class."""
    from tunedgemm.analysis.bit_labels import proved
    from tunedgemm.cli.bits import proof_text

    for proof in proved(rows, op, current_device(), Registry()):
        if not proof.agrees:
            yield f"other bits than those of the row's class: {proof_text(proof)}"


def _stated(file: Path) -> Iterator[str]:
    """Yield what a published table states; its checksum is right, because its rows were read."""
    stated = provenance_of(file)
    if stated is None:
        return
    yield f"{file}: published, and the checksum is right"
    yield from (f"  {name}: {text}" for name, text in stated.facts.items())


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if not row.err_ratio <= MOST_ERRORS:
            yield f"{row.source}:{row.line}: err_ratio {row.err_ratio} exceeds {MOST_ERRORS}"


def _duplicates(file: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the duplicates of a device and shape: equal rows, and rows of which only one can win."""
    groups: dict[tuple[str, int, str, Shape], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for group in groups.values():
        if len(group) == 1:
            continue
        lines = ", ".join(str(row.line) for row in group)
        fault = "all equal" if len({(row.solution, row.us) for row in group}) == 1 else ", ".join(map(solution_text, group))
        yield f"{file}: {len(group)} rows for {shape_text(group[0])} in lines {lines}: {fault}"


def _unreachable(rows: Sequence[Row], op: Op) -> Iterator[str]:
    """Yield the rows that no look-up reaches."""
    for row in rows:
        if why := _unreached_reason(row.shape, op):
            yield f"{row.source}:{row.line}: no look-up reaches this row: {why}"


def _unreached_reason(shape: Shape, op: Op) -> str:
    if shape.m and shape.m not in op.padded_m(shape.m, shape.n):
        return f"M={shape.m} is not a padded M"
    if shape not in [key_shape(other) for other in op.equivalent_shapes(shape)]:
        return "calls of its shape look up other keys"
    return ""


def _unsplit(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows that add a bias after a kernel where none can be added."""
    for row in rows:
        whole = split_bias.kernel_and_shape(row.solution, row.shape)
        if isinstance(whole, Unsupported):
            yield f"{row.source}:{row.line}: {row.solution}: {whole.reason}"


def _unknown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the libtypes that are neither installed nor known, which are probably misspelt."""
    installed = Registry().libtypes
    for libtype in dict.fromkeys(row.solution.libtype for row in rows):
        if libtype not in installed and not is_known(libtype):
            first = next(row for row in rows if row.solution.libtype == libtype)
            count = sum(row.solution.libtype == libtype for row in rows)
            yield f"{first.source}:{first.line}: unknown libtype {libtype!r}, in {count} rows; installed: {', '.join(installed)}"


def _classes(file: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows that break a bit class, and class rows in one file with others."""
    yield from (f"{row.source}:{row.line}: {why}" for row, why in class_faults(rows))
    plain = [row for row in rows if not row.bit_class]
    if plain and len(plain) < len(rows):
        what = f"{number_of(len(plain), 'row')} without a bit class, the first in line {plain[0].line}, next to rows with one"
        yield f"{file}: {what}: in batch-invariant mode they serve no call, outside it rows with M = 0 come first; keep two files"


def _notes(file: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows that are valid but unusable here."""
    registry, reasons, versions, deny_list = Registry(), defaultdict(list), defaultdict(list), DenyList.load()
    joint = [row for row in rows if JOINT in row.solution.libtype and not registry.runners(row.shape.op, row.solution.libtype)]
    if joint:
        kinds = ", ".join(sorted({row.solution.libtype for row in joint}))
        yield f"note: {file}: {len(joint)} rows have stages of two backends ({kinds}), and none runs both; first in line {joint[0].line}"
    for row in rows:
        if not _has_backend(row, registry):
            answer = registry.get(row.solution.libtype)
            if isinstance(answer, Unsupported) and JOINT not in row.solution.libtype and is_known(row.solution.libtype):
                reasons[f"{row.solution.libtype}: {answer.reason}"].append(row.line)
            continue
        if not row.gfx or not row.valid:
            continue  # it names no device, or never wins
        device = as_present(Device(row.gfx, row.cu_num))
        if reason := _denial(row, device, registry, deny_list) or row_refusal(row, device, registry):
            reasons[f"{row.solution.libtype}: {reason}"].append(row.line)
        elif row.libver and (now := registry.library_version(row.solution.libtype, device)) not in ("", row.libver):
            versions[f"{row.solution.libtype}: tuned with {row.libver}, now {now}"].append(row.line)
    for change, lines in versions.items():
        count = f"{number_of(len(lines), 'row')}, the first in line {lines[0]}"
        yield f"note: {file}: {count}, saw another version of the library, which decides whether it binds them: {change}"
    for reason, lines in reasons.items():
        count = f"{len(lines)} rows are misses here, the first in line" if len(lines) > 1 else "one row is a miss here, in line"
        yield f"note: {file}: {count} {lines[0]}: {reason}"


def _denial(row: Row, device: Device, registry: Registry, deny_list: DenyList) -> str:
    """Return the entry of a deny list that denies a row's kernel; "" without one."""
    denied = deny_list.against(row.shape, device, lambda libtype: registry.library_version(libtype, device))
    return denied(row.solution) if denied else ""


def _elsewhere(file: Path, rows: Sequence[Row], op: Op) -> Iterator[str]:
    """Yield a note on a table whose rows are all for other devices."""
    here = current_device()
    if others := Table(op, [rows]).foreign(here):
        remedy = f"to tune its shapes here, run `tunedgemm tune --op {op.name} -i {file}`"
        yield f"note: {file}: no row for this device, {here}; rows are for {others}; {remedy}"


def _has_backend(row: Row, registry: Registry) -> bool:
    """Tell whether an installed backend covers the row's op, or runs such rows for the row's own backend."""
    backend = registry.get(row.solution.libtype)
    covered = isinstance(backend, Backend) and row.shape.op in backend.ops
    return covered or bool(registry.runners(row.shape.op, row.solution.libtype))
