"""Exposition: an API server's `/metrics` has its workers' counts, OpenTelemetry those of a process."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tunedgemm.dispatch import counters
from tunedgemm.integrations import exposition

#: What an engine's worker does: it counts demotions, and writes its counters.
WORKER = """
import sys
from tunedgemm.dispatch.counters import count
from tunedgemm.integrations.exposition import expose_counters, write
expose_counters()
for _ in range(int(sys.argv[1])):
    count("demotions", "a16w16", "turbo")
write()
"""
#: An API server with two workers that have ended; vLLM's registry is the default one, or in
#: multiprocess mode a new one. It prints torch if that is loaded.
SERVER = f"""
import os, subprocess, sys
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from tunedgemm.dispatch.counters import count
from tunedgemm.integrations.exposition import expose_counters
expose_counters()
expose_counters()
count("verifications", "a16w16", "turbo")
for number in (2, 3):
    subprocess.run([sys.executable, "-c", {WORKER!r}, str(number)], check=True)
registry = REGISTRY
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    from tunedgemm.integrations.exposition import write
    write()
print(generate_latest(registry).decode(), *{{"torch"}} & set(sys.modules))
print("folder", os.environ.get("TUNEDGEMM_METRICS_DIR"))
"""
SAMPLES = re.compile(r"^(tunedgemm_\w+\{.*\} [\d.]+)$", re.MULTILINE)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_server_shows_its_workers_counters(multiprocess: bool, tmp_path: Path, monkeypatch, child: Callable[..., str]) -> None:
    """The sums of all processes are there once, in both modes; the folder goes with the server."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("TUNEDGEMM_METRICS", "1")
    if multiprocess:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    out = child(SERVER)
    assert sorted(SAMPLES.findall(out)) == [
        'tunedgemm_demotions_total{backend="turbo",op="a16w16"} 5.0',
        'tunedgemm_verifications_total{backend="turbo",op="a16w16"} 1.0',
    ]
    assert "# TYPE tunedgemm_demotions_total counter" in out and not out.rstrip().endswith("torch")
    folder = out.splitlines()[-1].removeprefix("folder ")
    assert folder == "None" if multiprocess else not Path(folder).exists()


def test_off_shows_nothing(child: Callable[..., str]) -> None:
    """Without the variable neither client is loaded, and no folder is made."""
    source = "import os, sys\nfrom tunedgemm.integrations.exposition import expose_counters\nexpose_counters()\n"
    shown = "print({'prometheus_client', 'opentelemetry'} & set(sys.modules), os.environ.get('TUNEDGEMM_METRICS_DIR'))"
    assert child(source + shown) == "set() None"


def test_opentelemetry_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's provider gets each counter with its labels as attributes."""
    api = pytest.importorskip("opentelemetry.metrics")
    export, sdk = pytest.importorskip("opentelemetry.sdk.metrics.export"), pytest.importorskip("opentelemetry.sdk.metrics")
    monkeypatch.setattr(counters, "_events", {})
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(api, "get_meter", provider.get_meter)
    exposition._start_opentelemetry(api)
    counters.count("demotions", "a16w16", "turbo")
    (scope,) = json.loads(reader.get_metrics_data().to_json())["resource_metrics"][0]["scope_metrics"]
    found = {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"] if metric["data"]["data_points"]}
    (point,) = found["tunedgemm.demotions"]
    assert (point["attributes"], point["value"]) == ({"op": "a16w16", "backend": "turbo"}, 1)
    provider.shutdown()


@pytest.mark.parametrize("content", ["", "raise AttributeError('no REGISTRY')"], ids=["another module", "import fails"])
def test_a_library_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, content: str
) -> None:
    """An incompatible client is one warning with the remedy; an absent one is none."""

    def fail(module: object) -> None:
        raise AttributeError("no REGISTRY")

    monkeypatch.setenv("TUNEDGEMM_METRICS", "1")
    (tmp_path / "prometheus_client.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    monkeypatch.setattr(exposition, "_start_prometheus", fail)
    with caplog.at_level(logging.WARNING):
        exposition.expose_counters.__wrapped__()
    assert "prometheus_client does not show them (got no REGISTRY); update it, or unset TUNEDGEMM_METRICS" in caplog.text
    assert len(caplog.records) == 1


def test_a_removed_folder_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that outlives the folder's owner goes on without value files."""
    pytest.importorskip("prometheus_client")
    monkeypatch.delenv(exposition.MULTIPROCESS, raising=False)
    monkeypatch.setenv(exposition.FOLDER, str(tmp_path / "gone"))
    exposition.write()
    assert not (tmp_path / "gone").exists()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Name an empty folder of value files."""
    pytest.importorskip("prometheus_client")
    monkeypatch.delenv(exposition.MULTIPROCESS, raising=False)
    monkeypatch.setenv(exposition.FOLDER, str(tmp_path))
    return tmp_path


def test_a_value_file_has_its_blocks(folder: Path) -> None:
    """A disk that fills up later cannot end the process by SIGBUS."""
    exposition.write()
    (file,) = folder.iterdir()
    assert file.suffix == ".db" and file.stat().st_blocks * 512 >= file.stat().st_size > 0


def test_a_full_disk_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectors would fail at an empty one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    exposition.write()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"\xff\x00\x00\x00" * 9], ids=["empty", "cut"])
def test_a_damaged_value_file_stops_nothing(folder: Path, content: bytes) -> None:
    """Neither the page of metrics nor this process's counters."""
    (folder / "counter_tunedgemm1.db").write_bytes(content)
    (folder / f"counter_tunedgemm{os.getpid()}.db").write_bytes(content)
    exposition.write()
    assert exposition._Collector().collect() == []


def test_the_dashboard_asks_for_our_counters() -> None:
    """Each expression names counters and labels that are exposed, and each counter is shown."""
    board = json.loads((Path(__file__).parents[2] / "examples" / "grafana" / "tunedgemm.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"tunedgemm_(\w+)_total", text)}
    assert named == set(counters.COUNTERS)
    for text in expressions:
        (first, *_) = re.findall(r"tunedgemm_(\w+)_total", text)
        labels = {label for group in re.findall(r"by \((.*?)\)", text) for label in group.split(", ")}
        assert labels <= set(counters.COUNTERS[first][0]), text
