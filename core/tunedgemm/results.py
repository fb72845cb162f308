"""Menu for packages that show what tuning found: tables, trial logs and profiles as values.

`read_sides` and `read_findings` read the files. An `Entry` has what they say about one shape on one
device, and the figures that follow.
"""

from __future__ import annotations

from tunedgemm.analysis.results import read_findings, read_sides
from tunedgemm.analysis.results.covered import covered
from tunedgemm.analysis.results.entry import BASELINE, TIMED, UNKNOWN, Entry, Trial, Winner, gain_of
from tunedgemm.analysis.results.files import Faults
from tunedgemm.analysis.results.findings import Findings
from tunedgemm.device import device_of_text
from tunedgemm.libtypes import rank
from tunedgemm.text.printable import printable_line
from tunedgemm.timing import STATUSES
from tunedgemm.tuner.log import trials_path
from tunedgemm.tuner.report import SLOWER, number_of, sizes
from tunedgemm.tuner.select import tie_margin

__all__ = [
    "BASELINE",
    "Entry",
    "Faults",
    "Findings",
    "SLOWER",
    "STATUSES",
    "TIMED",
    "Trial",
    "UNKNOWN",
    "Winner",
    "covered",
    "device_of_text",
    "gain_of",
    "number_of",
    "printable_line",
    "rank",
    "read_findings",
    "read_sides",
    "sizes",
    "tie_margin",
    "trials_path",
]
