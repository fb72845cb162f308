"""The loop over device tuners.

A free device does each task once, and a lost one costs time only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_registry
from tunedgemm.timing import Timing
from tunedgemm.tuner.device_tuner import DeviceTuner
from tunedgemm.tuner.executors import WorkerGroup, work
from tunedgemm.tuner.executors.local import device_tuners, devices
from tunedgemm.tuner.trial import Event, Options, Outcome, Place, Task, Trials
from tunedgemm.tuner.worker_client import DeviceLost

TASKS = [Task(Shape("a16w16", m, 64, 64)) for m in range(1, 25)]
FAILED = Solution("turbo", "broken")


@attrs.define(eq=False)
class Hand:
    """A device tuner that takes some time for each shape, and may be lost in the middle of one.

    Each shape waits for *may_go_on*, which makes the order of two devices' steps certain.
    """

    name: str
    seconds: float = 0.002
    may_go_on: Callable[[], object] = lambda: True
    gone: bool = False
    lost_after: int = 10**9
    raises: bool = False
    exits: bool = False
    lost_ahead: int = 10**9
    place: Place = attrs.field(factory=lambda: Place(Device("sm_90", 132)))
    ranks: Mapping[str, int] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    done: list[int] = attrs.field(factory=list)
    listed: list[int] = attrs.field(factory=list)
    known: dict[int, int] = attrs.field(factory=dict)
    stopped: threading.Event = attrs.field(factory=threading.Event)

    def stop(self) -> None:
        self.stopped.set()

    def ahead(self, task: Task) -> None:
        self.listed.append(task.shape.m)
        if len(self.done) >= self.lost_ahead:
            self.gone = True
            raise DeviceLost("the device is gone")

    def tune(self, task: Task, known: Sequence[Timing], emit: Callable[[Event], None], deadline: float = 0.0) -> None:
        self.known[task.shape.m] = len(known)
        if self.raises:
            raise ZeroDivisionError("ours")
        if self.exits:
            raise SystemExit("whoever asked for it")
        emit(Trials(task, (Timing(task.shape, FAILED, "failed"),)))
        limit = time.monotonic() + 60
        while not self.may_go_on() and time.monotonic() < limit:
            time.sleep(0.001)
        if len(self.done) >= self.lost_after or self.stopped.wait(self.seconds):
            raise DeviceLost("the node is gone")
        self.done.append(task.shape.m)
        emit(Outcome(task, None, None, place=self.place))


def outcomes(*groups: WorkerGroup) -> Counter[int]:
    return Counter(event.task.shape.m for _, event in work(groups) if isinstance(event, Outcome))


def test_every_task_is_done_once_and_the_faster_device_does_more() -> None:
    """Each shape is tuned once, and the faster device takes over what the slow one has claimed."""
    fast = Hand("fast")
    slow = Hand("slow", may_go_on=lambda: len(fast.done) >= 20)
    group = WorkerGroup([fast, slow], deque(TASKS))

    assert outcomes(group) == Counter({task.shape.m: 1 for task in TASKS})
    assert len(fast.done) >= 20
    assert group.left() == []


def test_tasks_are_compiled_ahead_up_to_the_limit() -> None:
    """Compilers get work for later shapes; --batch bounds how far ahead."""
    tuner = Hand("one")
    seen: list[int] = []
    group = WorkerGroup([tuner], deque(TASKS), ahead=3)
    for _, event in work([group]):
        if isinstance(event, Trials):
            seen.append(len(tuner.listed) - len(tuner.done))

    assert seen[0] == 3
    assert max(seen) <= 4  # the device may be a step beyond its last event
    assert sorted(tuner.listed) == [task.shape.m for task in TASKS]


def test_a_lost_device_hands_its_work_on() -> None:
    """An idle device takes over the lost one's shape, with its final timings."""
    steady, frail = Hand("steady"), Hand("frail", lost_after=0)
    steady.may_go_on = lambda: frail.known
    frail.may_go_on = lambda: len(steady.done) == 5
    group = WorkerGroup([steady, frail], deque(TASKS[:6]))

    assert outcomes(group) == Counter({task.shape.m: 1 for task in TASKS[:6]})
    [taken_over] = frail.known
    assert steady.done[-1] == taken_over
    assert steady.known[taken_over] == 1, "its failed solution is known and does not run again"


def test_a_device_lost_between_shapes_returns_only_unfinished_tasks() -> None:
    """If its worker cannot be replaced while it claims ahead, its finished shape stays finished."""
    frail = Hand("frail", lost_ahead=1)
    steady = Hand("steady", may_go_on=lambda: frail.gone)
    group = WorkerGroup([frail, steady], deque(TASKS), ahead=2)

    assert outcomes(group) == Counter({task.shape.m: 1 for task in TASKS})
    assert len(frail.done) == 1
    assert group._running == 0


