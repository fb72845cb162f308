"""Combine the partials of split-K and stream-K: the last consumer to arrive adds all in the order
of K.

Each consumer stores its 32-bit partials in the workspace and increments a counter. The fixed order
makes the bits reproducible. A counter belongs to one consumer's part of a tile and ends at zero.
The workspace interleaves four accumulators of all 128 threads, so that every access is 16 bytes in
a line.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.abi import argument
from tunedgemm_asm.ptx.barriers import meet_consumer
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import GROUP_THREADS
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.resources import WORD_BYTES

_PACK, _PACK_BYTES = 4, 16


def slot_bytes(accumulators: int) -> int:
    """Return the bytes of one partial of a consumer's part of a tile."""
    return accumulators * GROUP_THREADS * 4


@attrs.frozen
class Fixup:
    """Place where the partials of a consumer's part of a tile are combined, as registers.

    Attributes:
        slot: index of the part of the tile among all.
        number: index of the consumer.
        within: index of the thread in its consumer.
        start: address of the thread's first partial; others follow at multiples of `slot_bytes`.
        mine: address of the thread's own partial.
        parts: number of partials.
    """

    slot: str
    number: str
    within: str
    start: str
    mine: str
    parts: str

    @classmethod
    def of(cls, f: Frame, tile: str, number: str, parts: tuple[str, str]) -> Fixup:
        """Return the place for a tile; *parts* has the index of the own partial and the number of
        partials.
        """
        t, numbers, (part, count) = f.text, f.arguments, parts
        slot = tile if f.config.turns else t.to("b32", "mad.lo.u32", tile, f.config.consumers, number)
        first = t.to("b32", "mul.lo.u32", slot, numbers["splits"])
        base = t.to("b64", "ld.param.u64", argument("workspace"))
        within = t.to("b32", "and.b32", f.thread, GROUP_THREADS - 1)
        lane = t.to("b64", "mul.wide.u32", within, _PACK_BYTES)
        base = t.to("b64", "add.s64", base, lane)
        start = t.to("b64", "mul.wide.u32", first, slot_bytes(f.config.accumulators))
        start = t.to("b64", "add.s64", base, start)
        mine = t.to("b64", "mul.wide.u32", part, slot_bytes(f.config.accumulators))
        mine = t.to("b64", "add.s64", start, mine)
        return cls(slot, number, within, start, mine, count)

    def leave(self, f: Frame, accumulators: list[str], elsewhere: str) -> None:
        """Store the partial and count it; jump *elsewhere* unless it is the last.

        One thread counts for all and shares the result; the last resets the counter. Its atomic
        releases and acquires for all: barriers before and after order the other threads' accesses
        (PTX ISA, "Causality order").
        """
        t = f.text
        for at in range(0, len(accumulators), _PACK):
            offset = at // _PACK * GROUP_THREADS * _PACK_BYTES
            t.op(f"st.relaxed.gpu.global.v4.{_kind(f)}", f"[{self.mine}+{offset}]", _braced(accumulators[at : at + _PACK]))
        # Counts up to the number of partials minus one, then wraps to zero.
        seen, most, *_ = self._asked(f, "atom.acq_rel.gpu.global.inc.u32", True)
        t.op("bra", elsewhere, when=t.to("pred", "setp.ne.u32", seen, most))

    def look(self, f: Frame, otherwise: str) -> None:
        """Continue if all other partials are stored, and reset the counter; else jump *otherwise*.

        The thread acquires what the counting threads released: each atomic reads the previous one
        (PTX ISA, "Observation order").
        """
        t = f.text
        seen, most, reads, counter = self._asked(f, "ld.acquire.gpu.global.u32", False)
        t.op("bra", otherwise, when=t.to("pred", "setp.ne.u32", seen, most))
        t.op("st.relaxed.gpu.global.u32", f"[{counter}]", t.to("b32", "mov.u32", 0), when=reads)

    def _asked(self, f: Frame, instruction: str, limited: bool) -> tuple[str, str, str, str]:
        """Read the counter in one thread, for all, by an instruction that may be *limited* by the
        maximum.

        Returns:
            The value, its maximum, a predicate of the reading thread, and the counter's address.
        """
        t = f.text
        word = t.to("b32", "mad.lo.u32", self.number, WORD_BYTES, f.shared)
        meet_consumer(f)
        reads = t.to("pred", "setp.eq.u32", self.within, 0)
        base = t.to("b64", "ld.param.u64", argument("counters"))
        far = t.to("b64", "mul.wide.u32", self.slot, 4)
        counter = t.to("b64", "add.s64", base, far)
        most = t.to("b32", "sub.u32", self.parts, 1)
        came = t.new("b32")
        t.op(instruction, came, f"[{counter}]", *[most] * limited, when=reads)
        t.op("st.shared.u32", f"[{word}+{f.words}]", came, when=reads)
        meet_consumer(f)
        return t.to("b32", "ld.shared.u32", f"[{word}+{f.words}]"), most, reads, counter


