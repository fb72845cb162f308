"""Device tuners on a Ray cluster: an actor for each GPU, or one on each node without GPUs.

An actor holds a `DeviceTuner` with its worker process and compilers, and streams its events to the
driver. If an actor or its node is lost, its device is lost, and another device tunes its shape.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm import __version__
from tunedgemm.integrations import DeviceLost, Registry, device_tuner
from tunedgemm.plugin import Op, UserError
from tunedgemm.tools.tables import Options, Outcome, op_named

from tunedgemm_ray.cluster import connect

_log = logging.getLogger("tunedgemm")

#: Seconds until an actor must have begun: it waits for its share of the node, imports torch twice
#: and makes a device context.
_START_S = 180.0
#: Seconds for which Ray may count the resources of an ended run as taken.
_FREE_S = 5.0
_THREADS = "OMP_NUM_THREADS"


@attrs.frozen
class DriverSettings:
    """Settings that actors copy from the driver: its log level, and its torch threads."""

    level: int
    threads: str


@attrs.frozen
class Started:
    """An actor's answer once its device tuner has begun.

    Attributes:
        place: the device, with its number on the node, and Ray's id of the node.
        versions: library versions by libtype.
        software: versions of the installed packages.
    """

    place: Any
    versions: Mapping[str, str]
    software: Mapping[str, str]


class TunerActor:
    """The actor: a `DeviceTuner` on the node of its device.

    Args:
        op: name of the op.
        options: how to tune.
        ranks: libtype to its rank for ties.
        jobs: node id to the compiling processes of each of its devices.
        bench: the pickled source of times.
        driver: the driver's log level and torch threads.
    """

    def __init__(
        self, op: str, options: Options, ranks: Mapping[str, int], jobs: Mapping[str, int], bench: bytes, driver: DriverSettings
    ) -> None:
        import ray

        context = ray.get_runtime_context()
        self._node = str(context.get_node_id())
        self._gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        os.environ.pop(_THREADS, None)  # Ray sets it to the actor's CPUs; unset, torch takes all cores
        if driver.threads:
            os.environ[_THREADS] = driver.threads
        logging.getLogger("tunedgemm").setLevel(driver.level)
        index = 0 if self._gpus else -1  # Ray shows the actor its GPU alone
        self._tuner = device_tuner(op_named(op), options, index, ranks, jobs.get(self._node, 1), pickle.loads(bench), self._node)

    def begin(self) -> Started:
        """Start the device's worker and its compilers."""
        self._tuner.compilers.start(self._tuner.ranks)
        self._tuner.begin()
        return Started(self._numbered_place(self._tuner.place), self._tuner.versions, _software(self._tuner.options))

    def ahead(self, task: Any) -> None:
        """Compile the solutions of a later shape."""
        self._tuner.ahead(task)

    def tune(self, task: Any, earlier: Sequence[Any], seconds: float) -> Iterator[tuple[Any, ...]]:
        """Tune a shape; yield its events as they come.

        Args:
            task: the shape.
            earlier: final timings of earlier runs.
            seconds: time to the deadline; the clocks of two machines have different zeros.
        """
        emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        deadline = time.monotonic() + seconds

        def tune() -> None:
            try:
                self._tuner.tune(task, earlier, emitted.put, deadline)
                emitted.put(None)
            except Exception as error:
                emitted.put(error)

        threading.Thread(target=tune, daemon=True).start()
        last: Any = None
        while True:
            events: list[Any] = []
            last = emitted.get()
            while not (last is None or isinstance(last, Exception)):
                events.append(self._numbered(last))
                try:
                    last = emitted.get_nowait()
                except queue.Empty:
                    break
            if events:
                yield tuple(events)
            if last is None:
                return
            if isinstance(last, Exception):
                raise last

    def _numbered(self, event: Any) -> Any:
        return attrs.evolve(event, place=self._numbered_place(event.place)) if isinstance(event, Outcome) and event.place else event

    def _numbered_place(self, place: Any) -> Any:
        """Return the place by the node's number of the GPU, which has number 0 in the actor."""
        number = next((int(gpu) for gpu in self._gpus if gpu.isdecimal()), place.device.index)
        return attrs.evolve(place, device=attrs.evolve(place.device, index=number))


