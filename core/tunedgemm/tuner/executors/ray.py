"""Lanes over a Ray cluster: an actor for each of its GPUs, or one on each node where it has none.

An actor holds the same lane as this machine's devices have, with a worker process and compilers of
its own; what that lane tells streams to the driver. An actor that is lost, with its node or alone,
is a lost lane: another does its shape.
"""

from __future__ import annotations

import contextlib
import functools
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
from tunedgemm.backends.registry import Registry
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.timing import Timing
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.executors.cluster import joined
from tunedgemm.tuner.lane import Lane
from tunedgemm.tuner.remote import LaneLost
from tunedgemm.tuner.session import Session
from tunedgemm.tuner.trial import Bench, Event, Options, Outcome, Place, Task
from tunedgemm.tuner.worker import Worker

_log = logging.getLogger("tunedgemm")

#: Seconds until an actor must have begun: it waits for its share of the node, imports torch twice and makes a device context.
_START_S = 180.0
#: Seconds that resources of a run that has just ended may still count as taken.
_FREE_S = 5.0
_THREADS = "OMP_NUM_THREADS"


@attrs.frozen
class Driver:
    """What actors take over from the driver: the level of its log, and the threads that its torch was told to take."""

    level: int
    threads: str


@attrs.frozen
class Begun:
    """What an actor says when its lane has begun.

    Attributes:
        place: device, with the number that its node gives it, and Ray's id of the node.
        versions: library versions by libtype.
        software: versions of what is installed there.
    """

    place: Place
    versions: Mapping[str, str]
    software: Mapping[str, str]


class Seat:
    """The actor: a `Lane` where the device is.

    Args:
        op: name of the op.
        options: how to tune.
        places: libtype to its place for ties.
        jobs: node id to the compiling processes of each of its lanes.
        bench: pickled; where times come from.
        driver: how the driver logs, and how many threads its torch was told to take.
    """

    def __init__(self, op: str, options: Options, places: Mapping[str, int], jobs: Mapping[str, int], bench: bytes, driver: Driver) -> None:
        import ray

        context = ray.get_runtime_context()
        self._node = str(context.get_node_id())
        self._gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        os.environ.pop(_THREADS, None)  # Ray sets it to the actor's CPUs; torch takes all cores where nobody says otherwise
        if driver.threads:
            os.environ[_THREADS] = driver.threads
        logging.getLogger("tunedgemm").setLevel(driver.level)
        index = 0 if self._gpus else -1  # Ray shows the actor its GPU alone
        make = functools.partial(Session, op, index, options, bench=pickle.loads(bench), node=self._node)
        compilers = Compilers(jobs.get(self._node, 1), options.timeout)
        self._lane = Lane(op_named(op), options, Worker(make), compilers, places)

    def begin(self) -> Begun:
        """Start the lane's worker and its compilers."""
        self._lane.compilers.start(self._lane.places)
        self._lane.begin()
        return Begun(self._place(self._lane.place), self._lane.versions, _software(self._lane.options))

    def ahead(self, task: Task) -> None:
        """Have a shape compiled."""
        self._lane.ahead(task)

    def tune(self, task: Task, known: Sequence[Timing], seconds: float) -> Iterator[tuple[Event, ...]]:
        """What the lane tells while it tunes a shape, as it comes.

        Args:
            task: the shape.
            known: timings that are final.
            seconds: until the deadline; clocks of two machines have different zeros.
        """
        told: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()
        deadline = time.monotonic() + seconds

        def tune() -> None:
            try:
                self._lane.tune(task, known, told.put, deadline)
                told.put(None)
            except Exception as error:
                told.put(error)

        threading.Thread(target=tune, daemon=True).start()
        last: Event | Exception | None = None
        while True:
            events: list[Event] = []
            last = told.get()
            while not (last is None or isinstance(last, Exception)):
                events.append(self._numbered(last))
                try:
                    last = told.get_nowait()
                except queue.Empty:
                    break
            if events:
                yield tuple(events)
            if last is None:
                return
            if isinstance(last, Exception):
                raise last

    def _numbered(self, event: Event) -> Event:
        return attrs.evolve(event, place=self._place(event.place)) if isinstance(event, Outcome) and event.place else event

    def _place(self, place: Place) -> Place:
        """The place by the node's own number of the GPU: here each is the only one and has number 0."""
        number = next((int(gpu) for gpu in self._gpus if gpu.isdigit()), place.device.index)
        return attrs.evolve(place, device=attrs.evolve(place.device, index=number))


