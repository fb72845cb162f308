"""Finds backends by entry point, loads them one at a time and guarded, and binds their hooks.

A broken plugin is skipped and its reason is kept; requested by name it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import attrs

from tunedgemm.backends import hookspecs, split
from tunedgemm.backends.contract import (
    about_kernels,
    bound_hooks,
    check_name,
    guarded_details,
    guarded_version,
    stated_names,
    stated_options,
    stated_platforms,
    stated_rows,
    stated_variables,
)
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.option import Option
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError, PluginError
from tunedgemm.libtypes import BUILTIN, listed, owners, pip_hint, rank
from tunedgemm.ops import ops
from tunedgemm.ops.scale_order import SHUFFLED, scale_order, usual_order
from tunedgemm.process.foreign import attempt, described, entry_points, load
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution, Unsupported
from tunedgemm.text.printable import warn_once
from tunedgemm.version import __version__

GROUP = "tunedgemm.backends"
#: Most solutions of one list; a longer one never ends.
MOST_SOLUTIONS = 500_000
_END = object()
_BUILTIN_ENTRY = EntryPoint(BUILTIN, "tunedgemm.backends.builtin", GROUP)


@attrs.frozen(eq=False)
class Backend:
    """One plugin's hooks under one libtype, validated and bound as plain functions.

    Its methods check what the plugin returns, and raise PluginError where it breaks the contract.
    Where the core adds a bias after a kernel, the plugin is asked about the kernel alone.
    """

    libtype: str
    distribution: str
    version: str
    ops: tuple[str, ...]
    hooks: Mapping[str, Callable[..., Any]]
    library_version: Callable[[Device], str]
    details: Callable[[Device], tuple[str, ...]] = lambda _: ()
    lacks: Callable[[Solution, Shape, Device], str] = hookspecs.lacks
    source_of: Callable[[Solution, Shape, Device], str] = hookspecs.source_of
    options: tuple[Option, ...] = ()
    scale_orders: tuple[str, ...] = ()
    platforms: tuple[Platform, ...] = ()
    rows: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def supports(self, shape: Shape, device: Device, solution: Solution | None = None) -> bool | Unsupported:
        """Return True, or the reason for a refusal, which may be the hook's exception.

        With a *solution*, ask for the shape that its kernel runs.
        """
        if solution is not None:
            whole = split.kernel_and_shape(solution, shape)
            if isinstance(whole, Unsupported):
                return whole
            _, shape = whole
        if shape.op not in self.ops:
            return Unsupported(f"op {shape.op} is not covered (covers {', '.join(self.ops)})")
        orders = (usual_order(shape), *self.scale_orders)
        if (order := scale_order(shape)) not in orders:
            return Unsupported(f"scale_order must be {' or '.join(dict.fromkeys(orders))} (got {order})")
        answer: bool | Unsupported = self._asked("supports", "True", lambda answer: answer is True, shape, device)
        return answer

    def solutions(self, shape: Shape, device: Device) -> list[Solution]:
        """Return the solutions of a shape in the plugin's order, without duplicates.

        Raises:
            PluginError: the hook raised, or returned anything but Solutions of this libtype.
        """
        return self._solutions("enumerate_solutions", shape, device)

    def refine(self, solution: Solution, shape: Shape, device: Device) -> list[Solution]:
        """Return the neighbours of a solution; none where the plugin has no `refine`."""
        whole = split.kernel_and_shape(solution, shape)
        if "refine" not in self.hooks or isinstance(whole, Unsupported):
            return []
        neighbours = self._solutions("refine", *whole, device)
        return [split.with_add(near) for near in neighbours] if split.is_split(solution) else neighbours

    def _solutions(self, hook: str, *arguments: Any) -> list[Solution]:
        return list(dict.fromkeys(self.iterate(hook, *arguments)))

    def iterate(self, hook: str, *arguments: Any) -> Iterator[Solution]:
        """Yield the solutions that a hook gives, in the plugin's order and as the plugin lists them.

        Raises:
            PluginError: the hook raised, or gave something that is not a Solution of this libtype.
        """
        listed: Any = None
        solutions, raised = attempt(lambda: iter(self.hooks[hook](*arguments)))

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
        """Return why a listed value breaks the contract, or ""."""
        if not isinstance(solution, Solution) or solution.libtype != self.libtype:
            return f"returned a foreign solution: {solution!r}"
        return f"returned {solution}; names that end in {ADD} are the core's" if solution.kernel_name.endswith(ADD) else ""

    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the plugin's choice for an untuned call; None where it has none or its hook fails."""
        hook = self.hooks.get("heuristic_fallback")
        if hook is None or not self.supports(shape, device):
            return None

        def own() -> Solution | None:
            choice = hook(shape, device)
            return choice if isinstance(choice, Solution) and choice.libtype == self.libtype else None

        chosen: Solution | None = attempt(own)[0]  # if it raises, an untuned call has other fallbacks
        return chosen

    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Return the launcher of a solution for exactly this shape; an exception becomes a refusal.

        The plugin's launcher gets plain tensors: shuffled weights and scales come as their bytes
        are in memory. A plain `run`, which does not get the shape, gets the operands unchanged.
        """
        whole = split.kernel_and_shape(solution, shape)
        if isinstance(whole, Unsupported):
            return whole
        if split.is_split(solution):
            of_product = self.bind(*whole, device)
            return split.wrap_with_add(of_product, shape) if isinstance(of_product, Launcher) else of_product
        answer = self.bind_unwrapped(solution, shape, device)
        return with_plain_weights(answer, shape) if isinstance(answer, Launcher) and "bind" in self.hooks else answer

    def bind_unwrapped(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Bind without the wrapper between the operands of a call and the plugin's launcher."""
        if "bind" not in self.hooks:
            run = self.hooks["run"]
            # A plain `run` may do anything at its first call, so it is kept out of
            # captures.
            return Launcher(lambda *operands: run(solution, operands), graph_safe=False)
        answer: Launcher | Unsupported = self._asked(
            "bind", "a Launcher", lambda answer: isinstance(answer, Launcher), solution, shape, device
        )
        return answer

    def _asked(self, hook: str, wanted: str, is_wanted: Callable[[Any], bool], *arguments: Any) -> Any:
        """Return a hook's answer, or a refusal: the plugin's, or how it broke the contract."""

        passing: list[bool] = []

        def answered() -> Any:
            try:
                answer = self.hooks[hook](*arguments)
            except BaseException as error:  # which `attempt` judges
                passing.append(is_out_of_memory(error))
                raise
            if is_wanted(answer):
                return answer
            if isinstance(answer, Unsupported):
                return Unsupported(answer.reason)
            return Unsupported(f"its {hook}() returned {answer!r} instead of {wanted} or Unsupported(reason)")

        answer, fault = attempt(answered)  # also for the answer's class, text and attributes
        return Unsupported(f"its {hook}() raised {fault}", passing=any(passing)) if fault else answer

    def run(self, solution: Solution, shape: Shape, device: Device, operands: tuple[Any, ...]) -> Any:
        """Launch eagerly: the plugin's `run`, on the operands unchanged, else through `bind`.

        Raises:
            PluginError: `bind` refused.
        """
        if "run" in self.hooks and not split.is_split(solution):
            return self.hooks["run"](solution, operands)
        launcher = self.bind(solution, shape, device)
        if isinstance(launcher, Unsupported):
            raise PluginError(f"libtype {self.libtype!r}: {solution} cannot run {shape}: {launcher.reason}")
        return launcher.call(*operands)

    def prepare(self, solution: Solution, shape: Shape, device: Device) -> None:
        """Compile ahead, where the plugin can."""
        whole = split.kernel_and_shape(solution, shape)
        if "prepare" in self.hooks and not isinstance(whole, Unsupported):
            self.hooks["prepare"](*whole, device)