def test_a_device_that_is_asked_to_exit_ends_the_run() -> None:
    """A SystemExit may not end a device's thread in silence.

    The run would wait for it for ever.
    """
    with pytest.raises(RuntimeError, match="SystemExit: whoever asked for it"):
        outcomes(WorkerGroup([Hand("odd", exits=True)], deque(TASKS)))


def test_without_devices_tasks_are_left() -> None:
    """When the last device is lost, the loop ends with the remaining tasks."""
    group = WorkerGroup([Hand("a", lost_after=2), Hand("b", lost_after=1)], deque(TASKS[:8]))

    done = outcomes(group)

    assert sum(done.values()) == 3
    assert sorted([*done, *(task.shape.m for task in group.left())]) == list(range(1, 9))


def test_no_task_begins_after_the_deadline() -> None:
    """A budget ends the run between two shapes."""
    group = WorkerGroup([Hand("one", seconds=0.1)], deque(TASKS), deadline=time.monotonic() + 1.0)

    done = outcomes(group)

    assert 0 < sum(done.values()) < len(TASKS)
    assert len(group.left()) == len(TASKS) - sum(done.values())


def test_kinds_of_devices_do_not_mix() -> None:
    """Each kind has its own tasks: a shape is done once on each."""
    one, other = Hand("h100"), Hand("mi300", place=Place(Device("gfx942", 304)))

    assert outcomes(WorkerGroup([one], deque(TASKS[:5])), WorkerGroup([other], deque(TASKS[:5]))) == Counter(dict.fromkeys(range(1, 6), 2))
    assert (len(one.done), len(other.done)) == (5, 5)


def test_a_bug_in_the_tuner_ends_the_run() -> None:
    """A bug of the tuner is raised, and stops the other devices."""
    steady = Hand("steady", seconds=30.0)

    with pytest.raises(ZeroDivisionError, match="ours"):
        outcomes(WorkerGroup([steady, Hand("odd", raises=True)], deque(TASKS)))
    assert steady.stopped.is_set()


def test_leaving_the_loop_stops_the_devices() -> None:
    """Ctrl-C ends the loop from outside: whatever runs is ended."""
    tuner = Hand("one", seconds=30.0)
    events = work([WorkerGroup([tuner], deque(TASKS))])
    next(events)
    events.close()

    assert tuner.stopped.is_set()


@pytest.mark.parametrize(("count", "options", "wanted"), [
    (0, Options(), [-1]), (0, Options(mp=1), [-1]), (4, Options(), [0, 1, 2, 3]), (4, Options(mp=2), [0, 1]),
    (4, Options(device="3,1"), [3, 1]), (4, Options(device="cpu"), [-1]), (4, Options(device="0,2", mp=1), [0]),
])  # fmt: skip
def test_devices_are_all_of_the_machine_or_the_requested_ones(
    count: int, options: Options, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All GPUs by default, the CPU where there is none."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert devices(options) == wanted


@pytest.mark.parametrize(("count", "options", "visible", "said"), [
    (2, Options(device="2"), "", "has GPUs 0 to 1"), (0, Options(device="0"), "", "has no GPU"),
    (2, Options(device="0,x"), "", "--device x"), (2, Options(device="²"), "", "--device ²"),
    (2, Options(device="9" * 5000), "", "has GPUs 0 to 1"), (0, Options(), "7", "no GPU is visible with CUDA_VISIBLE_DEVICES='7'"),
])  # fmt: skip
def test_missing_devices_are_a_user_error(count: int, options: Options, visible: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists the present devices before anything starts."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with pytest.raises(UserError, match=said):
        devices(options)


@pytest.mark.parametrize(("count", "wanted", "said"), [(2, [0, 1], "only 2 GPUs"), (0, [-1], "the CPU, which is one device")])
def test_more_devices_than_there_are(
    count: int, wanted: list[int], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """--mp above the machine is a warning, and all of its devices are used, as in AITER."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert devices(Options(mp=8)) == wanted
    assert "--mp 8: this machine has" in caplog.text and said in caplog.text


def test_a_device_that_does_not_begin_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One GPU of two cannot be used.

    The other does the work, and where none is left it is the user's to mend.
    """
    gone = {0}

    def begin(self: DeviceTuner) -> None:
        if self.client.worker._make_session.args[1] in gone:
            raise DeviceLost("out of memory")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(DeviceTuner, "begin", begin)
    with device_tuners(op_named("a16w16"), Options(), {}, None, None) as found:
        assert [tuner.client.worker._make_session.args[1] for tuner in found] == [1]
    assert "left out: GPU 0: out of memory" in caplog.text

    gone.add(1)
    with (
        pytest.raises(UserError, match="no device to tune on works: GPU 0: out of memory; GPU 1"),
        device_tuners(op_named("a16w16"), Options(), {}, None, None),
    ):
        pass


def test_in_this_process_there_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process captures one graph at a time, so threads of it cannot tune on several GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(DeviceTuner, "begin", lambda self: None)

    with device_tuners(op_named("a16w16"), Options(), {}, fake_registry(), None) as found:
        assert len(found) == 1
