"""Insert the waits for memory and LDS, derived from the stream.

Memory instructions (``vmcnt``) and LDS instructions (``lgkmcnt``) of a wave end in order, scalar
loads (``lgkmcnt`` too) in any order. A register that is still to be written must not be read or
written. So the shortest sufficient wait precedes such an instruction and leaves younger ones in
flight. Before a barrier, a wave's LDS instructions and its loads into the published parts of LDS
have ended. A wave ends without loads into LDS in flight, since its LDS may already belong to
another workgroup.

Where paths join, the youngest pending write of each register counts; loops iterate to a fixed
point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from tunedgemm_asm_gcn import flow
from tunedgemm_asm_gcn.stream import Item, Op, Stream

#: Largest counts waited for: one below the limits of the counters (63, 15), which saturate.
MOST = {"vmcnt": 62, "lgkmcnt": 14}
_WAITS = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
#: Pending entries for any LDS instruction and for any scalar load.
_LDS, _SCALAR = ("any lds", 0), ("any smem", 0)
Unit = tuple[str, int]


@attrs.frozen
class Pending:
    """Writes in flight: register -> number of younger instructions of its counter."""

    vmcnt: Mapping[Unit, int] = attrs.field(factory=dict)
    lgkmcnt: Mapping[Unit, int] = attrs.field(factory=dict)

    def join(self, other: Pending) -> Pending:
        """Merge the writes in flight of two paths."""
        return Pending(_least(self.vmcnt, other.vmcnt), _least(self.lgkmcnt, other.lgkmcnt))

    def waits(self, item: Op) -> dict[str, int]:
        """Return the largest counts that may remain when an instruction is issued, where it must
        wait.
        """
        units = {unit for reg in (*item.read, *item.written) for unit in reg.units if reg.file != "lds" or item.unit == "barrier"}
        if item.unit == "barrier":
            units.add(_LDS)
        if item.unit == "end":
            units.update(unit for unit in self.vmcnt if unit[0] == "lds")
        ages_of = {name: [age for unit, age in getattr(self, name).items() if unit in units] for name in MOST}
        if ages_of["lgkmcnt"] and _SCALAR in self.lgkmcnt:
            ages_of["lgkmcnt"] = [0]
        return {counter: min(*ages, MOST[counter]) for counter, ages in ages_of.items() if ages}

    def after_wait(self, counts: Mapping[str, int]) -> Pending:
        """Return the accesses that remain in flight after a wait for these counts."""
        left = {name: {unit: age for unit, age in getattr(self, name).items() if age < counts.get(name, 1 << 30)} for name in MOST}
        return Pending(**left)

    def after(self, item: Op) -> Pending:
        """Return the accesses in flight after an instruction that needs no further waits."""
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


def _least(first: Mapping[Unit, int], other: Mapping[Unit, int]) -> dict[Unit, int]:
    return {unit: min(first.get(unit, 1 << 30), other.get(unit, 1 << 30)) for unit in (*first, *other)}


def _issued(pending: Mapping[Unit, int], units: Iterable[Unit]) -> dict[Unit, int]:
    return {unit: age + 1 for unit, age in pending.items()} | dict.fromkeys(units, 0)


def with_waits(stream: Stream) -> list[Item]:
    """Return the stream with the waits that it needs."""
    waited: list[Item] = []
    states = flow.entered(stream, Pending(), lambda state, item: state.after_wait(state.waits(item)).after(item))
    for item, state in zip(stream, states, strict=True):
        if isinstance(item, Op) and (counts := state.waits(item)):
            waited.append(wait(**counts))
        waited.append(item)
    return waited


def wait(vmcnt: int | None = None, lgkmcnt: int | None = None) -> Op:
    """Return a wait for at most these counts."""
    counts = (("vmcnt", vmcnt), ("lgkmcnt", lgkmcnt))
    return Op("s_waitcnt", mods=" ".join(f"{name}({count})" for name, count in counts if count is not None))
