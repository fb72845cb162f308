"""``tunedgemm plugins``: every installed backend, and whether it is usable here."""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json, print_document
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.backends.registry import Registry
    from tunedgemm.device import Device


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix", action="store_true", help="what each backend serves on which devices, what must be installed, and where it ran"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="with --matrix: print the table in Markdown")
    form.add_argument("--by-gfx", action="store_true", help="with --matrix: the backends of each op on each known architecture")
    add_json(form)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.matrix:
        return _print_matrix(arguments)
    if arguments.markdown or arguments.by_gfx:
        raise UserError(f"{'--markdown' if arguments.markdown else '--by-gfx'}: requires --matrix")
    return _print_backends(arguments)


def _print_matrix(arguments: argparse.Namespace) -> int:
    from tunedgemm.backends.registry import Registry
    from tunedgemm.cli import matrix

    rows = matrix.rows_of(Registry())
    if arguments.json:
        matrix.print_json(rows)
    elif arguments.markdown:
        print(matrix.markdown(rows), end="")
    elif arguments.by_gfx:
        matrix.print_served(rows)
    else:
        matrix.print_table(rows)
    return 0


@attrs.frozen
class _Installed:
    """An installed libtype.

    Attributes:
        libtype: its name.
        distribution, version, ops: the package that has it, its version, and the ops it covers.
        library: with -v, the library's version.
        reasons: why it is not usable on this device; none where it is.
        details: with -v, the backend's own lines about this machine.
        problems: its faults, and other plugins that claim its name.
    """

    libtype: str
    distribution: str = ""
    version: str = ""
    library: str = ""
    ops: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def _print_backends(arguments: argparse.Namespace) -> int:
    from tunedgemm.backends.loadable import in_threads
    from tunedgemm.backends.registry import Registry
    from tunedgemm.device import current_device
    from tunedgemm.libtypes import owners, pip_hint

    registry, device = Registry(), current_device()
    gc.freeze()  # a collection over torch's objects takes a tenth of a second
    for libtype in registry.libtypes:  # imports the plugins, one after the other
        registry.get(libtype)
    found = in_threads(lambda libtype: _installed(libtype, registry, device, verbose=arguments.verbose), registry.libtypes)
    missing = {libtype: pip_hint(libtype) for libtype in owners() if libtype not in registry}
    if arguments.json:
        backends = [{**attrs.asdict(backend), "usable": not backend.reasons} for backend in found]
        absent = [{"libtype": libtype, "install": hint} for libtype, hint in missing.items()]
        print_document("plugins", 1, {"device": device, "backends": backends, "not_installed": absent})
    else:
        _print_table(found, device, missing)
    return 0


def _installed(libtype: str, registry: Registry, device: Device, *, verbose: bool) -> _Installed:
    from tunedgemm.backends.usable import unusable_reasons
    from tunedgemm.solution import Unsupported

    backend, problems = registry.get(libtype), tuple(map(str, registry.problems(libtype)))
    if isinstance(backend, Unsupported):
        return _Installed(libtype, reasons=(backend.reason,), problems=problems)
    own: dict[str, Any] = {"details": tuple(backend.details(device)), "library": backend.library_version(device)} if verbose else {}
    reasons = unusable_reasons(backend, device)
    return _Installed(libtype, backend.distribution, backend.version, ops=backend.ops, reasons=reasons, problems=problems, **own)


def _print_table(found: list[_Installed], device: Device, missing: dict[str, str]) -> None:
    from tunedgemm.text.console import Column, console, grid_of, print_grid

    columns = ("libtype", "distribution", "version", Column("ops", prose=True), Column("usable here", prose=True))
    rows = []
    for backend in found:
        version = f"{backend.version or '-'} {backend.library}".strip() if backend.distribution else ""
        usable = f"no: {'; '.join(backend.reasons)}" if backend.reasons else "yes"
        cells = {"libtype": backend.libtype, "distribution": backend.distribution, "version": version}
        rows.append({**cells, "ops": ", ".join(backend.ops), "usable here": usable})
    output = console()
    print_grid(grid_of(columns, rows, f"backends on {device}"), output)
    lines = [f"{backend.libtype}: {line}" for backend in found for line in backend.details]
    lines += [f"warning: {problem}" for backend in found for problem in backend.problems]
    if missing:
        lines.append(f"not installed: {', '.join(f'{libtype} ({hint})' for libtype, hint in missing.items())}")
    for line in lines:
        output.print(line, soft_wrap=True)


command = Command("plugins", "list the installed backends and whether they are usable here", _add_arguments, _run)
