"""What a call launches, as data: steps in order, and where in a workspace they leave what.

Both the launcher and the tests in Triton's interpreter run these plans. Nothing in one depends on the values of operands: a captured call
serves any.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import attrs

from tunedgemm_triton.compile import compile_function
from tunedgemm_triton.fit import ceil_div

#: Addresses of buffers are multiples of it.
_ALIGNED = 256
#: The largest divisor of N and K that a program is compiled for: K / 2 bytes of mxfp4 are then whole loads of 16 bytes in every row, and
#: its K / 32 scales of 8.
_MULTIPLE = 256

Constant = int | float | bool | str


@attrs.frozen(cache_hash=True)
class Program:
    """All that a compile depends on.

    Attributes:
        function: ``file.function`` in `kernels`.
        types: Triton's type of each parameter that is not constant, by its name.
        constants: the values of the others.
        multiples: integers and a power of two that divides each: loads get as wide as rows are known to allow.
        warps, stages: compiler options.
    """

    function: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    multiples: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 1

    @property
    def source(self) -> Any:
        """The Triton function."""
        module, _, name = self.function.partition(".")
        return getattr(importlib.import_module(f"tunedgemm_triton.kernels.{module}"), name)

    def compiled(self, gfx: str) -> Any:
        """Triton's CompiledKernel, from the cache where it is there; raises what `compile_function` does."""
        types, values = dict(self.types), dict(self.constants)
        ordered = {name: "constexpr" if name in values else types[name] for name in self.source.arg_names}
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return compile_function(self.source, ordered, values, dict(self.multiples), options, (gfx, self.function))


@attrs.frozen
class Step:
    """One launch.

    Attributes:
        program: what is launched.
        grid: programs along the three axes.
        values: what each parameter that is not constant gets, in their order: a number, or the name of an operand, of a buffer or of
            ``counters`` (with ``+`` and a number of them: behind so many).
        given: the operand that decides whether the step is run, "" for always.
        present: whether it is run where that operand is there, or where it is not.
    """

    program: Program
    grid: tuple[int, int, int]
    values: tuple[tuple[str, int | str], ...]
    given: str = ""
    present: bool = False


@attrs.frozen
class Plan:
    """Steps in order.

    Attributes:
        steps: what is launched.
        buffers: (offset, bytes) of each buffer in the workspace.
        nbytes: of the workspace.
        counters: how many are counted with, which every call finds and leaves zero.
    """

    steps: tuple[Step, ...]
    buffers: dict[str, tuple[int, int]]
    nbytes: int
    counters: int = 0


class Maker:
    """Collects the steps and buffers of a plan."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.buffers: dict[str, tuple[int, int]] = {}
        self.nbytes = 0
        self.counters = 0

    def buffer(self, name: str, nbytes: int) -> None:
        """Room for *nbytes* bytes."""
        self.buffers[name] = (self.nbytes, nbytes)
        self.nbytes += ceil_div(max(nbytes, 1), _ALIGNED) * _ALIGNED

    def step(self, function: str, grid: tuple[int, ...], values: dict[str, Any], constants: dict[str, Constant], **options: Any) -> None:
        """Add a launch; *values* gives (type, value) of each parameter, an integer standing for itself."""
        typed = {name: value if isinstance(value, tuple) else ("i32", value) for name, value in values.items()}
        multiples = tuple((name, math.gcd(typed[name][1], _MULTIPLE)) for name in ("N", "K") if name in typed)
        types = tuple((name, kind) for name, (kind, _) in typed.items())
        given = {name: options.pop(name) for name in ("given", "present") if name in options}
        program = Program(function, types, tuple(constants.items()), multiples, **options)
        values_of = {name: value for name, (_, value) in typed.items()}
        ordered = tuple((name, values_of[name]) for name in program.source.arg_names if name in values_of)
        self.steps.append(Step(program, (*grid, *[1] * (3 - len(grid))), ordered, **given))

    def counted(self, count: int) -> str:
        """Counters for a step, as `Step.values` names them."""
        first = self.counters
        self.counters += ceil_div(count, 4) * 4  # addresses are of 16 bytes
        return f"counters+{first}"

    def plan(self) -> Plan:
        """All that was collected."""
        return Plan(tuple(self.steps), self.buffers, self.nbytes, self.counters)
