"""Ray: the tuner on a cluster that may lose nodes; here two nodes on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.fakes import fake_registry
from tunedgemm.testing.replay import read_trials
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.trial import Event, Outcome, Place, Step, Task
from tunedgemm.tuner.worker_client import DeviceLost
from tunedgemm_ray import cluster as joining
from tunedgemm_ray.cluster import connect
from tunedgemm_ray.executor import RayDeviceTuner, Started, _answer

pytestmark = pytest.mark.nightly

FAULTS = {"segfaults": "crashed", "hangs": "hung", "aborts_compiler": "compile_failed", "good": "ok"}
SHAPES = [Shape("a16w16", m, n, 128, "fp32") for n in (64, 96, 128) for m in (1, 8)]
FAST = Options(libtype="torch", iters=9, warmup=1, executor="ray")
#: Where the fake plugins are.
TESTS = Path(__file__).parents[3] / "tests"
#: Bytes; the least that Ray accepts is a little below.
STORE = 80 * 2**20


@attrs.define
class TwoNodes:
    """A head and a second node, a CPU each, in an environment that is the same whenever they are
    started.
    """

    environment: dict[str, str]
    cluster: Any = None
    second: Any = None

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    @property
    def options(self) -> Options:
        return attrs.evolve(FAST, ray_address=self.address)

    def add(self, **settings: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTHONPATH", raising=False)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return self.cluster.add_node(**{"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE, **settings})

    def both(self) -> TwoNodes:
        """The cluster, after the second node was lost with a new one."""
        if self.second is None:
            self.second = self.add()
        return self

    def lose(self) -> None:
        """End the second node as a power cut does.

        The head may count it as alive for some seconds.
        """
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Nodes take their environment from here.

    Where the plugins are comes from the driver of each run.
    """
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folders = {"TUNEDGEMM_HOME": str(tmp_path_factory.mktemp("home")), "TUNEDGEMM_CACHE": str(tmp_path_factory.mktemp("cache"))}
    settings = {
        "FAULTY_KINDS": ",".join(FAULTS),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "TUNEDGEMM_FAKE_SPACE": "full",
    }
    nodes = TwoNodes({**folders, **settings}, Cluster())
    nodes.add(include_dashboard=False)
    yield nodes
    nodes.cluster.shutdown()


