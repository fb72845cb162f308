"""Check the wait states of CDNA3 and CDNA4, by the ISA guides ("manually inserted wait states") and
LLVM's hazard recognizer. Each instruction is one wait state, `s_nop n` is n + 1. ``passes`` of an
MFMA are 4 cycles each.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .fault import Fault
from .operands import Bound
from .text import ACCUMULATION, VECTOR, Instruction
from .wave import EXEC, M0, Stored, Wave

EXECS = (EXEC, EXEC + 1)
#: What stands between an instruction that writes and one that uses it.
SCALAR_TO_MEMORY, SCALAR_TO_VECTOR, SCALAR_TO_LANE = 5, 2, 4
VECTOR_TO_DPP, VECTOR_TO_MATRIX, VECTOR_TO_READLANE, VECTOR_TO_PERMLANE = 2, 2, 1, 2
EXEC_TO_DPP, EXEC_TO_LANE, EXEC_TO_MATRIX = 5, 4, 4
TRANSCENDENTAL_TO_VECTOR, PART_TO_VECTOR, BASE_TO_COPY = 1, 1, 1


@attrs.frozen(eq=False)
class Product:
    """Result of an MFMA: time, passes and registers."""

    instruction: Instruction
    time: int
    passes: int
    keys: tuple[int, ...]
    single: bool


def addend_states(product: Product, gfx950: bool) -> int:
    """Return the wait states before an addend (SrcC) that overlaps the result."""
    return product.passes + (0 if product.single else 1 + gfx950)


def use_states(product: Product, gfx950: bool) -> int:
    """Return the wait states before any other access to the result."""
    return product.passes + (2 if product.single else 3 + (gfx950 and product.passes != 2))


class Hazards:
    """Rules of one architecture for the instructions of a wave."""

    def __init__(self, gfx: str, *, unobserved: bool = True) -> None:
        self.gfx950 = gfx == "gfx950"
        self.unobserved = unobserved

    def check(self, wave: Wave, bound: Bound) -> None:
        """Raise where too few wait states precede the next instruction."""
        kind = bound.kind
        if kind in ("salu", "control", "smem"):
            return
        if "copy" in bound.flags and self.unobserved and wave.time - wave.base_time - 1 < BASE_TO_COPY:
            raise Fault("wait states", "M0 was written by the instruction before: a load to LDS wants one wait state")
        if wave.written:
            self._after_vector(wave, bound)
        if wave.products:
            self._after_matrix(wave, bound)
        if wave.addends and kind != "mfma":
            for key in bound.writes:
                if key in wave.addends:
                    time, passes = wave.addends[key]
                    _need(wave, bound, time, passes - 1, f"{_name(key)} is the addend of a matrix instruction that still reads it")
        if wave.stored and kind in ("valu", "trans", "mfma"):
            self._after_store(wave, bound)

    def note(self, wave: Wave, bound: Bound) -> None:
        """Record what later instructions are checked against."""
        kind = bound.kind
        if kind in ("valu", "trans"):
            what = "trans" if kind == "trans" else "part" if "part" in bound.flags else "valu"
            for key in bound.writes:
                wave.written[key] = (wave.time, what)
        elif wave.written:
            for key in bound.writes:
                wave.written.pop(key, None)
        if kind == "mfma":
            product = Product(bound.instruction, wave.time, bound.passes, bound.product, "f32_16x16x4" in bound.instruction.mnemonic)
            for key in bound.product:
                wave.products[key] = product
            for key in bound.addend:
                wave.addends[key] = (wave.time, bound.passes)
        elif wave.products:
            for key in bound.writes:
                wave.products.pop(key, None)
        if kind == "salu" and M0 in bound.writes:
            wave.base_time = wave.time
        if "wide" in bound.flags:
            wave.stored = [each for each in wave.stored if wave.time - each.time < 3]
            wave.stored.append(Stored(frozenset(bound.data), wave.time, 1 if "steady" in bound.flags else 2))

    def _after_vector(self, wave: Wave, bound: Bound) -> None:
        kind, flags = bound.kind, bound.flags
        if kind == "vmem":
            _since(wave, bound, bound.scalar_reads, SCALAR_TO_MEMORY, "a vector instruction wrote this scalar register")
        if kind not in ("valu", "trans", "mfma"):
            return
        if self.unobserved:
            scalars = (key for key in bound.scalar_reads if key < EXEC)
            _since(wave, bound, scalars, SCALAR_TO_VECTOR, "a vector instruction wrote this scalar register")
        if kind != "trans":
            _since(wave, bound, bound.vector_reads, TRANSCENDENTAL_TO_VECTOR, "a transcendental instruction wrote it", "trans")
        _since(wave, bound, bound.vector_reads, PART_TO_VECTOR, "a part of it was written", "part")
        if kind == "mfma":
            _since(wave, bound, bound.vector_reads, VECTOR_TO_MATRIX, "a vector instruction wrote it")
            _since(wave, bound, EXECS, EXEC_TO_MATRIX, "a vector instruction wrote EXEC")
        if "dpp" in flags:
            _since(wave, bound, bound.vector_reads, VECTOR_TO_DPP, "a vector instruction wrote it, DPP reads it")
            _since(wave, bound, EXECS, EXEC_TO_DPP, "a vector instruction wrote EXEC")
        if "readlane" in flags:
            _since(wave, bound, bound.vector_reads, VECTOR_TO_READLANE, "a vector instruction wrote it")
        if flags & {"readlane", "lane", "permlane"}:
            _since(wave, bound, EXECS, EXEC_TO_LANE, "a vector instruction wrote EXEC")
        if bound.select:
            _since(wave, bound, bound.select, SCALAR_TO_LANE, "a vector instruction wrote the number of the lane")
        if "permlane" in flags:
            _since(wave, bound, bound.vector_reads, VECTOR_TO_PERMLANE, "a vector instruction wrote it, lanes are exchanged")

    def _after_matrix(self, wave: Wave, bound: Bound) -> None:
        products = wave.products
        for key in bound.vector_reads:
            product = products.get(key)
            if product is None:
                continue
            states = use_states(product, self.gfx950)
            if bound.kind == "mfma" and key in bound.addend and key not in _factors(bound):
                # A chain of the same instruction on the same registers is forwarded.
                same = bound.addend == product.keys and bound.instruction.mnemonic == product.instruction.mnemonic
                states = (2 if product.passes == 2 else 0) if same else addend_states(product, self.gfx950)
            _need(wave, bound, product.time, states, f"{_name(key)} is the result of {product.instruction}")
        if bound.kind != "mfma":
            for key in bound.writes:
                product = products.get(key)
                if product is not None:
                    states = use_states(product, self.gfx950)
                    _need(wave, bound, product.time, states, f"{_name(key)} is overwritten, the result of {product.instruction}")

    def _after_store(self, wave: Wave, bound: Bound) -> None:
        for each in wave.stored:
            if not each.keys.isdisjoint(bound.writes):
                _need(wave, bound, each.time, each.states, "a store of more than 64 bits still reads the register")


def _factors(bound: Bound) -> frozenset[int]:
    """Return the registers of an MFMA's first two sources."""
    return frozenset(key for operand in bound.instruction.operands[1:3] for key in operand.keys)  # type: ignore[union-attr]


def _name(key: int) -> str:
    if key < VECTOR:
        return f"s{key}"
    return f"v{key - VECTOR}" if key < ACCUMULATION else f"a{key - ACCUMULATION}"


def _since(wave: Wave, bound: Bound, keys: Iterable[int], states: int, why: str, kind: str | None = None) -> None:
    """Require wait states since a vector instruction wrote one of the registers."""
    for key in keys:
        found = wave.written.get(key)
        if found is not None and (kind is None or found[1] == kind):
            _need(wave, bound, found[0], states, f"{_name(key)}: {why}")


def _need(wave: Wave, bound: Bound, time: int, states: int, why: str) -> None:
    passed = wave.time - time - 1
    if passed < states:
        raise Fault("wait states", f"{why}: {states} wait states are needed, {max(passed, 0)} passed")
