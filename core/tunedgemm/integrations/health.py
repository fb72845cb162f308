"""Routing status: settings of dispatch, patched torch functions, and plugins of engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata

import attrs

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section
from tunedgemm.device import Device
from tunedgemm.dispatch.settings import BACKGROUND, MOE, Settings
from tunedgemm.integrations.patching import routed_functions
from tunedgemm.process.plugin_guard import entry_points, load
from tunedgemm.process.variables import read_switch

#: Entry points of the engines' packages.
GROUP = "tunedgemm.engines"
#: Variables that switch on a plugin of tunedgemm's own wheel.
SWITCHES = ("TUNEDGEMM_SGLANG", "TUNEDGEMM_VLLM")


@attrs.frozen
class Engine:
    """A serving engine with a plugin of ours.

    Attributes:
        name, distribution: its name, and that of its distribution.
        group: the group of entry points by which it finds plugins.
        chosen: its variable with comma-separated plugins to load.
        variable: the variable that switches our plugin on.
        off_reason: (switch, version, is_cpu) -> why the plugin routes nothing, or "".
    """

    name: str
    distribution: str
    group: str
    chosen: str
    variable: str
    off_reason: Callable[[str, str, bool], str]


def engines() -> tuple[list[Engine], list[Fault]]:
    """Load the engines that the entry points of `GROUP` name; those that fail are faults."""
    found: list[Engine] = []
    faults = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        engine, fault = load(entry)
        if isinstance(engine, Engine):
            found.append(engine)
        else:
            faults.append(Fault(entry.value, f"is not an engine (got {fault or repr(engine)})", "reinstall its distribution"))
    return found, faults


def routing(device: Device, rows: int) -> Section:
    """Describe what is routed, and why not.

    Args:
        device: the device of the calls.
        rows: how many rows of the tables are for it.
    """
    settings = Settings.from_environment()
    facts = [
        Fact("capture of shapes", settings.capture),
        Fact("log of choices", settings.log_choices),
        Fact("online tuning", BACKGROUND if settings.background else settings.online, {"fmoe": settings.tunes_online(MOE)}),
        Fact("untuned calls", ", ".join((*settings.untuned, "torch's own")), {"variable": "TUNEDGEMM_FALLBACK"}),
        Fact("rows for this device", rows),
    ]
    facts += [Fact(name, state) for name, state in routed_functions().items()]
    found, faults = engines()
    if not found and (on := [name for name in SWITCHES if read_switch(name)]):
        remedy = f"install tunedgemm with pip instead of through a path, or unset {' and '.join(on)}"
        faults.append(Fault("engines", f"none can be routed (got no entry point {GROUP!r})", remedy))
    for engine in found:
        fact, fault = answer(engine, device, rows, settings)
        facts.append(fact)
        faults += [fault] if fault else []
    return Section("routing", tuple(facts), tuple(faults))


def answer(engine: Engine, device: Device, rows: int, settings: Settings) -> tuple[Fact, Fault | None]:
    """Return whether an engine's plugin would route, with a fault if it is on but would not."""
    version = _version(engine.distribution)
    switch = read_switch(engine.variable)
    if not switch:
        reason = f"{engine.name} is not installed" if not version else f"{engine.variable} is not set; set it to 1"
        return Fact(f"{engine.name} would route", f"no: {reason}", {"version": version}), None
    reason, remedy = _off(engine, switch, version, device) or _rowless(device, rows, settings) or ("", "")
    fact = Fact(f"{engine.name} would route", f"no: {reason}" if reason else "yes", {"version": version})
    return fact, Fault(engine.name, f"layers are not routed (got: {reason})", remedy) if reason else None


def _off(engine: Engine, switch: str, version: str, device: Device) -> tuple[str, str] | None:
    """Return why an engine does not load the plugin, or the plugin is off, with the remedy."""
    unset = f"or unset {engine.variable}"
    if not version:
        return f"{engine.name} is not installed", f"install {engine.distribution} in this environment, {unset}"
    points = [point for point in metadata.entry_points(group=engine.group) if point.name == "tunedgemm"]
    if not points:
        return "tunedgemm has no installed entry point", f"install tunedgemm with pip instead of through a path, {unset}"
    chosen = os.environ.get(engine.chosen, "")
    if chosen and "tunedgemm" not in [name.strip() for name in chosen.split(",")]:
        return f"{engine.chosen} leaves it out (it is {chosen!r})", f"add tunedgemm to {engine.chosen}, {unset}"
    if reason := engine.off_reason(switch, version, device.kind == "cpu"):
        return reason, f"change that, {unset}"
    return None


def _rowless(device: Device, rows: int, settings: Settings) -> tuple[str, str] | None:
    if rows or settings.capture or settings.online or settings.background:
        return None
    return f"no table has a row for {device}", "capture the shapes with AITER_TUNE_GEMM=1, then run `tunedgemm tune`"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