def with_plain_weights(launcher: Launcher, shape: Shape) -> Launcher:
    """Wrap a launcher to take shuffled weights and scales out of their types, where the shape has such.

    See `Backend.bind`.
    """
    if shape.layout == "row" and scale_order(shape) != SHUFFLED:
        return launcher
    from torch import Tensor  # a caller that launches has loaded it

    from tunedgemm.ops.formats.shuffle import plain_weight

    call = launcher.call

    def unwrapped(*operands: Any) -> Any:
        return call(*[operand if type(operand) is Tensor else plain_weight(operand) for operand in operands])

    return attrs.evolve(launcher, call=unwrapped)


class Registry:
    """The installed backends by libtype, each loaded on first use."""

    def __init__(self, entries: Iterable[EntryPoint] | None = None) -> None:
        points = entry_points(group=GROUP) if entries is None else entries
        self._entries, self._rivals = _by_name(points)
        self._loaded: dict[str, Backend | Unsupported] = {}
        self._runners: dict[tuple[str, str], tuple[Backend, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the entry points; another process loads its plugins anew."""
        return type(self), (list(self._entries.values()),)

    @property
    def libtypes(self) -> tuple[str, ...]:
        """Return the installed libtypes in order of rank, even those that do not load."""
        return tuple(sorted(self._entries, key=rank))

    def __contains__(self, libtype: object) -> bool:
        """Tell whether a libtype is installed, even one that does not load."""
        return libtype in self._entries

    def get(self, libtype: str) -> Backend | Unsupported:
        """Return the backend of a libtype, or why there is none; import that plugin on first use."""
        if libtype not in self._loaded:
            entry = self._entries.get(libtype)
            self._loaded[libtype] = self._missing(libtype) if entry is None else _load(entry)
        return self._loaded[libtype]

    def runners(self, op: str, libtype: str) -> tuple[Backend, ...]:
        """Return the backends that state in ``ROWS`` that they run such rows.

        The first call imports all plugins.
        """
        if (op, libtype) not in self._runners:
            self._runners[op, libtype] = tuple(backend for backend in self._all() if f"{op}:{libtype}" in backend.rows)
        return self._runners[op, libtype]

    def problems(self, libtype: str) -> tuple[str, ...]:
        """Return problems other than a failed load: other distributions that claim the same libtype."""
        return tuple(self._rivals.get(libtype, ()))

    def select(self, libtypes: str = "all") -> list[Backend]:
        """Return the backends of a ``--libtype`` text: ``all`` that load, or a comma list.

        ``all`` is in order of rank, with a warning of others. A list is in its order, and ``both``
        is ck and cktile.

        Raises:
            LibtypeError: a named one is unknown or does not load; the message names the remedy.
        """
        wanted = listed(libtypes)
        if not wanted:
            return self._all()
        selected = []
        for libtype in wanted:
            answer = self.get(libtype)
            if isinstance(answer, Unsupported):
                raise LibtypeError(f"libtype {libtype!r}: {answer.reason}")
            selected.append(answer)
        return selected

    def _all(self) -> list[Backend]:
        """Return the installed backends that load; warn of each other one, once in a process."""
        answers = {libtype: self.get(libtype) for libtype in self.libtypes}
        for libtype, answer in answers.items():
            if isinstance(answer, Unsupported):
                warn_once(f"libtype {libtype!r}: left out: {answer.reason}")
        return [answer for answer in answers.values() if isinstance(answer, Backend)]

    def add(self, backend: Backend) -> None:
        """Add a backend to this registry only, for tests and experiments."""
        self._entries[backend.libtype] = EntryPoint(backend.libtype, "", GROUP)
        self._loaded[backend.libtype] = backend
        self._runners.clear()

    def _missing(self, libtype: str) -> Unsupported:
        hint = pip_hint(libtype)
        how = f"not installed; {hint}" if hint else f"no backend of that name; installed: {', '.join(self.libtypes)}"
        return Unsupported(how)


def make_backend(libtype: str, plugin: object, distribution: str = "", version: str = "") -> Backend:
    """Check an object with hookimpls against the contract and bind its hooks.

    Raises:
        PluginError: names the libtype, the hook and the fault.
    """
    check_name(libtype)
    hooks, covered = bound_hooks(libtype, plugin), stated_names(libtype, plugin, "OPS")
    if not covered:
        raise PluginError(f"libtype {libtype!r}: states no OPS; choose from {', '.join(ops())}")
    options = stated_options(libtype, getattr(plugin, "OPTIONS", ()))
    return Backend(
        *(libtype, distribution, version, covered, hooks),
        library_version=guarded_version(libtype, getattr(plugin, "library_version", None)),
        details=guarded_details(getattr(plugin, "details", None)),
        lacks=about_kernels(libtype, plugin, "lacks"),
        source_of=about_kernels(libtype, plugin, "source_of"),
        options=options,
        scale_orders=stated_names(libtype, plugin, "SCALE_ORDERS"),
        platforms=stated_platforms(libtype, getattr(plugin, "PLATFORMS", ()), covered),
        rows=stated_rows(libtype, plugin, covered),
        variables=stated_variables(libtype, plugin, options),
    )


def _load(entry: EntryPoint) -> Backend | Unsupported:
    distribution = _owner(entry)
    version = entry.dist.version if entry.dist else __version__
    plugin, fault = load(entry)
    if fault:
        return Unsupported(f"{distribution} cannot be imported: {fault}")
    try:
        return make_backend(entry.name, plugin, distribution, version)
    except PluginError as error:
        return Unsupported(f"{distribution} breaks the contract: {error}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # its attributes may raise anything
        return Unsupported(f"{distribution} breaks the contract: {described(error)}")


def _by_name(points: Iterable[EntryPoint]) -> tuple[dict[str, EntryPoint], dict[str, list[str]]]:
    """Return one entry per libtype: of several claimants our distribution's, else the first by name."""
    official = owners()
    claims: dict[str, list[EntryPoint]] = {BUILTIN: [_BUILTIN_ENTRY]}
    for entry in points:
        if (entry.name, entry.value) != (_BUILTIN_ENTRY.name, _BUILTIN_ENTRY.value):
            claims.setdefault(entry.name, []).append(entry)
    entries, rivals = {}, {}
    for name, claimants in claims.items():
        ordered = sorted(claimants, key=lambda entry: _claim_rank(entry, official.get(name)))
        entries[name] = ordered[0]
        if len({entry.value for entry in ordered}) > 1:
            rivals[name] = [f"{_owner(entry)} also claims libtype {name!r}; {_owner(ordered[0])} keeps it" for entry in ordered[1:]]
    return entries, rivals


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "tunedgemm"


def _claim_rank(entry: EntryPoint, official: str | None) -> tuple[Any, ...]:
    return entry is not _BUILTIN_ENTRY, _owner(entry) != official, _owner(entry), entry.value


def tie_order(backends: Sequence[Backend], libtypes: str) -> dict[str, int]:
    """Map each libtype to its position for ties: the order of ``--libtype``, else the rank."""
    ranked = sorted((backend.libtype for backend in backends), key=rank)
    return {libtype: position for position, libtype in enumerate(dict.fromkeys([*listed(libtypes), *ranked]))}
