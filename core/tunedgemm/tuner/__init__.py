"""The tuner: `tune` is the list of its stages, in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.device import Device, current_device
from tunedgemm.folders import tuned_path
from tunedgemm.launcher import Launcher
from tunedgemm.ops import op_named
from tunedgemm.ops.op import Op
from tunedgemm.registry import Backend, Registry, order
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.candidates import candidates, neighbours, reference
from tunedgemm.tuner.measure import Workload, median_and_noise
from tunedgemm.tuner.plan import plan, requested
from tunedgemm.tuner.screen import screen
from tunedgemm.tuner.select import DEFAULT_TIE, TIE, select
from tunedgemm.tuner.store import Store
from tunedgemm.tuner.trial import Bench, Candidate, Options, Outcome, Report, Sampler, Samples, Task, failed
from tunedgemm.tuner.verify import Verifier, bind
from tunedgemm.tuner.worker import Compilers

_log = logging.getLogger("tunedgemm")

#: Rounds of the accurate phase after which what is clearly slower than the best is timed no further.
FIRST_ROUNDS = 11
#: "Clearly slower" than the best by then.
BEHIND = 0.08
#: Fewest rounds of a finalist, whatever the time they take.
FEWEST_ROUNDS = 15
#: Rounds of the last comparison, winner against torch's call.
DUEL_ROUNDS = 51


def tune(
    op: str = "a16w16",
    shapes: Iterable[Shape] | Path | None = None,
    output: Path | None = None,
    options: Options | None = None,
    *,
    registry: Registry | None = None,
    bench: Bench = Workload,
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Time every solution of every chosen backend on each shape, and store the winners.

    Args:
        op: name of the op.
        shapes: shapes, or an untuned CSV; without it the file that capture wrote.
        output: the tuned CSV; without it the op's table in the user folder (or the first path of its variable).
        options: how; see `Options`.
        registry, bench: other backends, or another source of times (a replay), than the installed and the real one.
        progress: called with each outcome.

    Raises:
        UserError: the input, the output or a libtype cannot be used; nothing was measured.
    """
    options, registry, family, device = options or Options(), registry or Registry(), op_named(op), current_device()
    output = output or tuned_path(family)
    backends = registry.select(options.libtype)
    listed = requested(family, shapes) if shapes is None or isinstance(shapes, Path) else [(shape, 1) for shape in shapes]
    work = plan(family, listed, output, device, retune=options.all)
    store = Store(family, device, output, output.with_suffix(".trials.jsonl"), options.profile, options.sort)
    store.open()
    outcomes = []
    with Compilers(device, options.jobs, options.timeout) as compilers:
        for batch in work.batches(options.batch):
            offered = {task: candidates(task.shape, device, backends) for task in batch}
            started = time.perf_counter()
            lost = compilers.prepare((task.shape, candidate) for task, found in offered.items() for candidate in found)
            _log.info("compiled ahead for %d shapes in %.1f s, %d did not compile", len(batch), time.perf_counter() - started, len(lost))
            for task, found in offered.items():
                run = _ShapeRun(family, task, device, options, registry, compilers, bench)
                outcome = run.outcome(found, [timing for timing in lost if timing.shape == task.shape], backends)
                store.log(outcome.timings)
                if outcome.winner is not None:
                    store.put(outcome.winner, next(b for b in backends if b.libtype == outcome.winner.solution.libtype))
                outcomes.append(outcome)
                if progress is not None:
                    progress(outcome)
    return Report(device, output, tuple(outcomes), work.skipped)


