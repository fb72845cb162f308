"""Requests to a worker: each class names one call of the session, its arguments and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.trial import DeviceFault, Place, Samples, failed

if TYPE_CHECKING:
    from tunedgemm.tuner.session import Session

Answer_co = TypeVar("Answer_co", covariant=True)


class Request(Protocol[Answer_co]):
    """A value that travels to the worker; `run` executes there."""

    def run(self, session: Session) -> Answer_co:
        """Call the session and return its answer."""


@attrs.frozen
class GetPlace:
    """Ask for the device and its node."""

    def run(self, session: Session) -> Place:
        """Call `Session.place`."""
        return session.place()


@attrs.frozen
class GetLibtypes:
    """Ask for the installed libtypes."""

    def run(self, session: Session) -> tuple[str, ...]:
        """Return `Registry.libtypes`."""
        return session.registry.libtypes


@attrs.frozen
class GetVersion:
    """Ask for the library version of a libtype."""

    libtype: str

    def run(self, session: Session) -> str:
        """Call `Session.version`."""
        return session.version(self.libtype)


@attrs.frozen
class GetBaseline:
    """Ask for the baseline of a shape."""

    shape: Shape

    def run(self, session: Session) -> Solution | None:
        """Call `Session.baseline`."""
        return session.baseline(self.shape)


@attrs.frozen
class GetRefusal:
    """Ask why a backend does not support a shape."""

    libtype: str
    shape: Shape

    def run(self, session: Session) -> str:
        """Call `Session.refusal`."""
        return session.refusal(self.libtype, self.shape)


@attrs.frozen
class WhyNone:
    """Ask why a backend offers no solution of a shape."""

    libtype: str
    shape: Shape

    def run(self, session: Session) -> str:
        """Call `Session.why_none`."""
        return session.why_none(self.libtype, self.shape)


@attrs.frozen
class StatesPlatform:
    """Ask whether a backend states that it serves an op on such devices."""

    libtype: str
    op: str

    def run(self, session: Session) -> bool:
        """Call `Session.states_platform`."""
        return session.states_platform(self.libtype, self.op)


@attrs.frozen
class ListSolutions:
    """Ask for the solutions of a backend for a shape."""

    libtype: str
    shape: Shape

    def run(self, session: Session) -> tuple[Solution, ...]:
        """Call `Session.list`."""
        return session.list(self.libtype, self.shape)


@attrs.frozen
class ListNeighbours:
    """Ask for the solutions around some solutions of one backend."""

    shape: Shape
    leaders: tuple[Solution, ...]

    def run(self, session: Session) -> tuple[Solution, ...]:
        """Call `Session.neighbours`."""
        return session.neighbours(self.shape, self.leaders)


@attrs.frozen
class Open:
    """Make the operands of a shape."""

    shape: Shape

    def run(self, session: Session) -> None:
        """Call `Session.open`."""
        session.open(self.shape)


@attrs.frozen
class Bind:
    """Bind a solution to a shape."""

    shape: Shape
    solution: Solution

    def run(self, session: Session) -> Timing | None:
        """Call `Session.bind`."""
        return session.bind(self.shape, self.solution)


@attrs.frozen
class CheckFirst:
    """Verify one call of a solution."""

    shape: Shape
    solution: Solution

    def run(self, session: Session) -> Timing:
        """Call `Session.check_first`."""
        return session.check_first(self.shape, self.solution)


@attrs.frozen
class Check:
    """Verify a solution on all operand sets."""

    shape: Shape
    solution: Solution

    def run(self, session: Session) -> Timing:
        """Call `Session.check`."""
        return session.check(self.shape, self.solution)


@attrs.frozen
class CheckAgain:
    """Verify a solution after its timing."""

    shape: Shape
    solution: Solution

    def run(self, session: Session) -> Timing:
        """Call `Session.check_again`."""
        return session.check_again(self.shape, self.solution)


@attrs.frozen
class CheckServed:
    """Verify all that the row of a solution serves."""

    shape: Shape
    solution: Solution

    def run(self, session: Session) -> Timing:
        """Call `Session.check_served`."""
        return session.check_served(self.shape, self.solution)


@attrs.frozen
class Batch:
    """Several requests about one solution each: a message costs as much as a small check."""

    requests: tuple[Bind | CheckFirst | Check | CheckAgain, ...]

    def run(self, session: Session) -> list[Timing | None]:
        """Run each request; a failure is returned as its Timing.

        Raises:
            DeviceFault: a request broke the device's context.
        """
        answers: list[Timing | None] = []
        for request in self.requests:
            try:
                answers.append(request.run(session))
            except DeviceFault:
                raise
            except Exception as error:  # a plugin may raise anything
                answers.append(failed(request.shape, request.solution, error))
        return answers


@attrs.frozen
class TakeSamples:
    """Time solutions in interleaved rounds."""

    shape: Shape
    solutions: Sequence[Solution]
    rounds: int

    def run(self, session: Session) -> dict[Solution, Samples | Timing]:
        """Call `Session.sample`."""
        return session.sample(self.shape, self.solutions, self.rounds)


@attrs.frozen
class Forget:
    """Free the launchers of a shape but for those of some solutions."""

    shape: Shape
    keep: tuple[Solution, ...]

    def run(self, session: Session) -> None:
        """Call `Session.forget`."""
        session.forget(self.shape, self.keep)
