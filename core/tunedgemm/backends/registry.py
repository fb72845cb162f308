"""Finds backends by entry point, loads them one at a time and guarded, and binds their hooks.

A broken plugin is skipped and its reason is kept; requested by name it is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs
import pluggy

from tunedgemm import __version__
from tunedgemm.backends import hookspecs, split
from tunedgemm.backends.hookspecs import CONTRACT
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.option import Option
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError, PluginError
from tunedgemm.libtypes import BUILTIN, listed, owners, pip_hint, rank
from tunedgemm.ops import ops
from tunedgemm.ops.scale_order import SHUFFLED, scale_order, usual_order
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution, Unsupported

GROUP = "tunedgemm.backends"
HOOKS = ("supports", "enumerate_solutions", "run", "heuristic_fallback", "bind", "prepare", "refine")
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
        try:
            answer = self.hooks["supports"](shape, device)
        except Exception as error:  # a plugin may raise anything
            return Unsupported(f"its supports() raised {type(error).__name__}: {error}")
        if answer is True or isinstance(answer, Unsupported):
            return answer
        return Unsupported(f"its supports() returned {answer!r} instead of True or Unsupported(reason)")

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
        solution: Any = None
        try:
            for solution in self.hooks[hook](*arguments):
                if not isinstance(solution, Solution) or solution.libtype != self.libtype:
                    break
                if solution.kernel_name.endswith(ADD):
                    break
                yield solution
            else:
                return
        except Exception as error:
            raise PluginError(f"libtype {self.libtype!r}: {hook}() raised {type(error).__name__}: {error}") from error
        if not isinstance(solution, Solution) or solution.libtype != self.libtype:
            raise PluginError(f"libtype {self.libtype!r}: {hook}() returned a foreign solution: {solution!r}")
        raise PluginError(f"libtype {self.libtype!r}: {hook}() returned {solution}; names that end in {ADD} are the core's")

    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the plugin's choice for an untuned call; None where it has none or its hook fails."""
        hook = self.hooks.get("heuristic_fallback")
        if hook is None or not self.supports(shape, device):
            return None
        try:
            choice = hook(shape, device)
        except Exception:  # an untuned call has other fallbacks
            return None
        return choice if isinstance(choice, Solution) and choice.libtype == self.libtype else None

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
        try:
            answer = self.hooks["bind"](solution, shape, device)
        except Exception as error:
            return Unsupported(f"its bind() raised {type(error).__name__}: {error}")
        if isinstance(answer, Launcher | Unsupported):
            return answer
        return Unsupported(f"its bind() returned {answer!r} instead of a Launcher or Unsupported(reason)")

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

    def problems(self, libtype: str) -> tuple[str, ...]:
        """Return problems other than a failed load: other distributions that claim the same libtype."""
        return tuple(self._rivals.get(libtype, ()))

    def select(self, libtypes: str = "all") -> list[Backend]:
        """Return the backends of a ``--libtype`` text: ``all`` that load, or a comma list.

        ``all`` is in order of rank, a list in its order, and ``both`` is ck and cktile.

        Raises:
            LibtypeError: a named one is unknown or does not load; the message names the remedy.
        """
        wanted = listed(libtypes)
        if not wanted:
            answers = [self.get(libtype) for libtype in self.libtypes]
            return [answer for answer in answers if isinstance(answer, Backend)]
        selected = []
        for libtype in wanted:
            answer = self.get(libtype)
            if isinstance(answer, Unsupported):
                raise LibtypeError(f"libtype {libtype!r}: {answer.reason}")
            selected.append(answer)
        return selected

    def add(self, backend: Backend) -> None:
        """Add a backend to this registry only, for tests and experiments."""
        self._entries[backend.libtype] = EntryPoint(backend.libtype, "", GROUP)
        self._loaded[backend.libtype] = backend

    def _missing(self, libtype: str) -> Unsupported:
        hint = pip_hint(libtype)
        how = f"not installed; {hint}" if hint else f"no backend of that name; installed: {', '.join(self.libtypes)}"
        return Unsupported(how)


