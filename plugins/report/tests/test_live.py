"""`tunedgemm tune --live`: the report of a run, while it runs, and its last state afterwards."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tunedgemm_report.live as live_module
from tunedgemm.cli import main
from tunedgemm.device import Device, device_of
from tunedgemm.shape import Shape
from tunedgemm.tuner.progress import Progress
from tunedgemm.tuner.trial import Outcome, Place, Planned, Task
from tunedgemm_report.live import LiveReport

pytest.importorskip("vl_convert", reason="the report's library is not installed; `pip install tunedgemm[report]`")

SHAPES = [Shape("a16w16", m, 64, 64) for m in (1, 2, 4)]
CPU, GPU = Place(device_of(-1)), Place(Device("sm_90", 132, "nvidia-h200", 0))


def get(url: str, name: str = "", **headers: str) -> tuple[int, Any]:
    """Return the status and the content of a part of the page, JSON as values."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url + name, headers=headers), timeout=30) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if ".json" in name else text
    except urllib.error.HTTPError as error:
        return error.code, ""


def ask(url: str, seen: int = 0, page: str = "p") -> dict[str, Any]:
    """Ask as an open page does; return the state."""
    return get(url, f"state.json?seen={seen}&page={page}")[1]


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something to be true."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


@pytest.fixture
def shown(tmp_path: Path, trial_log: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LiveReport]]:
    """Return a function that serves a run of three shapes at a place; its log has a trial of each."""
    reports: list[LiveReport] = []
    monkeypatch.setattr(live_module, "LAST", 0.2)
    trial_log(*((shape, "k_v1", 0, 5.0) for shape in SHAPES))

    def show(place: Place = CPU) -> LiveReport:
        report = LiveReport(0)
        reports.append(report)
        report.__enter__()
        report.watch(Progress(then=report.receive), "a16w16", [])
        report.receive(None, Planned(tuple(map(Task, SHAPES)), (), (place,), tmp_path / "tuned.csv"))
        return report

    yield show
    for report in reports:
        if report._server._thread.is_alive():
            report.__exit__(None, None, None)


def finish(report: LiveReport, place: Place = CPU) -> None:
    """Send the event of a finished shape."""
    report.receive(place, Outcome(Task(SHAPES[0]), None, None))


def test_documents_are_made_only_for_open_pages(shown):
    """Make no document for a page that was never opened or that is closed."""
    report = shown()
    finish(report)
    assert get(report.url, "report.json")[1]["version"] == 0

    assert ask(report.url)["version"] == 0
    finish(report)
    assert get(report.url, "report.json")[1]["version"] == 1
    assert [shape["m"] for shape in get(report.url, "report.json")[1]["report"]["shapes"]] == [1, 2, 4]


def test_on_a_cpu_documents_are_made_between_shapes(shown):
    """Make no document when a page asks, which may be amid a timing."""
    report = shown()
    for _ in range(3):
        assert ask(report.url)["version"] == 0
        assert get(report.url)[0] == 200
    finish(report)

    assert ask(report.url)["version"] == 1


def test_on_a_gpu_documents_are_made_when_a_page_asks(shown):
    """Leave the run's events alone, and answer the next question with the news."""
    report = shown(GPU)
    assert ask(report.url)["version"] == 1
    finish(report, GPU)
    report._next = 0.0

    assert ask(report.url)["version"] == 2


def test_documents_are_seconds_apart(shown, monkeypatch):
    """Make one document however many shapes finish, and wait longer where a document takes longer."""
    monkeypatch.setattr(live_module, "PAUSE", 100.0)
    report = shown()
    ask(report.url)
    before = time.monotonic()
    for _ in range(5):
        finish(report)
    assert ask(report.url)["version"] == 1
    took = time.monotonic() - before

    made = report._made
    monkeypatch.setattr(report, "_made", lambda version: (time.sleep(0.1), made(version))[1])
    report._next = 0.0
    finish(report)

    assert ask(report.url)["version"] == 2
    assert report._next - time.monotonic() > 100 * 0.1 - 1 > live_module.EVERY > took


def test_a_fault_of_a_file_stops_no_run(shown, tmp_path):
    """Keep the last report and name the fault in the page; update it when the file is mended."""
    report = shown()
    ask(report.url)
    finish(report)
    log = tmp_path / "tuned.trials.jsonl"
    text = log.read_text()
    log.write_text("no log\n")
    report._next = 0.0
    finish(report)
    state = ask(report.url)
    assert state["version"] == 1 and re.search(r"The report is not current: .*tuned.trials.jsonl: not a", state["text"])
    assert len(get(report.url, "report.json")[1]["report"]["shapes"]) == 3

    log.write_text(text)
    report._next = 0.0
    finish(report)
    state = ask(report.url)
    assert state["version"] == 2 and "not current" not in state["text"]


