"""Lane: one device, and the stages of one shape after the other on it, from candidates to the outcome.

The stages run on this side and see solutions only; what touches the device is asked of its session,
from afar.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.compilers import Compilers
from tunedgemm.tuner.measure import Effort, duel, median_and_noise, race, steady
from tunedgemm.tuner.remote import LaneLost, Remote
from tunedgemm.tuner.roofline import floor_us
from tunedgemm.tuner.screen import screen
from tunedgemm.tuner.select import DEFAULT_TIE, MAX_NOISE, TIE, select
from tunedgemm.tuner.trial import POWER_CAP, Event, Options, Outcome, Place, Samples, Step, Task, Trials, failed
from tunedgemm.tuner.worker import Died, Inline, Worker

Tell = Callable[[Event], None]

#: A difference that no duel turns round.
CLEAR = 0.15
#: Finalists that meet once more, alone: this many of the fastest, and each libtype's first guess, within this of the fastest.
FEW, NEAR = 3, 0.1


class Lane:
    """One device.

    Attributes:
        op: what is tuned.
        options: how.
        remote: the device's session.
        compilers: compile ahead, shared by the lanes of this machine.
        places: libtype to its place for ties; those that may be stored are its keys.
        versions: libtype to the version of its library.
    """

    def __init__(self, op: Op, options: Options, worker: Worker | Inline, compilers: Compilers, places: Mapping[str, int]) -> None:
        self.op, self.options, self.compilers, self.places = op, options, compilers, places
        self.remote = Remote(op, options, worker)
        self.versions: Mapping[str, str] = {}
        self._listed: dict[Shape, tuple[tuple[Solution, ...], Solution | None]] = {}

    @property
    def place(self) -> Place:
        """Where the device is; known once the lane has begun."""
        return self.remote.place

    def begin(self) -> None:
        """Start the worker and learn what its device is.

        Raises:
            LaneLost: there is no such device, or its worker dies.
        """
        self.remote.begin()
        try:
            self.versions = self.remote.ask("versions")
        except Died as error:
            raise LaneLost(f"its worker died when it was asked for library versions: {error}") from error

    def stop(self) -> None:
        """End the worker, whatever it does; `tune` raises LaneLost then."""
        self.remote.stop()

    def ahead(self, task: Task) -> None:
        """List a shape's solutions and have them compiled, while others are timed."""
        if not task.only:
            with contextlib.suppress(Died):  # tuning it will tell
                found, _ = self.listed(task.shape)
                self.compilers.begin(task.shape, found, self.place.device)

    def listed(self, shape: Shape) -> tuple[tuple[Solution, ...], Solution | None]:
        """The solutions of a shape, and torch's own call."""
        if shape not in self._listed:
            self._listed[shape] = self.remote.ask("list", shape)
        return self._listed[shape]

    def tune(self, task: Task, known: Sequence[Timing], tell: Tell, deadline: float = float("inf")) -> None:
        """All stages of one shape; the last thing told is its outcome.

        Args:
            known: timings that were final before: these solutions are not run again.
            deadline: `time.monotonic` after which nothing but the least is measured.

        Raises:
            LaneLost: the device stopped working.
        """
        _Run(self, task, tell, deadline).run(known)
        self._listed.pop(task.shape, None)


