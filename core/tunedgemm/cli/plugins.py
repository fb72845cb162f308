"""``tunedgemm plugins``: every installed backend, and whether it is usable here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.backends.registry import Backend
    from tunedgemm.device import Device

#: M of the sample products for an op without examples: some backends serve only few rows, some
#: only many.
_ROWS = (64, 1, 16, 1024)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix", action="store_true", help="what each backend serves on which devices, what must be installed, and where it ran"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="with --matrix: print the table in Markdown")
    form.add_argument("--json", action="store_true", help="with --matrix: print a JSON list with an object for each row")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.matrix:
        return _print_matrix(arguments)
    if arguments.markdown or arguments.json:
        raise UserError("--markdown, --json: require --matrix")
    return _print_backends(arguments)


def _print_matrix(arguments: argparse.Namespace) -> int:
    from tunedgemm.backends.registry import Registry
    from tunedgemm.cli import matrix

    rows = matrix.rows_of(Registry())
    if arguments.json:
        print(matrix.as_json(rows))
    elif arguments.markdown:
        print(matrix.markdown(rows), end="")
    else:
        matrix.print_table(rows)
    return 0


def _print_backends(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from tunedgemm.backends.registry import Registry
    from tunedgemm.console import console
    from tunedgemm.device import current_device
    from tunedgemm.libtypes import owners, pip_hint
    from tunedgemm.solution import Unsupported

    registry, device = Registry(), current_device()
    details: list[str] = []
    table = Table(title=f"backends on {device}", title_justify="left")
    for heading in ("libtype", "distribution", "version", "ops", "usable here"):
        table.add_column(heading, overflow="fold")
    for libtype in registry.libtypes:
        backend = registry.get(libtype)
        if isinstance(backend, Unsupported):
            table.add_row(libtype, "", "", "", f"no: {backend.reason}")
            continue
        answer = _usable(backend, device)
        library = backend.library_version(device) if arguments.verbose else ""
        details += [f"{libtype}: {line}" for line in backend.details(device)] if arguments.verbose else []
        table.add_row(libtype, backend.distribution, f"{backend.version or '-'} {library}".strip(), ", ".join(backend.ops), answer)
    output = console()
    output.print(table)
    for line in details:
        output.print(line, soft_wrap=True)
    for libtype in registry.libtypes:
        for problem in registry.problems(libtype):
            output.print(f"warning: {problem}", soft_wrap=True)
    missing = [libtype for libtype in owners() if libtype not in registry]
    if missing:
        names = ", ".join(f"{libtype} ({pip_hint(libtype)})" for libtype in missing)
        output.print(f"not installed: {names}", soft_wrap=True)
    return 0


def _usable(backend: Backend, device: Device) -> str:
    """Return "yes" if a backend serves a sample shape on a device, else its reason for each op."""
    from tunedgemm.ops import ops
    from tunedgemm.shape import Shape

    reasons = set()
    for name in backend.ops:
        if name not in ops():
            continue
        shapes = ops()[name].examples or tuple(Shape(name, m, 1024, 1024) for m in _ROWS)
        answers = [backend.supports(shape, device) for shape in shapes]
        if any(answers):
            return "yes"
        reasons.add(str(answers[0]))
    return "no: " + "; ".join(sorted(reasons))


command = Command("plugins", "list the installed backends and whether they are usable here", _add_arguments, _run)