def test_a_bug_of_the_report_stops_no_run(shown, monkeypatch):
    """Name the exception in the page, and let the run go on."""
    report = shown()
    ask(report.url)
    finish(report)
    monkeypatch.setattr(report, "_made", lambda version: {}[version])
    report._next = 0.0
    finish(report)

    state = ask(report.url)
    assert state["version"] == 1 and "The report is not current: KeyError" in state["text"]


def test_nothing_is_shown_before_the_first_shape(shown, tmp_path):
    """Serve an empty page without a fault while the log has the run's header alone."""
    report = shown()
    log = tmp_path / "tuned.trials.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    ask(report.url)
    finish(report)

    state = ask(report.url)
    assert (state["version"], state["text"].count("not current"), state["finished"]) == (0, 0, False)


def test_the_end_waits_for_open_pages(shown, monkeypatch):
    """Serve the last state until an open page has it; wait for no closed page."""
    monkeypatch.setattr(live_module, "LAST", 5.0)
    report = shown()
    ask(report.url)
    report.end("Finished.")
    answers: list[dict[str, Any]] = []
    page = threading.Timer(0.5, lambda: answers.append(ask(report.url, report._document.version)))
    page.start()
    before = time.monotonic()
    report.__exit__(None, None, None)
    page.join()

    assert 0.4 < time.monotonic() - before < 4
    assert [(state["finished"], state["text"]) for state in answers] == [(True, "Finished.")]
    second = shown()
    before = time.monotonic()
    second.__exit__(None, None, None)
    assert time.monotonic() - before < 2


def test_a_slow_document_is_not_made_at_the_end(shown, monkeypatch):
    """End at once where the last document of a huge log took longer than the end may wait."""
    report = shown()
    ask(report.url)
    finish(report)
    report._cost = 30.0
    finish(report)
    made: list[int] = []
    monkeypatch.setattr(report, "_made", made.append)
    report.__exit__(None, None, None)

    assert made == [] and report._document.version == 1


def test_tables_of_several_ops_are_one_report(shown, tmp_path, trial_log):
    """Name the files of all runs of a command in the command that keeps the page."""
    report = shown()
    other = tmp_path / "other.trials.jsonl"
    other.write_text((tmp_path / "tuned.trials.jsonl").read_text())
    report.watch(Progress(), "a8w8", [])
    report.receive(None, Planned((), (), (CPU,), tmp_path / "other.csv"))

    assert shlex.split(ask(report.url)["command"]) == [
        *("tunedgemm", "report", str(tmp_path / "tuned.trials.jsonl"), str(other)),
        *("-o", "report.html"),
    ]


