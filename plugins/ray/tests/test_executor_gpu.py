"""Ray with GPUs: two nodes on one machine, each with one GPU of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_trials
from tunedgemm.tuner import Options, Report, tune
from tunedgemm.tuner.trial import Event, Place, Step, Task
from tunedgemm_ray.cluster import connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPES = [Shape("a16w16", m, n, 1024) for n in (512, 1024, 2048) for m in (1, 16, 256)]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@attrs.define
class Nodes:
    """A head with GPU 0, and a second node with GPU 1."""

    cluster: object
    second: object
    address: str


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """The cluster, with this process as a driver of it."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    cluster, started = Cluster(), []
    for gpu in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VISIBLE, gpu)
            started.append(cluster.add_node(num_cpus=4, num_gpus=1, object_store_memory=80 * 2**20))
    with connect(cluster.address):
        yield Nodes(cluster, started[1], str(cluster.address))
    cluster.shutdown()


def run(nodes: Nodes, table: Path, progress: Callable[[Place | None, Event], None] | None = None) -> Report:
    """Tune all shapes on the cluster."""
    options = Options(libtype="torch", iters=9, warmup=1, executor="ray", ray_address=nodes.address)
    return tune(shapes=SHAPES, output=table, options=options, progress=progress)


def require_all_once(table: Path) -> None:
    """Check that each shape has a row of this kind of GPU, and no solution two final trials."""
    rows, device = read_rows(table, op_named("a16w16"))[0], device_of(0)
    assert {row.shape for row in rows} == set(SHAPES)
    assert len(rows) == len(SHAPES)
    assert {(row.gfx, row.cu_num, row.device) for row in rows} == {(device.gfx, device.cu_num, device.name)}
    counts = Counter((trial.shape, trial.solution) for trial in read_trials(table.with_suffix(".trials.jsonl")))
    assert set(counts.values()) == {1}


def is_busy_on(place: Place | None, event: Event, gpu: int) -> bool:
    """Return whether a GPU has begun a shape, whose outcome is far away."""
    return place is not None and place.device.index == gpu and isinstance(event, Step) and event.activity == "check"


def gpu_processes(gpu: str) -> list[int]:
    """Return the actors' child processes that have a context on a GPU."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            spawned = b"spawn_main" in (folder / "cmdline").read_bytes() and f"{VISIBLE}={gpu}".encode() in variables
            processes += [int(folder.name)] if spawned and "libcuda.so" in (folder / "maps").read_text() else []
        except OSError:
            continue
    return processes


def test_a_gpu_each(nodes: Nodes, tmp_path: Path) -> None:
    """Both GPUs tune, by the numbers that they have on the machine, and all rows are of one kind."""
    report = run(nodes, tmp_path / "t.csv")

    assert sorted(place.device.index for place in report.places) == [0, 1]
    assert len({place.node for place in report.places}) == 2
    assert {outcome.place.device.index for outcome in report.outcomes if outcome.place} == {0, 1}
    require_all_once(tmp_path / "t.csv")


def test_a_killed_worker_is_replaced(nodes: Nodes, tmp_path: Path) -> None:
    """The process of GPU 1 is killed while it works: no solution is blamed, and no shape is lost."""
    killed: list[int] = []

    def kill(place: Place | None, event: Event) -> None:
        if not killed and is_busy_on(place, event, 1):
            killed.extend(gpu_processes("1"))
            for process in killed:
                os.kill(process, signal.SIGKILL)

    report = run(nodes, tmp_path / "t.csv", kill)

    assert killed
    assert not report.lost and not report.failed
    trials = read_trials(tmp_path / "t.trials.jsonl")
    assert {trial.status for trial in trials} <= {"ok", "screened", "unsupported"}
    require_all_once(tmp_path / "t.csv")


def test_a_lost_node_hands_its_shape_over(nodes: Nodes, tmp_path: Path) -> None:
    """The node of GPU 1 is lost in the middle of a shape: GPU 0 tunes what has no outcome yet."""
    lost: list[Task] = []

    def lose(place: Place | None, event: Event) -> None:
        if not lost and is_busy_on(place, event, 1):
            assert isinstance(event, Step)
            lost.append(event.task)
            nodes.cluster.remove_node(nodes.second, allow_graceful=False)  # type: ignore[attr-defined]

    report = run(nodes, tmp_path / "t.csv", lose)

    assert lost
    gpus = [outcome.place.device.index for outcome in report.outcomes if outcome.place]
    assert gpus.count(1) <= 1, "the first may have ended before its process"
    assert not report.lost and not report.failed
    require_all_once(tmp_path / "t.csv")
