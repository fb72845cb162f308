"""The page in a browser: Debian's Chromium, headless, on committed results of an H200."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.analysis.results import read_findings
from tunedgemm.device import Device
from tunedgemm_report import report_page
from tunedgemm_report.document import document
from tunedgemm_report.page import page

from .conftest import TRIALS, WIDE, log_lines, trial_line, with_name

pytest.importorskip("vl_convert")

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200-2026-11-23"
FILES = [RESULTS / "all-a16w16-tuned.csv", RESULTS / "all-a16w16-profile.csv.gz"]
EARLIER = [RESULTS / "asm" / "a16w16-tuned.csv"]
EVIL = "<script>document.title=1</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
#: Elements that reach beyond the screen.
WIDER = """[...document.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => [e.tagName, e.id, e.className.toString(), Math.round(e.getBoundingClientRect().right), innerWidth])"""
FLAGS = ["--disable-gpu", "--disable-background-networking", "--no-first-run"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.skipif(not FILES[0].is_file(), reason="needs the committed results"),
    pytest.mark.no_cover,
]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Run one browser for all tests."""
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of the committed results, in a folder whose name is wider than a phone."""
    path = tmp_path_factory.mktemp("h200") / "report.html"
    folder = path.with_name("w" * 120)
    folder.mkdir()
    path.write_text(report_page([Path(shutil.copy(file, folder)) for file in FILES]))
    return path


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Open a page once it is drawn; fail for each error, and each request beyond its file."""
    faults: list[str] = []
    contexts = []

    def run(path: Path, *, width: int = 1280, scheme: str = "light", first: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        context.add_init_script(first)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: faults.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_function("Object.values(tunedgemmReport.views).every((view) => view.view)")
        return page

    yield run
    for context in contexts:
        context.close()
    assert not faults


def cells(page: Any, column: str) -> list[str]:
    """Return a column of the table of shapes."""
    heads = [text.strip() for text in page.locator("#table th").all_inner_texts()]
    index = next(number for number, text in enumerate(heads, 1) if text.split(" ▼")[0].split(" ▲")[0] == column)
    return page.locator(f"#table tbody td:nth-child({index})").all_inner_texts()


def dots(page: Any, chart: str) -> int:
    """Return how many dots a plot has."""
    return page.locator(f"[data-chart={chart}] .mark-symbol.role-mark path").count()


def test_the_first_screen_answers(h200: Path, visit: Open) -> None:
    """Show device, versions, gain and the shapes with the most lost time without scrolling."""
    page = visit(h200)

    assert "12 shapes of a16w16" in page.inner_text("#where") and "nvidia-h200" in page.inner_text("#where")
    assert "torch 2.11.0+cu130" in page.inner_text("#where")
    tiles = page.inner_text("#tiles")
    assert "1.027x" in tiles and "3 / 9 / 0" in tiles and "1.20x" in tiles
    slow = page.locator("#slow li").all_inner_texts()
    assert len(slow) == 5 and "M=4096 N=7168 K=8192" in slow[0] and "40 %" in slow[0]
    assert page.locator("#slow li").last.bounding_box()["y"] < 850


def test_filters_change_table_and_plots(h200: Path, visit: Open) -> None:
    """Filter by M, backend and text; plots, table and their summary follow."""
    page = visit(h200)
    assert (len(cells(page, "M")), dots(page, "gain-by-m")) == (12, 12)

    page.select_option("#f-m", "1024")
    assert cells(page, "M") == ["1024"] * 4
    page.wait_for_function("document.querySelectorAll('[data-chart=gain-by-m] .mark-symbol.role-mark path').length === 4")
    assert page.inner_text("#shown") == "4 of 12 shapes, geometric mean 1.02x"

    page.select_option("#f-libtype", "asm")
    assert {text.partition(":")[0] for text in cells(page, "winner")} == {"asm"} and len(cells(page, "M")) == 2
    page.fill("#f-text", "N=7168")
    assert cells(page, "shape") == ["M=1024 N=7168 K=8192 bf16"]

    page.fill("#f-text", "nothing has this")
    assert cells(page, "shape") == [] and "No chosen shape" in page.inner_text("[data-chart=roofline]")
    for control in ("#f-m", "#f-libtype"):
        page.select_option(control, "")
    page.fill("#f-text", "")
    page.wait_for_function("document.querySelectorAll('[data-chart=gain-by-m] .mark-symbol.role-mark path').length === 12")


def test_a_filter_before_the_first_drawing_counts(h200: Path, visit: Open) -> None:
    """Draw what is chosen by the time that a plot is ready."""
    choose = "const m = document.getElementById('f-m'); m.value = '1024'; m.dispatchEvent(new Event('change'));"
    at_once = (
        f"let kept; Object.defineProperty(window, 'tunedgemmReport', {{get: () => kept, set: (value) => {{ kept = value; {choose} }}}})"
    )
    page = visit(h200, first=at_once)

    assert cells(page, "M") == ["1024"] * 4
    page.wait_for_function("document.querySelectorAll('[data-chart=gain-by-m] .mark-symbol.role-mark path').length === 4")


def test_devices_are_filtered(visit: Open, log: Callable[..., Path], tmp_path: Path) -> None:
    """Tell the devices of several logs apart, and leave floors out where no ceilings are known."""
    other = Device("gfx942", 304, "amd-instinct-mi300x")
    report = tmp_path / "report.html"
    report.write_text(report_page([log(log_lines() + log_lines(device=other), "both.jsonl")]))
    page = visit(report)
    page.select_option("#f-device", str(other))
    assert all(text.endswith(" on amd-instinct-mi300x") for text in cells(page, "shape")) and len(cells(page, "shape")) == 2
    assert set(cells(page, "over floor")) == {"\N{EN DASH}"}


def test_hover_shows_the_solution(h200: Path, visit: Open) -> None:
    """Show shape, solution, time and noise of the point under the cursor."""
    page = visit(h200)
    page.select_option("#f-libtype", "triton")
    page.wait_for_function("document.querySelectorAll('[data-chart=roofline] path[aria-roledescription=circle]').length === 1")
    page.locator("[data-chart=roofline] path[aria-roledescription=circle]").hover(force=True)

    tip = page.locator("#vg-tooltip-element.visible").inner_text()

    assert "M=64 N=2112 K=7168 bf16" in tip and "triton:gemm_r1_m64n32k128_g1_w4s7 splitK=2" in tip
    assert "11.79 us ± 0.2 %" in tip and "14.13 us" in tip and "1.198x" in tip
    page.locator("[data-chart=candidates] path[aria-roledescription=circle]").last.hover(force=True)
    assert re.search(r"solution\s+\w+:", page.locator("#vg-tooltip-element.visible").inner_text())


def test_columns_sort_by_keyboard(h200: Path, visit: Open) -> None:
    """Sort by a column with Enter, turn the order, and keep the focus."""
    page = visit(h200)
    page.focus("#table [data-sort=gain]")
    page.keyboard.press("Enter")

    gains = [float(text[:-1]) for text in cells(page, "gain")]
    assert gains == sorted(gains, reverse=True)
    assert page.locator("#table th[aria-sort=descending]").inner_text().startswith("gain")
    page.keyboard.press("Enter")
    gains = [float(text[:-1]) for text in cells(page, "gain")]
    assert gains == sorted(gains) and page.evaluate("document.activeElement.dataset.sort") == "gain"


def test_a_shape_shows_its_candidates(visit: Open, tmp_path: Path) -> None:
    """Show a picked shape's candidates with their reasons, and the damaged lines; all by keyboard."""
    lines = log_lines()
    path = tmp_path / "tuned.trials.jsonl"
    path.write_text("".join([*lines, "{damaged\n"]))
    report = tmp_path / "report.html"
    report.write_text(report_page([path]))
    page = visit(report)

    page.get_by_role("button", name="M=64 N=2048 K=4096 bf16").last.focus()
    page.keyboard.press("Enter")

    assert page.evaluate("document.activeElement.id") == "strip-shape"
    assert "3 solutions timed" in page.inner_text("#strip-note") and "tied with 1 other" in page.inner_text("#strip-note")
    failed = page.inner_text("#strip-failed")
    assert "unsupported" in failed and "K must be a multiple of 96" in failed and "triton:bad" in failed
    assert "compile 3" in page.inner_text("#seconds") and "tuned 2026-11-23" in page.inner_text("#where")
    assert f"{path}: 1 line left out" in page.inner_text("#about") and "line 11: not JSON" in page.inner_text("#about")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (380, "light")])
