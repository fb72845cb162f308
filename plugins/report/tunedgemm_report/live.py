"""The page of ``tunedgemm tune --live``: a run's report, served on this machine while it tunes.

The server answers from memory. Documents are made from the table and the trial log of the run,
every few seconds at most and only while a page asks. On a CPU they are made between shapes, so that
no timing shares the processor with them.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
from tunedgemm.analysis.results import Findings, read_findings, trials_path
from tunedgemm.plugin import TunedGemmError, UserError
from tunedgemm.tools.tables import Outcome, Planned, Progress

from tunedgemm_report.document import document
from tunedgemm_report.liveserver import LiveServer, Resource
from tunedgemm_report.page import json_text, page, vega

#: Least seconds between two documents, and between them as a multiple of what one takes.
EVERY, PAUSE = 3.0, 20.0
#: A page that has not asked for this many seconds is closed.
CLOSED = 5.0
#: Most seconds that the end of a run waits for open pages to fetch its last state. A document that
#: takes longer is not made at the end.
LAST = 3.0
#: Most pages that are remembered, and the longest name of one.
_PAGES, _LONGEST = 64, 32
_SCRIPT = Path(__file__).with_name("live.js")


@attrs.frozen
class _Document:
    """One state of the report, as the server sends it."""

    version: int
    page: Resource
    report: Resource


@attrs.frozen
class _Page:
    """An open page: when it last asked, the version that it showed then, and whether the runs were over."""

    asked: float
    seen: str
    ended: bool


class LiveReport:
    """Serves the report of one command's runs; a context manager around them."""

    def __init__(self, port: int) -> None:
        """Bind the port of 127.0.0.1; 0 is any free one.

        Raises:
            UserError: the port cannot be bound, or the library of the plots is missing.
        """
        vega()
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._progress: Progress | None = None
        self._ops: list[str] = []
        self._tables: list[Path] = []
        self._lists: list[Path] = []
        self._on_cpu = True
        self._is_stale, self._next, self._cost = False, 0.0, 0.0
        self._pages: dict[str, _Page] = {}
        self._ending, self._ended, self._fault = "The run has failed.", "", ""
        self._document = self._made(0)
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = LiveServer(port, self._token, self._resource)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--live: cannot listen on 127.0.0.1 (got port {port}: {reason}); name another port, or none") from None

    @property
    def url(self) -> str:
        """Return the address of the page, with the token that it needs."""
        return f"http://127.0.0.1:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> LiveReport:
        self._server.start()
        print(f"live report: {self.url}", file=sys.stderr, flush=True)  # noqa: T201  # the terminal of the run
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._finish()
        finally:
            self._server.stop()

    def end(self, text: str) -> None:
        """Set what the page says once the runs are over."""
        self._ending = text

    def watch(self, progress: Progress, op: str, lists: Sequence[Path]) -> None:
        """Show a run, whose events `receive` gets.

        Args:
            progress: the display, for the line of what is going on.
            op: the op of the run.
            lists: the files of its shapes, which have their calls.
        """
        with self._lock:
            self._progress = progress
            self._ops = [*(other for other in self._ops if other != op), op]
            self._lists += [path for path in lists if path not in self._lists]

    def receive(self, _: Any, event: Any) -> None:
        """Note that there is news; on a CPU make the next document now, between two shapes."""
        if isinstance(event, Planned):
            with self._lock:
                self._on_cpu = all(place.device.kind == "cpu" for place in event.places)
                self._tables += [event.output] if event.output not in self._tables else []
        if isinstance(event, Planned | Outcome):
            self._is_stale = True
            if self._on_cpu:
                self._refresh()

    # ---- answers

    def _resource(self, name: str, query: dict[str, str]) -> Resource | None:
        """Return what a path below the token names, None for nothing."""
        if name not in ("", "state.json", "report.json"):
            return None
        if name == "state.json":
            self._note_page(query.get("page", "")[:_LONGEST], query.get("seen", ""))
        if not self._on_cpu:
            self._refresh()
        if name == "state.json":
            return Resource(json.dumps(self._state()).encode(), "application/json")
        return self._document.report if name else self._document.page

    def _note_page(self, page: str, seen: str) -> None:
        with self._lock:
            if page in self._pages or len(self._pages) < _PAGES:
                self._pages[page] = _Page(time.monotonic(), seen, bool(self._ended))
            self._changed.notify_all()

    def _state(self) -> dict[str, Any]:
        """Return what a page asks for each second."""
        progress = self._progress
        text = self._ended or (f"Tuning {self._ops[-1]}: {progress.status()}" if progress is not None else "Starting.")
        if self._fault and self._document.version:
            text += f" The report is not current: {self._fault}."
        return {"version": self._document.version, "finished": bool(self._ended), "text": text, "command": self._command()}

    def _command(self) -> str:
        """Return the command that writes the same report to a file, "" where there is nothing to report."""
        with self._lock:
            tables, lists = self._files(), list(self._lists)
        return f"tunedgemm report {' '.join(shlex.quote(str(path)) for path in (*tables, *lists))} -o report.html" if tables else ""

    def _files(self) -> list[Path]:
        """Return the tables that are there, and the trial logs of the others."""
        paths = [table if table.is_file() else trials_path(table) for table in self._tables]
        return [path for path in paths if path.is_file()]

    def _open_pages(self) -> list[_Page]:
        """Return the pages that asked lately; the caller holds the lock."""
        return [page for page in self._pages.values() if time.monotonic() - page.asked < CLOSED]

    # ---- documents

    def _refresh(self, *, last: bool = False) -> None:
        """Make a newer document if there is news, a page is open, and the previous one is old enough."""
        now = time.monotonic()
        with self._lock:
            due = now >= self._next or (last and self._cost < LAST)
            wanted = due and self._is_stale and bool(self._open_pages())
        if not wanted or not self._making.acquire(blocking=last):
            return
        pause = 0.0
        try:
            self._is_stale = False
            self._document = self._made(self._document.version + 1)
            self._fault, pause = "", EVERY
        except Exception as error:  # no shape yet, or a damaged file; not even a bug here may stop the run
            self._fault = str(error) if isinstance(error, TunedGemmError) else f"{type(error).__name__}: {error}"
        finally:
            self._cost = time.monotonic() - now
            self._next = time.monotonic() + max(pause, PAUSE * self._cost)
            self._making.release()

    def _made(self, version: int) -> _Document:
        """Return the document of what the files say now."""
        with self._lock:
            tables, lists, names = self._files(), list(self._lists), [table.name for table in self._tables]
            op = self._ops[0] if len(self._ops) == 1 else ""  # of several, names and columns decide
        findings = read_findings([*tables, *lists], op=op) if tables else Findings()
        made = document(findings, title=", ".join(names) or "tunedgemm tune")
        drawn = [made["libtypes"], sorted({shape["libtype"] for shape in made["shapes"]})]
        given = {"version": version, "drawn": json.dumps(drawn)}
        script = _SCRIPT.read_text(encoding="utf-8").replace("'@@GIVEN@@'", json_text(given))
        return _Document(
            version,
            Resource(page(made, live=script).encode(), "text/html; charset=utf-8", f'"page-{version}"'),
            Resource(json_text({**given, "report": made}).encode(), "application/json", f'"report-{version}"'),
        )

    def _finish(self) -> None:
        """Make the last document, and let the open pages fetch it."""
        self._refresh(last=True)
        end = time.monotonic() + LAST
        with self._lock:
            self._ended = self._ending
            final = str(self._document.version)
            while not all(page.ended and page.seen == final for page in self._open_pages()) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
