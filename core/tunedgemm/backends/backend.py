"""Backend: what a plugin registers under one libtype, and the guarded questions of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from tunedgemm.backends import split_bias
from tunedgemm.backends.contract import (
    bound_hooks,
    check_contract,
    check_libtype,
    check_ops,
    check_options,
    check_orders,
    check_platforms,
    check_rows,
    check_variables,
    tuple_of,
)
from tunedgemm.backends.hookspecs import CONTRACT
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.option import Option
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.errors import PluginError
from tunedgemm.ops.scale_order import SHUFFLED, scale_order, usual_order
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution, Unsupported
from tunedgemm.text.cell import RULE, is_kept
from tunedgemm.text.printable import warn_once

#: Most solutions per list; a longer one is assumed to be endless.
MOST_SOLUTIONS = 500_000
_END = object()


@attrs.frozen(eq=False)
class Backend:
    """A plugin's kernels under one libtype: a record of properties and hooks.

    Its methods call the hooks, check the results, and raise PluginError if a plugin breaks the
    contract. Hooks get the device whose limits apply, and only supported shapes. For a split bias,
    they get the kernel's unbiased shape.

    Raises:
        PluginError: a field or a hook is invalid.

    Attributes:
        libtype: the name of the entry point.
        hooks: a module or instance whose public functions are hooks, marked with `hookimpl`.
        ops: names of the ops that it supports.
        platforms: supported architectures, their requirements, and tested hardware.
        rows: other libtypes whose rows it can run, as ``op:libtype``, if their own backend cannot.
        scale_orders: supported orders of scales, in addition to the default one.
        options: its options of ``tunedgemm tune``.
        variables: environment variables that it reads, except those of its options.
        contract: version of the contract that it implements.
        host: the device that a CPU emulates, in tests over fakes.
        distribution, version: its distribution, set by the registry.
        functions: hook name -> function that takes all arguments of the hook by position.
    """

    libtype: str = attrs.field(validator=check_libtype)
    hooks: Any
    contract: int = attrs.field(default=CONTRACT, kw_only=True, validator=check_contract)
    ops: tuple[str, ...] = attrs.field(kw_only=True, validator=[tuple_of(str), check_ops])
    platforms: tuple[Platform, ...] = attrs.field(default=(), kw_only=True, validator=[tuple_of(Platform), check_platforms])
    rows: tuple[str, ...] = attrs.field(default=(), kw_only=True, validator=[tuple_of(str), check_rows])
    scale_orders: tuple[str, ...] = attrs.field(default=(), kw_only=True, validator=[tuple_of(str), check_orders])
    options: tuple[Option, ...] = attrs.field(default=(), kw_only=True, validator=[tuple_of(Option), check_options])
    variables: tuple[str, ...] = attrs.field(default=(), kw_only=True, validator=[tuple_of(str), check_variables])
    host: Device | None = attrs.field(default=None, kw_only=True)
    distribution: str = attrs.field(default="", kw_only=True)
    version: str = attrs.field(default="", kw_only=True)
    functions: Mapping[str, Callable[..., Any]] = attrs.field(init=False, repr=False)

    @functions.default
    def _functions(self) -> Mapping[str, Callable[..., Any]]:
        return bound_hooks(self.libtype, self.hooks)

    def refusal(self, shape: Shape, device: Device, solution: Solution | None = None) -> Unsupported | None:
        """Return why static limits exclude a shape, or that the hook failed; else None.

        With a *solution*, check the shape of its kernel, which may have no bias.
        """
        if solution is not None:
            whole = split_bias.kernel_and_shape(solution, shape)
            if isinstance(whole, Unsupported):
                return whole
            _, shape = whole
        if shape.op not in self.ops:
            return Unsupported(f"op {shape.op} is not covered (covers {', '.join(self.ops)})")
        orders = (usual_order(shape), *self.scale_orders)
        if (order := scale_order(shape)) not in orders:
            return Unsupported(f"scale_order must be {' or '.join(dict.fromkeys(orders))} (got {order})")
        answer: Unsupported | None = self._asked("supports", type(None), shape, device.limiting(self.host))
        return answer

    def solutions(self, shape: Shape, device: Device) -> list[Solution]:
        """Return the solutions of a shape in the plugin's order, without duplicates.

        Raises:
            PluginError: the hook raised, or returned something other than Solutions of this
                libtype.
        """
        return list(dict.fromkeys(self.iterate(shape, device)))

    def iterate(self, shape: Shape, device: Device) -> Iterator[Solution]:
        """Yield the solutions of a shape in the plugin's order; none if it is not supported.

        Raises:
            PluginError: as `solutions`.
        """
        return iter(()) if self.refusal(shape, device) else self._listed("enumerate_solutions", shape, device)

    def is_ranked(self, op: str, device: Device) -> bool:
        """Check that measured times confirm the order of the plugin's lists."""
        return any(platform.is_ranked(op, device) for platform in self.platforms)

    def refine(self, solution: Solution, shape: Shape, device: Device) -> list[Solution]:
        """Return the neighbours of a solution; none without a `refine` hook."""
        whole = split_bias.kernel_and_shape(solution, shape)
        if "refine" not in self.functions or isinstance(whole, Unsupported) or self.refusal(whole[1], device):
            return []
        neighbours = list(dict.fromkeys(self._listed("refine", *whole, device)))
        return [split_bias.with_add(near) for near in neighbours] if split_bias.is_split(solution) else neighbours

    def _listed(self, hook: str, *arguments: Any) -> Iterator[Solution]:
        """Yield the checked solutions of a hook."""
        *before, device = arguments
        listed: Any = None
        solutions, raised = attempt(lambda: iter(self.functions[hook](*before, device.limiting(self.host))))

        def following() -> tuple[Any, str]:
            solution = next(solutions, _END)
            return solution, "" if solution is _END else self._fault_of(solution)

        for _ in range(MOST_SOLUTIONS):
            if not raised:
                listed, raised = attempt(following)
            if fault := f"raised {raised}" if raised else listed[1]:
                raise PluginError(f"libtype {self.libtype!r}: {hook}() {fault}")
            if listed[0] is _END:
                return
            yield listed[0]
        raise PluginError(f"libtype {self.libtype!r}: {hook}() lists more than {MOST_SOLUTIONS} solutions")

    def _fault_of(self, solution: Any) -> str:
        """Return why a value is not a valid solution, or ""."""
        if not isinstance(solution, Solution) or solution.libtype != self.libtype:
            return f"returned a foreign solution: {solution!r}"
        return f"returned {solution}; names that end in {ADD} are the core's" if solution.kernel_name.endswith(ADD) else ""

    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the plugin's choice for an untuned call; None if it has none or its hook fails."""
        return self._chosen("heuristic_fallback", shape, device)

    def invariant_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the plugin's choice for an untuned call in batch-invariant mode; see the hook.

        None if it has none, if its hook fails, or if the choice names no order of sums.
        """
        chosen = self._chosen("invariant_fallback", shape, device)
        return chosen if chosen is not None and chosen.sum_order else None

    def _chosen(self, name: str, shape: Shape, device: Device) -> Solution | None:
        """Return the solution that a hook chooses for a supported shape."""
        hook = self.functions.get(name)
        if hook is None or self.refusal(shape, device):
            return None

        def own() -> Solution | None:
            choice = hook(shape, device.limiting(self.host))
            return choice if isinstance(choice, Solution) and choice.libtype == self.libtype else None

        chosen: Solution | None = attempt(own)[0]  # if it raises, an untuned call has other fallbacks
        return chosen

    def bind(self, solution: Solution, shape: Shape, device: Device, *, asked: bool = False) -> Launcher | Unsupported:
        """Bind a solution to exactly this shape; an exception becomes a refusal.

        *asked* means that `refusal` has just accepted the kernel's shape.

        The plugin's launcher gets shuffled weights and scales as plain tensors of their bytes. A
        plugin with only `run`, which does not get the shape, gets the operands unchanged.
        """
        whole = split_bias.kernel_and_shape(solution, shape)
        if isinstance(whole, Unsupported):
            return whole
        if split_bias.is_split(solution):
            of_product = self.bind(*whole, device, asked=asked)
            return split_bias.wrap_with_add(of_product, shape) if isinstance(of_product, Launcher) else of_product
        answer = self.bind_unwrapped(solution, shape, device, asked=asked)
        return with_plain_weights(answer, shape) if isinstance(answer, Launcher) and "bind" in self.functions else answer

    def bind_unwrapped(self, solution: Solution, shape: Shape, device: Device, *, asked: bool = False) -> Launcher | Unsupported:
        """Bind without the wrapper that converts shuffled operands to plain tensors."""
        if not asked and (refusal := self.refusal(shape, device)):
            return refusal
        if not (limiting := device.limiting(self.host)).is_present:
            return Unsupported(f"device: not present (got {device})")
        if "bind" not in self.functions:
            run = self.functions["run"]
            # `run` may do anything at its first call, so it must not be captured.
            return Launcher(lambda *operands: run(solution, operands), graph_safe=False)
        answer: Launcher | Unsupported = self._asked("bind", Launcher, solution, shape, limiting)
        return answer

    def _asked(self, hook: str, wanted: type[Any], *arguments: Any) -> Any:
        """Return a hook's result, or a refusal by the plugin or for a broken contract."""
        passing: list[bool] = []

        def answered() -> Any:
            try:
                answer = self.functions[hook](*arguments)
            except PluginError as error:
                return Unsupported(str(error))
            except BaseException as error:  # which `attempt` judges
                passing.append(is_out_of_memory(error))
                raise
            if isinstance(answer, wanted):
                return answer
            if isinstance(answer, Unsupported):
                return Unsupported(answer.reason)
            expected = "None" if wanted is type(None) else f"a {wanted.__name__}"
            return Unsupported(f"its {hook}() returned {answer!r} instead of {expected} or Unsupported(reason)")

        answer, fault = attempt(answered)  # also for the answer's class, text and attributes
        return Unsupported(f"its {hook}() raised {fault}", passing=any(passing)) if fault else answer

    def run(self, solution: Solution, shape: Shape, device: Device, operands: tuple[Any, ...]) -> Any:
        """Launch eagerly, by the plugin's `run` on unchanged operands, else by `bind`.

        Raises:
            PluginError: `bind` refused.
        """
        if "run" in self.functions and not split_bias.is_split(solution):
            return self.functions["run"](solution, operands)
        launcher = self.bind(solution, shape, device)
        if isinstance(launcher, Unsupported):
            raise PluginError(f"libtype {self.libtype!r}: {solution} cannot run {shape}: {launcher.reason}")
        return launcher.call(*operands)

    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile ahead, if the plugin has a `prepare` hook and supports the shape."""
        whole = split_bias.kernel_and_shape(solution, shape)
        if "prepare" in self.functions and not isinstance(whole, Unsupported) and not self.refusal(whole[1], device):
            self.functions["prepare"](*whole, device.limiting(self.host))

    def lacks(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return why `bind` would refuse a solution, if the plugin knows without binding; else ""."""
        if "lacks" not in self.functions:
            return ""
        refusal = self.refusal(shape, device, solution)
        return str(refusal) if refusal else self._text("lacks", solution, shape, device)

    def why_none(self, shape: Shape, device: Device) -> str:
        """Return why a supported shape has no solutions."""
        return self.lacks(Solution(self.libtype), shape, device) or f"{self.libtype} lists no kernel for this shape"

    def source_of(self, solution: Solution, shape: Shape, device: Device) -> str:
        """Return the file and entry from which the plugin chose a solution, or ""."""
        return "" if self.refusal(shape, device, solution) else self._text("source_of", solution, shape, device)

    def _text(self, hook: str, solution: Solution, shape: Shape, device: Device) -> str:
        """Return the text of a hook; "" if it is missing, fails or returns something else."""
        whole = split_bias.kernel_and_shape(solution, shape)
        if hook not in self.functions or isinstance(whole, Unsupported):
            return ""

        def text() -> str:
            try:
                answer = self.functions[hook](*whole, device.limiting(self.host))
            except PluginError as error:
                return str(error)
            return answer if isinstance(answer, str) else ""

        return attempt(text)[0] or ""

    def library_version(self, device: Device) -> str:
        """Return the library version; "" if it is unknown or cannot be stored in a table."""
        if "library_version" not in self.functions:
            return ""
        answer, _ = attempt(self.functions["library_version"], device.limiting(self.host))
        version = answer.strip() if isinstance(answer, str) else ""
        if is_kept(version):
            return version
        warn_once(f"libtype {self.libtype!r}: library_version() must be {RULE} (got {version!r:.80}); its rows have none")
        return ""

    def details(self, device: Device) -> tuple[str, ...]:
        """Return the plugin's lines about this machine, or the reason why its hook failed."""
        if "details" not in self.functions:
            return ()

        def lines() -> tuple[str, ...]:
            return tuple(" ".join(str(line).splitlines()) for line in self.functions["details"](device.limiting(self.host)))

        answer, fault = attempt(lines)
        return (f"its details() raised {fault}",) if fault else answer


def with_plain_weights(launcher: Launcher, shape: Shape) -> Launcher:
    """Wrap a launcher to convert shuffled weights and scales to plain tensors; see `Backend.bind`."""
    if shape.layout == "row" and scale_order(shape) != SHUFFLED:
        return launcher
    from torch import Tensor  # already imported when launching

    from tunedgemm.ops.formats.shuffle import plain_weight

    call = launcher.call

    def unwrapped(*operands: Any) -> Any:
        return call(*[operand if type(operand) is Tensor else plain_weight(operand) for operand in operands])

    return attrs.evolve(launcher, call=unwrapped)
