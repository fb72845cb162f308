"""Parts of K: each consumer leaves its sums of 32 bits in the workspace and counts; the last to come adds all parts in the order of K.

So the bits do not depend on who comes last. A counter belongs to one consumer's share of a tile, and is zero again at the end. The
workspace has for each part of each of those 128 threads times their sums, four sums of all threads side by side: every access is of
16 bytes in a line.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.arguments import argument
from tunedgemm_asm.ptx.barriers import meet_consumer
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.plan import GROUP_THREADS, WORD_BYTES

_PACK, _PACK_BYTES = 4, 16


def slot_bytes(sums: int) -> int:
    """Bytes of one part of one consumer's share of a tile."""
    return sums * GROUP_THREADS * 4


def join_parts(f: Frame, place: Place, number: str, sums: list[str], elsewhere: str) -> None:
    """Leave the sums; who is not the last goes *elsewhere*, the last has the sums of all parts."""
    t, told = f.text, f.arguments
    slot = place.tile if f.plan.turns else t.to("b32", "mad.lo.u32", place.tile, f.plan.consumers, number)
    first = t.to("b32", "mul.lo.u32", slot, told["splits"])
    base = t.to("b64", "ld.param.u64", argument("workspace"))
    within = t.to("b32", "and.b32", f.thread, GROUP_THREADS - 1)
    lane = t.to("b64", "mul.wide.u32", within, _PACK_BYTES)
    base = t.to("b64", "add.s64", base, lane)
    start = t.to("b64", "mul.wide.u32", first, slot_bytes(f.plan.sums))
    start = t.to("b64", "add.s64", base, start)
    mine = t.to("b64", "mul.wide.u32", place.part, slot_bytes(f.plan.sums))
    mine = t.to("b64", "add.s64", start, mine)
    for at in range(0, len(sums), _PACK):
        t.op(
            f"st.relaxed.gpu.global.v4.{_kind(f)}", f"[{mine}+{at // _PACK * GROUP_THREADS * _PACK_BYTES}]", _braced(sums[at : at + _PACK])
        )
    _count(f, slot, number, within, elsewhere)
    _add(f, start, sums)


def _kind(f: Frame) -> str:
    """Of the sums, as memory has them; adding integers needs no sign."""
    return "f32" if f.variant.sum_kind == "f32" else "u32"


def _braced(registers: list[str]) -> str:
    return f"{{{', '.join(registers)}}}"


def _count(f: Frame, slot: str, number: str, within: str, elsewhere: str) -> None:
    """One thread counts for all, who see what it found; at the last it leaves zero.

    Its atomic releases and acquires for all: barriers before and behind order what the others wrote and read (PTX ISA, "Causality order").
    """
    t = f.text
    word = t.to("b32", "mad.lo.u32", number, WORD_BYTES, f.shared)
    meet_consumer(f)
    one = t.to("pred", "setp.eq.u32", within, 0)
    base = t.to("b64", "ld.param.u64", argument("counters"))
    far = t.to("b64", "mul.wide.u32", slot, 4)
    counter = t.to("b64", "add.s64", base, far)
    most = t.to("b32", "sub.u32", f.arguments["splits"], 1)
    # Counts up to the number of parts less one, then wraps to zero.
    came = t.new("b32")
    t.op("atom.acq_rel.gpu.global.inc.u32", came, f"[{counter}]", most, when=one)
    t.op("st.shared.u32", f"[{word}+{f.words}]", came, when=one)
    meet_consumer(f)
    seen = t.to("b32", "ld.shared.u32", f"[{word}+{f.words}]")
    t.op("bra", elsewhere, when=t.to("pred", "setp.ne.u32", seen, most))


def _add(f: Frame, start: str, sums: list[str]) -> None:
    """The parts in the order of K, the first as it is."""
    t = f.text
    at, left = t.to("b64", "mov.u64", start), t.to("b32", "sub.u32", f.arguments["splits"], 1)
    _load(f, at, sums)
    again = t.label("PART")
    t.place(again)
    t.op("add.s64", at, at, slot_bytes(f.plan.sums))
    for first in range(0, len(sums), _PACK):
        loaded = t.many(f.variant.sum_kind, _PACK)
        _load(f, at, loaded, first)
        for mine, theirs in zip(sums[first : first + _PACK], loaded, strict=True):
            t.op("add.rn.f32" if _kind(f) == "f32" else "add.u32", mine, mine, theirs)
    t.op("sub.u32", left, left, 1)
    t.op("bra", again, when=t.to("pred", "setp.ne.u32", left, 0))


def _load(f: Frame, at: str, registers: list[str], first: int = 0) -> None:
    for index in range(0, len(registers), _PACK):
        offset = (first + index) // _PACK * GROUP_THREADS * _PACK_BYTES
        f.text.op(f"ld.relaxed.gpu.global.v4.{_kind(f)}", _braced(registers[index : index + _PACK]), f"[{at}+{offset}]")
