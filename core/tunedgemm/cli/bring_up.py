"""``tunedgemm doctor --bring-up``: check every backend on this device, and write what was found."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import UserError
from tunedgemm.process.files import replace_file
from tunedgemm.process.paths import expanded

if TYPE_CHECKING:
    from tunedgemm.analysis.bring_up.examiner import Examiner

#: Seconds in which the plan is made, and in which another run leaves the report.
_PLAN_S, _LOCK_S = 600.0, 1.0
_MOST_MINUTES = 24 * 60.0


def add_bring_up(parser: argparse.ArgumentParser) -> None:
    """Define ``--bring-up`` and its options."""
    add = parser.add_argument
    add(
        "--bring-up",
        action="store_true",
        help="check every backend on this device in some minutes, and write a report without private data",
    )
    add("--minutes", default="15", metavar="M", help="with --bring-up: most minutes; a second call goes on (default: %(default)s)")
    add("--libtype", default="all", metavar="A,B", help="with --bring-up: the backends to check (default: %(default)s)")
    add("-o", "--output", type=expanded, default=None, metavar="FILE",
        help="with --bring-up: the report, a JSON file; its page ends in .html (default: bring-up-GFX-CU.json)")  # fmt: skip


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0.0 < minutes <= _MOST_MINUTES:
        raise UserError(f"--minutes: must be above 0, at most {_MOST_MINUTES:g} (got {text!r})")
    return minutes


def bring_up(arguments: argparse.Namespace) -> int:
    """Run the kit; return 1 if a check found a fault, 130 after Ctrl-C, 143 after SIGTERM, else 0."""
    from tunedgemm.analysis.bring_up.examiner import Examiner
    from tunedgemm.table.sheet import locked
    from tunedgemm.tuner import Terminated, stopped_by_sigterm

    if arguments.output is not None and arguments.output.suffix != ".json":
        raise UserError(f"-o: must end in .json, as a page is written with .html (got {arguments.output})")
    seconds, examiner = 60 * _minutes(arguments.minutes), Examiner()
    with stopped_by_sigterm():
        try:
            plan = _plan(examiner, arguments.libtype)
            device = plan["device"]
            path = arguments.output or Path(f"bring-up-{device['gfx']}-{device['cu_num']}.json")
            with locked(path, timeout=_LOCK_S):
                return _run(path, plan, examiner, arguments.libtype, seconds)
        except Terminated:
            print("tunedgemm: interrupted", file=sys.stderr)
            return 128 + signal.SIGTERM
        finally:
            examiner.stop()


def _plan(examiner: Examiner, libtypes: str) -> dict[str, Any]:
    """Return the plan of the checks."""
    print("listing the checks", file=sys.stderr)
    plan = examiner.ask({"plan": libtypes}, time.monotonic() + _PLAN_S)
    if plan is None or "items" not in plan:
        fault = f"{plan['kernel']} {plan['status']}: {plan['detail']}" if plan else "too slow"
        raise UserError(f"--bring-up: the checks cannot be listed (got {fault.strip()}); leave that plugin out of this environment")
    return plan


def _run(path: Path, plan: dict[str, Any], examiner: Examiner, libtypes: str, seconds: float) -> int:
    """Run the checks of a plan for some seconds; return the exit code."""
    from tunedgemm.analysis.bring_up import Bringing
    from tunedgemm.analysis.bring_up.report import Report, page
    from tunedgemm.tuner import Terminated

    started, device = time.monotonic(), plan["device"]
    bringing, stopped = Bringing(Report.opened(path, plan), examiner, libtypes), 0
    known = len(bringing.report.results)
    print(f"{device['name'] or device['gfx']}: {len(plan['items'])} checks, {known} of them known; results go to {path}", file=sys.stderr)
    try:
        bringing.run(plan["items"], started + seconds, _print_result)
    except KeyboardInterrupt as stop:
        stopped = 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    bringing.report.write()
    examiner.stop()
    document = bringing.report.to_dict()
    replace_file(path.with_suffix(".html"), page(document).encode())
    left = len(bringing.report.without_result(plan["items"]))
    _print_summary(path, document, bringing.failed, left, time.monotonic() - started)
    return stopped or int(bool(bringing.failed))


def _print_result(number: int, items: int, left: float, result: dict[str, Any]) -> None:
    detail = f": {result['detail']}" if result["status"] != "ok" else ""
    kernel = f" {result['kernel']}" if detail and result["kernel"] else ""
    print(f"{number}/{items} {max(left, 0):.0f} s left, {result['status']}: {result['id']}{kernel}{detail}", file=sys.stderr, flush=True)


def _print_summary(path: Path, document: dict[str, Any], failed: list[dict[str, Any]], left: int, seconds: float) -> None:
    for result in failed:
        print(f"{result['status']}: {result['id']}: {result['kernel']}: {result['detail']}")
    counts = ", ".join(f"{count} {status}" for status, count in document["counts"].items()) or "none"
    rest = f"; {left} left, which the same command runs" if left else ""
    print(f"{path}: {len(document['results'])} checks in {seconds:.0f} s: {counts}{rest}")
