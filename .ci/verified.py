"""Turn reports of ``tunedgemm doctor --bring-up`` into lines of docs/verified.md and issue texts.

``python .ci/verified.py REPORT.json …`` prints the changed lines and a text for each kind of fault;
``--write`` changes the page, and ``--issues FOLDER`` writes the texts as files.

A line of the page names what would settle it: `kit CHECK+CHECK LIBTYPE KERNEL on GFX GFX` in code.
Each check must have run on a device whose architecture begins with such a text, without a fault.
KERNEL is in the name of a kernel that ran. Read each changed line against the report before it is
committed: one result settles it.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.analysis.bring_up.report import FAULTY, read_report

PAGE = Path(__file__).parents[1] / "docs" / "verified.md"
_MARK = re.compile(r"`kit (?P<checks>[\w+]+)(?: (?P<libtype>(?!on )\w+))?(?: (?P<kernel>(?!on )\w+))?(?: on (?P<devices>[\w ]+))?`")
_NEVER = re.compile(rf"never run( here)? \({_MARK.pattern}\)")
_MAKERS = re.compile(r"^(amd-instinct|amd-radeon|amd|nvidia-geforce|nvidia)-")
#: Results that an issue lists.
_LISTED = 10


@attrs.frozen
class Mark:
    """What would settle a line of the page.

    Attributes:
        checks: names of checks of the kit.
        libtype: the backend whose results count; "" for any.
        kernel: part of the name of a kernel that must have run; "" for any.
        devices: beginnings of architectures; () for any.
    """

    checks: tuple[str, ...]
    libtype: str = ""
    kernel: str = ""
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: re.Match[str]) -> Mark:
        """Return the mark of a match of the pattern."""
        return cls(
            tuple(found["checks"].split("+")), found["libtype"] or "", found["kernel"] or "", tuple((found["devices"] or "").split())
        )

    def __str__(self) -> str:
        words = ["kit", "+".join(self.checks), self.libtype, self.kernel, *(["on", *self.devices] if self.devices else [])]
        return f"`{' '.join(filter(None, words))}`"

    def device_in(self, report: dict[str, Any]) -> str:
        """Return the beginning that fits the report's device; "" for none."""
        gfx = report["device"]["gfx"]
        return next((device for device in self.devices or ("",) if gfx.startswith(device)), "") or (gfx if not self.devices else "")

    def results_in(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the results that settle the line; [] if a check did not run, or one found a fault."""
        found = [
            result
            for result in report["results"]
            if result["check"] in self.checks
            and result["status"] in ("ok", *FAULTY)
            and self.libtype in ("", result["libtype"], *result["measures"].get("lists", ()))
        ]
        named = any(self.kernel in name for result in found for name in result["measures"].get("kernels", ()))
        whole = {result["check"] for result in found} == set(self.checks) and (named or not self.kernel)
        return found if whole and self.device_in(report) and all(result["status"] == "ok" for result in found) else []


def marks(page: str) -> list[Mark]:
    """Return all marks of the page."""
    return [Mark.of(found) for found in _MARK.finditer(page)]


def where(report: dict[str, Any]) -> str:
    """Return the device, runtime and date of a report, as the page has them."""
    name = _MAKERS.sub("", report["device"]["name"]).upper().replace("-", " ") or report["device"]["gfx"]
    runtime = re.match(r"\w+ \d+(\.\d+)?", report["versions"]["torch's GPU runtime"])
    day = datetime.date.fromisoformat(report["date"])
    return ", ".join([name, *([runtime[0]] if runtime else []), f"{day.day} {day:%B %Y}"])


def updated(page: str, report: dict[str, Any]) -> str:
    """Return the page with the lines that the report settles."""

    def line(found: re.Match[str]) -> str:
        mark = Mark.of(found)
        if not (results := mark.results_in(report)):
            return found[0]
        rest = tuple(device for device in mark.devices if device != mark.device_in(report))
        elsewhere = f"; elsewhere never run ({attrs.evolve(mark, devices=rest)})" if rest else f" ({mark})"
        return f"run: {where(report)}, {len(results)} checks{elsewhere}"

    return _NEVER.sub(line, page)


def issues(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of an issue for each backend, check and status that is a fault."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for result in report["results"]:
        if result["status"] in FAULTY:
            groups.setdefault((result["libtype"], result["check"], result["status"]), []).append(result)
    versions = "\n".join(f"- {name}: {version}" for part in ("versions", "libraries") for name, version in report[part].items())
    for (libtype, check, status), results in groups.items():
        named = "\n".join(f"- `{each['id']}`, kernel `{each['kernel']}`: {each['detail']}" for each in results[:_LISTED])
        more = f"\n- and {len(results) - _LISTED} more" if len(results) > _LISTED else ""
        again = f"tunedgemm doctor --bring-up{f' --libtype {libtype}' if libtype else ''} -o again.json"
        title = f"{libtype or 'Bring-up'}: {status} in check {check} on {report['device']['gfx']}"
        yield title, f"Found by the bring-up kit: {where(report)}.\n\n{named}{more}\n\nAgain: `{again}`\n\n{versions}\n"


def main() -> int:
    """Print or write what the reports change; return 1 if a report has faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--write", action="store_true", help="change docs/verified.md")
    parser.add_argument("--issues", type=Path, metavar="FOLDER", help="write each issue's text into a file here")
    arguments = parser.parse_args()
    before = page = PAGE.read_text()
    texts = []
    for path in arguments.reports:
        report = read_report(path)
        page = updated(page, report)
        texts += list(issues(report))
    for old, new in zip(before.splitlines(), page.splitlines(), strict=True):
        if old != new:
            print(f"-{old}\n+{new}")
    if arguments.write:
        PAGE.write_text(page)
    for number, (title, text) in enumerate(texts, 1):
        if arguments.issues:
            arguments.issues.mkdir(parents=True, exist_ok=True)
            (arguments.issues / f"{number:02d}.md").write_text(f"# {title}\n\n{text}")
        else:
            print(f"\n# {title}\n\n{text}")
    return int(bool(texts))


if __name__ == "__main__":
    raise SystemExit(main())
