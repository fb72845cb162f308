"""Environment variables: those that are understood and set, misspelt ones, and values without effect."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section, fault_of_error
from tunedgemm.backends.registry import Backend, Registry
from tunedgemm.dispatch.settings import Settings
from tunedgemm.errors import UserError
from tunedgemm.ops import ops
from tunedgemm.process.variables import AITERS_OWN, MACHINE, OFF, ON, OTHERS, RESERVED, SWITCHES

#: Similarity from which a name counts as misspelt: of AITER's own variables, the nearest to one of
#: ours that is not in `AITERS_OWN` has 0.81.
_SIMILAR = 0.87
#: The same for names that are tunedgemm's alone.
_SIMILAR_RESERVED = 0.78


def understood(registry: Registry) -> tuple[str, ...]:
    """Return the variables that the core and the installed plugins read, sorted."""
    of_plugins = (name for backend in _backends(registry) for name in backend.variables)
    return tuple(sorted({*SWITCHES, *OTHERS, *(op.columns.variable for op in ops().values()), *of_plugins}))


def environment(registry: Registry, variables: Mapping[str, str] = os.environ) -> Section:
    """List the variables that are set, and find misspelt names and values without effect."""
    known = understood(registry)
    facts = [Fact(name, variables[name], {"read_by": "tunedgemm"}) for name in known if name in variables]
    facts += [Fact(name, variables[name], {"read_by": "others"}) for name in MACHINE if name in variables]
    faults = [*_misspelt(variables, known), *_without_effect(variables, _backends(registry))]
    try:
        Settings.from_environment(variables)
    except UserError as error:
        faults.append(fault_of_error(error))
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
    for name in SWITCHES:
        if (text := variables.get(name, "").strip().lower()) not in (*ON, *OFF):
            yield Fault(name, f"neither on nor off, so it is off (got {text!r})", "use 1 or 0")
    for option in sorted({option for backend in backends for option in backend.options if option.choices}, key=str):
        if (text := option.value(variables)) not in option.choices:
            yield Fault(option.variable, f"not one of its values (got {text!r})", f"use {' or '.join(option.choices)}")
