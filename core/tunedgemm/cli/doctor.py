"""``tunedgemm doctor``: the state of this installation, for people and for bug reports."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tunedgemm.backends.command import Command
from tunedgemm.cli.bring_up import add_bring_up, bring_up
from tunedgemm.cli.document import add_json, print_document
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.analysis.doctor import Diagnosis, Section

#: Most seconds of the self-test.
_MOST_SECONDS = 3600.0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _MOST_SECONDS:
        raise UserError(f"--seconds: must be 0 to {_MOST_SECONDS:g} (got {text!r}); 0 leaves the self-test out")
    return seconds


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--seconds", default="10", metavar="S", help="most seconds of the self-test, 0 to leave it out (default: %(default)s)"
    )
    add_bring_up(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.bring_up:
        return bring_up(arguments)
    diagnosis = diagnose(_seconds(arguments.seconds))
    if arguments.json:
        print_document("doctor", 1, diagnosis.to_dict())
    else:
        _print(diagnosis)
    return 0 if diagnosis.healthy else 1


def diagnose(seconds: float) -> Diagnosis:
    """Examine every part of the installation.

    Args:
        seconds: most seconds of the self-test; 0 leaves it out.
    """
    from tunedgemm.analysis.doctor import Diagnosis, caches, environment, examined, installed, machine, self_test, tables
    from tunedgemm.backends.registry import Registry
    from tunedgemm.device import current_device, device_of
    from tunedgemm.process.plugin_guard import attempt

    def routing() -> Section:
        from tunedgemm.integrations import health  # reads variables, which may be wrong

        return health.routing(device, rows)

    registry = Registry()
    device = attempt(current_device)[0] or device_of(-1)  # the section of devices gives the reason
    sections = [
        examined("versions", machine.versions),
        examined("device", machine.devices),
        examined("backends", lambda: installed.backends(registry, device)),
        examined("toolchains", lambda: installed.toolchains(registry, device)),
        examined("caches", caches.caches),
        examined("tables", lambda: tables.tables(registry, device)),
        examined("environment", lambda: environment.environment(registry)),
    ]
    rows = tables.rows_here(sections[5])
    sections.append(examined("routing", routing))
    if seconds:
        sections.append(examined("self-test", lambda: self_test.self_test(seconds)))
    return Diagnosis(tuple(sections))


def _print(diagnosis: Diagnosis) -> None:
    from tunedgemm.text.console import console

    output = console()
    for section in diagnosis.sections:
        output.print(section.name, style="bold")
        for fact in section.facts:
            output.print(f"  {fact}", soft_wrap=True)
    problems, notes = diagnosis.problems, diagnosis.notes
    for heading, faults in (("to know", notes), ("to mend", problems)):
        if faults:
            output.print(heading, style="bold")
        for _, fault in faults:
            output.print(f"  {fault}", soft_wrap=True)
    output.print(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}" if problems else "healthy", style="bold")


command = Command("doctor", "examine devices, backends, tables, caches and variables, and say what to mend", _add_arguments, _run)