@attrs.define(eq=False)
class _ShapeRun:
    """The stages of one shape, from candidates to the outcome."""

    op: Op
    task: Task
    device: Device
    options: Options
    registry: Registry
    compilers: Compilers
    bench: Bench
    _timings: dict[Solution, Timing] = attrs.field(factory=dict, init=False)
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)

    def outcome(self, found: Sequence[Candidate], lost: Sequence[Timing], backends: Sequence[Backend]) -> Outcome:
        """Check, screen, measure, check again, select."""
        shape = self.task.shape
        self._note(lost)
        yardstick = reference(shape, self.device, self.registry)
        offered = [c for c in [*([yardstick] if yardstick else []), *found] if c.solution not in self._timings]
        with self._clock("time"):
            sampler = self.bench(self.op, shape, self.device)
        sets = getattr(sampler, "copies", None) or [self.op.make_inputs(shape, self.device.torch_device, seed) for seed in (0, 1)]
        verifier = Verifier(self.op, shape, sets, self.options.errRatio)
        checked = self._checked(list({c.solution: c for c in offered}.values()), verifier)
        timed = self._timed(sampler)
        screened = screen(self.task, checked, timed, self.options.topk, lambda leaders: self._neighbours(leaders, verifier))
        self._note(screened.dropped)
        finalists = {candidate.solution: candidate for candidate in screened.survivors}
        if yardstick is not None:
            finalists |= {c.solution: c for c in checked if c.solution == yardstick.solution and c.solution in screened.rough}
        calls = getattr(sampler, "calls", 1)
        forget = getattr(sampler, "forget", None)
        self._measure(finalists, {s: us * calls * 1e-6 for s, us in screened.rough.items()}, timed, forget, yardstick)
        self._check_again(finalists, verifier, len(sets) - 1)
        winner, tied = self._selected(backends, finalists, timed, yardstick)
        yard = self._timings.get(yardstick.solution) if yardstick else None
        return Outcome(self.task, winner, yard, tuple(self._timings.values()), tied, tuple(self._seconds.items()))

    def _selected(
        self, backends: Sequence[Backend], finalists: Mapping[Solution, Candidate], sampler: Sampler, yardstick: Candidate | None
    ) -> tuple[Timing | None, int]:
        """The row and how many tied with it; what wins among all must win against torch's call alone, too."""
        incumbent, keep = self.task.incumbent, TIE
        if incumbent is None and yardstick is not None and self.options.libtype == "all":
            incumbent, keep = yardstick.solution, DEFAULT_TIE
        places, eligible = order(backends, self.options.libtype), [backend.libtype for backend in backends]
        winner, tied = select(tuple(self._timings.values()), incumbent, places, eligible, keep)
        if winner is not None and yardstick is not None and winner.solution != yardstick.solution:
            pair = self._duel(winner.solution, yardstick.solution, finalists, sampler)
            winner = select(pair, incumbent, places, eligible, keep)[0] if pair else winner
        return winner, tied

    @contextlib.contextmanager
    def _clock(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[activity] = self._seconds.get(activity, 0.0) + time.perf_counter() - start

    def _timed(self, sampler: Sampler) -> Sampler:
        def sample(launchers: Mapping[Solution, Launcher], rounds: int) -> dict[Solution, Samples | Exception]:
            with self._clock("time"):
                return sampler(launchers, rounds)

        return sample

    def _note(self, timings: Iterable[Timing]) -> None:
        for timing in timings:
            self._timings[timing.solution] = timing

    def _checked(self, fresh: Sequence[Candidate], verifier: Verifier) -> list[Candidate]:
        """Bind and verify; what fails is noted, what is right comes back with its launcher."""
        right = []
        for candidate in fresh:
            _log.debug("checking %s", candidate.solution)  # the last one of a run that hangs is the culprit
            with self._clock("check"):
                bound = bind(candidate, self.task.shape, self.device)
                timing = bound if isinstance(bound, Timing) else verifier.check(bound.solution, bound.launcher)  # type: ignore[arg-type]
            self._note([timing])
            if timing.status == "ok" and isinstance(bound, Candidate):
                right.append(bound)
        return right

    def _neighbours(self, leaders: Sequence[Candidate], verifier: Verifier) -> list[Candidate]:
        shape = self.task.shape
        near = neighbours(leaders, shape, self.device)
        fresh = {candidate.solution: candidate for candidate in near if candidate.solution not in self._timings}
        with self._clock("compile"):
            self._note(self.compilers.prepare((shape, candidate) for candidate in fresh.values()))
        return self._checked([candidate for solution, candidate in fresh.items() if solution not in self._timings], verifier)

    def _duel(self, winner: Solution, default: Solution, finalists: Mapping[Solution, Candidate], sampler: Sampler) -> list[Timing]:
        """Time the winner against torch's call alone: beside many candidates the chip runs hotter than beside one."""
        launchers = {s: candidate.launcher for s in (winner, default) if (candidate := finalists.get(s)) and candidate.launcher}
        if len(launchers) < 2:
            return []
        answers = sampler(launchers, min(self.options.iters, DUEL_ROUNDS))
        self._note(self._retimed(solution, answer) for solution, answer in answers.items())
        return [self._timings[solution] for solution in launchers]

    def _retimed(self, solution: Solution, answer: Samples | Exception) -> Timing:
        if not isinstance(answer, Samples):
            return failed(self.task.shape, solution, answer)
        median, noise = median_and_noise(answer.us)
        return attrs.evolve(self._timings[solution], us=median, noise=noise, samples=len(answer.us), clock_mhz=answer.clock_mhz)

    def _check_again(self, finalists: Mapping[Solution, Candidate], verifier: Verifier, place: int) -> None:
        """Verify on other contents after the timing: a kernel that was right once may have left something behind."""
        for solution, candidate in finalists.items():
            with self._clock("check"):
                after = verifier.check(solution, candidate.launcher, places=(place,)) if candidate.launcher else None
            if after is not None and after.status != "ok" and self._timings[solution].ok:
                self._note([attrs.evolve(after, detail=f"right at first, then not: {after.detail}")])

    def _measure(
        self,
        finalists: dict[Solution, Candidate],
        cost: Mapping[Solution, float],
        sampler: Sampler,
        forget: Callable[[Mapping[Solution, Launcher]], None] | None,
        yardstick: Candidate | None,
    ) -> None:
        """Two phases of interleaved rounds: all finalists, then those that are near the best (and torch's call).

        Args:
            cost: device seconds of one round of each solution.
            forget: frees what the sampler keeps for others than these, if it keeps anything.
        """
        samples: dict[Solution, tuple[float, ...]] = dict.fromkeys(finalists, ())
        racing, rounds, clock = dict(finalists), min(FIRST_ROUNDS, self.options.iters), 0
        for phase in (0, 1):
            launchers = {solution: candidate.launcher for solution, candidate in racing.items() if candidate.launcher}
            if forget is not None:
                forget(launchers)
            if phase == 0 and self.options.warmup:
                sampler(launchers, self.options.warmup)
            for solution, answer in sampler(launchers, rounds).items():
                if isinstance(answer, Samples):
                    samples[solution] += answer.us
                    clock = answer.clock_mhz
                else:
                    self._note([failed(self.task.shape, solution, answer)])
                    racing.pop(solution)
            medians = {solution: median_and_noise(samples[solution])[0] for solution in racing}
            best = min(medians.values(), default=0.0)
            spared = yardstick.solution if yardstick else None
            racing = {s: c for s, c in racing.items() if medians[s] <= best * (1 + BEHIND) or s == spared}
            affordable = int(self.options.seconds / max(sum(cost.get(s, 0.0) for s in racing), 1e-9))
            rounds = min(self.options.iters, max(affordable, FEWEST_ROUNDS)) - rounds
            if rounds <= 0:
                break
        for solution, us in samples.items():
            if us and self._timings[solution].status == "ok":
                self._note([self._retimed(solution, Samples(us, clock))])


__all__ = ["Options", "Outcome", "Report", "tune"]
