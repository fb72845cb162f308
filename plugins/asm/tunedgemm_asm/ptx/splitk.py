"""Parts of K: each consumer leaves its accumulators of 32 bits in the workspace and counts; the last to come adds all parts in the order of K.

So the bits do not depend on who comes last. A counter belongs to one consumer's share of a tile, and is zero again at the end. The
workspace has for each part of each of those 128 threads times their accumulators, four accumulators of all threads side by side: every access is of
16 bytes in a line.
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
    """Bytes of one part of one consumer's share of a tile."""
    return accumulators * GROUP_THREADS * 4


@attrs.frozen
class Fixup:
    """Where the parts of a consumer's share of a tile meet, as registers.

    Attributes:
        slot: number of the share among all.
        number: the consumer's number.
        within: the thread's number in its consumer.
        start: address of what the thread has of the first part; that of others lies `slot_bytes` further on each.
        mine: address of what it has of its own.
        parts: how many there are.
    """

    slot: str
    number: str
    within: str
    start: str
    mine: str
    parts: str

    @classmethod
    def of(cls, f: Frame, tile: str, number: str, parts: tuple[str, str]) -> Fixup:
        """Of a tile; *parts* are the number of the consumer's own, and how many there are."""
        t, told, (part, count) = f.text, f.arguments, parts
        slot = tile if f.config.turns else t.to("b32", "mad.lo.u32", tile, f.config.consumers, number)
        first = t.to("b32", "mul.lo.u32", slot, told["splits"])
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
        """Leave the accumulators in the workspace, and count; who is not the last goes *elsewhere*.

        One thread counts for all, who see what it found; at the last it leaves zero. Its atomic releases and acquires for all: barriers
        before and behind order what the others wrote and read (PTX ISA, "Causality order").
        """
        t = f.text
        for at in range(0, len(accumulators), _PACK):
            offset = at // _PACK * GROUP_THREADS * _PACK_BYTES
            t.op(f"st.relaxed.gpu.global.v4.{_kind(f)}", f"[{self.mine}+{offset}]", _braced(accumulators[at : at + _PACK]))
        # Counts up to the number of parts less one, then wraps to zero.
        seen, most, *_ = self._asked(f, "atom.acq_rel.gpu.global.inc.u32", True)
        t.op("bra", elsewhere, when=t.to("pred", "setp.ne.u32", seen, most))

    def look(self, f: Frame, otherwise: str) -> None:
        """Go on where all others have come: nobody else counts, so the counter is set to zero; else go *otherwise*.

        The thread that looks acquires what those released that counted: each atomic reads the one before it (PTX ISA, "Observation order").
        """
        t = f.text
        seen, most, one, counter = self._asked(f, "ld.acquire.gpu.global.u32", False)
        t.op("bra", otherwise, when=t.to("pred", "setp.ne.u32", seen, most))
        t.op("st.relaxed.gpu.global.u32", f"[{counter}]", t.to("b32", "mov.u32", 0), when=one)

    def _asked(self, f: Frame, instruction: str, limited: bool) -> tuple[str, str, str, str]:
        """What one thread finds in the counter, by an instruction that is *limited* by the most or not, for all threads.

        Returns:
            It, the most that it can be, a predicate of that thread, the counter's address.
        """
        t = f.text
        word = t.to("b32", "mad.lo.u32", self.number, WORD_BYTES, f.shared)
        meet_consumer(f)
        one = t.to("pred", "setp.eq.u32", self.within, 0)
        base = t.to("b64", "ld.param.u64", argument("counters"))
        far = t.to("b64", "mul.wide.u32", self.slot, 4)
        counter = t.to("b64", "add.s64", base, far)
        most = t.to("b32", "sub.u32", self.parts, 1)
        came = t.new("b32")
        t.op(instruction, came, f"[{counter}]", *[most] * limited, when=one)
        t.op("st.shared.u32", f"[{word}+{f.words}]", came, when=one)
        meet_consumer(f)
        return t.to("b32", "ld.shared.u32", f"[{word}+{f.words}]"), most, one, counter


def fixup_splits(f: Frame, place: Place, number: str, accumulators: list[str], elsewhere: str) -> None:
    """Leave the accumulators; who is not the last goes *elsewhere*, the last has the accumulators of all parts: in the order of K, the first as it is."""
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
    """The same of a tile whose steps are shared, where the accumulators may never have to leave their registers.

    A consumer whose range ends in the tile comes late to it, one whose range begins there early. So the first part, and the second where
    it is not the last, look whether all others have come; if so they add those to what they have, in the order of K: a sum of two has
    the same bits either way round. Sums of others, and of who looks too early, go to the workspace; of the third part or a later one
    they are loaded from there where it comes last.

    Args:
        parts: the number of the own, and how many there are.
        own: the consumer's number, and its accumulators.
        elsewhere: where who is not the last goes.
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
    """The accumulators of all parts; *own* are the number of the own part, and a predicate: whether its accumulators are kept in registers."""
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
    """Of the accumulators, as memory has them; adding integers needs no sign."""
    return "f32" if f.variant.accumulator_kind == "f32" else "u32"


def _braced(registers: list[str]) -> str:
    return f"{{{', '.join(registers)}}}"


def _add(f: Frame, at: str, accumulators: list[str]) -> None:
    """A part to the accumulators."""
    t = f.text
    for first in range(0, len(accumulators), _PACK):
        loaded = t.many(f.variant.accumulator_kind, _PACK)
        _load(f, at, loaded, first)
        for mine, theirs in zip(accumulators[first : first + _PACK], loaded, strict=True):
            t.op("add.rn.f32" if _kind(f) == "f32" else "add.u32", mine, mine, theirs)


def _load(f: Frame, at: str, registers: list[str], first: int = 0) -> None:
    """What the thread has of a part."""
    for index in range(0, len(registers), _PACK):
        offset = (first + index) // _PACK * GROUP_THREADS * _PACK_BYTES
        f.text.op(f"ld.relaxed.gpu.global.v4.{_kind(f)}", _braced(registers[index : index + _PACK]), f"[{at}+{offset}]")