def test_accessible(h200: Path, visit: Open, width: int, scheme: str) -> None:
    """Have no serious fault by axe-core, and no page wider than the screen."""
    page = visit(h200, width=width, scheme=scheme)

    found = axe.Axe().run(page).response["violations"]

    grave = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    assert [(fault["id"], fault["nodes"][0]["html"][:120]) for fault in grave] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.evaluate(WIDER)


def test_themes_and_print(h200: Path, visit: Open) -> None:
    """Follow the system's theme, switch by the button, and print dark on white."""
    page = visit(h200, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('[data-chart=roofline] .role-axis-label text')).fill"
    dark, light_label = page.evaluate(ground), page.evaluate(label)
    page.click("#theme")

    assert (dark, page.evaluate(ground)) == ("rgb(21, 24, 28)", "rgb(255, 255, 255)")
    assert page.evaluate(label) != light_label  # the plots follow without being drawn again
    page.click("#theme")
    page.emulate_media(media="print")
    assert page.evaluate(ground) == "rgb(255, 255, 255)" and not page.locator("#filters").is_visible()


def test_paper_has_all_rows(visit: Open, log: Callable[..., Path], tmp_path: Path) -> None:
    """Show a hundred rows and a button for more on a screen, and all on paper."""
    lines = [trial_line(attrs.evolve(TRIALS[WIDE][0], shape=WIDE.with_m(m))) for m in range(1, 151)]
    report = tmp_path / "report.html"
    report.write_text(report_page([log(lines)]))
    page = visit(report)
    assert page.inner_text("#more") == "Show 50 more of 50" and len(cells(page, "M")) == 100

    page.pdf()

    assert len(cells(page, "M")) == 150 and page.locator("#more").is_hidden()


