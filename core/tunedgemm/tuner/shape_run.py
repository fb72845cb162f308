"""Shape run: the stages of one shape on one device, from candidates to the outcome.

The stages run in the tuning process; the worker runs the kernels.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.measure import TURNS, Effort, median_and_noise, paired_comparison, race, steady
from tunedgemm.tuner.open_device import OpenDevice
from tunedgemm.tuner.roofline import floor_us
from tunedgemm.tuner.screen import screen
from tunedgemm.tuner.search import FULL, QUICK_ROUNDS, Further
from tunedgemm.tuner.select import DEFAULT_TIE, MAX_NOISE, TIE, select
from tunedgemm.tuner.trial import POWER_CAP, Event, Outcome, Samples, Step, Task, Trials, failed
from tunedgemm.tuner.worker import WorkerDied
from tunedgemm.tuner.worker_client import BudgetSpent, DeviceLost

Emit = Callable[[Event], None]

#: Relative difference that no paired comparison reverses.
CLEAR = 0.15
#: Finalists of the last comparison: this many of the fastest, and each libtype's first guess within
#: this relative distance of the fastest.
LAST_FINALISTS, NEAR = 3, 0.1
#: Fractions of the time to the deadline. After CHECKING no solution is compiled or checked, after
#: REFINING none is refined. After RACING only the fastest, baseline and incumbent are timed.
CHECKING, REFINING, RACING = 0.5, 0.7, 0.8


@attrs.define(eq=False)
class ShapeRun:
    """One shape on its way through the stages.

    Attributes:
        _timings: the latest timing of each solution.
        _fully_checked: solutions that passed the full check.
        _rest, _quick: further solutions of a quick search, and its libtypes.
        _last, _guesses: solutions of the last comparison, and each libtype's first guess.
    """

    tuner: OpenDevice
    task: Task
    emit: Emit
    deadline: float
    _begun: float = attrs.field(factory=time.monotonic, init=False)
    _timings: dict[Solution, Timing] = attrs.field(factory=dict, init=False)
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)
    _best: tuple[Solution, float] | None = attrs.field(default=None, init=False)
    _baseline: Solution | None = attrs.field(default=None, init=False)
    _baseline_us: float = attrs.field(default=0.0, init=False)
    _reason: str = attrs.field(default="", init=False)
    _refusals: tuple[tuple[str, str], ...] = attrs.field(default=(), init=False)
    _rest: tuple[Solution, ...] = attrs.field(default=(), init=False)
    _quick: frozenset[str] = attrs.field(default=frozenset(), init=False)
    _fully_checked: set[Solution] = attrs.field(factory=set, init=False)
    _last: tuple[Solution, ...] = attrs.field(default=(), init=False)
    _guesses: frozenset[Solution] = attrs.field(default=frozenset(), init=False)

    def run(self, earlier: Sequence[Timing]) -> None:
        """List, compile, check, screen, check fully, measure, check again, select.

        Raises:
            BudgetSpent: candidates are left untried, and it is not the first shape of the run.
        """
        self._timings.update({timing.solution: timing for timing in earlier})
        candidates = self._list()
        right = self._try(candidates) if self._open(candidates) else []
        self._leave_if_late(candidates)
        winner, tied = self._winner(right)
        libver = self.tuner.versions.get(winner.solution.libtype, "") if winner else ""
        seconds = tuple(self._seconds.items())
        baseline = self._timings.get(self._baseline) if self._baseline else None
        timings = tuple(self._timings.values())
        self.emit(Outcome(self.task, winner, baseline, timings, tied, seconds, libver, self.tuner.place, self._reason, self._refusals))

    def _leave_if_late(self, wanted: Iterable[Solution]) -> None:
        """Raise BudgetSpent if wanted solutions are untried, and it is not the first shape."""
        if self.tuner.finished and self._is_late(CHECKING) and any(solution not in self._timings for solution in wanted):
            raise BudgetSpent("the budget leaves no time for all candidates")

    def _list(self) -> list[Solution]:
        """Return the candidates to try first: the baseline, the backends' solutions, and what serves now.

        Refining may not find the latter again, which then would lose unmeasured.
        """
        shape, holder = self.task.shape, self.task.holder
        self._emit_step("list")
        try:
            with self._clock("list"):
                listing = self.tuner.listed(shape)
        except WorkerDied as error:
            self._reason = f"its baseline ended the worker: {error}"
            return []
        offered, self._baseline = listing.solutions, listing.baseline
        self._rest, self._quick = listing.rest, listing.quick
        self._reason, self._refusals = "" if offered else listing.reasons, listing.refusals
        if holder and holder.libtype in {solution.libtype for solution in offered} & self.tuner.ranks.keys():
            offered = (*offered, holder)
        candidates = dict.fromkeys([*([self._baseline] if self._baseline else []), *(self.task.only or offered)])
        return [solution for solution in candidates if solution not in self._timings]

    def _compile(self, candidates: Sequence[Solution]) -> list[Solution]:
        self._emit_step("compile")
        compilers, shape, device = self.tuner.compilers, self.task.shape, self.tuner.place.device
        with self._clock("compile"):
            if self.deadline < math.inf:
                candidates = compilers.ready(shape, candidates, device, self._moment(CHECKING))
            lost = compilers.finish(shape, candidates, device)
            if device.kind == "cpu":
                compilers.drain(self._moment(CHECKING))
        self._finalize(lost)
        return [solution for solution in candidates if solution not in self._timings]

    def _try(self, candidates: Sequence[Solution]) -> list[Solution]:
        """Compile and check solutions as they get ready; return those that pass, with timings, in order."""
        if self.deadline < math.inf:  # it limits the wait for all of them
            return self._check(self._compile(candidates))
        left, right = list(candidates), set[Solution]()
        self.tuner.compilers.begin(self.task.shape, left, self.tuner.place.device, first=True)
        while left:
            batch = self.tuner.compilers.compiled(self.task.shape, left, self.tuner.place.device) or left[:1]
            right.update(self._check(self._compile(batch)))
            left = [solution for solution in left if solution not in batch]
        self._timings.update({solution: self._timings.pop(solution) for solution in candidates if solution in self._timings})
        return [solution for solution in candidates if solution in right]

    def _open(self, candidates: Sequence[Solution]) -> bool:
        """Make the operands; a failure fails all candidates."""
        try:
            with self._clock("open"):
                self.tuner.client.open(self.task.shape)
        except DeviceLost:
            raise
        except Exception as error:  # too large for the device, most likely
            self._finalize([failed(self.task.shape, solution, error) for solution in candidates])
            return False
        return True

    def _check(self, solutions: Sequence[Solution], fully: bool = False) -> list[Solution]:
        """Bind and verify solutions; return those that pass.

        One correct call suffices before the screen. Finalists, and all with bitwise requirements,
        are checked *fully*.
        """
        right: list[Solution] = []
        fully = fully or bool(self.task.only) or self.tuner.options.deterministic
        check = "check" if fully else "check_first"
        with self._clock("check"):
            self._emit_step("check", solutions[0] if solutions else None)
            until = math.inf if fully else self._moment(CHECKING)
            for timing in self.tuner.client.check_all(check, self.task.shape, solutions, until):
                self._emit_step("check", timing.solution)
                if timing.status == "ok":
                    self._timings[timing.solution] = timing
                    right.append(timing.solution)
                else:
                    self._finalize([timing])
        self._fully_checked |= set(right if fully else ())
        return right

    def _sample(self, solutions: Sequence[Solution], rounds: int) -> Mapping[Solution, Samples | Timing]:
        if not solutions:
            return {}
        with self._clock("time"):
            answers = self.tuner.client.sample(self.task.shape, solutions, rounds)
        for solution, answer in answers.items():
            if isinstance(answer, Samples):
                self._seconds["device"] = self._seconds.get("device", 0.0) + sum(answer.us) * answer.calls * 1e-6
                median, _ = median_and_noise(answer.us)
                self._baseline_us = median if solution == self._baseline else self._baseline_us
                self._best = min(self._best or (solution, median), (solution, median), key=lambda pair: pair[1])
        self._emit_step("time")
        return answers

    def _neighbours(self, leaders: Sequence[Solution]) -> list[Solution]:
        if self._is_late(REFINING) or 0 < self.tuner.options.candidates < FULL.leaders:
            return []
        with self._clock("list"):
            near = self.tuner.neighbours(self.task.shape, leaders, self._timings)
        return self._try(near)

    def _continue(self, libtypes: Collection[str], leaders: Sequence[Solution]) -> list[Solution]:
        """Compile and check the rest of these libtypes' lists, while the leaders' neighbours compile."""
        rest = [solution for solution in self._rest if solution.libtype in libtypes and solution not in self._timings]
        right: list[Solution] = []
        if rest and not self._is_late(CHECKING):
            near = self.tuner.neighbours(self.task.shape, leaders, self._timings)
            self.tuner.compilers.begin(self.task.shape, [*rest, *near], self.tuner.place.device, first=True)
            right = self._try(rest)
        self._leave_if_late(rest)
        return right

    def _winner(self, right: Sequence[Solution]) -> tuple[Timing | None, int]:
        """Screen, check fully, race, check again, select; return the winner and its ties.

        A late failure repeats this without the failed solution, which may have displaced others.
        """
        while True:
            finalists, slow = (list(right), []) if self.task.only else self._screen(right)
            racing = tuple(finalists)
            with contextlib.suppress(WorkerDied):
                self.tuner.client.ask("forget", self.task.shape, racing)
            self._check([solution for solution in finalists if solution not in self._fully_checked], fully=True)
            finalists = [solution for solution in finalists if solution in self._fully_checked]
            if len(finalists) == len(racing):
                self._race(finalists)
                self._compare_last(finalists, right)
                self._check_again(finalists)
            if self.task.only or len(finalists) == len(racing):
                winner, tied = self._select(finalists)
                if self._is_right_in_use(winner):
                    self._finalize(slow)
                    return winner, tied
            tried = dict.fromkeys([*right, *racing, *(timing.solution for timing in slow)])
            right = [solution for solution in tried if self._timings[solution].status == "ok"]

    def _screen(self, right: Sequence[Solution]) -> tuple[list[Solution], list[Timing]]:
        """Return the finalists with the baseline, and the timings of dropped solutions."""
        baseline = self._baseline
        self._emit_step("screen")
        floor = floor_us(self.tuner.op, self.task.shape, self.tuner.place.device)
        further = Further(self._neighbours, self._continue, self._quick)
        screened = screen(self.task.shape, right, self._sample, self.tuner.options.topk, further, floor, self._ineligible_baseline)
        self._finalize(timing for timing in screened.dropped if timing.status != "screened")
        slow = [timing for timing in screened.dropped if timing.status == "screened" and timing.solution != baseline]
        survivors = list(screened.survivors[: 1 if self._is_late(RACING) else None])
        if baseline and baseline in screened.rough and baseline not in survivors:
            survivors.append(baseline)
        return survivors, slow

    @property
    def _ineligible_baseline(self) -> Solution | None:
        """Return the baseline if it may not be stored; else None."""
        baseline = self._baseline
        return baseline if baseline and baseline.libtype not in self.tuner.ranks else None

    def _effort(self, rounds: float = math.inf) -> Effort:
        options = self.tuner.options
        return Effort(0 if self._is_late(RACING) else options.warmup, int(min(options.iters, rounds)), options.seconds, self.deadline)

    def _race(self, finalists: list[Solution]) -> None:
        """Run the accurate phase; remove finalists that fail."""
        self._emit_step("time")
        effort = self._effort(QUICK_ROUNDS if self._quick and not self.task.only else math.inf)
        answers = race(self.task.shape, finalists, self._sample, effort, self._baseline, self._ineligible_baseline)
        for solution, answer in answers.items():
            self._retime(solution, answer)
        finalists[:] = [solution for solution in finalists if self._timings[solution].ok]

    def _compare_last(self, finalists: list[Solution], guesses: Sequence[Solution]) -> None:
        """Compare the few possible winners without the load of the others.

        With few solutions the chip is cooler and faster, by 5 % or more at its power cap. The times
        of the others are scaled accordingly.

        Args:
            finalists: those that fail are removed.
            guesses: solutions in their backends' order, best guesses first.
        """
        self._last = ()
        eligible = sorted((s for s in finalists if s.libtype in self.tuner.ranks), key=lambda solution: self._timings[solution].us)
        if self.task.only or len(eligible) < 2 or self._is_late(RACING):
            return
        first = {solution.libtype: solution for solution in reversed(guesses)}
        limit = self._timings[eligible[0]].us * (1 + NEAR)
        leaders = dict.fromkeys([*eligible[:LAST_FINALISTS], *first.values()])
        few = [s for s in leaders if s in eligible and self._timings[s].us <= limit]
        before = {solution: self._timings[solution].us for solution in few}
        for solution, answer in paired_comparison(few, self._sample, self._effort()).items():
            self._retime(solution, answer)
        finalists[:] = [solution for solution in finalists if self._timings[solution].ok]
        shifts = [self._timings[solution].us / before[solution] for solution in few if self._timings[solution].ok]
        shift = statistics.median(shifts or [1.0])
        for solution in set(finalists) - set(few):
            timing = self._timings[solution]
            self._timings[solution] = attrs.evolve(timing, us=timing.us * shift)
        self._last, self._guesses = tuple(few), frozenset(first.values())

    def _retime(self, solution: Solution, answer: Samples | Timing) -> None:
        if isinstance(answer, Timing):
            self._finalize([answer])
            return
        median, noise = median_and_noise(answer.us)
        clock, throttled = answer.clock_mhz, answer.throttled
        timing = self._timings[solution]
        self._timings[solution] = attrs.evolve(timing, us=median, noise=noise, samples=len(answer.us), clock_mhz=clock, throttled=throttled)

    def _check_again(self, finalists: list[Solution]) -> None:
        """Verify again, fastest first, until every possible winner has passed."""
        limit = float("inf")
        with self._clock("check"):
            for solution in sorted(finalists, key=lambda solution: self._timings[solution].us):
                us = self._timings[solution].us
                if us > limit and solution not in (self._baseline, self.task.holder):  # both may still win
                    continue
                after = self.tuner.client.check("check_again", self.task.shape, solution)
                if after.status != "ok":
                    self._finalize([after])
                    finalists.remove(solution)
                elif solution.libtype in self.tuner.ranks:
                    limit = min(limit, us * (1 + MAX_NOISE))

    def _is_right_in_use(self, winner: Timing | None) -> bool:
        """Verify all calls that the row would serve; record a fault."""
        if winner is None:
            return True
        with self._clock("check"):
            served = self.tuner.client.check("check_served", self.task.shape, winner.solution)
        self._finalize([served] if served.status != "ok" else [])
        return served.status == "ok"

    def _select(self, finalists: Sequence[Solution]) -> tuple[Timing | None, int]:
        """Return the winner, and the number of ties.

        The fastest must beat what serves now, or else the baseline, in a paired comparison.
        """
        ranks, baseline, holder = self.tuner.ranks, self._baseline, self.task.holder
        last = [timing for solution, timing in self._timings.items() if solution in self._last and timing.ok]
        challenger, tied = select(last or tuple(self._timings.values()), None, ranks, tuple(ranks), guesses=self._guesses)
        if challenger is None:
            return None, 0
        chosen = challenger.solution
        near = sorted((timing for timing in last if timing.us <= challenger.us * (1 + MAX_NOISE)), key=lambda timing: timing.us)
        possible = list(dict.fromkeys([chosen, *(timing.solution for timing in near)]))
        if holder is not None and holder in finalists:
            chosen = self._better(possible, holder, TIE)
            possible = [chosen]
        if baseline is not None and baseline in finalists:
            better = self._better(possible, baseline, DEFAULT_TIE if holder is None else TIE)
            chosen = better if better.libtype in ranks else chosen
        if not self._timings[chosen].ok:  # it failed in its last rounds, and not all of the others were checked again
            self._check_again([solution for solution in finalists if self._timings[solution].ok])
            return select(tuple(self._timings.values()), holder, ranks, tuple(ranks))
        return self._timings[chosen], tied

    def _better(self, challengers: Sequence[Solution], holder: Solution, keep: float) -> Solution:
        """Return the first challenger that beats the holder by more than *keep*, else the holder.

        Paired comparison is more accurate than medians of different moments. At the power cap, the
        challenger must also not be slower when run alone, since a busy chip cannot draw more power.
        """
        second = self._timings[holder]  # timed together with the challengers
        for challenger in challengers:
            first = self._timings[challenger]
            if challenger == holder or second.us > first.us * (1 + CLEAR):
                return challenger
            if first.us > second.us * (1 + CLEAR) or self._is_late(1.0):
                return holder
            answers = paired_comparison((challenger, holder), self._sample, self._effort())
            if self._gain(challenger, holder, answers) <= 1 + keep:
                return holder
            capped = {key: answer for key, answer in answers.items() if isinstance(answer, Samples) and POWER_CAP in answer.throttled}
            if len(capped) < len(answers) or time.monotonic() >= self.deadline:
                return challenger
            if self._gain(challenger, holder, steady(capped, self._sample, 1 if self._quick else TURNS)) >= 1:
                return challenger
        return holder

    def _gain(self, challenger: Solution, holder: Solution, answers: Mapping[Solution, Samples | Timing]) -> float:
        """Update both timings; return the challenger's speed-up, 1 if within noise."""
        for solution, answer in answers.items():
            self._retime(solution, answer)
        mine, theirs = answers[challenger], answers[holder]
        if isinstance(mine, Timing) or isinstance(theirs, Timing):
            return 0.0 if isinstance(theirs, Samples) else math.inf
        ratio, noise = median_and_noise([slow / fast for slow, fast in zip(theirs.us, mine.us, strict=True)])
        return min(ratio, 1.0) if ratio * (1 - noise) <= 1 else ratio

    def _finalize(self, timings: Iterable[Timing]) -> None:
        """Record and emit final timings."""
        timings = tuple(timings)
        self._timings.update({timing.solution: timing for timing in timings})
        if timings:
            self.emit(Trials(self.task, timings))

    def _moment(self, share: float) -> float:
        """Return the `time.monotonic` after this fraction of the time to the deadline."""
        return self._begun + share * (self.deadline - self._begun)

    def _is_late(self, share: float) -> bool:
        return time.monotonic() >= self._moment(share)

    def _emit_step(self, activity: str, solution: Solution | None = None) -> None:
        self.emit(Step(self.task, activity, solution, self._best, self._baseline_us))

    @contextlib.contextmanager
    def _clock(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[activity] = self._seconds.get(activity, 0.0) + time.perf_counter() - start