def test_a_taken_port_is_a_usage_error(capsys, tmp_path):
    """Name the port and the remedy, before anything is tuned."""
    (tmp_path / "shapes.csv").write_text("M,N,K\n1,64,64\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["tune", "-i", str(tmp_path / "shapes.csv"), "-o", str(tmp_path / "tuned.csv"), "--live", str(port)])

    assert code == 2
    assert f"--live: cannot listen on 127.0.0.1 (got port {port}: Address already in use)" in capsys.readouterr().err
    assert not (tmp_path / "tuned.csv").exists()


@pytest.mark.parametrize(
    ("words", "fault"), [(["--live", "70000"], "expected a port"), (["--live", "--run_config"], "--run_config tunes nothing")]
)
def test_wrong_use_is_an_error(words, fault, capsys, tmp_path):
    """Refuse a number beyond all ports, and a command that tunes nothing."""
    (tmp_path / "shapes.csv").write_text("M,N,K\n1,64,64\n")

    assert main(["tune", "-i", str(tmp_path / "shapes.csv"), *words]) == 2
    assert fault in capsys.readouterr().err


def test_a_missing_library_is_an_error(capsys, tmp_path, monkeypatch):
    """Name the command that installs the library of the plots, before anything is tuned."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    (tmp_path / "shapes.csv").write_text("M,N,K\n1,64,64\n")

    assert main(["tune", "-i", str(tmp_path / "shapes.csv"), "-o", str(tmp_path / "tuned.csv"), "--live"]) == 2
    assert "pip install 'tunedgemm[report]'" in capsys.readouterr().err


class Run:
    """A real run of `tunedgemm tune --live` in a session without other processes."""

    def __init__(self, folder: Path, shapes: int, *flags: str) -> None:
        self.table = folder / "tuned.csv"
        rows = "".join(f"{m},96,64,fp32,10\n" for m in range(1, shapes + 1))
        (folder / "shapes.csv").write_text(f"M,N,K,dtype,count\n{rows}")
        files = ["-i", str(folder / "shapes.csv"), "-o", str(self.table)]
        command = [sys.executable, "-m", "tunedgemm", "tune", "--live", *files, "--libtype", "torch", "--iters", "15", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        found = re.fullmatch(r"live report: (http://127\.0\.0\.1:\d+/[\w-]{32}/)\n", first)
        assert found, first
        self.url = found[1]

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the rest of standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def remains(self) -> list[str]:
        """Return what the run left: processes of its session, and its port."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(folder.name)
        with socket.socket() as probe:
            port = int(self.url.split(":")[2].split("/")[0])
            return found + ([f"port {port}"] if probe.connect_ex(("127.0.0.1", port)) == 0 else [])


@pytest.mark.slow
def test_a_page_follows_a_real_run(tmp_path, monkeypatch):
    """Serve growing reports while the run tunes, then its last state; leave the table and its log alone."""
    run = Run(tmp_path, 12)
    assert get(run.url.rpartition("/")[0].rpartition("/")[0] + "/")[0] == 403
    assert get(run.url, Host="evil.example")[0] == 403

    seen, sizes, last, finished = 0, [], {}, False
    while not finished:
        time.sleep(0.2)
        asked, state = seen, ask(run.url, seen)
        finished = state["finished"]
        if state["version"] != seen:
            last = get(run.url, "report.json")[1]
            seen = last["version"]
            sizes.append(len(last["report"]["shapes"]))
    if seen != asked:  # as an open page does: the end waits for a page that has not shown the last report, and for no other
        ask(run.url, seen)
    code, errors = run.end()

    assert (code, errors) == (0, "")
    assert state["text"] == "Finished." and state["command"].startswith(f"tunedgemm report {run.table} {tmp_path / 'shapes.csv'}")
    assert len(last["report"]["shapes"]) == 12 and last["report"]["summary"]["weighted"]
    assert sizes == sorted(sizes) and sizes and sizes[0] < 12
    until(lambda: run.remains() == [], "the end of all processes")
    names = {path.name for path in tmp_path.iterdir()} - {"home", "cache", "shapes.csv"}
    assert {name.removesuffix(".lock") for name in names} == {"tuned.csv", "tuned.trials.jsonl"}


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path):
    """End at Ctrl-C with the ordinary message and code; tell the page, and free process and port."""
    run = Run(tmp_path, 200)
    until(lambda: re.search(r"[1-9]\d* of 200 shapes", ask(run.url)["text"]), "the first shape")
    before = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    state = ask(run.url)
    while not state["finished"]:
        time.sleep(0.05)
        state = ask(run.url, state["version"])
    code, errors = run.end()

    assert state["text"] == "Interrupted; the same command resumes."
    assert code == 130 and "interrupted by SIGINT" in errors
    assert time.monotonic() - before < 15
    until(lambda: run.remains() == [], "the end of all processes")


@pytest.fixture
def browser() -> Iterator[Any]:
    """Return a page of a headless Chromium."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--disable-gpu", "--disable-dev-shm-usage"])
        yield chromium.new_page()
        chromium.close()


@pytest.mark.slow
def test_an_open_page_updates_itself(browser, shown, trial_log, monkeypatch):
    """Show new shapes without loading again, keep the filter, and say at the end how to keep the page."""
    trial_log((SHAPES[0], "k_v1", 0, 5.0))
    report = shown(GPU)
    monkeypatch.setattr(live_module, "EVERY", 0.0)
    monkeypatch.setattr(live_module, "LAST", 5.0)

    def text(name: str) -> str:
        return str(browser.locator(f"#{name}").text_content())  # waits where the page loads again

    messages: list[str] = []
    browser.on("console", lambda message: messages.append(message.text))
    browser.on("pageerror", lambda error: messages.append(str(error)))
    browser.goto(report.url)
    until(lambda: text("shown").startswith("1 of 1 shape"), "the first shape")
    until(lambda: text("live").startswith("Tuning a16w16: "), "the state of the run")
    browser.evaluate("window.kept = true")
    browser.fill("#f-text", "M=4")
    trial_log(*((shape, "k_v1", 0, 5.0) for shape in SHAPES))
    finish(report, GPU)
    report._next = 0.0

    until(lambda: text("shown").startswith("1 of 3 shapes"), "the other shapes")
    assert browser.evaluate("window.kept")
    report.end("Finished.")
    report.__exit__(None, None, None)
    until(lambda: text("live").startswith("Finished."), "the end")
    assert "To keep this page:tunedgemm report " in text("live")
    assert text("shown").startswith("1 of 3 shapes")
    browser.wait_for_timeout(1500)  # a page that asked on would log the refused connection
    assert messages == []
