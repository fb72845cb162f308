"""Kernels of two arms over a list of shapes: rounds in one process, in which arms take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from tunedgemm.analysis.ab.turns import AGAIN, ARMS, FEWEST_TURNS, A, B, Result
from tunedgemm.analysis.compare.measuring import Measuring, measuring
from tunedgemm.analysis.compare.production import Side
from tunedgemm.analysis.compare.verdict import Served
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.tuner.select import TIE
from tunedgemm.tuner.trial import Options, Samples

#: Device seconds of a shape, and seconds until calls count as hung.
_SECONDS, _HUNG = 3.0, 30.0


@attrs.frozen
class ShapeResult:
    """One shape: what serves it in both arms, and its rounds.

    Attributes:
        calls: its calls in the workload.
        a, b: the solutions, with the status of a failed one.
        result: the rounds; without any if an arm failed.
    """

    calls: int
    a: Served
    b: Served
    result: Result

    @property
    def failure(self) -> str:
        """Return why an arm has no time; "" if both have."""
        return next((f"arm {name}: {arm.status}" for name, arm in (("a", self.a), ("b", self.b)) if not arm.ok), self.result.ended)


@attrs.frozen
class Kernels:
    """All shapes, and the time of all their calls.

    Attributes:
        device: the device.
        shapes: the shapes in the order of timing, those before an interruption.
        ended: why it ended early: ``interrupted`` or ``SIGTERM``; "" if it did not.
    """

    device: Device
    shapes: tuple[ShapeResult, ...]
    ended: str = ""

    @property
    def whole(self) -> Result:
        """Return the microseconds of all calls by turn, over the shapes that both arms serve."""
        timed = [shape for shape in self.shapes if not shape.failure]
        turns = min((len(shape.result.turns) for shape in timed), default=0)
        sums = [{arm: sum(shape.calls * shape.result.turns[turn][arm] for shape in timed) for arm in ARMS} for turn in range(turns)]
        return Result(tuple(sums), least=TIE, ended=self.ended)


def side_of(name: str, tables: Sequence[Path] | None) -> Side:
    """Return an arm: these tables alone, torch's call for None, and the configured tables for ()."""
    return Side(name, builtin=True) if tables is None else Side(name, only=tuple(tables))


def compare_kernels(
    op: Op,
    shapes: Callable[[Device], Mapping[Shape, int]],
    arms: tuple[Sequence[Path] | None, Sequence[Path] | None],
    turns: int,
    keep: Callable[[Kernels], None] = lambda _: None,
) -> Kernels:
    """Verify and time each shape in both arms; an interruption keeps the shapes before.

    Args:
        op: the op.
        shapes: returns the shapes of a device with their calls.
        arms: see `side_of`.
        turns: rounds of each shape.
        keep: called with the result so far after each shape.

    Raises:
        UserError: no shape is for this device.
    """
    sides = (side_of(A, arms[0]), side_of(B, arms[1]), side_of(AGAIN, arms[0]))
    options = Options(iters=turns, seconds=_SECONDS, kernel_timeout=_HUNG, mp=1)
    with measuring(op.name, sides, options) as ask:
        found = Kernels(ask.begin().device, ())
        listed = shapes(found.device)
        if not listed:
            raise UserError(f"no shape of {op.name} for {found.device}; name a list of shapes with -i")
        try:
            for shape, calls in listed.items():
                found = attrs.evolve(found, shapes=(*found.shapes, _timed(ask, shape, calls)))
                keep(found)
        except KeyboardInterrupt as stop:
            return attrs.evolve(found, ended=str(stop) or "interrupted")
    return found


def _timed(ask: Measuring, shape: Shape, calls: int) -> ShapeResult:
    a, b, again = (ask.checked(shape, side) for side in ask.sides)
    if not (a.ok and b.ok and again.ok):
        return ShapeResult(calls, a, b, Result(()))
    samples = ask.samples(shape, ask.sides)
    if isinstance(samples, str):
        return ShapeResult(calls, a, b, Result((), ended=samples))
    rounds = _rounds(samples)
    return ShapeResult(calls, a, b, Result(rounds, least=TIE, ended="" if len(rounds) >= FEWEST_TURNS else "a kernel failed while timed"))


def _rounds(samples: Iterable[object]) -> tuple[Mapping[str, float], ...]:
    times = [sample.us for sample in samples if isinstance(sample, Samples)]
    return tuple(dict(zip(ARMS, us, strict=True)) for us in zip(*times, strict=False)) if len(times) == len(ARMS) else ()
