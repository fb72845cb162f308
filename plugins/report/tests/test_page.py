"""The page as a file: one document, no way out of it, and no text that becomes markup."""

from __future__ import annotations

import html.parser
import json
import sys

import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.errors import UserError
from tunedgemm_report import report_page
from tunedgemm_report.document import document
from tunedgemm_report.page import page

from .conftest import TRIALS, WIDE, trial_line, with_name

pytest.importorskip("vl_convert")

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(html.parser.HTMLParser):
    """Collects the tags of a page, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def test_the_page_names_no_other_file(log):
    """Write one document without links to scripts, styles, pictures or fonts."""
    parsed = Tags(report_page([log()]))

    assert not [(tag, given) for tag, given in parsed.tags if "src" in given or tag in ("link", "iframe", "object", "img")]
    assert [given["href"] for tag, given in parsed.tags if tag == "a"] == ["#shapes"]
    policy = next(given["content"] for tag, given in parsed.tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src" not in policy and "unsafe-eval" not in policy


def test_text_of_files_is_data(log, tmp_path):
    """Keep names that look like markup in the data alone, where the parser sees no tags."""
    evil = with_name(TRIALS[WIDE][1], EVIL)
    folder = tmp_path / "<b>x"
    folder.mkdir()
    path = log([trial_line(evil)]).rename(folder / "a<script>.trials.jsonl")

    plain, parsed = Tags(report_page([log()])), Tags(report_page([path]))

    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in plain.tags]
    assert not {"<", ">", "&"} & set(parsed.scripts[0])
    assert json.loads(parsed.scripts[0])["report"]["shapes"]["winner"] == [f"asm:{EVIL} splitK=2"]
    assert json.loads(parsed.scripts[0])["report"]["title"] == "a<script>.trials.jsonl"


def test_a_live_page_may_ask_its_own_server_alone(log):
    """Add the script of a live page, and allow requests to the page's own server."""
    text = page(document(read_findings([log()])), live="tunedgemmReport.update")

    assert "<script>tunedgemmReport.update</script>" in text
    assert "connect-src 'self'" in text


def test_a_missing_library_is_one_line(log, monkeypatch):
    """Name the command that installs the library of the plots."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    with pytest.raises(UserError, match=r"report: the plots need vl-convert-python.*; pip install 'tunedgemm\[report\]'"):
        report_page([log()])
