"""Report of the bring-up kit: one JSON file, also the journal of the run, without private data."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.errors import UserError
from tunedgemm.process.files import read_regular, replace_file
from tunedgemm.text.printable import printable_line

SCHEMA, VERSION = "tunedgemm.bring_up", 1
#: Parts that a further run and the pages read.
_READ = frozenset(("date", "device", "versions", "libraries", "begun", "results"))
#: Statuses of a result that are faults; ``late``, ``refused`` and ``ok`` are none.
FAULTY = ("wrong", "failed", "hung", "crashed", "fault", "leaks", "ended")
#: Characters of a text in the report.
_TEXT = 600
#: Endings of files whose names say nothing of a user.
_PUBLIC = (".py", ".so", ".co", ".hsaco", ".h", ".hpp", ".cpp", ".cu", ".hip", ".cuh")
#: Name that stands for one of this user or host; a path may have it.
_NAME = "<name>"
#: Paths: in quotes, where blanks are part of them; else after an option of one letter, or where no
#: fraction or product of names goes on.
_PATH = re.compile(
    r"(?<=')(?:~|\.{1,2})?/[^'\n]+(?=')|"
    rf"(?:file://)?(?:(?<![\w.)\]])|(?<=[\s'\"]-[A-Z]))(?:~|\.{{1,2}}|[A-Za-z]:)?(?:[\\/](?:{_NAME}|[^\s\\/:;,'\"()<>|\[\]])+)+[\\/]?"
)
_OTHER = (
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<address>"),
    (re.compile(r"\b\w+://\S+"), "<address>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
    (re.compile(r"\b(?:GPU-)?[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<uuid>"),
    (re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE), "<bus>"),
)
#: Shortest host or user name to replace; shorter ones would hit words.
_SHORTEST = 3


def private_words() -> tuple[str, ...]:
    """Return the names of this user and host, longest first."""
    words = {Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user without a name
        words.add(getpass.getuser())
    return tuple(sorted((word for word in words if len(word) >= _SHORTEST), key=len, reverse=True))


def scrubbed(text: str, words: tuple[str, ...]) -> str:
    """Return a text without paths, addresses, identifiers of hardware, and these words."""
    for pattern, name in _OTHER:
        text = pattern.sub(name, text)
    for word in words:  # with the domain of a host
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?:\.[\w-]+)*(?![\w-])", _NAME, text)
    text = _PATH.sub(_less_folder, text)
    return printable_line(text)[:_TEXT]


def _less_folder(path: re.Match[str]) -> str:
    name = re.split(r"[\\/]", path[0].rstrip("\\/"))[-1]
    return f"<path>/{name}" if name.endswith(_PUBLIC) or re.search(r"\.so[.\d]*$", name) else "<path>"


def _plain(value: Any, words: tuple[str, ...]) -> Any:
    """Return a value of JSON with every text scrubbed."""
    if isinstance(value, str):
        return scrubbed(value, words)
    if isinstance(value, Mapping):
        return {scrubbed(str(key), words): _plain(each, words) for key, each in value.items()}
    return [_plain(each, words) for each in value] if isinstance(value, list) else value


@attrs.define(eq=False)
class Report:
    """Results of the checks on one device, as a file that is complete after each check.

    Attributes:
        path: the file.
        facts: the device, versions, libraries and backends, as the child's plan has them.
        results: the results so far; each is the item with its verdict.
    """

    path: Path
    facts: dict[str, Any]
    results: list[dict[str, Any]] = attrs.field(factory=list)
    _begun: dict[str, Any] | None = None
    _planned: int = 0
    _words: tuple[str, ...] = attrs.field(factory=private_words)

    @classmethod
    def opened(cls, path: Path, plan: Mapping[str, Any]) -> Report:
        """Return the report for a plan: a new one, or that of the file, to go on with.

        A check that had begun when the last run ended counts as ``ended``, and is not repeated.

        Raises:
            UserError: the file is not a report, or one of another device or other versions.
        """
        facts = {name: value for name, value in plan.items() if name != "items"}
        report = cls(path, facts, planned=len(plan["items"]))
        report.facts = _plain(facts, report._words)
        if not path.exists():
            return report
        found = read_report(path)
        for name in ("device", "versions"):
            if found[name] != report.facts[name]:
                raise UserError(
                    f"{path}: has results of other {name} (got {_difference(found[name], report.facts[name])}); name another -o"
                )
        report.results = found["results"]
        if found["begun"] is not None:
            detail = "the command or the machine ended during this check"
            report.record(found["begun"], {"status": "ended", "detail": detail, "kernel": "", "measures": {}}, 0.0)
        return report

    def without_result(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the items that no run has finished."""
        known = {result["id"] for result in self.results}
        return [item for item in items if item["id"] not in known]

    def begin(self, item: dict[str, Any]) -> None:
        """Store that a check begins."""
        self._begun = item
        self.write()

    def give_up(self) -> None:
        """Store that the check that had begun may run again."""
        self._begun = None
        self.write()

    def record(self, item: dict[str, Any], verdict: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Store the verdict of a check; return its result."""
        result = {**item, **_plain(dict(verdict), self._words), "seconds": round(seconds, 2)}
        self.results.append(result)
        self._begun = None
        self.write()
        return result

    def write(self) -> None:
        """Write the file."""
        replace_file(self.path, (json.dumps(self.to_dict(), indent=1) + "\n").encode(), durable=self._begun is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "date": time.strftime("%Y-%m-%d"),
            **self.facts,
            "counts": dict(Counter(result["status"] for result in self.results)),
            "planned": self._planned,
            "begun": self._begun,
            "results": self.results,
        }


def read_report(path: Path) -> dict[str, Any]:
    """Return the document of a file.

    Raises:
        UserError: the file cannot be read or is not a report.
    """
    try:
        found = json.loads(read_regular(path))
        known = found["schema"] == SCHEMA and found["version"] == VERSION
        missing = sorted(_READ - found.keys()) if known else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a report of the bring-up kit (got {type(error).__name__}); name another file") from error
    if not known:
        raise UserError(f"{path}: not a report of this version (got {found['schema']} {found['version']}); name another file")
    if missing:
        raise UserError(f"{path}: not a whole report (got no {missing[0]}); name another file")
    return found  # type: ignore[no-any-return]


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    changed = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    return f"{changed} {there.get(changed)}, now {here.get(changed)}"


_STYLE = "body{font:14px sans-serif}table{border-collapse:collapse}td{border:1px solid #ccc;padding:2px 6px;vertical-align:top}"


def page(document: Mapping[str, Any]) -> str:
    """Return a report as one HTML page: facts, faults, then every other result."""

    def table(rows: Iterable[Iterable[Any]]) -> str:
        cells = ("".join(f"<td>{escape(str(cell or ''))}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"

    device, faulty, others = document["device"], list[Any](), list[Any]()
    title = f"Bring-up of {device['name'] or device['gfx']}, {document['date']}"
    facts = [(name, value) for part in ("device", "versions", "libraries", "backends") for name, value in document[part].items()]
    for result in document["results"]:
        cells = [result[name] for name in ("status", "id", "kernel", "detail", "measures", "seconds")]
        (faulty if result["status"] in FAULTY else others).append(cells)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"{table(facts)}<h2>Faults: {len(faulty)}</h2>{table(faulty)}"
        f"<h2>Others: {len(others)} of {document['planned']} checks</h2>{table(others)}</html>\n"
    )
