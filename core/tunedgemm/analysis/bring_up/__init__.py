"""Bring-up: check every backend on a device that none of us has, within some minutes.

The checks run in a child process, `tunedgemm.testing.bring_up`. A hang or a crash costs one check:
the next one runs in a new child. `Bringing.report` is complete after each check, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm.analysis.bring_up.examiner import Examiner
from tunedgemm.analysis.bring_up.report import FAULTY, Report

#: Seconds of a check after which its backend counts as slow.
_SLOW_S = 40.0
#: Receives (number of results, items of the plan, seconds left, result) after each check.
Progress = Callable[[int, int, float, dict[str, Any]], None]


@attrs.define(eq=False)
class Bringing:
    """One run of the kit.

    Attributes:
        report: what was found so far.
        examiner: the child process.
        libtypes: the libtypes to check.
    """

    report: Report
    examiner: Examiner
    libtypes: str = "all"

    def run(self, items: list[dict[str, Any]], until: float, progress: Progress) -> None:
        """Run the items that have no result yet, until a time of `time.monotonic`.

        Items of a libtype whose kernels compile slowly come after all others.
        """
        waiting = self.report.without_result(items)
        slow: set[str] = set()
        while waiting and time.monotonic() < until:
            item = waiting.pop(next((index for index, each in enumerate(waiting) if each["libtype"] not in slow), 0))
            try:
                result = self._result(item, until)
            except BaseException:  # Ctrl-C, at any place
                self.report.give_up()
                raise
            if result is None:
                return
            is_slow = item["libtype"] and (result["status"] == "late" or result["seconds"] > _SLOW_S)
            slow |= {item["libtype"]} if is_slow else set()
            progress(len(self.report.results), len(items), until - time.monotonic(), result)

    def _result(self, item: dict[str, Any], until: float) -> dict[str, Any] | None:
        """Return the stored result of a check; None if the end of the budget cut it off."""
        self.report.begin(item)
        started = time.monotonic()
        answer = self.examiner.ask({**item, "libtypes": self.libtypes}, until)
        if answer is None:
            self.report.give_up()
            return None
        return self.report.record(item, answer, time.monotonic() - started)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Return the results that are faults."""
        return [result for result in self.report.results if result["status"] in FAULTY]