def fixup_splits(f: Frame, place: Place, number: str, accumulators: list[str], elsewhere: str) -> None:
    """Store the partial; the last consumer loads the first partial and adds the others in the order
    of K.
    """
    t, splits = f.text, f.arguments["splits"]
    fixup = Fixup.of(f, place.tile, number, (place.part, splits))
    fixup.leave(f, accumulators, elsewhere)
    at, left = t.to("b64", "mov.u64", fixup.start), t.to("b32", "sub.u32", splits, 1)
    _load(f, at, accumulators)
    again = t.label("PART")
    t.place(again)
    t.op("add.s64", at, at, slot_bytes(f.config.accumulators))
    _add(f, at, accumulators)
    t.op("sub.u32", left, left, 1)
    t.op("bra", again, when=t.to("pred", "setp.ne.u32", left, 0))


def fixup_stream(f: Frame, tile: str, parts: tuple[str, str], own: tuple[str, list[str]], elsewhere: str) -> None:
    """Combine the partials of a stream-K tile, if possible without storing the own one.

    A consumer whose range ends in the tile arrives late, one whose range begins there early. So the
    first partial, and the second unless it is the last, check whether all others are stored. If so,
    they add those to their registers in the order of K; a sum of two has the same bits in either
    order. All other partials go to the workspace. The third or a later one is loaded from there if
    it arrives last.

    Args:
        parts: index of the own partial, and number of partials.
        own: index of the consumer, and its accumulators.
        elsewhere: label for all but the last consumer.
    """
    t, (number, accumulators), (part, count) = f.text, own, parts
    fixup = Fixup.of(f, tile, number, parts)
    leave, add = t.label("LEAVE"), t.label("ADD")
    kept = t.to("pred", "setp.lt.u32", part, 2)
    early = t.to("pred", "setp.ge.u32", t.to("b32", "add.u32", part, 1), count)
    t.op("bra", leave, when=f"!{kept}")
    t.op("bra", leave, when=early)
    fixup.look(f, leave)
    t.op("bra", add)
    t.place(leave)
    fixup.leave(f, accumulators, elsewhere)
    t.place(add)
    _add_others(f, fixup, (part, kept), accumulators)


def _add_others(f: Frame, fixup: Fixup, own: tuple[str, str], accumulators: list[str]) -> None:
    """Add all other partials; *own* has the index of the own one and whether it stays in registers."""
    t, (part, kept) = f.text, own
    again, having, passed = t.label("PART"), t.label("HAVING"), t.label("PASSED")
    t.op("bra", having, when=kept)
    _load(f, fixup.start, accumulators)
    t.place(having)
    had, other = t.to("b32", "selp.b32", part, 0, kept), t.to("b32", "mov.u32", 0)
    at = t.to("b64", "mov.u64", fixup.start)
    t.place(again)
    t.op("bra", passed, when=t.to("pred", "setp.eq.u32", other, had))
    _add(f, at, accumulators)
    t.place(passed)
    t.op("add.s64", at, at, slot_bytes(f.config.accumulators))
    t.op("add.u32", other, other, 1)
    t.op("bra", again, when=t.to("pred", "setp.lt.u32", other, fixup.parts))


def _kind(f: Frame) -> str:
    """Return the type of partials in memory; adding integers needs no sign."""
    return "f32" if f.variant.accumulator_kind == "f32" else "u32"


def _braced(registers: list[str]) -> str:
    return f"{{{', '.join(registers)}}}"


def _add(f: Frame, at: str, accumulators: list[str]) -> None:
    """Add a partial to the accumulators."""
    t = f.text
    for first in range(0, len(accumulators), _PACK):
        loaded = t.many(f.variant.accumulator_kind, _PACK)
        _load(f, at, loaded, first)
        for mine, theirs in zip(accumulators[first : first + _PACK], loaded, strict=True):
            t.op("add.rn.f32" if _kind(f) == "f32" else "add.u32", mine, mine, theirs)


def _load(f: Frame, at: str, registers: list[str], first: int = 0) -> None:
    """Load the thread's part of a partial."""
    for index in range(0, len(registers), _PACK):
        offset = (first + index) // _PACK * GROUP_THREADS * _PACK_BYTES
        f.text.op(f"ld.relaxed.gpu.global.v4.{_kind(f)}", _braced(registers[index : index + _PACK]), f"[{at}+{offset}]")
