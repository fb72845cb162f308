"""Waits for memory and LDS, derived from the stream.

Memory instructions (``vmcnt``) and LDS instructions (``lgkmcnt``) of a wave end in order, scalar loads (``lgkmcnt`` too) in any. A register
that one of them has still to write must neither be read nor written: before such an instruction stands the wait that is just long enough,
which leaves what is younger on its way. Before a barrier a wave's LDS instructions have ended, and so have the loads into the parts of LDS
that the barrier publishes; a wave ends with no load into LDS on its way, since its LDS may be another's by then.

Where ways join, of each register the youngest write that may be pending counts; loops are followed until nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from tunedgemm_asm.gcn import flow
from tunedgemm_asm.gcn.stream import Item, Op, Stream

#: The most that is waited for: one less than the counters hold (63, 15), where they may stand for more.
MOST = {"vmcnt": 62, "lgkmcnt": 14}
_WAITS = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
#: Stand for "any LDS instruction" and "any scalar load" among the pending.
_LDS, _SCALAR = ("any lds", 0), ("any smem", 0)
Unit = tuple[str, int]


@attrs.frozen
class Pending:
    """What is on its way: of each register, how many younger instructions of its counter there are."""

    vmcnt: Mapping[Unit, int] = attrs.field(factory=dict)
    lgkmcnt: Mapping[Unit, int] = attrs.field(factory=dict)

    def join(self, other: Pending) -> Pending:
        """What may be on its way after one of two ways."""
        return Pending(_least(self.vmcnt, other.vmcnt), _least(self.lgkmcnt, other.lgkmcnt))

    def waits(self, item: Op) -> dict[str, int]:
        """How many of each counter may still be on their way when an instruction is issued; only counters that it must wait for."""
        units = {unit for reg in (*item.read, *item.written) for unit in reg.units if reg.file != "lds" or item.unit == "barrier"}
        if item.unit == "barrier":
            units.add(_LDS)
        if item.unit == "end":
            units.update(unit for unit in self.vmcnt if unit[0] == "lds")
        found = {name: [age for unit, age in getattr(self, name).items() if unit in units] for name in MOST}
        if found["lgkmcnt"] and _SCALAR in self.lgkmcnt:
            found["lgkmcnt"] = [0]
        return {counter: min(*ages, MOST[counter]) for counter, ages in found.items() if ages}

    def after_wait(self, counts: Mapping[str, int]) -> Pending:
        """What is left after waiting until at most so many are on their way."""
        left = {name: {unit: age for unit, age in getattr(self, name).items() if age < counts.get(name, 1 << 30)} for name in MOST}
        return Pending(**left)

    def after(self, item: Op) -> Pending:
        """What is on its way once an instruction is issued that needs no more waits."""
        if item.unit == "wait":
            return self.after_wait({name: int(count) for name, count in _WAITS.findall(f"{item.of} {item.mods}")})
        units = [unit for reg in item.written for unit in reg.units]
        if item.unit == "vmem":
            return attrs.evolve(self, vmcnt=_issued(self.vmcnt, units))
        if item.unit == "lds":
            return attrs.evolve(self, lgkmcnt=_issued(self.lgkmcnt, [*units, _LDS]))
        if item.unit == "smem":
            return attrs.evolve(self, lgkmcnt=_issued(self.lgkmcnt, [*units, _SCALAR]))
        return self


def _least(one: Mapping[Unit, int], other: Mapping[Unit, int]) -> dict[Unit, int]:
    return {unit: min(one.get(unit, 1 << 30), other.get(unit, 1 << 30)) for unit in (*one, *other)}


def _issued(pending: Mapping[Unit, int], units: Iterable[Unit]) -> dict[Unit, int]:
    return {unit: age + 1 for unit, age in pending.items()} | dict.fromkeys(units, 0)


def entered(stream: Stream, obey: bool) -> list[Pending]:
    """Of each item what may be on its way before it.

    Args:
        stream: the items.
        obey: whether the waits that an instruction needs are taken to stand before it, beside those that do.
    """

    def after(state: Pending, item: Op) -> Pending:
        return (state.after_wait(state.waits(item)) if obey else state).after(item)

    return flow.entered(stream, Pending(), after)


def with_waits(stream: Stream) -> list[Item]:
    """The stream with the waits that it needs."""
    waited: list[Item] = []
    for item, state in zip(stream, entered(stream, obey=True), strict=True):
        if isinstance(item, Op) and (counts := state.waits(item)):
            waited.append(wait(**counts))
        waited.append(item)
    return waited


def wait(vmcnt: int | None = None, lgkmcnt: int | None = None) -> Op:
    """A wait until at most so many are on their way."""
    counts = (("vmcnt", vmcnt), ("lgkmcnt", lgkmcnt))
    return Op("s_waitcnt", mods=" ".join(f"{name}({count})" for name, count in counts if count is not None))


def unmet(stream: Stream) -> Sequence[tuple[int, dict[str, int]]]:
    """Places of a finished stream where a wait is missing, and which."""
    states = entered(stream, obey=False)
    missing = ((at, states[at].waits(item)) for at, item in enumerate(stream) if isinstance(item, Op))
    return [(at, counts) for at, counts in missing if counts]
