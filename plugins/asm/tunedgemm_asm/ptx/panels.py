"""Panels: outputs of 16 bits go through shared memory to the copy engine, which stores them while the consumer goes on.

A panel is 64 rows of 64, 32 or 16 columns, one box of the output's descriptor, which clips it; its rows of 128, 64 or 32 bytes are swizzled
by as many (PTX ISA, "Swizzling Modes"): of an address bits 4 to 6, 4 and 5, or 4 are exclusive-ored with those from 7 on. Eight rows of
16 bytes of a matrix that `stmatrix` stores so lie in all banks.

What threads wrote the copy engine sees behind a fence between both proxies by each thread, then a barrier (PTX ISA, "membar / fence",
"Async proxy"); a place is written again when the thread that had it stored has waited until it was read (PTX ISA,
"cp.async.bulk.wait_group"), then a barrier.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.abi import MAP_OUT
from tunedgemm_asm.ptx.barriers import meet_consumer
from tunedgemm_asm.ptx.frame import Frame, map_of
from tunedgemm_asm.ptx.names import GROUP_THREADS, SIDE
from tunedgemm_asm.ptx.resources import OTHER_REGISTERS

_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
_BANKS, _UNIT = 128, 16  # bytes
#: Registers of one `stmatrix`: 16 rows of 16 columns of a warp, of its 64 rows of a consumer.
_REGISTERS = 4


@attrs.frozen
class Panels:
    """The panels of one tile, as registers.

    Attributes:
        begin: first row and column of the consumer's share of the tile.
        issuing: whether it is this thread that has panels stored, and waits for them.
        map: generic address of the output's descriptor.
        area: where the first panel lies but for the offset of panels.
        places: where the lane's 16 bytes of each `stmatrix` of a panel go, likewise.
    """

    begin: tuple[str, str]
    issuing: str
    map: str
    area: str
    places: list[str]

    @classmethod
    def of(cls, f: Frame, begin: tuple[str, str]) -> Panels:
        """All of a tile, whose places nobody reads any more."""
        t, config = f.text, f.config
        width = 2 * config.panel_columns
        area = t.to("b32", "mad.lo.u32", f.group, config.panels * config.panel_bytes, f.shared)
        # Lanes 0 to 15 give the rows of the left 8 columns, 16 to 31 those of the right.
        row = t.to("b32", "and.b32", f.lane, 15)
        row = t.to("b32", "mad.lo.u32", t.to("b32", "bfe.u32", f.thread, 5, 2), 16, row)
        line = t.to("b32", "mad.lo.u32", row, width, area)
        turned = t.to("b32", "bfe.u32", f.lane, (_BANKS // width).bit_length() - 1, (width // _UNIT).bit_length() - 1)
        turned = t.to("b32", "xor.b32", turned, t.to("b32", "shr.u32", f.lane, 4))
        place = t.to("b32", "mad.lo.u32", turned, _UNIT, line)
        places = [place, *(t.to("b32", "xor.b32", place, far) for far in range(2 * _UNIT, width, 2 * _UNIT))]
        made = cls(begin, _issuing(f), map_of(f, MAP_OUT), area, places)
        made._free(f, 0)
        return made

    def store(self, f: Frame, number: int, packed: list[str]) -> None:
        """One panel, in the order of columns, of each the blocks of rows; of each 8 columns a register, and one 8 rows below.

        Half of the places are written at a time, then given to the copy engine as one group, while it reads those of the group before.
        """
        config, half = f.config, -(-f.config.panels // 2)
        group, last = number // half, min((number // half + 1) * half, config.all_panels) - 1
        if number % half == 0 and last >= config.panels:
            self._free(f, group - 1 - (last - config.panels) // half)
        for at, place in enumerate(self.places):
            four = ", ".join(packed[_REGISTERS * at : _REGISTERS * (at + 1)])
            f.text.op("stmatrix.sync.aligned.m8n8.x4.shared.b16", f"[{place}+{_offset(f, number)}]", f"{{{four}}}")
        if number == last:
            f.text.op("fence.proxy.async.shared::cta")
            meet_consumer(f)
            for panel in range(group * half, last + 1):
                self._give(f, panel)
            f.text.op("cp.async.bulk.commit_group", when=self.issuing)

    def _give(self, f: Frame, number: int) -> None:
        """A panel to the copy engine."""
        t, config = f.text, f.config
        across, block = divmod(number, config.blocks)
        row = t.to("b32", "add.u32", self.begin[0], block * SIDE)
        column = t.to("b32", "add.u32", self.begin[1], across * config.panel_columns)
        t.op(_STORE, f"[{self.map}, {{{column}, {row}}}]", f"[{self.area}+{_offset(f, number)}]", when=self.issuing)

    def _free(self, f: Frame, others: int) -> None:
        """All but so many of the last groups were read, and everybody knows."""
        f.text.op("cp.async.bulk.wait_group.read", others, when=self.issuing)
        meet_consumer(f)


def column_load(f: Frame) -> str:
    """How scales and bias of columns are loaded: by the read-only path, unless with panels all of them would not fit beside the accumulators.

    ptxas moves loads by that path to the front, across the fences between panels; others it does not.
    """
    config, kinds = f.config, (f.variant.scale == "row") + bool(f.variant.bias)
    crowded = config.accumulators + kinds * config.tile_b // 4 + OTHER_REGISTERS > config.consumer_registers
    return "ld.global" if config.panels and crowded else "ld.global.nc"


def await_reads(f: Frame) -> None:
    """At a consumer's end, what the copy engine still reads of shared memory, which ends with the block."""
    f.text.op("cp.async.bulk.wait_group.read", 0, when=_issuing(f))


def _offset(f: Frame, number: int) -> int:
    """Of the place of a panel: places are used in turn; the first consumer's number is 1."""
    return f.panels + (number % f.config.panels - f.config.panels) * f.config.panel_bytes


def _issuing(f: Frame) -> str:
    """Whether the thread is its consumer's first."""
    t = f.text
    return t.to("pred", "setp.eq.u32", t.to("b32", "and.b32", f.thread, GROUP_THREADS - 1), 0)
