"""Make a backend of one Triton kernel, its parameters and their values, for kernel authors.

docs/tuning-triton.md shows a complete one. ``tunedgemm triton tune --libtype NAME`` tunes it, and
its JSON files serve untuned calls if TUNEDGEMM_FALLBACK names it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from tunedgemm.plugin import Backend, Device, Launcher, Shape, Solution, Unsupported, UserError, hookimpl
from tunedgemm.tools.launching import on_device

from tunedgemm_triton.heuristic import solution_from_file
from tunedgemm_triton.jsonfiles import space as json_space
from tunedgemm_triton.jsonfiles.dialect import Dialect
from tunedgemm_triton.jsonfiles.entries import Entry

Values = Mapping[str, Any]


@attrs.frozen(eq=False)
class TunedKernel:
    """Hooks of one kernel; register its `backend` in the group ``tunedgemm.backends``.

    Attributes:
        libtype: the backend's name, that of the entry point.
        op: the op that it computes.
        space: parameter -> its values, the usual ones first; the tuner times their product.
        launch: (parameters, *operands) -> a new output.
        takes: (shape, device) -> None, or Unsupported with a reason.
        fits: (parameters, shape, device) -> why these cannot serve, or an empty text.
        revision: raise it whenever the kernel's source changes, so that earlier results are not
            used.
        graph_safe: a call may be captured in a graph after it has run outside one.
        deterministic, batch_invariant: claims, which the tuner verifies on request.
    """

    libtype: str = attrs.field(validator=attrs.validators.matches_re(r"[A-Za-z0-9]+"))
    op: str
    space: Mapping[str, tuple[Any, ...]]
    launch: Callable[..., Any]
    takes: Callable[[Shape, Device], Unsupported | None]
    fits: Callable[[Values, Shape, Device], str] = lambda *_: ""
    revision: int = 1
    graph_safe: bool = True
    deterministic: bool = True
    batch_invariant: bool = False

    @functools.cached_property
    def backend(self) -> Backend:
        """Return the record to register."""
        return Backend(self.libtype, self, ops=(self.op,), options=(json_space.OPTION,))

    @functools.cached_property
    def dialect(self) -> Dialect:
        """Return the description of its solutions in JSON files."""
        tag = f"GEMM-{self.libtype.upper()}"
        return Dialect(
            libtype=self.libtype,
            ops=(self.op,),
            tags={tag: self.op},
            tag_of=lambda _: tag,
            entry_of=lambda solution, *_: dict(self._values_of(solution)),
            unused_of=lambda entry, _: self._checked(entry) and (),
            solution_of=self._solution_of,
            fits=lambda solution, shape, device: not self.fits(self._values_of(solution), shape, device),
            unsupported=lambda shape, device: str(self.takes(shape, device) or ""),
            listed=self._listed,
        )

    @hookimpl
    def supports(self, shape: Shape, device: Device) -> Unsupported | None:
        """Return the answer of the author's function."""
        return self.takes(shape, device)

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Device) -> list[Solution]:
        """Return the space, a JSON file's choice first; or the user's search space."""
        user_space = json_space.enumerate_current(self.dialect, shape, device)
        if user_space is not None:
            return list(user_space)
        first = solution_from_file(self.dialect, shape, device)
        return list(dict.fromkeys([*([first] if first else []), *self._listed(shape, device)]))

    def _listed(self, shape: Shape, device: Device) -> Iterator[Solution]:
        """Yield the author's space without parameters that cannot serve."""
        for choice in itertools.product(*self.space.values()):
            values = dict(zip(self.space, choice, strict=True))
            if not self.fits(values, shape, device):
                yield self._solution(values)

    @hookimpl
    def heuristic_fallback(self, shape: Shape, device: Device) -> Solution | None:
        """Return the choice of a JSON file."""
        return solution_from_file(self.dialect, shape, device)

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
        """Return the kernel with the solution's parameters; Triton compiles at the first call."""
        try:
            values = self._values_of(solution)
        except UserError as error:
            return Unsupported(str(error))
        if reason := self.fits(values, shape, device):
            return Unsupported(reason)
        launch = self.launch
        return Launcher(on_device(lambda *operands: launch(values, *operands), device.index), graph_safe=self.graph_safe)

    def _solution(self, values: Values) -> Solution:
        """Return the solution of parameters; its kernelName has them all."""
        text = ";".join(f"{name}={value}" for name, value in values.items())
        claims = {"deterministic": self.deterministic, "batch_invariant": self.batch_invariant}
        return Solution(self.libtype, f"{self.libtype}_r{self.revision};{text}", **claims)

    def _values_of(self, solution: Solution) -> Values:
        """Return the parameters of a solution.

        Raises:
            UserError: the solution is not of this revision.
        """
        head, *assignments = solution.kernel_name.split(";")
        match = re.fullmatch(rf"{self.libtype}_r(\d+)", head)
        if not match or int(match[1]) != self.revision:
            raise UserError(f"{self.libtype}: unknown kernel {solution.kernel_name!r} in revision {self.revision}; tune again")
        texts = dict(text.split("=", 1) for text in assignments if "=" in text)
        known = {name: {str(value): value for value in values} for name, values in self.space.items()}
        return {name: known.get(name, {}).get(text, _value(text)) for name, text in texts.items()}

    def _checked(self, entry: Entry) -> dict[str, Any]:
        """Return an entry's parameters.

        Raises:
            UserError: a parameter is missing, unknown, or of another type than in the space.
        """
        if unknown := [name for name in entry if name not in self.space]:
            raise UserError(f"{self.libtype} has no parameter {unknown[0]!r}; known: {', '.join(self.space)}")
        if missing := [name for name in self.space if name not in entry]:
            raise UserError(f"{missing[0]} is missing")
        for name, values in self.space.items():
            if type(entry[name]) not in {type(value) for value in values}:
                raise UserError(f"{name} must be like {values[0]!r} (got {entry[name]!r})")
        return {name: entry[name] for name in self.space}

    def _solution_of(self, entry: Entry, shape: Shape, device: Device) -> tuple[Solution | None, tuple[str, ...]]:
        values = self._checked(entry)
        reason = self.fits(values, shape, device)
        return (None, (reason,)) if reason else (self._solution(values), ())


def _value(text: str) -> Any:
    """Return a value that the author does not list, from a user's search space."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if text.lstrip("-").isdecimal() else text