@attrs.define(eq=False)
class _Run:
    """One shape on its way through the stages."""

    lane: Lane
    task: Task
    tell: Tell
    deadline: float
    _timings: dict[Solution, Timing] = attrs.field(factory=dict, init=False)
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)
    _best: tuple[Solution, float] | None = attrs.field(default=None, init=False)
    _yardstick: Solution | None = attrs.field(default=None, init=False)
    _torch_us: float = attrs.field(default=0.0, init=False)
    _reason: str = attrs.field(default="", init=False)
    _wholly: set[Solution] = attrs.field(factory=set, init=False)
    _last: tuple[Solution, ...] = attrs.field(default=(), init=False)
    _guesses: frozenset[Solution] = attrs.field(default=frozenset(), init=False)

    def run(self, known: Sequence[Timing]) -> None:
        """List, compile, check, screen, check wholly, measure, check again, select."""
        self._timings.update({timing.solution: timing for timing in known})
        offered = self._offered()
        yardstick = self._yardstick
        right = self._checked(self._compiled(offered)) if self._opened(offered) else []
        finalists = self._finalists(right)
        winner, tied = self._selected(finalists)
        libver = self.lane.versions.get(winner.solution.libtype, "") if winner else ""
        seconds = tuple(self._seconds.items())
        yard = self._timings.get(yardstick) if yardstick else None
        place = self.lane.place
        self.tell(Outcome(self.task, winner, yard, tuple(self._timings.values()), tied, seconds, libver, place, self._reason))

    def _offered(self) -> list[Solution]:
        """What is to be tried: torch's own call first, then what the backends offer, and the row of the table.

        What refining once found need not be found again; unmeasured, it would give way to what is
        slower.
        """
        shape, incumbent = self.task.shape, self.task.incumbent
        self._step("list")
        try:
            found, self._yardstick = self.lane.listed(shape)
            if not found:
                self._reason = self.lane.remote.ask("refusals", shape)
        except Died as error:
            self._reason = f"listing its solutions ended the worker: {error}"
            return []
        if incumbent and incumbent.libtype in {solution.libtype for solution in found} & self.lane.places.keys():
            found = (*found, incumbent)
        found = self.task.only or found
        wanted = dict.fromkeys([*([self._yardstick] if self._yardstick else []), *found])
        return [solution for solution in wanted if solution not in self._timings]

    def _compiled(self, offered: Sequence[Solution]) -> list[Solution]:
        """What compiles."""
        self._step("compile")
        with self._clock("compile"):
            lost = self.lane.compilers.finish(self.task.shape, offered, self.lane.place.device)
            if self.lane.place.device.kind == "cpu":
                self.lane.compilers.drain()
        self._final(lost)
        return [solution for solution in offered if solution not in self._timings]

    def _opened(self, offered: Sequence[Solution]) -> bool:
        """Make the operands; where that fails, so does everything."""
        try:
            self.lane.remote.ask_twice("open", self.task.shape)
        except LaneLost:
            raise
        except Exception as error:  # too large for the device, most likely
            self._final([failed(self.task.shape, solution, error) for solution in offered])
            return False
        return True

    def _checked(self, fresh: Sequence[Solution], wholly: bool = False) -> list[Solution]:
        """Bind and verify each; what fails is final, what is right comes back.

        Most are dropped after a rough timing, for which one right call is enough; what goes on, or
        must be more than right, is checked *wholly*.
        """
        right = []
        wholly = wholly or bool(self.task.only) or self.lane.options.deterministic or self.lane.options.batch_invariant
        with self._clock("check"):
            for solution in fresh:
                self._step("check", solution)
                timing = self.lane.remote.verdict("check" if wholly else "check_first", self.task.shape, solution)
                if timing.status == "ok":
                    self._timings[solution] = timing
                    right.append(solution)
                else:
                    self._final([timing])
        self._wholly |= set(right if wholly else ())
        return right

    def _sample(self, solutions: Sequence[Solution], rounds: int) -> Mapping[Solution, Samples | Timing]:
        """Time solutions in interleaved rounds."""
        if not solutions:
            return {}
        with self._clock("time"):
            answers = self.lane.remote.sample(self.task.shape, solutions, rounds)
        for solution, answer in answers.items():
            if isinstance(answer, Samples):
                self._seconds["device"] = self._seconds.get("device", 0.0) + sum(answer.us) * answer.calls * 1e-6
                median, _ = median_and_noise(answer.us)
                self._torch_us = median if solution == self._yardstick else self._torch_us
                self._best = min(self._best or (solution, median), (solution, median), key=lambda pair: pair[1])
        self._step("time")
        return answers

    def _neighbours(self, leaders: Sequence[Solution]) -> list[Solution]:
        """What lies around the leaders, compiled and checked."""
        shape = self.task.shape
        try:
            near = self.lane.remote.ask("neighbours", shape, tuple(leaders))
        except Died:
            return []
        fresh = [solution for solution in near if solution not in self._timings]
        return self._checked(self._compiled(fresh))

    def _finalists(self, right: Sequence[Solution]) -> list[Solution]:
        """Screen, check wholly, race and check again; once more without those that failed late, for others were dropped because of them."""
        while True:
            finalists, slow = (list(right), []) if self.task.only else self._screened(right)
            racing = tuple(finalists)
            with contextlib.suppress(Died):
                self.lane.remote.ask("forget", self.task.shape, racing)
            self._checked([solution for solution in finalists if solution not in self._wholly], wholly=True)
            finalists = [solution for solution in finalists if solution in self._wholly]
            if len(finalists) == len(racing):
                self._raced(finalists)
                self._met_alone(finalists, right)
                self._checked_again(finalists)
            if self.task.only or len(finalists) == len(racing):
                self._final(slow)
                return finalists
            known = dict.fromkeys([*right, *racing, *(timing.solution for timing in slow)])
            right = [solution for solution in known if self._timings[solution].status == "ok"]

    def _screened(self, right: Sequence[Solution]) -> tuple[list[Solution], list[Timing]]:
        """Those that deserve the accurate phase, torch's own call always among them, and the timings of those that are too slow."""
        yardstick = self._yardstick
        self._step("screen")
        floor = floor_us(self.lane.op, self.task.shape, self.lane.place.device)
        screened = screen(self.task.shape, right, self._sample, self.lane.options.topk, self._neighbours, floor, self._beside)
        self._final(timing for timing in screened.dropped if timing.status != "screened")
        slow = [timing for timing in screened.dropped if timing.status == "screened" and timing.solution != yardstick]
        survivors = list(screened.survivors)
        if yardstick and yardstick in screened.rough and yardstick not in survivors:
            survivors.append(yardstick)
        return survivors, slow

    @property
    def _beside(self) -> Solution | None:
        """Torch's own call where it is timed and may not be stored."""
        yardstick = self._yardstick
        return yardstick if yardstick and yardstick.libtype not in self.lane.places else None

    def _raced(self, finalists: list[Solution]) -> None:
        """The accurate phase; what fails in it is no finalist any more."""
        options = self.lane.options
        self._step("time")
        effort = Effort(options.warmup, options.iters, options.seconds, self.deadline)
        for solution, answer in race(self.task.shape, finalists, self._sample, effort, self._yardstick, self._beside).items():
            self._retime(solution, answer)
        finalists[:] = [solution for solution in finalists if self._timings[solution].ok]

    def _met_alone(self, finalists: list[Solution], guesses: Sequence[Solution]) -> None:
        """Time the few that may be selected without the many: who dropped out of the race early did so beside all of them.

        Beside few the chip is cooler and faster, by 5 % and more under its power cap. The times of
        the others follow, so that all are of one moment.

        Args:
            guesses: in their backends' order, best guesses first.
        """
        self._last = ()
        may = sorted((s for s in finalists if s.libtype in self.lane.places), key=lambda solution: self._timings[solution].us)
        if self.task.only or len(may) < 2:
            return
        first = {solution.libtype: solution for solution in reversed(guesses)}
        limit = self._timings[may[0]].us * (1 + NEAR)
        few = [s for s in dict.fromkeys([*may[:FEW], *first.values()]) if s in may and self._timings[s].us <= limit]
        before = {solution: self._timings[solution].us for solution in few}
        for solution, answer in self._alone(few).items():
            self._retime(solution, answer)
        finalists[:] = [solution for solution in finalists if self._timings[solution].ok]
        shifts = [self._timings[solution].us / before[solution] for solution in few if self._timings[solution].ok]
        shift = statistics.median(shifts or [1.0])
        for solution in set(finalists) - set(few):
            timing = self._timings[solution]
            self._timings[solution] = attrs.evolve(timing, us=timing.us * shift)
        self._last, self._guesses = tuple(few), frozenset(first.values())

    def _alone(self, few: Sequence[Solution]) -> Mapping[Solution, Samples | Timing]:
        options = self.lane.options
        return duel(few, self._sample, Effort(options.warmup, options.iters, options.seconds, self.deadline))

    def _retime(self, solution: Solution, answer: Samples | Timing) -> None:
        if isinstance(answer, Timing):
            self._final([answer])
            return
        median, noise = median_and_noise(answer.us)
        clock, throttled = answer.clock_mhz, answer.throttled
        timing = self._timings[solution]
        self._timings[solution] = attrs.evolve(timing, us=median, noise=noise, samples=len(answer.us), clock_mhz=clock, throttled=throttled)

    def _checked_again(self, finalists: list[Solution]) -> None:
        """Once more after the timing, the fastest first, until what may be selected is known to be right still."""
        limit = float("inf")
        with self._clock("check"):
            for solution in sorted(finalists, key=lambda solution: self._timings[solution].us):
                us = self._timings[solution].us
                if us > limit and solution not in (self._yardstick, self.task.incumbent):  # these two may win a duel yet
                    continue
                after = self.lane.remote.verdict("check_again", self.task.shape, solution)
                if after.status != "ok":
                    self._final([after])
                    finalists.remove(solution)
                elif solution.libtype in self.lane.places:
                    limit = min(limit, us * (1 + MAX_NOISE))

    def _selected(self, finalists: Sequence[Solution]) -> tuple[Timing | None, int]:
        """The row and how many tied with it.

        The fastest of the race has to beat, in a duel, what serves the shape now: the row of the
        table, else torch's call.
        """
        places, yardstick = self.lane.places, self._yardstick
        last = [timing for solution, timing in self._timings.items() if solution in self._last and timing.ok]
        challenger, tied = select(last or tuple(self._timings.values()), None, places, tuple(places), guesses=self._guesses)
        if challenger is None:
            return None, 0
        chosen = challenger.solution
        if self.task.incumbent in finalists and self.task.incumbent is not None:
            chosen = self._duelled(chosen, self.task.incumbent, TIE)
        if yardstick in finalists and yardstick is not None:
            keep = DEFAULT_TIE if self.task.incumbent is None else TIE
            faster = self._duelled(chosen, yardstick, keep)
            chosen = faster if faster.libtype in places else chosen
        if not self._timings[chosen].ok:  # it failed in its last rounds; what is left has raced already, and not all was checked again
            left = [solution for solution in finalists if self._timings[solution].ok]
            self._checked_again(left)
            return select(tuple(self._timings.values()), self.task.incumbent, places, tuple(places))
        return self._timings[chosen], tied

    def _duelled(self, challenger: Solution, holder: Solution, keep: float) -> Solution:
        """The challenger, unless it is slower than the holder or faster by no more than *keep*, the two timed alone.

        Beside many others the chip runs hotter than beside one, and ratios within rounds tell more
        than medians apart. At the power cap the challenger may not be slower where each runs by
        itself: what only spends more is no faster in a model that keeps the chip busy, and what is
        faster in rounds and no slower so is faster wherever the chip has a moment's rest.
        """
        first, second = self._timings[challenger], self._timings[holder]
        if challenger == holder or second.us > first.us * (1 + CLEAR):
            return challenger
        if first.us > second.us * (1 + CLEAR):
            return holder
        answers = self._alone((challenger, holder))
        winner = challenger if self._gain(challenger, holder, answers) > 1 + keep else holder
        samples = {
            solution: answer for solution, answer in answers.items() if isinstance(answer, Samples) and POWER_CAP in answer.throttled
        }
        if winner == holder or len(samples) < len(answers) or time.monotonic() >= self.deadline:
            return winner
        return challenger if self._gain(challenger, holder, steady(samples, self._sample)) >= 1 else holder

    def _gain(self, challenger: Solution, holder: Solution, answers: Mapping[Solution, Samples | Timing]) -> float:
        """How many times as fast the challenger is by the samples of both, which are their times from here on; 1 where noise hides it."""
        for solution, answer in answers.items():
            self._retime(solution, answer)
        mine, theirs = answers[challenger], answers[holder]
        if isinstance(mine, Timing) or isinstance(theirs, Timing):
            return 0.0 if isinstance(theirs, Samples) else math.inf
        ratio, noise = median_and_noise([slow / fast for slow, fast in zip(theirs.us, mine.us, strict=True)])
        return min(ratio, 1.0) if ratio * (1 - noise) <= 1 else ratio

    def _final(self, timings: Iterable[Timing]) -> None:
        """Note timings that will not change, and tell them at once."""
        timings = tuple(timings)
        self._timings.update({timing.solution: timing for timing in timings})
        if timings:
            self.tell(Trials(self.task, timings))

    def _step(self, activity: str, solution: Solution | None = None) -> None:
        self.tell(Step(self.task, activity, solution, self._best, self._torch_us))

    @contextlib.contextmanager
    def _clock(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[activity] = self._seconds.get(activity, 0.0) + time.perf_counter() - start