@attrs.define(eq=False)
class RayLane:
    """What stands here for the lane in an actor.

    Attributes:
        actor: handle of a `Seat`.
        places: libtype to its place for ties.
        place: where the actor is.
        versions: library versions by libtype, there.
    """

    actor: Any
    places: Mapping[str, int]
    place: Place
    versions: Mapping[str, str]
    _idle: threading.Event = attrs.field(factory=threading.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._idle.set()

    def begin(self) -> None:
        """It has begun: an actor that did not is no lane."""

    def stop(self) -> None:
        """Kill the actor, whatever it does; `tune` raises LaneLost then, and is waited for."""
        _kill(self.actor)
        self._idle.wait(timeout=10)

    def ahead(self, task: Task) -> None:
        """Have a shape compiled there, without waiting."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # tuning it will tell
            self.actor.ahead.remote(task)

    def tune(self, task: Task, known: Sequence[Timing], tell: Callable[[Event], None], deadline: float = float("inf")) -> None:
        """All stages of one shape, there; see `Lane.tune`.

        Raises:
            LaneLost: the actor, its node or its device does not work any more.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        over = False
        self._idle.clear()
        try:
            for answer in self.actor.tune.options(num_returns="streaming").remote(task, tuple(known), deadline - time.monotonic()):
                for event in ray.get(answer):
                    over = over or isinstance(event, Outcome)
                    tell(event)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            _kill(self.actor)  # it may only be out of reach, and would go on
            if not over:
                raise LaneLost(_words(error)) from None
        finally:
            self._idle.set()
        if not over:
            raise LaneLost("it ended without an outcome")


@contextlib.contextmanager
def lanes(op: Op, options: Options, places: Mapping[str, int], registry: Registry | None, bench: Bench | None) -> Iterator[list[RayLane]]:
    """Lanes that have begun; their actors, and Ray where it was not running before, end with the context.

    Args:
        registry: must be None: what runs elsewhere uses the backends that are installed there.
        bench: where times come from; importable on the nodes.

    Raises:
        UserError: Ray is missing, the cluster cannot be reached or has nothing to tune on, or no
            lane begins.
    """
    if registry is not None:
        raise UserError("--executor ray uses the backends installed on the nodes; a registry of this process cannot travel there")
    try:
        pickled = pickle.dumps(bench)
    except Exception as error:
        raise UserError(f"--executor ray: the bench must be importable on the nodes, and cannot be pickled: {error}") from error
    with joined(options.ray_address):
        seats = _seats(op, options, places, pickled)
        try:
            yield _begun(seats, places, options)
        finally:
            for seat in seats:
                _kill(seat)


def _seats(op: Op, options: Options, places: Mapping[str, int], bench: bytes) -> list[Any]:
    """An actor for each GPU, wherever Ray finds it; without GPUs, or for --device cpu, one on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if options.device.strip().lower() not in ("", "cpu"):
        raise UserError(f"--device {options.device}: with --executor ray, Ray assigns the GPUs; leave it out, or say cpu")
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    gpus = 0 if options.device else sum(int(resources.get("GPU", 0)) for resources in nodes.values())
    cpus = [node for node, resources in nodes.items() if resources.get("CPU", 0) >= 1]
    if options.mp > (gpus or len(cpus)):
        there = f"{gpus} GPUs" if gpus else f"{len(cpus)} nodes, whose CPU is one device each"
        raise UserError(f"--mp {options.mp}: the cluster has only {there}")
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    stated = [option for backend in Registry().select(options.libtype) for option in backend.options]
    variables = {**({"PYTHONPATH": path} if path else {}), **{option.variable: option.value() for option in stated}}
    shared = {"runtime_env": {"env_vars": variables}} if variables else {}
    if gpus:
        wanted = [{"num_gpus": 1, "num_cpus": 0, **shared}] * _free(gpus, options.mp or gpus)
    else:
        wanted = [
            {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), **shared}
            for node in cpus[: options.mp or None]
        ]
    if not wanted:
        raise UserError("the Ray cluster has neither a GPU nor a node with a CPU to tune on")
    jobs = {
        node: max(1, (options.jobs or int(resources.get("CPU", 1))) // max(1, int(resources.get("GPU", 0)) if gpus else 1))
        for node, resources in nodes.items()
    }
    driver = Driver(_log.getEffectiveLevel(), os.environ.get(_THREADS, ""))
    actor = ray.remote(Seat)
    return [actor.options(**what).remote(op.name, options, places, jobs, bench, driver) for what in wanted]


def _free(gpus: int, wanted: int) -> int:
    """How many of the wanted GPUs no other job holds.

    Raises:
        UserError: none.
    """
    import ray

    deadline = time.monotonic() + _FREE_S
    while (free := int(ray.available_resources().get("GPU", 0))) < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    if not free:
        raise UserError(f"other jobs hold all {gpus} GPUs of the Ray cluster; `ray status` shows them")
    if free < wanted:
        _log.warning("other jobs hold %d of the %d GPUs of the Ray cluster; the run does without them", gpus - free, gpus)
    return min(free, wanted)


def _begun(seats: Sequence[Any], places: Mapping[str, int], options: Options) -> list[RayLane]:
    """The lanes of the actors that begin; of the others it is told why not, and they end.

    Raises:
        UserError: none begins.
    """
    import ray

    answers = [seat.begin.remote() for seat in seats]
    ray.wait(answers, num_returns=len(answers), timeout=_START_S)
    here = _software(options)
    found, reasons = [], []
    for seat, answer in zip(seats, answers, strict=True):
        try:
            begun = _answer(answer, here)
        except LaneLost as error:
            _log.warning("a lane of the Ray cluster is left out: %s", error)
            reasons.append(str(error))
            _kill(seat)
        else:
            found.append(RayLane(seat, places, begun.place, begun.versions))
    if not found:
        raise UserError(f"no lane of the Ray cluster can be used: {reasons[0]}")
    return found


def _answer(answer: Any, here: Mapping[str, str]) -> Begun:
    """What an actor says, which has the same tunedgemm as this process; other differences are told.

    Raises:
        LaneLost: it did not begin.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        begun: Begun = ray.get(answer, timeout=1.0)
    except GetTimeoutError:
        raise LaneLost(f"it did not begin within {_START_S:g} s; `ray status` shows whether other jobs hold its node") from None
    except RayError as error:
        raise LaneLost(_words(error)) from None
    there = begun.software
    differing = [f"{name} {there.get(name, 'not at all')}" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if differing:
        told = f"{begun.place} has {', '.join(differing)}, other than here"
        if there["tunedgemm"] != here["tunedgemm"]:
            raise LaneLost(told)
        _log.warning("%s", told)
    return begun


def _software(options: Options) -> dict[str, str]:
    """Versions of what decides about times, as far as this process has it."""
    backends = Registry().select(options.libtype)
    versions = {f"{backend.libtype} of {backend.distribution}": backend.version for backend in backends}
    return {"tunedgemm": __version__, "torch": importlib.metadata.version("torch"), **versions}


def _cause(error: Any) -> Exception:
    """What was raised in the actor, of a RayTaskError."""
    return error.cause if isinstance(error.cause, Exception) else error


def _words(error: Exception) -> str:
    """One line of what Ray says in many: the first, unless it is an exception's trace, and the last, which has the cause."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip() and "ray::" not in line]
    return f"{type(cause).__name__}: {' … '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:400]}"


def _kill(actor: Any) -> None:
    """End an actor at once; its worker process sees that and ends, too."""
    import ray

    with contextlib.suppress(Exception):  # the node or the cluster may be gone
        ray.kill(actor)
