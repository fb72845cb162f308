"""Environment variables: those that are understood and set, misspelt ones, and values without effect."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.ops import ops
from tunedgemm.process.variables import AITERS_OWN, KINDS, MACHINE, RESERVED, fault_of

#: Similarity from which a name counts as misspelt: of AITER's own variables, the nearest to one of
#: ours that is not in `AITERS_OWN` has 0.81.
_SIMILAR = 0.87
#: The same for names that are tunedgemm's alone.
_SIMILAR_RESERVED = 0.78


def understood(registry: Registry) -> tuple[str, ...]:
    """Return the variables that the core and the installed plugins read, sorted."""
    of_plugins = (
        name for backend in _backends(registry) for name in (*backend.variables, *(option.variable for option in backend.options))
    )
    return tuple(sorted({*KINDS, *(op.columns.variable for op in ops().values()), *of_plugins}))


def environment(registry: Registry, variables: Mapping[str, str] = os.environ) -> Section:
    """List the variables that are set, and find misspelt names and values without effect."""
    known = understood(registry)
    facts = [Fact(name, variables[name], {"read_by": "tunedgemm"}) for name in known if name in variables]
    facts += [Fact(name, variables[name], {"read_by": "others"}) for name in MACHINE if name in variables]
    faults = [*_misspelt(variables, known), *_without_effect(variables, _backends(registry))]
    return Section("environment", tuple(facts), tuple(faults))


def _backends(registry: Registry) -> list[Backend]:
    return [answer for libtype in registry.libtypes if isinstance(answer := registry.get(libtype), Backend)]


def _misspelt(variables: Mapping[str, str], known: tuple[str, ...]) -> Iterator[Fault]:
    for name in sorted(set(variables) - {*known, *AITERS_OWN, *MACHINE}):
        reserved = name.startswith(RESERVED)
        nearest = difflib.get_close_matches(name.upper(), known, 1, _SIMILAR_RESERVED if reserved else _SIMILAR)
        if nearest:
            yield Fault(name, f"not a variable that tunedgemm reads (got {name}={variables[name]})", f"did you mean {nearest[0]}?")
        elif reserved:
            remedy = "unset it, or install the plugin that reads it"
            yield Fault(name, f"not a variable that tunedgemm or an installed plugin reads (got {name}={variables[name]})", remedy)


def _without_effect(variables: Mapping[str, str], backends: Iterable[Backend]) -> Iterator[Fault]:
    for name in KINDS:
        fault, remedy = fault_of(name, variables)
        if fault:
            yield Fault(name, fault, remedy)
    for option in sorted({option for backend in backends for option in backend.options if option.choices}, key=str):
        if (text := variables.get(option.variable, "").strip()) not in ("", *option.choices):
            yield Fault(option.variable, f"not one of its values (got {text!r})", f"use {' or '.join(option.choices)}")
