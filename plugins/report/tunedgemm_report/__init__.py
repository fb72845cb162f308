"""Report: what tuning found, as one HTML page that opens from disk, or is served while a run tunes.

`document.document` turns the findings of some files into plain values, and `page.page` these into
one HTML file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunedgemm.analysis.results import covered, read_sides
from tunedgemm.plugin import Device

from tunedgemm_report.document import document
from tunedgemm_report.page import page


def report_page(
    paths: Sequence[str | Path], against: Sequence[str | Path] = (), *, op: str = "", device: Device | None = None, live: str = ""
) -> str:
    """Return the page of some files.

    Args:
        paths, against, op, device: as of `tunedgemm.analysis.results.read_sides`.
        live: a script of a live page; see `page.page`.

    Raises:
        UserError: a file cannot be read or has no shape, or the library of the plots is missing.
    """
    first, second = read_sides(paths, against, op=op, device=device)
    return page(document(second, against=first, coverage=covered(second, op)), live=live)


__all__ = ["report_page"]
