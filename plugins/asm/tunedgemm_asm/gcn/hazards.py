"""Wait states: what the hardware does not look after, derived from the stream.

Sources: AMD's ISA guides of CDNA3 and CDNA4, "manually inserted wait states", and LLVM's ``GCNHazardRecognizer``. One instruction is one
wait state, ``s_nop n`` is n + 1. Where ways join, the least distance from a writer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from tunedgemm_asm.gcn import flow
from tunedgemm_asm.gcn.registers import M0, Reg
from tunedgemm_asm.gcn.resources import Target
from tunedgemm_asm.gcn.stream import Item, Op, Stream, op

Unit = tuple[str, int]
#: Wait states from a kind of writer to a kind of reader.
VALU_TO_PRODUCT = 2  # a vector register, to a matrix instruction
VALU_SCALAR_TO_MEMORY = 5  # a scalar, to a memory instruction
VALU_SCALAR_TO_VALU = 2  # a scalar or VCC, to a vector instruction
VALU_TO_READLANE = 1  # a vector register, to v_readfirstlane
TRANSCENDENTAL_TO_VALU = 1
M0_TO_LDS_LOAD = 1  # a scalar instruction's M0, to a load into LDS
STORE_TO_VALU = 2  # a store of more than 8 bytes of a lane, until vector and matrix instructions may overwrite its data
#: No distance matters beyond it.
FAR = 24
_TRANSCENDENTAL = ("v_rcp", "v_rsq", "v_sqrt", "v_exp", "v_log", "v_sin", "v_cos")


@attrs.frozen
class Rules:
    """Wait states after a matrix instruction, by the number of its passes."""

    target: Target

    @property
    def to_sum(self) -> int:
        """Until another one adds to a part of its result; to exactly the same registers it may at once."""
        return self.target.passes + 1 + self.target.newer

    @property
    def to_operand(self) -> int:
        """Until another one multiplies its result, and until any other instruction reads or overwrites it."""
        return self.target.passes + 3 + self.target.newer

    @property
    def from_sum(self) -> int:
        """Until a vector instruction may overwrite what it adds to."""
        return self.target.passes - 1

    def needed(self, item: Op, past: Past) -> int:
        """Wait states that must pass before an instruction."""
        found = [self._vector(item, past), self._scalar(item, past)]
        if "lds" in item.mods.split() and item.unit == "vmem":
            found.append(M0_TO_LDS_LOAD - past.since("m0", M0.units))
        return max(0, *found)

    def _vector(self, item: Op, past: Past) -> int:
        if item.unit not in ("valu", "mfma", "vmem", "lds"):
            return 0
        units = [unit for reg in item.read for unit in reg.units if unit[0] in "va"]
        if item.unit == "mfma":
            result, total = item.to[0], item.of[2]
            operands = [unit for reg in item.read if reg != total for unit in reg.units]
            found = [VALU_TO_PRODUCT - past.since("valu", units), self.to_operand - past.since("mfma", operands)]
            found.append(STORE_TO_VALU - past.since("store", result.units))
            if isinstance(total, Reg):
                parts = [unit for unit in total.units if total != result or past.results.get(unit) != total]
                found.append(self.to_sum - past.since("mfma", parts))
            return max(found)
        found = [self.to_operand - past.since("mfma", units)]
        if item.unit == "valu":
            written = [unit for reg in item.written for unit in reg.units if unit[0] in "va"]
            found += [self.to_operand - past.since("mfma", written), self.from_sum - past.since("sum", written)]
            found += [STORE_TO_VALU - past.since("store", written), TRANSCENDENTAL_TO_VALU - past.since("trans", units)]
            if item.name.startswith("v_readfirstlane"):
                found.append(VALU_TO_READLANE - past.since("valu", units))
        return max(found)

    def _scalar(self, item: Op, past: Past) -> int:
        units = [unit for reg in item.read for unit in reg.units if unit[0] in ("s", "vcc")]
        needed = {"vmem": VALU_SCALAR_TO_MEMORY, "valu": VALU_SCALAR_TO_VALU, "mfma": VALU_SCALAR_TO_VALU}.get(item.unit, 0)
        return needed - past.since("valu", units) if needed else 0


@attrs.frozen
class Past:
    """How many wait states ago each register was last written, by the kind of writer.

    Attributes:
        ago: of a kind and a register: wait states since; 0 is the instruction before.
        results: of a register the whole result of the matrix instruction that wrote it.
    """

    ago: Mapping[tuple[str, Unit], int] = attrs.field(factory=dict)
    results: Mapping[Unit, Reg] = attrs.field(factory=dict)

    def since(self, kind: str, units: Iterable[Unit]) -> int:
        """Wait states since any of these registers was written by this kind; `FAR` if it is long ago."""
        return min((self.ago.get((kind, unit), FAR) for unit in units), default=FAR)

    def after(self, item: Op) -> Past:
        """The past after an instruction."""
        states = int(item.of[0]) + 1 if item.name == "s_nop" else 1
        ago = {key: since + states for key, since in self.ago.items() if since + states < FAR}
        results = self.results
        written = [unit for reg in item.written for unit in reg.units]
        if item.unit in ("valu", "mfma"):
            for kind in ("valu", "mfma", "trans"):
                for unit in written:
                    ago.pop((kind, unit), None)
        if item.unit == "valu":
            ago.update({("valu", unit): 0 for unit in written})
            if item.name.startswith(_TRANSCENDENTAL):
                ago.update({("trans", unit): 0 for unit in written})
        elif item.unit == "mfma":
            total = item.of[2]
            ago.update({("mfma", unit): 0 for unit in written} | {("sum", unit): 0 for unit in getattr(total, "units", ())})
            results = {**results, **dict.fromkeys(written, item.to[0])}
        elif item.unit == "salu" and M0 in item.written:
            ago.update({("m0", unit): 0 for unit in M0.units})
        elif item.stores and item.name.endswith(("x3", "x4")):
            ago.update({("store", unit): 0 for reg in item.of[:1] for unit in getattr(reg, "units", ())})
        return Past(ago, results)

    def join(self, other: Past) -> Past:
        """The past after one of two ways."""
        keys = {*self.ago, *other.ago}
        results = {unit: result for unit, result in self.results.items() if other.results.get(unit, result) == result}
        results |= {unit: result for unit, result in other.results.items() if unit not in self.results}
        return Past({key: min(self.ago.get(key, FAR), other.ago.get(key, FAR)) for key in keys}, results)


def entered(stream: Stream, target: Target, obey: bool) -> list[Past]:
    """Of each item its past; with ``obey`` the wait states that an instruction needs are taken to have passed before it."""
    rules = Rules(target)

    def after(past: Past, item: Op) -> Past:
        needed = rules.needed(item, past) if obey else 0
        return (past.after(nop(needed)) if needed else past).after(item)

    return flow.entered(stream, Past(), after)


def with_nops(stream: Stream, target: Target) -> list[Item]:
    """The stream with the wait states that it needs."""
    rules, padded = Rules(target), []
    for item, past in zip(stream, entered(stream, target, obey=True), strict=True):
        if isinstance(item, Op):
            needed = rules.needed(item, past)
            while needed > 0:
                padded.append(nop(min(needed, 16)))
                needed -= 16
        padded.append(item)
    return padded


def unmet(stream: Stream, target: Target) -> list[tuple[int, int]]:
    """Places of a finished stream where wait states are missing, and how many."""
    rules = Rules(target)
    states = entered(stream, target, obey=False)
    missing = ((at, rules.needed(item, states[at])) for at, item in enumerate(stream) if isinstance(item, Op))
    return [(at, count) for at, count in missing if count]


def nop(states: int) -> Op:
    """So many wait states."""
    return op("s_nop", (), states - 1)
