"""What tuning found, read from its tables, trial logs, profiles and lists of shapes.

It is the menu of packages that show results. `read_sides` and `read_findings` read the files. An
`Entry` has what they say about one shape on one device, and the figures that follow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tunedgemm.analysis.coverage.captured import Replays
from tunedgemm.analysis.results.captured import covered
from tunedgemm.analysis.results.entry import BASELINE, TIMED, UNKNOWN, Entry, Trial, Winner, gain_of
from tunedgemm.analysis.results.files import Faults, is_packed, kind_of, op_of_table
from tunedgemm.analysis.results.findings import Findings
from tunedgemm.analysis.results.trials import read_log_into, read_profile_into
from tunedgemm.device import Device, device_of_text
from tunedgemm.errors import UserError
from tunedgemm.libtypes import rank
from tunedgemm.ops import op_named, ops
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import home_folder, named_file, tuned_path
from tunedgemm.table.sheet import present
from tunedgemm.table.untuned import Untuned, read_listed
from tunedgemm.text.printable import printable_line
from tunedgemm.timing import STATUSES
from tunedgemm.tuner.log import trials_path
from tunedgemm.tuner.report import SLOWER, number_of, sizes
from tunedgemm.tuner.select import tie_margin
from tunedgemm.workload.lists import op_of_file

#: Kinds in the order of reading: a device that a table or log names is known to the others.
_ORDER = ("table", "log", "profile", "list")


def read_findings(paths: Sequence[str | Path], *, op: str = "", device: Device | None = None, replays: str = "1") -> Findings:
    """Read what some files say; a table's trial log in its folder is read with it.

    Args:
        paths: tables, trial logs, profiles and lists of captured shapes; logs and profiles may be
            packed with gzip.
        op: the op of tables, profiles and lists; by default their columns and names decide.
        device: the device of lines that name none.
        replays: the runs of captured graphs: a number, or one for each M as ``M:N,M:N``.

    Raises:
        UserError: a file cannot be read, is none of these, or its op is not certain; or no file has
            a shape.
    """
    findings, per_graph = Findings(), Replays.of(replays)
    for path, kind in _with_logs([named_file(str(path)) for path in paths]):
        findings.files.append((path, kind))
    listed: list[Untuned] = []
    for path, kind in sorted(findings.files, key=lambda file: _ORDER.index(file[1])):
        faults = Faults(path)
        if kind == "log":
            read_log_into(path, findings, faults)
        elif kind == "profile":
            read_profile_into(path, findings, faults, op)
        elif kind == "table":
            _read_table(path, findings, faults, op)
        else:
            shapes, problems = read_listed(path, op_named(op) if op else op_of_file(path), device.gfx if device else "")
            listed += shapes
            faults.add_all(problems)
        findings.faults += [faults] if faults.count else []
    if not findings.entries:
        named = "; ".join(f"{faults.path}: {faults.named[0]}" for faults in findings.faults)
        raise UserError(f"{', '.join(map(str, paths)) or 'report'}: no tuned shape{f' ({named})' if named else ''}; name a table or a log")
    findings.name_devices(device)
    if missing := findings.count_calls(listed, per_graph):
        findings.notes.append(f"{missing:,} captured calls are of shapes that these files do not have; the gains leave them out")
    return findings


def read_sides(
    paths: Sequence[str | Path], against: Sequence[str | Path] = (), *, op: str = "", device: Device | None = None, replays: str = "1"
) -> tuple[Findings | None, Findings]:
    """Read the findings of one side, or of two to compare; see `read_findings`.

    Without *paths* they are those of the user's tuned tables.

    Two tables, or two logs or profiles, that share a shape are two sides. All other files without
    *against* are one.

    Args:
        against: the files of the earlier side.

    Returns:
        The earlier findings, None for a single side, and the others.
    """
    paths = paths or _of_user_folder()
    if against:
        return read_findings(against, op=op, device=device), read_findings(paths, op=op, device=device, replays=replays)
    kinds = ["table" if kind_of(named_file(str(path))) == "table" else "trials" for path in paths] if len(paths) == 2 else []
    if len(set(kinds)) == 1:
        first, second = (read_findings([path], op=op, device=device) for path in paths)
        if {shape for _, shape in first.entries} & {shape for _, shape in second.entries}:
            return first, second
    return None, read_findings(paths, op=op, device=device, replays=replays)


def _of_user_folder() -> list[Path]:
    files = [path for op in ops().values() if present(path := tuned_path(op))]
    if not files:
        raise UserError(f"{home_folder()}: no tuned table; run `tunedgemm tune`, or name a table or a trial log")
    return files


def _with_logs(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the distinct files with their kinds, and after each table its trial log."""
    found: dict[str, tuple[Path, str]] = {}
    for path in paths:
        kind = kind_of(path)
        if kind in ("table", "list") and is_packed(path):
            raise UserError(f"{path}: a packed {kind}; unpack it with gunzip first")
        found.setdefault(os.path.realpath(path), (path, kind))
        log = trials_path(path)
        if kind == "table" and present(log):
            found.setdefault(os.path.realpath(log), (log, "log"))
    return list(found.values())


def _read_table(path: Path, findings: Findings, faults: Faults, op: str) -> None:
    family = op_of_table(path, op)
    rows, problems = read_rows(path, family)
    faults.add_all(problems)
    for row in rows:
        if not row.valid:
            continue
        entry = findings.entry(Device(row.gfx or UNKNOWN, row.cu_num, row.device), family, row.shape)
        entry.put_row(Winner(str(row.solution), row.solution.libtype, row.us))
        if row.libver:
            libtype = row.solution.libtype
            findings.versions.add(row.libver if libtype in row.libver.lower() else f"{libtype} {row.libver}")


__all__ = [
    "BASELINE",
    "Entry",
    "Findings",
    "SLOWER",
    "STATUSES",
    "TIMED",
    "Trial",
    "UNKNOWN",
    "Winner",
    "covered",
    "device_of_text",
    "gain_of",
    "number_of",
    "printable_line",
    "rank",
    "read_findings",
    "read_sides",
    "sizes",
    "tie_margin",
    "trials_path",
]
