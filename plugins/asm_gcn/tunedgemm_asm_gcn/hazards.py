"""Insert the wait states that the hardware does not enforce, derived from the stream.

Sources: AMD's ISA guides of CDNA3 and CDNA4, "manually inserted wait states", and LLVM's
``GCNHazardRecognizer``. One instruction is one wait state, ``s_nop n`` is n + 1. Where paths join,
the shortest distance from a writer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from tunedgemm_asm_gcn import flow
from tunedgemm_asm_gcn.registers import M0, Reg
from tunedgemm_asm_gcn.resources import Target
from tunedgemm_asm_gcn.stream import Item, Op, Stream, op

Unit = tuple[str, int]
#: Wait states from a kind of writer to a kind of reader.
VALU_TO_PRODUCT = 2  # vector register to MFMA
VALU_SCALAR_TO_MEMORY = 5  # scalar written by VALU to memory instruction
VALU_SCALAR_TO_VALU = 2  # scalar or VCC written by VALU to VALU
VALU_TO_READLANE = 1  # vector register to v_readfirstlane
TRANSCENDENTAL_TO_VALU = 1
M0_TO_LDS_LOAD = 1  # M0 written by SALU to load into LDS
STORE_TO_VALU = 2  # store of more than 8 bytes per lane to overwriting its data by VALU or MFMA
#: Distance beyond which no hazard exists.
FAR = 24
_TRANSCENDENTAL = ("v_rcp", "v_rsq", "v_sqrt", "v_exp", "v_log", "v_sin", "v_cos")


@attrs.frozen
class Rules:
    """Wait states after an MFMA, by its number of passes."""

    target: Target

    @property
    def to_sum(self) -> int:
        """Return the wait states before another MFMA adds to a part of the result; the same
        registers need none.
        """
        return self.target.passes + 1 + self.target.newer

    @property
    def to_operand(self) -> int:
        """Return the wait states before the result is an MFMA operand, or is read or overwritten
        otherwise.
        """
        return self.target.passes + 3 + self.target.newer

    @property
    def from_sum(self) -> int:
        """Return the wait states before VALU may overwrite the accumulator operand."""
        return self.target.passes - 1

    def needed(self, item: Op, past: Past) -> int:
        """Return the wait states that must precede an instruction."""
        states = [self._vector(item, past), self._scalar(item, past)]
        if "lds" in item.mods.split() and item.unit == "vmem":
            states.append(M0_TO_LDS_LOAD - past.since("m0", M0.units))
        return max(0, *states)

    def _vector(self, item: Op, past: Past) -> int:
        if item.unit not in ("valu", "mfma", "vmem", "lds"):
            return 0
        units = [unit for reg in item.read for unit in reg.units if unit[0] in "va"]
        if item.unit == "mfma":
            result, total = item.to[0], item.of[2]
            operands = [unit for reg in item.read if reg != total for unit in reg.units]
            states = [VALU_TO_PRODUCT - past.since("valu", units), self.to_operand - past.since("mfma", operands)]
            states.append(STORE_TO_VALU - past.since("store", result.units))
            if isinstance(total, Reg):
                parts = [unit for unit in total.units if total != result or past.results.get(unit) != total]
                states.append(self.to_sum - past.since("mfma", parts))
            return max(states)
        states = [self.to_operand - past.since("mfma", units)]
        if item.unit == "valu":
            written = [unit for reg in item.written for unit in reg.units if unit[0] in "va"]
            states += [self.to_operand - past.since("mfma", written), self.from_sum - past.since("sum", written)]
            states += [STORE_TO_VALU - past.since("store", written), TRANSCENDENTAL_TO_VALU - past.since("trans", units)]
            if item.name.startswith("v_readfirstlane"):
                states.append(VALU_TO_READLANE - past.since("valu", units))
        return max(states)

    def _scalar(self, item: Op, past: Past) -> int:
        units = [unit for reg in item.read for unit in reg.units if unit[0] in ("s", "vcc")]
        needed = {"vmem": VALU_SCALAR_TO_MEMORY, "valu": VALU_SCALAR_TO_VALU, "mfma": VALU_SCALAR_TO_VALU}.get(item.unit, 0)
        return needed - past.since("valu", units) if needed else 0


@attrs.frozen
class Past:
    """Distance in wait states from the last write of each register, by kind of writer.

    Attributes:
        ago: distance by kind and register; 0 means the previous instruction.
        results: register -> whole result of the MFMA that wrote it.
    """

    ago: Mapping[tuple[str, Unit], int] = attrs.field(factory=dict)
    results: Mapping[Unit, Reg] = attrs.field(factory=dict)

    def since(self, kind: str, units: Iterable[Unit]) -> int:
        """Return the distance from the last write of these registers by this kind, at most `FAR`."""
        return min((self.ago.get((kind, unit), FAR) for unit in units), default=FAR)

    def after(self, item: Op) -> Past:
        """Return the state after an instruction."""
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
        """Merge the states of two paths."""
        keys = {*self.ago, *other.ago}
        results = {unit: result for unit, result in self.results.items() if other.results.get(unit, result) == result}
        results |= {unit: result for unit, result in other.results.items() if unit not in self.results}
        return Past({key: min(self.ago.get(key, FAR), other.ago.get(key, FAR)) for key in keys}, results)


def with_nops(stream: Stream, target: Target) -> list[Item]:
    """Return the stream with the wait states that it needs."""
    rules, padded = Rules(target), []

    def after(past: Past, item: Op) -> Past:
        needed = rules.needed(item, past)
        return (past.after(nop(needed)) if needed else past).after(item)

    for item, past in zip(stream, flow.entered(stream, Past(), after), strict=True):
        if isinstance(item, Op):
            needed = rules.needed(item, past)
            while needed > 0:
                padded.append(nop(min(needed, 16)))
                needed -= 16
        padded.append(item)
    return padded


def nop(states: int) -> Op:
    """Return an instruction with this many wait states."""
    return op("s_nop", (), states - 1)