def kinds(table: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of a trial log by their kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in table.with_suffix(".trials.jsonl").read_text().splitlines():
        fields = json.loads(line)
        found.setdefault(fields["kind"], []).append(fields)
    return found


def twice(table: Path) -> dict[tuple[Shape, object], int]:
    counts = Counter((trial.shape, trial.solution) for trial in read_trials(table.with_suffix(".trials.jsonl")))
    return {trial: count for trial, count in counts.items() if count > 1}


def tuned(table: Path) -> set[Shape]:
    return {row.shape for row in read_rows(table, op_named("a16w16"))[0]}


def seats() -> list[int]:
    """Processes of actors, and of the workers and compilers that actors start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            ours = b"ray::TunerActor" in words or (b"spawn_main" in words and b"RAY_JOB_ID" in (folder / "environ").read_bytes())
        except OSError:
            continue
        found += [int(folder.name)] if ours else []
    return found


def gone(seconds: float = 60.0) -> bool:
    """Whether no actor or child of one is left, at the latest after some seconds."""
    deadline = time.monotonic() + seconds
    while seats() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not seats()


@pytest.fixture
def connected(cluster: TwoNodes) -> Iterator[TwoNodes]:
    """The cluster, with this process as a driver of it."""
    with connect(cluster.address):
        yield cluster


def test_shapes_are_shared_among_the_nodes(cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape is tuned once, the trial log names both nodes, and no process stays on them.

    The nodes find a plugin through the driver's PYTHONPATH. An actor follows the driver's
    environment, not its node's.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("TUNEDGEMM_FAKE_SPACE", "")
    table = tmp_path / "t.csv"

    report = tune(shapes=SHAPES, output=table, options=attrs.evolve(cluster.both().options, libtype="fake"))

    lines = kinds(table)
    nodes = {line["node"] for line in lines["trial"]}
    assert len(nodes) == 2
    assert {place.node for place in report.places} == nodes
    assert tuned(table) == set(SHAPES)
    assert sorted(map(str, (outcome.task.shape for outcome in report.outcomes))) == sorted(map(str, SHAPES))
    assert twice(table) == {}
    fakes = Counter(trial.shape for trial in read_trials(table.with_suffix(".trials.jsonl")) if trial.solution.libtype == "fake")
    assert fakes == dict.fromkeys(SHAPES, 2)
    assert gone()


def test_faults_cost_their_solutions_alone(connected: TwoNodes, faulty_plugin: Path, tmp_path: Path) -> None:
    """On a node as here, the good solution wins, and each fault is the status of one solution."""
    options = attrs.evolve(connected.options, libtype="faulty", timeout=6, kernel_timeout=3, mp=1)

    tune(shapes=[Shape("a16w16", 8, 64, 128, "fp32")], output=tmp_path / "t.csv", options=options)

    trials = [trial for trial in read_trials(tmp_path / "t.trials.jsonl") if trial.solution.libtype == "faulty"]
    assert {trial.solution.kernel_name: trial.status for trial in trials} == FAULTS
    assert len(trials) == len(FAULTS)
    assert [str(row.solution) for row in read_rows(tmp_path / "t.csv", op_named("a16w16"))[0]] == ["faulty:good"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_tuner_leaves_no_actor_behind(cluster: TwoNodes, tmp_path: Path, number: signal.Signals) -> None:
    """After Ctrl-C and SIGTERM results are kept, and the nodes are idle again."""
    table, log = tmp_path / "t.csv", tmp_path / "t.trials.jsonl"
    (tmp_path / "in.csv").write_text("M,N,K,dtype\n" + "".join(f"{m},256,512,fp32\n" for m in range(1, 65)))
    words = f"tune -i {tmp_path / 'in.csv'} -o {table} --libtype torch --executor ray --mp 1 --ray-address {cluster.address}"
    process = subprocess.Popen([sys.executable, "-m", "tunedgemm", *words.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    try:
        while not (log.exists() and '"trial"' in log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        err = process.communicate(timeout=120)[1].decode()
    finally:
        process.kill()

    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert kinds(table)["trial"]
    assert gone()


def test_a_shape_is_lost_with_its_actor_unless_its_outcome_arrived(connected: TwoNodes, cpu: Device) -> None:
    """An actor that dies before a shape's outcome hands the shape back.

    After it, the shape is done.
    """
    import ray

    task = Task(SHAPES[0])
    outcome = Outcome(task, None, None)

    class Dying:
        def tune(self, task: Task, *_: Any) -> Iterator[tuple[Event, ...]]:
            if task.count == 2:
                yield (outcome,)
                time.sleep(0.5)  # the outcome arrives
            os._exit(1)

    same_code = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    for count in (1, 2):
        events: list[Event] = []
        actor = ray.remote(Dying).options(num_cpus=0, runtime_env=same_code).remote()
        tuner = RayDeviceTuner(actor, {}, Place(cpu, "node"), {})
        with contextlib.nullcontext() if count == 2 else pytest.raises(DeviceLost, match="ActorDied"):
            tuner.tune(Task(SHAPES[0], count), (), events.append)
        with pytest.raises(DeviceLost, match="ActorDied"):
            tuner.tune(Task(SHAPES[1]), (), events.append)
        assert events == [outcome] * (count - 1)


def test_another_tunedgemm_on_a_node_is_left_out(connected: TwoNodes, cpu: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Two versions of tunedgemm may not understand each other.

    A plugin that differs is a warning.
    """
    import ray

    here = {"tunedgemm": "2", "torch": "2.9", "turbo of fast": "1"}
    with pytest.raises(DeviceLost, match="tunedgemm 1, other than here"):
        _answer(ray.put(Started(Place(cpu, "node"), {}, here | {"tunedgemm": "1"})), here)
    started = _answer(ray.put(Started(Place(cpu, "node"), {"turbo": "7"}, {"tunedgemm": "2", "torch": "2.9"})), here)

    assert started.versions == {"turbo": "7"}
    assert "turbo of fast (none)" in caplog.text


def test_a_node_lost_in_the_middle_of_a_shape_costs_nothing(
    connected: TwoNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another node tunes its shape, no solution has two final trials, and the log names the node."""
    nodes, lost = connected.both(), ""
    second = str(nodes.second.node_id)

    def lose(place: Place | None, event: Event) -> None:
        nonlocal lost
        busy = (
            isinstance(event, Step) and event.activity == "check" and any(line["node"] == second for line in kinds(table).get("trial", []))
        )
        if not lost and place and place.node == second and busy:
            lost = str(event.task.shape)
            nodes.lose()

    table = tmp_path / "t.csv"
    report = tune(shapes=SHAPES, output=table, options=nodes.options, progress=lose)

    assert lost, "the second node had begun a shape"
    assert {place.node for place in report.places} == {line["node"] for line in kinds(table)["trial"]}
    assert tuned(table) == set(SHAPES)
    assert report.unbegun == () and len(report.outcomes) == len(SHAPES)
    assert twice(table) == {}
    assert [record for record in caplog.records if "is lost" in record.getMessage()]
    assert capfd.readouterr().out == "", "the standard output is the tuner's"
    assert gone()


def test_ray_assigns_the_gpus(connected: TwoNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each GPU of a cluster is a device, and one that does not work is a user error with its reason.

    Indices of a machine are refused; of more devices than the cluster has, all are used.
    """
    import torch

    if torch.cuda.is_available():
        pytest.skip("the GPU that Ray is given must not be there")
    table, options = tmp_path / "t.csv", connected.options
    with pytest.raises(UserError, match="Ray assigns"):
        tune(shapes=SHAPES, output=table, options=attrs.evolve(options, device="0"))
    node = connected.add(num_cpus=0, num_gpus=1)
    try:
        with pytest.raises(UserError, match="no worker can be started"):
            tune(shapes=SHAPES, output=table, options=attrs.evolve(options, mp=2))
    finally:
        connected.cluster.remove_node(node)
    assert len([record for record in caplog.records if "left out" in record.getMessage()]) == 1
    assert "--mp 2: the cluster has only 1 GPUs; it is used" in caplog.text
    assert gone()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "no server answers"),
        ("head", "HOST:PORT"),
        ("ray://127.0.0.1:10001", "HOST:PORT"),
        ("nowhere.invalid:6379", "no server answers"),
    ],
)
def test_an_unreachable_cluster_is_an_error_within_seconds(tmp_path: Path, address: str, words: str) -> None:
    """A clear error within seconds, where Ray itself would try for minutes."""
    pytest.importorskip("ray")
    started = time.monotonic()

    with pytest.raises(UserError, match=words):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=attrs.evolve(FAST, ray_address=address))

    assert time.monotonic() - started < 30


def test_another_server_at_the_address_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that accepts and never answers is given up, too."""
    pytest.importorskip("ray")
    monkeypatch.setattr(joining, "_JOIN_S", 3.0)

    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="not the head of a Ray cluster"):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=attrs.evolve(FAST, ray_address=f"127.0.0.1:{server.getsockname()[1]}"))


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is an extra."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UserError, match=r"pip install 'tunedgemm\[ray\]'"):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=FAST)


@pytest.mark.parametrize(("registry", "bench", "words"), [(fake_registry, None, "registry"), (lambda: None, lambda *_: None, "pickled")])
def test_what_cannot_be_pickled_is_refused(tmp_path: Path, registry: Callable[[], Registry | None], bench: Any, words: str) -> None:
    """Backends and times of this process cannot be used on other machines."""
    with pytest.raises(UserError, match=words):
        tune(shapes=SHAPES, output=tmp_path / "t.csv", options=FAST, registry=registry(), bench=bench)