def test_markup_in_files_is_text(visit: Open, tmp_path: Path) -> None:
    """Show names, reasons and layers that hold markup as text: in the table, tooltips, lists and notes."""
    folder = tmp_path / "<img src=x>"
    folder.mkdir()
    path = folder / "tuned.trials.jsonl"
    refused = [line.replace("K must be a multiple of 96", EVIL) for line in log_lines({WIDE: TRIALS[WIDE]})]
    winner = trial_line(with_name(TRIALS[WIDE][1], EVIL)).replace('"us": 8.0', '"us": 1.0')
    path.write_text("".join([line for line in refused if '"kind": "shape"' not in line] + [winner, f"{EVIL}\n"]))
    report = tmp_path / "report.html"
    report.write_text(report_page([path]))
    page = visit(report)

    assert cells(page, "winner") == [f"asm:{EVIL} splitK=2"]
    page.locator("[data-chart=roofline] path[aria-roledescription=circle]").hover(force=True)
    assert EVIL in page.locator("#vg-tooltip-element.visible").inner_text()
    assert EVIL in page.inner_text("#strip-failed") and "<img src=x>" in page.inner_text("#about")
    assert page.locator("img").count() == 0 and page.title() == "tuned.trials.jsonl - tunedgemm report"


def test_the_policy_blocks_what_is_injected(h200: Path, browser: Any) -> None:
    """Block scripts and requests that are not the page's own, even if markup came through."""
    page = browser.new_context().new_page()
    failed: dict[str, str] = {}
    page.on("requestfailed", lambda request: failed.update({request.url: request.failure}))
    page.goto(h200.as_uri())
    picture = "<img src=http://127.0.0.1:9/x onerror=window.taken=1>"
    page.evaluate("(picture) => document.body.insertAdjacentHTML('beforeend', picture)", picture)
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.taken = 2'}))")

    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'blocked')") == "blocked"
    page.wait_for_function("document.images[0].complete")
    assert page.evaluate("window.taken === undefined")
    assert failed == {"http://127.0.0.1:9/x": "csp"}


