"""Installed backends, whether each is usable here, and the toolchains that they name."""

from __future__ import annotations

import re

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.loadable import in_threads
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.usable import unusable_reasons
from tunedgemm.device import Device
from tunedgemm.libtypes import owners, pip_hint
from tunedgemm.solution import Unsupported

#: How the registry says that a plugin's function broke the contract.
_BROKEN = re.compile(r"its (\w+)\(\) (raised|returned) ")


def backends(registry: Registry, device: Device) -> Section:
    """List the backends with their reasons; a plugin that does not load is a fault."""
    for libtype in registry.libtypes:  # imports the plugins, one after the other
        registry.get(libtype)
    asked = in_threads(lambda libtype: _asked(libtype, registry.get(libtype), device), registry.libtypes)
    facts, faults = [fact for fact, _ in asked], [fault for _, fault in asked if fault]
    for libtype in registry.libtypes:
        remedy = "uninstall one of the two"
        faults += [Fault(f"libtype {libtype}", f"claimed twice (got: {rival})", remedy) for rival in registry.problems(libtype)]
    facts += [Fact(libtype, f"not installed; {pip_hint(libtype)}") for libtype in owners() if libtype not in registry]
    return Section("backends", tuple(facts), tuple(faults))


def _asked(libtype: str, backend: Backend | Unsupported, device: Device) -> tuple[Fact, Fault | None]:
    if isinstance(backend, Unsupported):
        remedy = "install another version of its distribution, or uninstall it"
        return Fact(libtype, f"no: {backend.reason}"), Fault(f"libtype {libtype}", f"does not load (got: {backend.reason})", remedy)
    reason = "; ".join(unusable_reasons(backend, device))
    more = {
        "distribution": backend.distribution, "version": backend.version, "library": backend.library_version(device),
        "ops": " ".join(backend.ops),
    }  # fmt: skip
    fault = Fault(f"libtype {libtype}", f"breaks the contract (got: {reason})", _replacement(backend)) if _BROKEN.search(reason) else None
    return Fact(libtype, f"no: {reason}" if reason else "yes", more), fault


def toolchains(registry: Registry, device: Device) -> Section:
    """List the libraries and compilers that the backends name in ``details``."""
    facts, faults = [], []
    for libtype in registry.libtypes:
        backend = registry.get(libtype)
        if isinstance(backend, Unsupported):
            continue
        for line in backend.details(device):
            facts.append(Fact(libtype, line))
            if _BROKEN.match(line):
                faults.append(Fault(f"libtype {libtype}", f"breaks the contract (got: {line})", _replacement(backend)))
    return Section("toolchains", tuple(facts), tuple(faults))


def _replacement(backend: Backend) -> str:
    return f"install another version of {backend.distribution}, or uninstall it"
