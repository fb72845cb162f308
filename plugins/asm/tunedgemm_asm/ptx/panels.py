"""Store 16-bit outputs with TMA from panels in shared memory while the consumer continues.

A panel is 64 rows of 64, 32 or 16 columns: one box of the output's tensor map, which clips it. Its
rows of 128, 64 or 32 bytes are swizzled by their size (PTX ISA, "Swizzling Modes"): address bits 4
to 6, 4 and 5, or 4 are XORed with the bits from 7 on. The eight 16-byte rows of an `stmatrix`
matrix then cover all banks.

TMA sees the threads' writes after a proxy fence in each thread and a barrier (PTX ISA, "membar /
fence", "Async proxy"). A buffer is written again after the issuing thread has waited for its read
(PTX ISA, "cp.async.bulk.wait_group") and a barrier.
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
#: Registers of one `stmatrix`: a warp's 16 rows of the consumer's 64, by 16 columns.
_REGISTERS = 4


@attrs.frozen
class Panels:
    """Panels of one tile, as registers.

    Attributes:
        begin: first row and column of the consumer's part of the tile.
        issuing: whether this thread issues the stores and waits for them.
        map: generic address of the output's tensor map.
        area: base of the consumer's panels, without the panel's offset.
        addresses: base of the lane's 16 bytes for each `stmatrix` of a panel, without the panel's
            offset.
    """

    begin: tuple[str, str]
    issuing: str
    map: str
    area: str
    addresses: list[str]

    @classmethod
    def of(cls, f: Frame, begin: tuple[str, str]) -> Panels:
        """Start a tile after all buffers have been read."""
        t, config = f.text, f.config
        width = 2 * config.panel_columns
        area = t.to("b32", "mad.lo.u32", f.group, config.panels * config.panel_bytes, f.shared)
        # Lanes 0 to 15 address the rows of the left 8 columns, 16 to 31 those of the right.
        row = t.to("b32", "and.b32", f.lane, 15)
        row = t.to("b32", "mad.lo.u32", t.to("b32", "bfe.u32", f.thread, 5, 2), 16, row)
        line = t.to("b32", "mad.lo.u32", row, width, area)
        turned = t.to("b32", "bfe.u32", f.lane, (_BANKS // width).bit_length() - 1, (width // _UNIT).bit_length() - 1)
        turned = t.to("b32", "xor.b32", turned, t.to("b32", "shr.u32", f.lane, 4))
        left = t.to("b32", "mad.lo.u32", turned, _UNIT, line)
        addresses = [left, *(t.to("b32", "xor.b32", left, far) for far in range(2 * _UNIT, width, 2 * _UNIT))]
        panels = cls(begin, _issuing(f), map_of(f, MAP_OUT), area, addresses)
        panels._free(f, 0)
        return panels

    def store(self, f: Frame, number: int, packed: list[str]) -> None:
        """Store one panel; panels are ordered by columns, then by blocks of rows.

        *packed* has one register for each 8 columns and one for the row 8 below. Half of the
        buffers are filled at a time and issued as one group, while TMA reads the previous group.
        """
        config, half = f.config, -(-f.config.panels // 2)
        group, last = number // half, min((number // half + 1) * half, config.all_panels) - 1
        if number % half == 0 and last >= config.panels:
            self._free(f, group - 1 - (last - config.panels) // half)
        for at, address in enumerate(self.addresses):
            four = ", ".join(packed[_REGISTERS * at : _REGISTERS * (at + 1)])
            f.text.op("stmatrix.sync.aligned.m8n8.x4.shared.b16", f"[{address}+{_offset(f, number)}]", f"{{{four}}}")
        if number == last:
            f.text.op("fence.proxy.async.shared::cta")
            meet_consumer(f)
            for panel in range(group * half, last + 1):
                self._give(f, panel)
            f.text.op("cp.async.bulk.commit_group", when=self.issuing)

    def _give(self, f: Frame, number: int) -> None:
        """Issue the TMA store of a panel."""
        t, config = f.text, f.config
        across, block = divmod(number, config.blocks)
        row = t.to("b32", "add.u32", self.begin[0], block * SIDE)
        column = t.to("b32", "add.u32", self.begin[1], across * config.panel_columns)
        t.op(_STORE, f"[{self.map}, {{{column}, {row}}}]", f"[{self.area}+{_offset(f, number)}]", when=self.issuing)

    def _free(self, f: Frame, others: int) -> None:
        """Wait until at most this many groups are unread, and tell all threads."""
        f.text.op("cp.async.bulk.wait_group.read", others, when=self.issuing)
        meet_consumer(f)


def column_load(f: Frame) -> str:
    """Return the load for column scales and bias: read-only, unless panels leave too few registers.

    ptxas hoists read-only loads across the fences between panels, but not other loads.
    """
    config, kinds = f.config, (f.variant.scale == "row") + bool(f.variant.bias)
    crowded = config.accumulators + kinds * config.tile_b // 4 + OTHER_REGISTERS > config.consumer_registers
    return "ld.global" if config.panels and crowded else "ld.global.nc"


def await_reads(f: Frame) -> None:
    """Wait at a consumer's end for TMA's reads of shared memory, which ends with the CTA."""
    f.text.op("cp.async.bulk.wait_group.read", 0, when=_issuing(f))


def _offset(f: Frame, number: int) -> int:
    """Return the offset of a panel's buffer; buffers rotate, and the first consumer's index is 1."""
    return f.panels + (number % f.config.panels - f.config.panels) * f.config.panel_bytes


def _issuing(f: Frame) -> str:
    """Return a predicate: whether the thread is its consumer's first."""
    t = f.text
    return t.to("pred", "setp.eq.u32", t.to("b32", "and.b32", f.thread, GROUP_THREADS - 1), 0)
