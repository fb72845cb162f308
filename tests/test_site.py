"""The site builds without a warning, is complete, and shows the pages as a code host does."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import tunedgemm
from markdown_it import MarkdownIt
from tunedgemm import integrations, plugin
from tunedgemm.analysis import results
from tunedgemm.tools import files, launching, tables

for library in ("material", "mdx_truly_sane_lists", "mkdocs", "mkdocstrings_handlers.python"):
    pytest.importorskip(library, reason="the site's libraries are not installed; `pip install tunedgemm[site]`")

ROOT = Path(__file__).parents[1]
#: Folders and files that the site is made of.
SOURCES = (".ci", "benchmarks", "core", "docs", "examples", "mkdocs.yml", "plugins", "*.md")
#: What a page loads without a click; links are followed by a click.
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*href=["']?(?:https?:)?//|url\(["']?https?:"""
)
COUNTED = ("h1", "h2", "h3", "h4", "li", "ol", "pre", "table", "tr", "ul")


MARKDOWN = sorted(
    path for path in ROOT.rglob("*.md") if not any(part in ("build", "dist") or part[0] == "." for part in path.relative_to(ROOT).parts)
)


def html_name(path: Path) -> str:
    """Return the path in the site of a page of the repository."""
    return re.sub(r"(README)?\.md$", lambda end: "index.html" if end[1] else ".html", str(path.relative_to(ROOT)))


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a tree into a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    answer = build(ROOT, folder)
    assert answer.returncode == 0, answer.stderr
    return folder


class Page(HTMLParser):
    """The links, anchors and elements of an HTML page.

    Attributes:
        links: what `href` and `src` name.
        anchors: each `id`.
        elements: the number of each counted element inside the article.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.elements = dict.fromkeys(COUNTED, 0)
        self._inside = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.links |= {values[name] for name in ("href", "src") if name in values}
        self.anchors |= {values["id"]} if "id" in values else set()
        self._inside = self._inside or tag == "article"
        if self._inside and tag in self.elements:
            self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "article"


def pages(site: Path) -> dict[Path, Page]:
    """Return each page of the site, parsed."""
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def targets(path: Path, page: Page) -> dict[Path, set[str]]:
    """Return the files of the site that a page links to, each with the anchors there."""
    found: dict[Path, set[str]] = {}
    for link in page.links:
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = unquote(link.split("?")[0]).partition("#")
            found.setdefault(Path(os.path.normpath(path.parent / name)) if name else path, set()).add(anchor)
    return found


def test_links_resolve(site):
    """Each link of each page leads to a file of the site and to an anchor that is there."""
    every = pages(site)

    broken = []
    for path, page in every.items():
        for target, anchors in targets(path, page).items():
            known = every[target].anchors if target in every else set()
            if not target.is_file() and not (target / "index.html").is_file():
                broken.append((path.name, str(target)))
            broken += [(path.name, f"{target.name}#{anchor}") for anchor in anchors - {""} if target in every and anchor not in known]

    assert len(every) > 50
    assert broken == []


def test_pages_are_reachable(site):
    """Links lead from the index to each page."""
    every = pages(site)
    seen, waiting = set(), [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path not in seen and path in every:
            seen.add(path)
            waiting += [target / "index.html" if target.is_dir() else target for target in targets(path, every[path])]

    assert sorted(set(every) - seen) == []


def test_every_page_of_the_repository(site):
    """Each Markdown page of the repository is a page of the site."""
    assert len(MARKDOWN) > 50
    assert [str(path) for path in MARKDOWN if not (site / html_name(path)).is_file()] == []


def test_no_request_leaves_the_site(site):
    """No page and no style sheet loads anything from another host."""
    files = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]

    assert [path.name for path in files if LOADED.search(path.read_text())] == []
    assert LOADED.search('<script src="https://unpkg.com/x">')


def test_pages_look_as_on_a_code_host(site):
    """Each page has the headings, lists, tables and code blocks that CommonMark gives it."""
    parser = MarkdownIt("commonmark").enable("table")

    differing = {}
    for path in MARKDOWN:
        shown, expected = Page((site / html_name(path)).read_text()).elements, Page(parser.render(path.read_text())).elements
        if shown != expected:
            differing[html_name(path)] = {tag: (shown[tag], expected[tag]) for tag in COUNTED if shown[tag] != expected[tag]}

    assert differing == {}


def test_reference_has_every_public_name(site):
    """The API reference has an entry for each public name, with its description."""
    expected = {
        "tunedgemm": [name for name in dir(tunedgemm) if not name.startswith("_")],
        "plugin": plugin.__all__,
        "tools": [f"{menu.__name__.rpartition('.')[2]}.{name}" for menu in (launching, files, tables) for name in menu.__all__],
        "integrations": integrations.__all__,
        "results": results.__all__,
    }

    missing = []
    for module, names in expected.items():
        page = Page((site / "api" / f"{module}.html").read_text())
        prefix = {"tunedgemm": "tunedgemm.", "results": "tunedgemm.analysis.results."}.get(module, f"tunedgemm.{module}.")
        missing += [prefix + name for name in names if prefix + name not in page.anchors]

    assert missing == []
    assert "activations [..., K] in bf16, fp16, fp32 or fp8" in (site / "api" / "tunedgemm.html").read_text()
    assert ">tuned_file,\N{NO-BREAK SPACE}untuned_file<" in (site / "api" / "plugin.html").read_text()  # of one description


def test_broken_links_are_errors(tmp_path):
    """A missing page, a missing anchor and a missing source file each fail the build, by name."""
    for path in (path for pattern in SOURCES for path in ROOT.glob(pattern) if path.name != "docs"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "docs").iterdir():
        (tmp_path / "docs" / path.name).symlink_to(path)
    page = tmp_path / "docs" / "terminal.md"
    text = page.read_text() + "\n[a](missing.md) [b](tuning.md#missing) [c](../core/missing.py)\n"
    page.unlink()
    page.write_text(text)

    answer = build(tmp_path, tmp_path / "site")

    assert answer.returncode != 0
    for link in ("missing.md", "tuning.md#missing", "../core/missing.py"):
        assert (
            f"'docs/terminal.md' contains a link '{link}'" in answer.stderr
            or f"contains an unrecognized relative link '{link}'" in answer.stderr
        )