@attrs.define(eq=False)
class RayDeviceTuner:
    """The driver's proxy of the device tuner in an actor.

    Attributes:
        actor: handle of a `TunerActor` that has begun.
        ranks: libtype to its rank for ties.
        place: the actor's device and node.
        versions: library versions by libtype on that node.
    """

    actor: Any
    ranks: Mapping[str, int]
    place: Any
    versions: Mapping[str, str]
    _idle: threading.Event = attrs.field(factory=threading.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._idle.set()

    def stop(self) -> None:
        """Kill the actor, and wait for `tune`, which raises DeviceLost."""
        _kill(self.actor)
        self._idle.wait(timeout=10)

    def ahead(self, task: Any) -> None:
        """Compile the solutions of a later shape in the actor; do not wait."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # `tune` reports it
            self.actor.ahead.remote(task)

    def tune(self, task: Any, earlier: Sequence[Any], emit: Callable[[Any], None], deadline: float = float("inf")) -> None:
        """Tune one shape in the actor; see `DeviceTuner.tune`.

        Raises:
            DeviceLost: the actor, its node or its device stopped working.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        done = False
        self._idle.clear()
        try:
            for answer in self.actor.tune.options(num_returns="streaming").remote(task, tuple(earlier), deadline - time.monotonic()):
                for event in ray.get(answer):
                    done = done or isinstance(event, Outcome)
                    emit(event)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayError as error:
            _kill(self.actor)  # it may only be out of reach, and would go on
            if not done:
                raise DeviceLost(_one_line(error)) from None
        finally:
            self._idle.set()
        if not done:
            raise DeviceLost("it ended without an outcome")


@contextlib.contextmanager
def device_tuners(
    op: Op, options: Options, ranks: Mapping[str, int], registry: Registry | None, bench: Any
) -> Iterator[list[RayDeviceTuner]]:
    """Yield device tuners that have begun.

    Their actors end with the context, and so does a Ray that started with it.

    Args:
        op: the op to tune.
        options: how to tune.
        ranks: libtype to its rank for ties.
        registry: must be None; actors use the backends that are installed on their nodes.
        bench: the source of times; importable on the nodes.

    Raises:
        UserError: Ray is missing, the cluster cannot be reached or has no device, or none begins.
    """
    if registry is not None:
        raise UserError("--executor ray uses the backends installed on the nodes; a registry of this process cannot travel there")
    try:
        pickled = pickle.dumps(bench)
    except Exception as error:
        raise UserError(f"--executor ray: the bench must be importable on the nodes, and cannot be pickled: {error}") from error
    with connect(options.ray_address):
        actors = _create_actors(op, options, ranks, pickled)
        try:
            yield _begin(actors, ranks, options)
        finally:
            for actor in actors:
                _kill(actor)


def _create_actors(op: Op, options: Options, ranks: Mapping[str, int], bench: bytes) -> list[Any]:
    """Create an actor for each GPU of the cluster; without GPUs, or for --device cpu, one on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if options.device.strip().lower() not in ("", "cpu"):
        raise UserError(f"--device {options.device}: with --executor ray, Ray assigns the GPUs; leave it out, or pass cpu")
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    gpus = 0 if options.device else sum(int(resources.get("GPU", 0)) for resources in nodes.values())
    cpu_nodes = [node for node, resources in nodes.items() if resources.get("CPU", 0) >= 1]
    if options.mp > (gpus or len(cpu_nodes)):
        present = f"{gpus} GPUs" if gpus else f"{len(cpu_nodes)} nodes, whose CPU is one device each"
        _log.warning("--mp %d: the cluster has only %s; it is used", options.mp, present)
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    plugin_options = [option for backend in Registry().select(options.libtype) for option in backend.options]
    variables = {**({"PYTHONPATH": path} if path else {}), **{option.variable: option.value() for option in plugin_options}}
    shared = {"runtime_env": {"env_vars": variables}} if variables else {}
    if gpus:
        wanted = [{"num_gpus": 1, "num_cpus": 0, **shared}] * _free_gpus(gpus, min(options.mp or gpus, gpus))
    else:
        wanted = [
            {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), **shared}
            for node in cpu_nodes[: options.mp or None]
        ]
    if not wanted:
        raise UserError("the Ray cluster has neither a GPU nor a node with a CPU to tune on")
    jobs = {
        node: max(1, (options.jobs or int(resources.get("CPU", 1))) // max(1, int(resources.get("GPU", 0)) if gpus else 1))
        for node, resources in nodes.items()
    }
    driver = DriverSettings(_log.getEffectiveLevel(), os.environ.get(_THREADS, ""))
    actor = ray.remote(TunerActor)
    return [actor.options(**resources).remote(op.name, options, ranks, jobs, bench, driver) for resources in wanted]


def _free_gpus(gpus: int, wanted: int) -> int:
    """Return how many of the wanted GPUs are free of other jobs.

    Raises:
        UserError: none is.
    """
    import ray

    deadline = time.monotonic() + _FREE_S
    while (free := int(ray.available_resources().get("GPU", 0))) < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    if not free:
        raise UserError(f"other jobs hold all {gpus} GPUs of the Ray cluster; `ray status` shows them")
    if free < wanted:
        _log.warning("other jobs hold %d of the %d GPUs of the Ray cluster; the run uses the others", gpus - free, gpus)
    return min(free, wanted)


def _begin(actors: Sequence[Any], ranks: Mapping[str, int], options: Options) -> list[RayDeviceTuner]:
    """Return the device tuners of the actors that begin; log why others do not, and end them.

    Raises:
        UserError: none begins.
    """
    import ray

    answers = [actor.begin.remote() for actor in actors]
    ray.wait(answers, num_returns=len(answers), timeout=_START_S)
    here = _software(options)
    tuners, reasons = [], []
    for actor, answer in zip(actors, answers, strict=True):
        try:
            started = _answer(answer, here)
        except DeviceLost as error:
            _log.warning("a device of the Ray cluster is left out: %s", error)
            reasons.append(str(error))
            _kill(actor)
        else:
            tuners.append(RayDeviceTuner(actor, ranks, started.place, started.versions))
    if not tuners:
        raise UserError(f"no device of the Ray cluster can be used: {reasons[0]}")
    return tuners


def _answer(answer: Any, here: Mapping[str, str]) -> Started:
    """Return an actor's answer; log how its software differs from this process's.

    Raises:
        DeviceLost: the actor did not begin, or has another tunedgemm.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        started: Started = ray.get(answer, timeout=1.0)
    except GetTimeoutError:
        raise DeviceLost(f"it did not begin within {_START_S:g} s; `ray status` shows whether other jobs hold its node") from None
    except RayError as error:
        raise DeviceLost(_one_line(error)) from None
    there = started.software
    differing = [f"{name} {there.get(name, '(none)')}" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if differing:
        message = f"{started.place} has {', '.join(differing)}, other than here"
        if there["tunedgemm"] != here["tunedgemm"]:
            raise DeviceLost(message)
        _log.warning("%s", message)
    return started


def _software(options: Options) -> dict[str, str]:
    """Return the versions of installed packages that affect times."""
    backends = Registry().select(options.libtype)
    versions = {f"{backend.libtype} of {backend.distribution}": backend.version for backend in backends}
    return {"tunedgemm": __version__, "torch": importlib.metadata.version("torch"), **versions}


def _one_line(error: Exception) -> str:
    """Return the first and the last line of Ray's message without traces; the last has the cause."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip() and "ray::" not in line]
    return f"{type(cause).__name__}: {' … '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:400]}"


def _kill(actor: Any) -> None:
    """End an actor at once; its worker process then ends, too."""
    import ray

    with contextlib.suppress(Exception):  # the node or the cluster may be gone
        ray.kill(actor)
