"""For authors of kernels: a backend made of one Triton kernel, its parameters and their values.

docs/tuning-triton.md has a whole one. ``tunedgemm triton tune --libtype NAME`` tunes it, and its JSON files answer untuned calls where
TUNEDGEMM_FALLBACK names it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, UserError, hookimpl
from tunedgemm.tools import on_device

from tunedgemm_triton import searchspace
from tunedgemm_triton.dialect import Dialect
from tunedgemm_triton.heuristic import chosen
from tunedgemm_triton.parameters import Entry

Values = Mapping[str, Any]


def _anything(values: Values, shape: Shape, device: Device) -> str:
    del values, shape, device
    return ""


@attrs.frozen(eq=False)
class TunedKernel:
    """A backend of one kernel; register the object itself under the group ``tunedgemm.backends``.

    Attributes:
        libtype: its name, that of the entry point.
        op: the op that it computes.
        space: each parameter's values, the usual ones first; their product is what is timed.
        launch: (parameters, *operands) -> a new output.
        takes: (shape, device) -> True, or Unsupported with a reason.
        fits: (parameters, shape, device) -> why these cannot serve, or an empty text.
        revision: raise it whenever the kernel's source changes: results of earlier ones are not used any more.
        graph_safe: whether a call may be captured in a graph, once it has run outside one.
        deterministic, batch_invariant: claims, which the tuner verifies where it is asked to.
    """

    libtype: str = attrs.field(validator=attrs.validators.matches_re(r"[A-Za-z0-9]+"))
    op: str
    space: Mapping[str, tuple[Any, ...]]
    launch: Callable[..., Any]
    takes: Callable[[Shape, Device], bool | Unsupported]
    fits: Callable[[Values, Shape, Device], str] = _anything
    revision: int = 1
    graph_safe: bool = True
    deterministic: bool = True
    batch_invariant: bool = False

    @property
    def OPS(self) -> tuple[str, ...]:
        """The op, as backends state it."""
        return (self.op,)

    OPTIONS = (searchspace.OPTION,)

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How its solutions are said in JSON files."""
        tag = f"GEMM-{self.libtype.upper()}"
        return Dialect(
            libtype=self.libtype,
            ops=(self.op,),
            tags={tag: self.op},
            tag_of=lambda _: tag,
            entry_of=lambda solution, *_: dict(self.values_of(solution)),
            unused_of=lambda entry, _: self._checked(entry) and (),
            solution_of=self._solution_of,
            fits=lambda solution, shape, device: not self.fits(self.values_of(solution), shape, device),
            supports=self.takes,
            listed=self.listed,
        )

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> bool | Unsupported:
        """What the author's function says."""
        return self.takes(shape, device)

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> list[Solution]:
        """The space, or the user's own; a JSON file's choice first."""
        own = searchspace.enumerated(self.dialect, shape, device, self.takes(shape, device))
        if own is not None:
            return list(own)
        first = chosen(self.dialect, shape, device)
        return list(dict.fromkeys([*([first] if first else []), *self.listed(shape, device)]))

    def listed(self, shape: Shape, device: Device) -> Iterator[Solution]:
        """The space of the author, what cannot serve left out."""
        if not self.takes(shape, device):
            return
        for choice in itertools.product(*self.space.values()):
            values = dict(zip(self.space, choice, strict=True))
            if not self.fits(values, shape, device):
                yield self.solution(values)

    @hookimpl
    def refine(self, solution: Solution, shape: Shape, device: Device) -> Iterable[Solution]:
        """Nothing: the space is timed as a whole."""
        del solution, shape, device
        return ()

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """The choice of a JSON file."""
        return chosen(self.dialect, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """The kernel with the solution's parameters; Triton compiles at the first call."""
        taken = self.takes(shape, device)
        if isinstance(taken, Unsupported):
            return taken
        try:
            values = self.values_of(solution)
        except UserError as error:
            return Unsupported(str(error))
        if reason := self.fits(values, shape, device):
            return Unsupported(reason)
        launch = self.launch
        return Launcher(on_device(lambda *operands: launch(values, *operands), device.index), graph_safe=self.graph_safe)

    def solution(self, values: Values) -> Solution:
        """The solution of some parameters: its kernelName says them all."""
        told = ";".join(f"{name}={value}" for name, value in values.items())
        claims = {"deterministic": self.deterministic, "batch_invariant": self.batch_invariant}
        return Solution(self.libtype, f"{self.libtype}_r{self.revision};{told}", **claims)

    def values_of(self, solution: Solution) -> Values:
        """The parameters of a solution.

        Raises:
            UserError: it is none of this revision.
        """
        head, *told = solution.kernel_name.split(";")
        found = re.fullmatch(rf"{self.libtype}_r(\d+)", head)
        if not found or int(found[1]) != self.revision:
            raise UserError(f"{self.libtype} has no kernel {solution.kernel_name!r} in revision {self.revision}: tune again")
        texts = dict(text.split("=", 1) for text in told if "=" in text)
        known = {name: {str(value): value for value in values} for name, values in self.space.items()}
        return {name: known.get(name, {}).get(text, _value(text)) for name, text in texts.items()}

    def _checked(self, entry: Entry) -> dict[str, Any]:
        """An entry's parameters.

        Raises:
            UserError: one is missing, unknown, or of another type than the space has.
        """
        if unknown := [name for name in entry if name not in self.space]:
            raise UserError(f"{self.libtype} has no parameter {unknown[0]!r}; known: {', '.join(self.space)}")
        if missing := [name for name in self.space if name not in entry]:
            raise UserError(f"lacks {missing[0]}")
        for name, values in self.space.items():
            if type(entry[name]) not in {type(value) for value in values}:
                raise UserError(f"{name} must be like {values[0]!r} (got {entry[name]!r})")
        return {name: entry[name] for name in self.space}

    def _solution_of(self, entry: Entry, shape: Shape, device: Device) -> tuple[Solution | None, tuple[str, ...]]:
        values = self._checked(entry)
        reason = self.fits(values, shape, device)
        return (None, (reason,)) if reason else (self.solution(values), ())


def _value(text: str) -> Any:
    """A value that is in no list of the author's: from an own search space."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if text.lstrip("-").isdecimal() else text
