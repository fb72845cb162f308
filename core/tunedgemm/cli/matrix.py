"""``tunedgemm plugins --matrix``: what each backend serves where, what that needs, and where it ran.

The table shows what backends state in ``platforms``. It asks no device and no library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.platforms import Platform
from tunedgemm.backends.registry import Registry
from tunedgemm.cli.document import print_document
from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN, owners, pip_hint
from tunedgemm.ops import ops
from tunedgemm.solution import Unsupported
from tunedgemm.text.console import Column, console, grid_of, print_grid

#: An op's list that lacks so many is shown by those that it lacks.
_MOST_MISSING = 3
#: Kind of device -> how its architectures' names begin, and its name.
_KINDS = {"nvidia": ("sm_", "NVIDIA GPU"), "amd": ("gfx", "AMD GPU"), "cpu": ("cpu-", "CPU")}
HEADINGS = ("libtype", "distribution", "ops", "devices", "must be installed", "ran on")
#: Headings of sentences and lists, which may wrap at spaces.
_PROSE = ("ops", "devices", "must be installed", "ran on")


@attrs.frozen
class Row:
    """Ops of one backend on some architectures; *problem* says why a backend has no more fields."""

    libtype: str
    distribution: str = ""
    ops: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    problem: str = ""


def rows_of(registry: Registry) -> list[Row]:
    """Return the platforms of the installed backends in order of rank, then the libtypes not installed."""
    rows = []
    for libtype in registry.libtypes:
        backend = registry.get(libtype)
        if isinstance(backend, Unsupported):
            rows.append(Row(libtype, problem=backend.reason))
            continue
        if not backend.platforms:
            rows.append(Row(libtype, backend.distribution, backend.ops, problem="states no platforms"))
        for platform in backend.platforms:
            covered = platform.ops or backend.ops
            rows.append(Row(libtype, backend.distribution, covered, platform.devices, platform.needs, platform.ran))
    missing = [libtype for libtype in owners() if libtype not in registry]
    return rows + [Row(libtype, owners()[libtype], problem=f"not installed; {pip_hint(libtype)}") for libtype in missing]


def print_table(rows: Iterable[Row]) -> None:
    """Print the rows as a table for a terminal."""
    rows = list(rows)
    columns = [Column(heading, prose=heading in _PROSE) for heading in HEADINGS]
    cells = (dict(zip(HEADINGS, _cells(row, rows), strict=True)) for row in rows)
    print_grid(grid_of(columns, cells, "what each backend serves, by its own statement"), console())


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown."""
    rows, lines = list(rows), [HEADINGS, ("---",) * len(HEADINGS)]
    for row in rows:
        cells = _cells(row, rows, "`")
        lines.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def print_json(rows: Iterable[Row]) -> None:
    """Print the rows as the document ``plugins.matrix``."""
    rows = list(rows)
    print_document("plugins.matrix", 1, {"rows": [attrs.asdict(row) for row in rows], "served": served(rows)})


def served(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """Return the libtypes that serve each op on each known architecture, apart from torch's own."""
    places: dict[str, dict[str, list[str]]] = {gfx: {name: [] for name in ops()} for gfx in ARCHITECTURES}
    for row in rows:
        platform = Platform(row.devices, ops=row.ops) if row.devices and row.libtype != BUILTIN else None
        for gfx, by_op in places.items():
            for name, libtypes in by_op.items():
                if platform and platform.serves(name, Device(gfx, 0)) and row.libtype not in libtypes:
                    libtypes.append(row.libtype)
    return places


def print_served(rows: Iterable[Row]) -> None:
    """Print `served` as a table with a line for each architecture."""
    columns = [Column("gfx"), *(Column(name, prose=True) for name in ops())]
    cells = [{"gfx": gfx} | {name: " ".join(libtypes) for name, libtypes in by_op.items()} for gfx, by_op in served(rows).items()]
    print_grid(grid_of(columns, cells, "backends of each op by architecture, apart from torch"), console())


def _cells(row: Row, rows: Sequence[Row], quote: str = "") -> tuple[str, ...]:
    """Return the texts of one of the *rows*, with names between quotes."""
    libtype = f"{quote}{row.libtype}{quote}"
    if row.problem and not row.ops:
        return libtype, row.distribution, "", "", row.problem, ""
    missing = [name for name in ops() if name not in row.ops]
    covered = _listed(row.ops, quote)
    if len(missing) <= _MOST_MISSING and set(row.ops) <= set(ops()):
        covered = "every op" + (f" but {_listed(missing, quote)}" if missing else "")
    needs = row.problem or "; ".join(row.needs) or "nothing else"
    ran = "" if row.problem else ", ".join(row.ran) or "never run"
    return libtype, row.distribution, covered, _devices(row, rows, quote), needs, ran


def _devices(row: Row, rows: Sequence[Row], quote: str) -> str:
    """Name the architectures; a kind stands for those that no row of the backend names."""
    named = " ".join(name for other in rows if other.libtype == row.libtype for name in other.devices)
    kinds = {kind: f"{'other' if start in named else 'any'} {word}" for kind, (start, word) in _KINDS.items()}
    return ", ".join(kinds.get(name, f"{quote}{name}{quote}") for name in row.devices)


def _listed(names: Sequence[str], quote: str) -> str:
    return ", ".join(f"{quote}{name}{quote}" for name in names)