def test_a_table_alone_shows_its_floor(visit: Open, tmp_path: Path) -> None:
    """Plot the time over the floor by M where no file has torch's time, and say what is missing."""
    report = tmp_path / "report.html"
    report.write_text(report_page(FILES[:1]))
    page = visit(report)

    assert page.inner_text("#h-m") == "Time over the floor by M" and dots(page, "floor-by-m") == 12
    assert "name the trial log or the profile, too" in page.inner_text("#tiles")
    assert page.locator("#layers").is_hidden() and page.locator("[data-chart=gain-by-m]").is_hidden()
    assert not {"gain", "torch us", "tied"} & {text.strip() for text in page.locator("#table th").all_inner_texts()}


def test_a_table_of_another_device_shows_rates(visit: Open, table: Callable[..., Path], tmp_path: Path) -> None:
    """Plot rates and list the longest calls where neither torch's time nor a floor is known."""
    report = tmp_path / "report.html"
    report.write_text(report_page([table(device=Device("gfx942", 304, ""))]))
    page = visit(report)

    assert page.inner_text("#h-m") == "Rate by M" and dots(page, "rate-by-m") == 2
    assert page.inner_text("#h-slow") == "Where time goes" and "M=4096" in page.locator("#slow li").first.inner_text()
    assert "rather than guessed" in page.inner_text("#roof-note") and "asm 1" in page.inner_text("#tiles")


def test_two_sides(visit: Open, tmp_path: Path) -> None:
    """List slower and faster shapes with both solutions, filtered like all others."""
    report = tmp_path / "report.html"
    report.write_text(report_page([FILES[0]], EARLIER))
    page = visit(report)

    assert page.inner_text("h1") == "all-a16w16-tuned.csv against a16w16-tuned.csv"
    verdicts = page.locator("#compare-table tbody td:first-child").all_inner_texts()
    assert sorted(verdicts) == ["equal"] * 6 + ["faster"] * 5 + ["slower"]
    page.select_option("#f-m", "64")
    assert page.locator("#compare-table tbody tr").count() == 2


def test_an_ab_has_its_section(visit: Open, tmp_path: Path) -> None:
    """Show arms, estimates and verdict as text; without a file the section is hidden."""
    texts = {"path": "ab.json", "what": EVIL, "a": "X=1", "b": "X=2", "turns": "9 turns", "effect": "+3.00% [+2.80%, +3.20%]",
        "control": "+0.01% [-0.30%, +0.30%]", "verdict": "B is slower"}  # fmt: skip
    for name, given in (("with", [texts]), ("without", [])):
        (tmp_path / f"{name}.html").write_text(page(document(read_findings(FILES), ab=given)))

    shown = visit(tmp_path / "with.html")
    assert shown.locator("#ab td").all_inner_texts() == [EVIL, *list(texts.values())[2:]]
    assert axe.Axe().run(shown).violations_count == 0
    assert visit(tmp_path / "without.html").locator("#ab").is_hidden()


def test_a_live_page_takes_newer_documents(h200: Path, visit: Open, log: Callable[..., Path]) -> None:
    """Replace all that the page shows by another document."""
    page = visit(h200)
    newer = document(read_findings([log()]))

    page.evaluate("(newer) => tunedgemmReport.update(newer)", json.loads(json.dumps(newer)))

    assert len(cells(page, "M")) == 2 and "2 shapes of a16w16" in page.inner_text("#where")
    page.wait_for_function("document.querySelectorAll('[data-chart=gain-by-m] .mark-symbol.role-mark path').length === 2")