def make_backend(libtype: str, plugin: object, distribution: str = "", version: str = "") -> Backend:
    """Check an object with hookimpls against the contract and bind its hooks.

    Raises:
        PluginError: names the libtype, the hook and the fault.
    """
    contract = getattr(plugin, "CONTRACT", CONTRACT)
    if contract not in (CONTRACT, CONTRACT - 1):
        raise PluginError(f"written for contract {contract}; this core knows {CONTRACT - 1} and {CONTRACT}")
    manager = pluggy.PluginManager("tunedgemm")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=libtype)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"libtype {libtype!r}: {' '.join(str(error).split())}") from error
    hooks = {}
    for name in HOOKS:
        for implementation in getattr(manager.hook, name).get_hookimpls():
            hooks[name] = _positional(libtype, name, implementation.function)
    missing = [name for name in ("supports", "enumerate_solutions") if name not in hooks]
    missing += [] if "run" in hooks or "bind" in hooks else ["run"]
    if missing:
        raise PluginError(f"libtype {libtype!r}: lacks the hook {missing[0]}(); implemented: {', '.join(hooks) or 'none'}")
    covered = tuple(getattr(plugin, "OPS", ()))
    if not covered:
        raise PluginError(f"libtype {libtype!r}: states no OPS; choose from {', '.join(ops())}")
    return Backend(
        *(libtype, distribution, version, covered, hooks),
        library_version=_guarded_text(getattr(plugin, "library_version", None)),
        details=_guarded_details(getattr(plugin, "details", None)),
        lacks=_asking_kernels(libtype, plugin, "lacks"),
        source_of=_asking_kernels(libtype, plugin, "source_of"),
        options=_options(libtype, getattr(plugin, "OPTIONS", ())),
        scale_orders=tuple(getattr(plugin, "SCALE_ORDERS", ())),
    )


def _options(libtype: str, stated: object) -> tuple[Option, ...]:
    """Validate the plugin's ``OPTIONS``."""
    options = tuple(stated) if isinstance(stated, tuple | list) else (stated,)
    for option in options:
        if not isinstance(option, Option):
            raise PluginError(f"libtype {libtype!r}: OPTIONS must be values of tunedgemm.plugin.Option (got {option!r})")
    if twice := {option.flag for option in options if sum(other.flag == option.flag for other in options) > 1}:
        raise PluginError(f"libtype {libtype!r}: OPTIONS state {', '.join(sorted(twice))} more than once")
    return options


def _positional(libtype: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function to take all of the hook's arguments by position."""
    spec_parameters = list(inspect.signature(getattr(hookspecs, name)).parameters)
    hook_parameters = inspect.signature(function).parameters
    for parameter in hook_parameters.values():
        fault = "" if parameter.name in spec_parameters else f"is not one of {', '.join(spec_parameters)}"
        fault = fault or ("" if parameter.default is parameter.empty else "may not have a default")
        if fault:
            written = str(parameter).split("=")[0].split(":")[0]
            raise PluginError(f"libtype {libtype!r}: hook {name}{inspect.signature(function)}: {written!r} {fault}")
    if list(hook_parameters) == spec_parameters:
        return function
    positions = [spec_parameters.index(argument) for argument in hook_parameters]
    return lambda *arguments: function(*(arguments[position] for position in positions))


def _guarded_text(function: Callable[..., str] | None) -> Callable[..., str]:
    """Wrap the plugin's function; return "" where it is missing, fails or returns anything but text."""

    def guarded(*arguments: Any) -> str:
        try:
            answer = function(*arguments) if function is not None else ""
        except Exception:  # unknown
            return ""
        return answer if isinstance(answer, str) else ""

    return guarded


def _asking_kernels(libtype: str, plugin: object, name: str) -> Callable[[Solution, Shape, Device], str]:
    """Wrap the plugin's function, if any, to ask about the kernel alone where a bias is added after it."""
    if not hasattr(plugin, name):
        return getattr(hookspecs, name)  # type: ignore[no-any-return]
    guarded = _guarded_text(_positional(libtype, name, getattr(plugin, name)))

    def asked(solution: Solution, shape: Shape, device: Device) -> str:
        whole = split.kernel_and_shape(solution, shape)
        return whole.reason if isinstance(whole, Unsupported) else guarded(*whole, device)

    return asked


def _guarded_details(details: Callable[[Device], Iterable[str]] | None) -> Callable[[Device], tuple[str, ...]]:
    """Wrap the plugin's function; return one line with the reason where it fails."""

    def guarded(device: Device) -> tuple[str, ...]:
        try:
            return tuple(" ".join(str(line).splitlines()) for line in (details(device) if details is not None else ()))
        except Exception as error:  # a plugin may raise anything
            return (f"its details() raised {type(error).__name__}: {error}",)

    return guarded


def _load(entry: EntryPoint) -> Backend | Unsupported:
    distribution = entry.dist.name if entry.dist else "tunedgemm"
    version = entry.dist.version if entry.dist else __version__
    try:
        return make_backend(entry.name, entry.load(), distribution, version)
    except PluginError as error:
        return Unsupported(f"{distribution} breaks the contract: {error}")
    except Exception as error:  # importing a plugin may raise anything
        return Unsupported(f"{distribution} cannot be imported: {type(error).__name__}: {error}")


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
