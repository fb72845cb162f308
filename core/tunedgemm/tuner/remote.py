"""Remote: a device's session from afar. Whoever was run when the worker died is to blame, and nobody else.

A worker that dies is replaced before the next call. Where it was asked to time several solutions,
they are asked for one by one; a death that does not come again is nobody's fault.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.roofline import patience_s
from tunedgemm.tuner.trial import Options, Place, Samples, failed
from tunedgemm.tuner.worker import Died, Inline, Worker

#: Calls of a verification: on several operands, and repeated; its comparisons are about as slow.
_CHECKS = 16
#: Seconds of a sample beside its calls, and of what is done for a solution once: a capture, a first launch.
_SAMPLE, _FIRST = 0.05, 1.0


class LaneLost(Exception):
    """The device, or its node, does not work any more; the shape at hand is not done."""


@attrs.define(eq=False)
class Remote:
    """The session of one device.

    Attributes:
        op: what is tuned.
        options: the deadlines matter here.
        worker: what has the session.
    """

    op: Op
    options: Options
    worker: Worker | Inline
    place: Place = attrs.field(init=False)
    _replaced: bool = attrs.field(default=True, init=False)

    def begin(self) -> Place:
        """Start the worker, alone, so that no solution is blamed for a device that is gone.

        Raises:
            LaneLost: there is no such device, or its worker dies at once.
        """
        try:
            self.place = self.worker("place", timeout=self.options.timeout)
        except Exception as error:  # also what a driver raises when it is asked for a device
            raise LaneLost(f"no worker can be started on it: {type(error).__name__}: {error}") from error
        self._replaced = False
        return self.place

    def stop(self) -> None:
        """End the worker, whatever it does."""
        self.worker.stop()

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """The session's answer.

        Args:
            timeout: seconds, 0 for no limit; what compiling and binding may take where it is not
                given.

        Raises:
            Died: this call ended the worker; the next gets a new one.
            LaneLost: no worker can be started on the device any more.
        """
        if self._replaced:
            self.begin()
        try:
            return self.worker(method, *arguments, timeout=self.options.timeout if timeout is None else timeout)
        except Died:
            self._replaced = True
            raise

    def ask_twice(self, method: str, *arguments: Any) -> Any:
        """Ask for something that no solution is to blame for, once more where the worker died."""
        with contextlib.suppress(Died):
            return self.ask(method, *arguments)
        return self.ask(method, *arguments)

    def bind(self, shape: Shape, solution: Solution) -> Timing | None:
        """Bind alone, under the deadline of compilations; the Timing of what does not bind."""
        try:
            refusal: Timing | None = self.ask("bind", shape, solution)
        except Died as error:
            status = "compile_timeout" if error.status == "hung" else error.status
            return Timing(shape, solution, status, detail=f"in bind: {error}"[:500])
        except LaneLost:
            raise
        except Exception as error:  # a plugin may raise anything
            return failed(shape, solution, error)
        return refusal

    def verdict(self, method: str, shape: Shape, solution: Solution) -> Timing:
        """What ``check_first``, ``check`` or ``check_again`` says of one solution, bound first, under the deadline of kernels."""
        refusal = self.bind(shape, solution)
        if refusal is not None:
            return refusal
        answer = self._alone(method, shape, solution, (solution,), _CHECKS)
        assert isinstance(answer, Timing), "a check answers with a Timing"
        return answer

    def sample(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> Mapping[Solution, Samples | Timing]:
        """Time solutions in interleaved rounds; what fails comes back as its Timing."""
        try:
            found: Mapping[Solution, Samples | Timing] = self.ask(
                "sample", shape, tuple(solutions), rounds, timeout=self.allowance(shape, rounds, len(solutions))
            )
        except LaneLost:
            raise
        except Exception:  # dead or not, it does not say who
            return self._one_by_one(shape, solutions, rounds)
        return found

    def _one_by_one(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        """The same rounds, a call of the worker for each sample, so that a death blames one."""
        samples: dict[Solution, Samples] = {}
        lost: dict[Solution, Timing] = {}
        for _ in range(rounds):
            alive = [solution for solution in solutions if solution not in lost]
            for solution in random.sample(alive, len(alive)):
                answer = self.bind(shape, solution) or self._alone("sample", shape, solution, ((solution,), 1), 4)
                if isinstance(answer, Timing):
                    lost[solution] = answer
                else:
                    earlier = samples.get(solution)
                    samples[solution] = attrs.evolve(answer, us=(earlier.us if earlier else ()) + answer.us)
        return {**{solution: found for solution, found in samples.items() if solution not in lost}, **lost}

    def _alone(self, method: str, shape: Shape, solution: Solution, arguments: tuple[Any, ...], samples: int) -> Samples | Timing:
        try:
            answer = self.ask(method, shape, *arguments, timeout=self.allowance(shape, samples))
        except Died as error:
            return Timing(shape, solution, error.status, detail=str(error)[:500])
        except LaneLost:
            raise
        except Exception as error:  # a kernel may raise anything
            return failed(shape, solution, error)
        found: Samples | Timing = answer[solution] if isinstance(answer, dict) else answer
        return found

    def allowance(self, shape: Shape, samples: int, solutions: int = 1) -> float:
        """Seconds until so many samples of each of some solutions count as hung; 0 is no limit."""
        kernel_timeout = self.options.kernel_timeout
        slow = _SAMPLE + patience_s(self.op, shape, self.place.device)
        return kernel_timeout + solutions * (_FIRST + samples * slow) if kernel_timeout else 0.0
