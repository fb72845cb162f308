"""Tables in installed distributions, found by entry points without importing them. Torch-free.

An entry point of group ``tunedgemm.tables`` names a package whose CSV files are published tables,
and at most one deny list.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import attrs

from tunedgemm.errors import TableError
from tunedgemm.ops import ops
from tunedgemm.process.packages import folder_of_entry
from tunedgemm.process.plugin_guard import entry_points
from tunedgemm.table.published import provenance_of
from tunedgemm.text.printable import warn_once

GROUP = "tunedgemm.tables"

#: Name of the user's deny list, and of that of a distribution. It needs no signature, because it
#: can make no call wrong.
DENY_FILE = "deny.csv"


@attrs.frozen
class Distribution:
    """The tables of one entry point.

    Attributes:
        label: name and version of the distribution.
        paths: (op name, published table) pairs, in order of file names.
        faults: why it has no tables, or why a file is not used.
        deny_lists: its deny list, if it has one.
    """

    label: str
    paths: tuple[tuple[str, Path], ...] = ()
    faults: tuple[str, ...] = ()
    deny_lists: tuple[Path, ...] = ()

    def of(self, op: str) -> tuple[Path, ...]:
        """Return the tables of an op."""
        return tuple(path for name, path in self.paths if name == op)


def distributions() -> tuple[Distribution, ...]:
    """Return the distributions with tables, by name; warn once about unusable ones."""
    found = tuple(sorted(map(_of_entry, entry_points(group=GROUP)), key=lambda distribution: (distribution.label, distribution.paths)))
    for fault in (fault for distribution in found for fault in distribution.faults):
        warn_once(f"a table that is not used: {fault}")
    return found


def _of_entry(entry: EntryPoint) -> Distribution:
    label = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
    folder, fault = folder_of_entry(entry)
    if folder is None:
        return Distribution(label, faults=(f"{label}: {fault}; install the distribution again",))
    paths: list[tuple[str, Path]] = []
    faults: list[str] = []
    deny_lists = tuple(sorted(folder.glob(DENY_FILE)))
    for path in sorted(set(folder.glob("*.csv")).difference(deny_lists)):
        try:
            stated = provenance_of(path)
        except TableError as error:
            faults.append(str(error))
            continue
        if stated is None:
            faults.append(f"{path}: not a published table; its author writes one with `tunedgemm table publish`")
        elif stated.op not in ops():
            faults.append(f"{path}: a table of an unknown op (got {stated.op!r}); install the distribution that has the op")
        else:
            paths.append((stated.op, path))
    if not paths and not faults and not deny_lists:
        faults.append(f"{label}: no table in {folder}; install the distribution again")
    return Distribution(label, tuple(paths), tuple(faults), deny_lists)
