"""Tables in effect: their layers, age and rows for this device, and the rows that are stale."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section, fault_of_error
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.settings import BATCH_INVARIANT
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.process.variables import switched_on
from tunedgemm.solution import Unsupported
from tunedgemm.table.deny import deny_paths, read_denials
from tunedgemm.table.distributions import distributions
from tunedgemm.table.folders import TableLayer, table_layers
from tunedgemm.table.index import Index, RowSource
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import present
from tunedgemm.table.source import open_source

#: Seconds in which the rows of one file are compared with the installed libraries.
SECONDS = 2.0
_DAY = 24 * 3600.0


@attrs.frozen
class _Examiner:
    """Examines the files of the tables for one device.

    Attributes:
        registry: the installed backends, whose library versions count.
        device: the device whose rows count.
        now: seconds since the epoch, for ages.
    """

    registry: Registry
    device: Device
    now: float
    _versions: dict[str, str | Unsupported] = attrs.field(factory=dict, init=False)

    def of_file(self, op: Op, layer: TableLayer, path: Path) -> tuple[list[Fact], list[Fault]]:
        """Return the fact and the faults of one table; neither for an optional file that is missing."""
        if not present(path):
            remedy = f"write it with `tunedgemm tune --op {op.name} -o {path}`, or unset {op.columns.variable}"
            missing = Fault(str(path), "no such file", remedy)
            return [], [missing] if layer.named_by_user else []
        try:
            source = open_source(path, op)
        except TableError as error:
            remedy = f"install {layer.origin} again" if layer.origin else "mend it, or move it away"
            fault = Fault(str(path), f"a table that is not used (got: {_less_path(str(error), path)})", remedy)
            return [Fact(op.name, str(path), {"layer": _layer(layer), "readable": False})], [fault]
        here, stale, unserved, complete = self._compared(op, source)
        fact = Fact(
            op.name,
            str(path),
            {
                "layer": _layer(layer),
                "readable": True,
                "rows": len(source),
                "rows_here": here,
                "stale": stale.total(),
                "unserved": unserved.total(),
                "compared_all": complete,
                "age_days": int((self.now - path.stat().st_mtime) / _DAY),
            },
        )
        faults = list(_of_lines(source, path))
        if not layer.is_shipped:  # a user cannot mend what the package ships
            faults += [self._stale_fault(op, layer, path, key, count) for key, count in stale.items()]
            faults += [self._unserved_fault(layer, path, libtype, count) for libtype, count in unserved.items()]
        if not layer.is_shipped and (others := Table(op, index=Index([[source]])).foreign(self.device)):
            faults.append(self._elsewhere_fault(op, path, others))
        return [fact], faults

    def _compared(self, op: Op, source: RowSource) -> tuple[int, Counter[tuple[str, str]], Counter[str], bool]:
        """Count the rows for the device; those of another library version; those without a backend."""
        here, stale, unserved = 0, Counter[tuple[str, str]](), Counter[str]()
        deadline = time.monotonic() + SECONDS
        for row in Index([[source]]).rows_of(self.device.gfx, self.device.cu_num):
            here += 1
            now = self._version(op, row)
            if isinstance(now, Unsupported):
                unserved[row.solution.libtype] += 1
            elif row.libver and row.libver != now:
                stale[row.solution.libtype, row.libver] += 1
            if time.monotonic() > deadline:
                return here, stale, unserved, False
        return here, stale, unserved, True

    def _version(self, op: Op, row: Row) -> str | Unsupported:
        """Return the present version of a row's library, or why no backend runs the row."""
        libtype = row.solution.libtype
        if libtype not in self._versions:
            answer = self.registry.get(libtype)
            self._versions[libtype] = answer.library_version(self.device) if isinstance(answer, Backend) else answer
        version = self._versions[libtype]
        return row.libver if isinstance(version, Unsupported) and self.registry.runners(op.name, libtype) else version

    def _stale_fault(self, op: Op, layer: TableLayer, path: Path, key: tuple[str, str], count: int) -> Fault:
        libtype, libver = key
        fault = (
            f"{_rows(count)} of {libtype} tuned with another version of its library (got {libver}, now {self._versions[libtype] or 'none'})"
        )
        if layer.origin:
            return Fault(str(path), fault, f"`tunedgemm tune --op {op.name} -i {path}` tunes these shapes for you", harmless=True)
        return Fault(str(path), fault, f"`tunedgemm tune --op {op.name} -o {path} --stale` tunes them again")

    def _unserved_fault(self, layer: TableLayer, path: Path, libtype: str, count: int) -> Fault:
        remedy = f"mend or install {libtype}, or tune these shapes again with --all"
        fault = f"{_rows(count)} of {libtype} that never serve (got: {self._versions[libtype]})"
        return Fault(str(path), fault, remedy, harmless=bool(layer.origin))

    def _elsewhere_fault(self, op: Op, path: Path, others: str) -> Fault:
        remedy = f"tune these shapes here with `tunedgemm tune --op {op.name} -i {path}`, or install tables of this device"
        return Fault(str(path), f"no row for {self.device} (got rows for {others})", remedy, harmless=True)


def tables(registry: Registry, device: Device, now: float | None = None) -> Section:
    """List the files of every op's table by precedence, for one device.

    Args:
        registry: the installed backends.
        device: the device whose rows count.
        now: seconds since the epoch, for ages; the present if absent.
    """
    examiner = _Examiner(registry, device, time.time() if now is None else now)
    facts: list[Fact] = []
    faults: list[Fault] = []
    faults += [fault_of_error(TableError(fault)) for found in distributions() for fault in found.faults]
    for op in ops().values():
        try:
            layers = table_layers(op, invariant=switched_on(BATCH_INVARIANT))
        except UserError as error:
            faults.append(fault_of_error(error))
            continue
        for layer in layers:
            for path in layer.paths:
                of_file = examiner.of_file(op, layer, path)
                facts += of_file[0]
                faults += of_file[1]
    for path in deny_paths():
        entries, problems = read_denials(path)
        facts.append(Fact("deny list", str(path), {"entries": len(entries)}))
        faults += [
            Fault(str(path), f"denies nothing (got: {_less_path(str(problem), path)})", "mend the deny list") for problem in problems
        ]
    return Section("tables", tuple(facts), tuple(faults))


def rows_here(section: Section) -> int:
    """Return how many rows of all tables are for the device."""
    return sum(int(fact.more.get("rows_here", 0)) for fact in section.facts)


def _of_lines(source: RowSource, path: Path) -> Iterator[Fault]:
    """Yield one fault for all lines of a file that cannot be used."""
    if faults := source.problems:
        fault = f"{len(faults)} {'lines' if len(faults) > 1 else 'line'} not used (got, in line {faults[0].line}: {faults[0].reason})"
        yield Fault(str(path), fault, f"`tunedgemm table check {path}` lists them; mend or delete them")


def _layer(layer: TableLayer) -> str:
    """Return a layer's name, with the distribution's; those of the package stay apart."""
    return layer.name if layer.is_shipped else str(layer)


def _less_path(text: str, path: Path) -> str:
    return text.removeprefix(f"{path}: ")


def _rows(count: int) -> str:
    return f"{count} {'rows' if count > 1 else 'row'}"
