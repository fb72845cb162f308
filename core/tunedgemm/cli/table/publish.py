"""``tunedgemm table publish``: a table with its provenance and a checksum, as one file to share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import attrs

from tunedgemm.cli.table.check import faults_of
from tunedgemm.cli.table.files import op_of
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops.op import Op
from tunedgemm.table.columns import in_order
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import named_file
from tunedgemm.table.published import provenance_of, published_text
from tunedgemm.table.row import Row, record_of, sort_key
from tunedgemm.table.sheet import Sheet, locked, present, replace_text
from tunedgemm.tuner.log import trials_path
from tunedgemm.tuner.provenance import Evidence, evidence, provenance
from tunedgemm.tuner.report import number_of

#: Most faults of a refused table that the error lists.
_NAMED = 3


def run(arguments: argparse.Namespace) -> int:
    """Write the published table; count the rows left out, and those that name torch's call."""
    if arguments.least_gain is not None and not arguments.least_gain >= 0:
        raise UserError(f"--least_gain: must be at least 0, as 0.01 for 1 % (got {arguments.least_gain:g})")
    file = named_file(arguments.file)
    op = op_of(arguments, [file])
    rows, problems = read_rows(file, op)
    if faults := [*map(str, problems), *faults_of(file, rows, op)]:
        more = f" (and {len(faults) - _NAMED} more)" if len(faults) > _NAMED else ""
        raise TableError(f"{'; '.join(faults[:_NAMED])}{more}; mend the table, `tunedgemm table check {file}` lists all")
    found = evidence(op, rows, _logs(arguments, file))
    kept, slower, untimed = _selected(rows, found, arguments.least_gain)
    of_torch = f"{number_of(slower, 'row')}: gain over torch below {100 * arguments.least_gain:g} %" if slower else ""
    left_out = f"{number_of(untimed, 'row')}: no time of torch in the trial log" if untimed else ""
    if len(kept) == slower:
        why = "; ".join(filter(None, (of_torch, left_out))) or "it has none"
        raise TableError(f"{file}: no row to publish ({why}); tune more shapes, or lower --least_gain")
    stated = provenance(op, kept, found, of_torch=of_torch, left_out=left_out)
    if earlier := provenance_of(file):
        stated = attrs.evolve(stated, facts={**earlier.facts, **stated.facts})
    out = arguments.output or Path(_default_name(op, kept))
    if present(out):
        raise TableError(f"{out}: exists already; name a new file with -o, or delete this one")
    records = sorted((record_of(row, op) for row in kept), key=lambda record: sort_key(record, op))
    columns = in_order(op, dict.fromkeys(column for record in records for column in record.cells))
    with locked(out):
        replace_text(out, published_text(stated, Sheet(columns, records).text()))
    print(f"{out}: {number_of(len(kept), 'row')} of {op.name}")
    print("\n".join(f"  {name}: {text}" for name, text in stated.facts.items()))
    return 0


def _logs(arguments: argparse.Namespace, file: Path) -> list[Path]:
    """Return the trial logs: those of ``--trials``, which must exist, else the table's if there is one."""
    if missing := [log for log in arguments.trials if not present(log)]:
        raise TableError(f"{missing[0]}: no such file; --trials takes trial logs, as `tunedgemm tune` writes them next to a table")
    return arguments.trials or [log for log in [trials_path(file)] if present(log)]


def _selected(rows: Sequence[Row], found: Evidence, least_gain: float | None) -> tuple[list[Row], int, int]:
    """Return the rows to publish, how many name torch's call instead, and how many are left out."""
    if least_gain is None:
        return list(rows), 0, 0
    gains = [(row, gain) for row in rows if (gain := found.gain(row)) is not None]
    kept = [row if gain >= least_gain else found.of_torch(row) for row, gain in gains]
    return kept, sum(gain < least_gain for _, gain in gains), len(rows) - len(gains)


def _default_name(op: Op, rows: Sequence[Row]) -> str:
    """Return a name with the device's, if all rows have one, and the op's."""
    devices = {row.device or row.gfx for row in rows}
    return "_".join([*(devices if len(devices) == 1 and "" not in devices else ()), op.columns.tuned_file])
