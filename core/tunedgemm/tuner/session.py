"""Session: lists, binds, verifies and times the candidates of a shape in the device's process.

That is a worker, or this process with the caller's registry. A session can be restarted at any
point, because each request first binds the solutions that it names.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import torch

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.errors import PluginError, TunedGemmError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import with_flags
from tunedgemm.ops.formats.tensor_bytes import fingerprint
from tunedgemm.ops.op import Op
from tunedgemm.process.plugin_guard import described
from tunedgemm.process.process_state import kept_torch_switches
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.timing import Timing
from tunedgemm.tuner.bits import Bits, StandardOperands, measure
from tunedgemm.tuner.candidates import baseline, candidates, refusal
from tunedgemm.tuner.rounds import Workload
from tunedgemm.tuner.search import QUICK
from tunedgemm.tuner.served import Served
from tunedgemm.tuner.trial import Bench, DeviceFault, Options, Place, Request, Sampler, Samples, failed
from tunedgemm.tuner.verify import Verifier

Answer = TypeVar("Answer")


@attrs.define(eq=False)
class Session:
    """State of a worker: one device, and the shape being tuned.

    Attributes:
        op_name: name of the op.
        index: number of the GPU; -1 is the CPU.
        options: how to tune.
        registry: the backends.
        bench: replaces measurement; None to measure.
        node: name of the machine; "" for the host name.
    """

    op_name: str
    index: int
    options: Options
    registry: Registry = attrs.field(factory=Registry)
    bench: Bench | None = None
    node: str = ""
    _launchers: dict[Solution, Launcher] = attrs.field(factory=dict, init=False)
    _shape: Shape | None = attrs.field(default=None, init=False)
    _sampler: Sampler | None = attrs.field(default=None, init=False)
    _verifier: Verifier | None = attrs.field(default=None, init=False)
    _served: Served | None = attrs.field(default=None, init=False)
    _standard: StandardOperands | None = attrs.field(default=None, init=False)
    _bound: tuple[Solution | None, dict[Shape, Launcher | Unsupported]] = attrs.field(default=(None, {}), init=False)
    _fingerprint: tuple[Any, ...] = attrs.field(default=(), init=False)

    @property
    def device(self) -> Device:
        """Return the device; the first use creates its context."""
        if self.index >= 0:
            torch.cuda.set_device(self.index)
        return device_of(self.index)

    def place(self) -> Place:
        """Return the device and its node."""
        return Place(self.device, self.node or socket.gethostname())

    def version(self, libtype: str) -> str:
        """Return the library version of a libtype; "" if it has none or does not load."""
        backend = self.registry.get(libtype)
        return self._keeping_switches(lambda: backend.library_version(self.device)) if isinstance(backend, Backend) else ""

    def libtypes(self) -> tuple[str, ...]:
        """Return the installed libtypes."""
        return self.registry.libtypes

    def baseline(self, shape: Shape) -> Solution | None:
        """Return the baseline of a shape."""
        return baseline(shape, self.device, self.registry)

    def refusal(self, libtype: str, shape: Shape) -> str:
        """Return why a backend supports a shape neither with nor without its bias; "" if it does."""
        backend = self.registry.get(libtype)
        if not isinstance(backend, Backend):
            return backend.reason
        return self._keeping_switches(lambda: refusal(shape, self.device, backend))

    def states_platform(self, libtype: str, op: str) -> bool:
        """Check that the backend's platforms, if any, include the op on this device."""
        backend = self.registry.get(libtype)
        platforms = backend.platforms if isinstance(backend, Backend) else ()
        return not platforms or any(platform.serves(op, self.device) for platform in platforms)

    def is_quick(self, libtype: str, op: str) -> bool:
        """Check that the options and the measured order of the backend's lists allow a quick search.

        `Options.deterministic` may exclude all solutions at the beginning of a list.
        """
        is_allowed = self.options.search == "quick" and not self.options.deterministic
        return is_allowed and self._backend(libtype).is_ranked(op, self.device)

    def solutions(self, libtype: str, shape: Shape) -> tuple[Solution, ...]:
        """Return the solutions of a backend."""
        backend = self._backend(libtype)
        most = self.options.candidates or (QUICK.most if self.is_quick(libtype, shape.op) else 0)
        listed = self._keeping_switches(lambda: candidates(shape, self.device, backend, most))
        if self.options.batch_invariant and (choice := self._keeping_switches(lambda: backend.invariant_fallback(shape, self.device))):
            return tuple(dict.fromkeys([*listed, choice]))  # some kernels are made for a class, and listed nowhere else
        return listed

    def why_none(self, libtype: str, shape: Shape) -> str:
        """Return why a backend offers no solution."""
        backend = self._backend(libtype)
        return self._keeping_switches(lambda: backend.why_none(shape, self.device))

    def neighbours(self, shape: Shape, leaders: Sequence[Solution]) -> tuple[Solution, ...]:
        """Return the neighbours of solutions of one backend."""
        backend = self._backend(leaders[0].libtype)
        near = self._keeping_switches(lambda: [near for leader in leaders for near in backend.refine(leader, shape, self.device)])
        return tuple(dict.fromkeys(near))

    def open(self, shape: Shape) -> None:
        """Make the operands of a shape, and free the previous ones."""
        if shape == self._shape:
            return
        self._free()
        self._make_operands(shape)
        self._shape = shape

    def _free(self) -> None:
        self._shape, self._launchers, self._standard = None, {}, None
        self._free_operands()

    def _free_operands(self) -> None:
        self._sampler, self._verifier, self._served = None, None, None
        gc.collect()
        if multiprocessing.parent_process() is not None:  # objects alive between shapes of a worker stay alive
            gc.freeze()
        if self.index >= 0:
            torch.cuda.empty_cache()

    def _make_operands(self, shape: Shape) -> None:
        self._free_operands()
        device, options = self.device, self.options
        op = with_tolerance(op_named(self.op_name), options)
        if self.bench is None:
            self._sampler = Workload(op, shape, device, cache=options.cache, timing=options.timing)
        else:
            self._sampler = self.bench(op, shape, device)
        copies: Sequence[tuple[Any, ...]] = getattr(self._sampler, "copies", ())
        sets = copies if len(copies) > 1 else [op.make_inputs(shape, device.torch_device, seed) for seed in (0, 1)]
        self._verifier = verifier = Verifier(op, shape, sets, options.errRatio)
        verifier.prepare()
        if isinstance(self._sampler, Workload):
            self._sampler.judge = lambda solution, out, index: self._judging(solution).judge(solution, out, verifier.variant(index))
        self._fingerprint = self._operands_now()

    def _operands_now(self) -> tuple[Any, ...]:
        """Return a fingerprint of the first and last operand set, to detect changes."""
        sets = self._checks.operand_sets
        return fingerprint([*sets[0], *sets[-1]])

    def _renew_changed_operands(self) -> bool:
        """Remake operands that calls have changed; keep the launchers and their state."""
        if self._operands_now() == self._fingerprint:
            return False
        assert self._shape is not None, "bind has opened the shape"
        self._make_operands(self._shape)
        return True

    def bind(self, shape: Shape, solution: Solution) -> Timing | None:
        """Bind a solution; return a Timing if it is refused."""
        self.open(shape)
        if solution in self._launchers:
            return None
        answer = self._run_on_device(lambda: self._backend(solution.libtype).bind(solution, shape, self.device))
        if isinstance(answer, Launcher):
            self._launchers[solution] = answer
            return None
        status = "out_of_resources" if "OutOfResources" in answer.reason else "unsupported"
        return Timing(shape, solution, status, detail=answer.reason[:500])

    def check_first(self, shape: Shape, solution: Solution) -> Timing:
        """Verify one call of a solution, before screening."""
        return self._bind_and_verify(shape, solution, lambda verifier, launcher: verifier.check_first(solution, launcher))

    def check(self, shape: Shape, solution: Solution) -> Timing:
        """Verify a solution, with the restrictions of `Options`."""
        timing = self._bind_and_verify(shape, solution, lambda verifier, launcher: verifier.check(solution, launcher))
        if timing.status == "ok" and self.options.deterministic and not timing.deterministic:
            return attrs.evolve(timing, status="nondeterministic", detail="four calls on the same operands gave different bits")
        return timing

    def bind_all(self, shape: Shape, solution: Solution, sizes: Sequence[int]) -> None:
        """Bind a solution at several M, ahead of `bits`, because compilations take long."""
        backend, canonical = self._backend(solution.libtype), op_named(self.op_name).canonical
        shapes = dict.fromkeys(canonical(shape.with_m(m)) for m in sizes)
        bound = {at: self._run_on_device(functools.partial(backend.bind, solution, at, self.device)) for at in shapes}
        self._bound = solution, bound

    def bits(self, shape: Shape, solution: Solution, sizes: Sequence[int]) -> Timing:
        """Measure the bits of a solution's rows at several M; *shape* has M = 0."""
        operands = self._standard_operands(shape)
        if self._bound[0] != solution:
            self.bind_all(shape, solution, sizes)
        any_m = operands.any_m if solution.libtype != BUILTIN else None  # torch's calls serve no class for every M
        found: Bits = self._run_on_device(lambda: measure(operands, self._bound[1].__getitem__, sizes, any_m, solution.sum_order))
        self._bound = None, {}
        if found.fault:
            self._alive(Timing(shape, solution, "failed", detail=found.fault))
        if operands.changed():
            self._standard = None
            return _changing(shape, solution)
        status = "failed" if found.raised else "ok" if found.label else "batch_variant" if found.fault else "unsupported"
        return Timing(shape, solution, status, batch_invariant=bool(found.label), bits=found.label, detail=found.detail[:500])

    def _standard_operands(self, shape: Shape) -> StandardOperands:
        """Return the standard operands of a shape, in place of those of the timed one."""
        if self._standard is None or self._standard.of != shape:
            self._free()
            self._standard = StandardOperands(op_named(self.op_name), shape, self.device.torch_device)
        return self._standard

    def check_again(self, shape: Shape, solution: Solution) -> Timing:
        """Verify a solution after timing, on the oldest operands, and from a graph if used."""
        graphs = self.options.timing == "graph"
        return self._bind_and_verify(
            shape, solution, lambda verifier, launcher: verifier.check_again(solution, launcher, graphed=launcher.graph_safe and graphs)
        )

    def check_served(self, shape: Shape, solution: Solution) -> Timing:
        """Verify all calls that a row with this solution serves; see `Served`."""
        bind = functools.partial(self._backend(solution.libtype).bind, solution, device=self.device)
        is_torchs = solution.libtype == BUILTIN
        return self._bind_and_verify(
            shape, solution, lambda by, launcher: self._served_checks(shape, by).check(solution, launcher, bind, is_torchs=is_torchs)
        )

    def _served_checks(self, shape: Shape, by: Verifier) -> Served:
        if self._served is None:
            solution = self.baseline(shape)
            launcher = self._backend(solution.libtype).bind(solution, shape, self.device) if solution else None
            self._served = Served(self._checks, self.device, launcher if isinstance(launcher, Launcher) else None)
        return self._served if by is self._checks else attrs.evolve(self._served, verifier=by)

    def _bind_and_verify(self, shape: Shape, solution: Solution, ask: Callable[[Verifier, Launcher], Timing]) -> Timing:
        """Bind and verify a solution; capture its sample, so that no capture interrupts the timing."""
        refusal = self.bind(shape, solution)
        if refusal is not None:
            return refusal
        verifier, launcher = self._judging(solution), self._launchers[solution]

        def verify() -> Timing:
            answer = ask(verifier, launcher)
            if answer.status == "ok" and isinstance(self._sampler, Workload):
                self._sampler.prepare(solution, launcher)
            return answer

        try:
            timing: Timing = self._run_on_device(verify)
        except DeviceFault:
            raise
        except Exception:
            self._renew_changed_operands()
            raise
        if self._renew_changed_operands():
            return _changing(shape, solution)
        return timing

    def sample(self, shape: Shape, solutions: Sequence[Solution], rounds: int) -> dict[Solution, Samples | Timing]:
        """Time solutions in interleaved rounds; return a Timing for a failure.

        Raises:
            DeviceFault: one of several solutions changed the operands; a retry one by one finds it.
        """
        refusals = [(solution, self.bind(shape, solution)) for solution in solutions]
        answers: dict[Solution, Samples | Timing] = {solution: refusal for solution, refusal in refusals if refusal is not None}
        launchers = {solution: self._launchers[solution] for solution in solutions if solution not in answers}
        sampler = self._sampler
        assert sampler is not None, "bind has opened the shape"
        samples = self._run_on_device(lambda: sampler(launchers, rounds))
        if self._renew_changed_operands():
            if len(launchers) > 1:
                raise DeviceFault("it changed its operands in a later call")
            return {**answers, **{solution: _changing(shape, solution) for solution in launchers}}
        for solution, answer in samples.items():
            if isinstance(answer, Exception):
                self._alive(answer)
            answers[solution] = failed(shape, solution, answer) if isinstance(answer, Exception) else answer
        return answers

    def each(self, requests: Iterable[Request]) -> list[Timing | None]:
        """Run a batch of requests about one solution each, since messages are costly.

        Returns a Timing for a failure.

        Raises:
            DeviceFault: a request broke the device's context.
        """
        answers: list[Timing | None] = []
        for request in requests:
            try:
                answers.append(request.run(self))
            except DeviceFault:
                raise
            except Exception as error:  # a plugin may raise anything
                answers.append(failed(request.arguments[0], request.arguments[1], error))
        return answers

    def forget(self, shape: Shape, keep: Iterable[Solution]) -> None:
        """Free the launchers of a shape, except those of some solutions."""
        if shape == self._shape:
            self._launchers = {solution: launcher for solution, launcher in self._launchers.items() if solution in set(keep)}
            if isinstance(self._sampler, Workload):
                self._sampler.forget(self._launchers)

    def _judging(self, solution: Solution) -> Verifier:
        """Return the verifier that judges a solution."""
        return self._checks.of(solution)

    @property
    def _checks(self) -> Verifier:
        assert self._verifier is not None, "bind has opened the shape"
        return self._verifier

    def _backend(self, libtype: str) -> Backend:
        backend = self.registry.get(libtype)
        if not isinstance(backend, Backend):
            raise TunedGemmError(f"libtype {libtype!r}: {backend.reason}")
        return backend

    def _keeping_switches(self, action: Callable[[], Answer]) -> Answer:
        """Run plugin code, and restore torch's global settings.

        Raises:
            PluginError: it changed a setting or tried to exit.
        """
        changed = list[str]()
        with kept_torch_switches(changed):
            try:
                answer = action()
            except (Exception, KeyboardInterrupt):
                raise
            except BaseException as error:
                raise PluginError(f"it raised {described(error)}") from error
        if changed:
            raise PluginError(f"it changed {' and '.join(changed)}, which the kernels of others depend on")
        return answer

    def _run_on_device(self, action: Callable[[], Any]) -> Any:
        """Run an action on the device, then check its context.

        Raises:
            DeviceFault: the action broke the device's context.
        """
        try:
            answer = self._keeping_switches(action)
        except Exception as error:
            self._alive(error)
            raise
        if (isinstance(answer, Timing) and answer.status == "failed") or isinstance(answer, Unsupported):
            self._alive(answer)
        return answer

    def _alive(self, blamed: object) -> None:
        if self.index < 0:
            return
        try:
            torch.cuda.synchronize(self.index)
        except Exception as error:
            detail = blamed.detail if isinstance(blamed, Timing) else str(error)
            raise DeviceFault(f"{detail}"[:500]) from None


def _changing(shape: Shape, solution: Solution) -> Timing:
    """Return the Timing of a solution whose later calls change its operands."""
    return Timing(shape, solution, "wrong", err_ratio=1.0, detail="a later call changed its operands")


def with_tolerance(op: Op, options: Options) -> Op:
    """Return an op with the tolerance of the options."""
    own = op.tolerance
    return attrs.evolve(op, tolerance=lambda shape: with_flags(own(shape), options.atol, options.rtol, options.errRatio))
