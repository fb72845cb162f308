"""Choose the bit class of an (N, K): of kernels with equal bits, the set that is fastest over all M."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.padded_m import serving
from tunedgemm.ops.scale_order import of_any_m
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.select import select
from tunedgemm.tuner.trial import SIZES, ChosenClass, ClassCost, Outcome

_log = logging.getLogger("tunedgemm")

#: A kernel's bits are measured if its time is within this factor of the fastest at some M. So many
#: are measured there of each declared order of sums, or of each backend and number of splits. Bits
#: take 0.15 s a kernel, and hundreds are within the factor (H200, bf16).
REACH, MEASURED = 2.0, 4
#: Members of a class that are timed accurately: this many of the fastest at each M, and for any M.
_FASTEST = 2
#: Classes whose members are timed accurately.
_LEADING = 3
#: Statuses of usable times; those of ``screened`` kernels are rough.
_ROUGH, _ACCURATE = ("ok", "screened"), ("ok",)


@attrs.frozen
class Fit:
    """The members of a class that would serve.

    Attributes:
        label: the hash of the class's bits.
        rows: the timing of the fastest member at each M.
        pin: the timing, at the first M, of the member for any M.
        us: time of all calls.
    """

    label: str
    rows: Mapping[Shape, Timing]
    pin: Timing
    us: float


@attrs.define(eq=False)
class Group:
    """The shapes of one (N, K) with all their timings.

    Attributes:
        shape: the shape with M = 0, and with the order of scales in which bits are measured.
        outcomes: the outcome of each M.
        ranks: maps a libtype that may be stored to its rank for ties.
        kind: the kind of the device.
        bits: trials of M = 0 by solution: labels and faults.
        served: kernels, by shape, that passed the checks of all calls that their row serves.
    """

    shape: Shape
    outcomes: Sequence[Outcome]
    ranks: Mapping[str, int]
    kind: str
    bits: dict[Solution, Timing] = attrs.field(factory=dict, init=False)
    served: set[tuple[Shape, Solution]] = attrs.field(init=False)
    times: dict[Shape, dict[Solution, Timing]] = attrs.field(init=False)
    counts: dict[Shape, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.times = {outcome.task.shape: {timing.solution: timing for timing in outcome.timings} for outcome in self.outcomes}
        self.counts = {outcome.task.shape: max(1, outcome.task.count) for outcome in self.outcomes}
        self.served = {(outcome.task.shape, outcome.winner.solution) for outcome in self.outcomes if outcome.winner}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the M at which bits are measured: the standard ones, and some that each row would serve."""
        tuned = sorted(shape.m for shape in self.times)
        between = ((less + more) // 2 for less, more in itertools.pairwise(tuned))  # which the nearest row serves
        return tuple(sorted({*SIZES, *between, *(m for shape in self.times for m in self._served_by(shape))}))

    def _served_by(self, shape: Shape) -> Iterator[int]:
        """Yield the M of a row, and the least and a middle one that padding gives to it."""
        yield shape.m
        padded_m, kind = op_named(shape.op).padded_m, self.kind
        served = [m for m in range(max(1, shape.m // 2), shape.m) if shape.m in serving(padded_m, m, shape.n, kind)]
        yield from {*served[:1], *served[len(served) // 2 :][:1]}

    def within_reach(self) -> tuple[Solution, ...]:
        """Return the kernels whose bits are measured, see `REACH`."""
        near: dict[Solution, None] = {}
        for shape in self.times:
            timed = self._timed(shape, _ROUGH)
            limit = REACH * min((timing.us for timing in timed), default=0.0)
            alike = collections.Counter[tuple[str, int]]()
            for solution in (timing.solution for timing in timed if timing.us <= limit):
                alike[kind := (solution.sum_order or solution.libtype, solution.split_k)] += 1
                near |= {solution: None} if alike[kind] <= MEASURED else {}
        largest = self.times[max(self.times, key=lambda shape: shape.m)]
        return tuple(sorted(near, key=lambda solution: solution not in largest))  # those for any M first, see `bits.measure`

    def _timed(self, shape: Shape, statuses: Sequence[str]) -> list[Timing]:
        """Return the times of kernels that may be stored, in an order that is equal in all runs."""
        timings = self.times[shape].values()
        usable = [timing for timing in timings if timing.us and timing.status in statuses and timing.solution.libtype in self.ranks]
        return sorted(usable, key=lambda timing: (timing.us, str(timing.solution)))

    def members(self) -> dict[str, list[Solution]]:
        """Return the kernels of each class."""
        by_label: dict[str, list[Solution]] = {}
        for solution, timing in self.bits.items():
            if timing.bits:
                by_label.setdefault(timing.bits, []).append(solution)
        return by_label

    def fits(self, *, rough: bool = False) -> list[Fit]:
        """Return the classes with a kernel for every M, the fastest first.

        Args:
            rough: whether times of the screen count, too.
        """
        fits = [self._fit(label, members, _ROUGH if rough else _ACCURATE) for label, members in self.members().items()]
        return sorted(filter(None, fits), key=lambda fit: (fit.us, fit.label))

    def _fit(self, label: str, members: Sequence[Solution], statuses: Sequence[str]) -> Fit | None:
        timed = {shape: [t for t in self._timed(shape, statuses) if t.solution in members] for shape in self.times}
        totals = self._totals(timed)
        pin, _ = select(list(totals.values()), None, self.ranks, tuple(self.ranks))
        if pin is None:
            return None
        rows: dict[Shape, Timing] = {}
        for shape, timings in timed.items():
            winner, _ = select(
                [attrs.evolve(timing, status="ok") for timing in timings], self._incumbent(shape), self.ranks, tuple(self.ranks)
            )
            assert winner is not None, "the member for any M has a time"
            rows[shape] = winner
        us = sum(self.counts[shape] * min(timing.us for timing in timings) for shape, timings in timed.items())
        first = self.outcomes[0].task.shape
        return Fit(label, rows, self.times[first][pin.solution], us)

    def _incumbent(self, shape: Shape) -> Solution | None:
        return next((outcome.task.incumbent for outcome in self.outcomes if outcome.task.shape == shape), None)

    def _totals(self, timed: Mapping[Shape, Sequence[Timing]]) -> dict[Solution, Timing]:
        """Return the total time of each kernel that serves every M, of those measured and of those listed."""
        by_shape = {shape: {timing.solution: timing.us for timing in timings} for shape, timings in timed.items()}
        every = [solution for solution, found in self.bits.items() if serves_any_m(found)]
        return {
            solution: Timing(self.shape, solution, "ok", us=sum(self.counts[shape] * us[solution] for shape, us in by_shape.items()))
            for solution in every
            if all(solution in us for us in by_shape.values())
        }

    def untimed(self) -> dict[Shape, tuple[Solution, ...]]:
        """Return the kernels to time accurately: the fastest members of the leading classes.

        An any-M kernel that was not listed at some M counts with its class's slowest time there.
        """
        labels, by_label = self._leading(), self.members()
        wanted: dict[Shape, dict[Solution, None]] = {shape: {} for shape in self.times}
        for label in labels:
            timed = {shape: [t for t in self._timed(shape, _ROUGH) if t.solution in by_label[label]] for shape in self.times}
            everywhere = self._guessed_totals(label, timed)[:_FASTEST]
            for shape, timings in timed.items():
                wanted[shape] |= dict.fromkeys([*(timing.solution for timing in timings[:_FASTEST]), *everywhere])
        return {
            shape: missing
            for shape, solutions in wanted.items()
            if (missing := tuple(solution for solution in solutions if self._needs_time(shape, solution)))
        }

    def _needs_time(self, shape: Shape, solution: Solution) -> bool:
        timing = self.times[shape].get(solution)
        return timing is None or timing.status == "screened"

    def _leading(self) -> list[str]:
        """Return the labels of the classes that are fastest by all times so far."""
        totals = {}
        for label, members in self.members().items():
            timed = {shape: [t for t in self._timed(shape, _ROUGH) if t.solution in members] for shape in self.times}
            if not self._guessed_totals(label, timed):
                continue
            slowest = {shape: max((t.us for t in self._timed(shape, _ROUGH)), default=0.0) for shape in self.times}
            totals[label] = sum(self.counts[shape] * (timings[0].us if timings else slowest[shape]) for shape, timings in timed.items())
        return sorted(totals, key=lambda label: (totals[label], label))[:_LEADING]

    def _guessed_totals(self, label: str, timed: Mapping[Shape, Sequence[Timing]]) -> list[Solution]:
        """Return the any-M kernels of a class, best first; those that failed at some M are left out."""
        totals: dict[Solution, float] = {}
        for solution, found in self.bits.items():
            known = [self.times[shape].get(solution) for shape in self.times]
            if found.bits == label and serves_any_m(found) and all(timing is None or timing.status in _ROUGH for timing in known):
                us = {shape: {t.solution: t.us for t in timings} for shape, timings in timed.items()}
                worst = {shape: max(of.values(), default=0.0) * REACH for shape, of in us.items()}
                totals[solution] = sum(self.counts[shape] * of.get(solution, worst[shape]) for shape, of in us.items())
        return sorted(totals, key=lambda solution: (totals[solution], str(solution)))

    def unserved(self) -> dict[Shape, tuple[Solution, ...]]:
        """Return the kernels of the fastest class whose rows' other calls are unchecked, by shape."""
        fits = self.fits()
        if not fits:
            return {}
        wanted = {shape: {row.solution: None} for shape, row in fits[0].rows.items()}
        for end in (min, max):  # a row for any M serves what those of the smallest and largest M do
            wanted[end(wanted, key=lambda shape: shape.m)][fits[0].pin.solution] = None
        missing = {shape: tuple(s for s in solutions if (shape, s) not in self.served) for shape, solutions in wanted.items()}
        return {shape: solutions for shape, solutions in missing.items() if solutions}

    def chosen(self) -> ChosenClass:
        """Return the fastest class, with the costs of all."""
        fits, best = self.fits(), sum(self.counts[shape] * self._fastest(shape) for shape in self.times)
        us = {fit.label: fit.us for fit in self.fits(rough=True)} | {fit.label: fit.us for fit in fits}
        costs = [
            ClassCost(label, len(members), tuple(sorted({member.libtype for member in members})), us.get(label, 0.0) / best)
            for label, members in self.members().items()
        ]
        first = fits[0].label if fits else ""
        costs.sort(key=lambda cost: (cost.label != first, not cost.cost, cost.cost, -cost.kernels))
        if not fits:
            return ChosenClass(self.shape, tuple(costs), reason=self._why_none())
        pin = attrs.evolve(fits[0].pin, shape=of_any_m(self.shape))
        rows = [attrs.evolve(row, bits=first) for row in (*fits[0].rows.values(), pin)]
        return ChosenClass(self.shape, tuple(costs), tuple(rows))

    def _fastest(self, shape: Shape) -> float:
        return min(timing.us for timing in self._timed(shape, _ACCURATE) or self._timed(shape, _ROUGH))

    def _why_none(self) -> str:
        """Return why no class has a kernel that serves every M."""
        faults = [f"{timing.solution}: {timing.detail}" for timing in self.bits.values() if timing.detail]
        example = f"; for example {faults[0]}" if faults else ""
        near = f"no kernel within {REACH:g}x of the fastest has equal bits at every M"
        return f"{near}, torch's own calls left out (measured: {len(self.bits)}){example}"

    def report_broken_claims(self) -> None:
        """Warn of kernels that declare one order of sums and have different bits."""
        for first, second in broken_claims(self.bits.values()):
            _log.warning(
                "%s: %s and %s declare the same sum_order %r and gave different bits (%s, %s); the measured ones count: "
                "report it to the authors of the plugins",
                self.shape, first.solution, second.solution, first.solution.sum_order, first.bits, second.bits,
            )  # fmt: skip


def serves_any_m(bits: Timing) -> bool:
    """Check whether a kernel may serve any M of its class.

    torch's own calls may not: their libraries choose kernels by M, so that a few M prove nothing of
    the others.
    """
    return bool(bits.bits) and not bits.detail and bits.solution.libtype != BUILTIN


def broken_claims(bits: Iterable[Timing]) -> list[tuple[Timing, Timing]]:
    """Return pairs of kernels of one `sum_order` with different bits, one for each further label."""
    by_order: dict[str, dict[str, Timing]] = {}
    for timing in bits:
        if timing.solution.sum_order and (timing.bits or timing.status == "batch_variant"):
            by_order.setdefault(timing.solution.sum_order, {}).setdefault(timing.bits or timing.detail, timing)
    return [(first, other) for first, *others in (tuple(found.values()) for found in by_order.values()) for other in others]
